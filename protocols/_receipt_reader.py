"""Read a receipt back from its JSON form and refuse one whose sums do not add up."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import cattrs

from ._receipts import OUR_SCHEMA, Receipt, bad_receipt


def read_receipt(value: Any) -> Receipt:
    """The receipt that ``value`` (parsed JSON) is the form of.

    Raises:
        UsageError: It is another form, a field is missing or wrong, or a sum is off.
    """
    if not isinstance(value, Mapping) or value.get("schema") != OUR_SCHEMA:  # pyright: ignore[reportUnknownMemberType]
        raise bad_receipt(f"its schema is not {OUR_SCHEMA!r}")
    try:
        receipt = _converter().structure(value, Receipt)
    except cattrs.BaseValidationError as error:
        details = "; ".join(cattrs.transform_error(error)[:3])
        raise bad_receipt(details) from None
    try:
        receipt.check()
    except AssertionError as error:
        raise bad_receipt(f"its sums do not add up at {error}") from None
    _compare_sums(value, receipt)  # pyright: ignore[reportUnknownArgumentType]
    return receipt


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter()
    converter.register_structure_hook(Decimal, lambda text, _: _decimal(text))
    converter.register_structure_hook(int, lambda number, _: _int(number))
    return converter


def _decimal(text: object) -> Decimal:
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not an amount written as text")
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text!r} is not an amount") from None


def _int(number: object) -> int:
    if type(number) is not int:
        raise ValueError(f"{number!r} is not a whole number")
    return number


def _compare_sums(value: Mapping[str, Any], receipt: Receipt) -> None:
    """The sums in the file are derived; they must be what the lines add up to."""
    derived = receipt.to_json()
    for name in ("own", "descendants", "total"):
        if value.get(name) != derived[name]:
            raise bad_receipt(
                f"{receipt.path}: {name} says {value.get(name)!r}, its lines add up to "
                f"{derived[name]!r}"
            )
    for child_value, child in zip(value["subagents"], receipt.subagents, strict=True):
        _compare_sums(child_value, child)
