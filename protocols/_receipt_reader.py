"""Read a receipt back from its JSON form and refuse one whose sums do not add up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeVar, cast

import cattrs

from ._receipts import OUR_SCHEMA, Receipt, bad_receipt

T = TypeVar("T")

_AMOUNT = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?")


def read_receipt(value: Any) -> Receipt:
    """The receipt that ``value`` (parsed JSON) is the form of.

    Raises:
        UsageError: It is another form, a field is missing or wrong, or a sum is off.
    """
    _check_schema(value)
    try:
        receipt = _converter().structure(value, Receipt)
    except (cattrs.BaseValidationError, RecursionError) as error:
        raise bad_receipt(_details(error)) from None
    problem = receipt.problem()
    if problem is not None:
        raise bad_receipt(f"its sums do not add up at {problem}")
    _compare_sums(value, receipt)
    return receipt


def _check_schema(value: Any) -> None:
    """Every receipt in the tree says what form it has."""
    if not isinstance(value, Mapping):
        raise bad_receipt("it is no JSON object")
    fields = cast("Mapping[str, Any]", value)
    if fields.get("schema") != OUR_SCHEMA:
        raise bad_receipt(f"its schema is {fields.get('schema')!r}, not {OUR_SCHEMA!r}")
    children = fields.get("subagents")
    if not isinstance(children, list):
        raise bad_receipt("it has no list of subagents")
    for child in children:  # pyright: ignore[reportUnknownVariableType]
        _check_schema(child)


def _details(error: BaseException) -> str:
    if isinstance(error, cattrs.BaseValidationError):
        return "; ".join(cattrs.transform_error(error)[:3])
    return "it is nested too deeply"


def _converter() -> cattrs.Converter:
    # Strict: cattrs would turn nearly anything into text, and a bool is an int to it.
    converter = cattrs.Converter()
    converter.register_structure_hook(Decimal, lambda text, _: _decimal(text))
    converter.register_structure_hook(bool, lambda flag, _: _exactly(bool, flag))
    converter.register_structure_hook(int, lambda number, _: _exactly(int, number))
    converter.register_structure_hook(str, lambda text, _: _exactly(str, text))
    converter.register_structure_hook_func(
        lambda kind: kind == tuple[str, ...], lambda texts, _: _texts(texts)
    )
    return converter


def _decimal(text: object) -> Decimal:
    # The form of our own writer and nothing else: no exponents, which can be short and enormous.
    if not isinstance(text, str) or not _AMOUNT.fullmatch(text):
        raise ValueError(f"{text!r} is not an amount written as text")
    return Decimal(text)


def _exactly(kind: type[T], value: object) -> T:
    if type(value) is not kind:
        raise ValueError(f"{value!r} is not a {kind.__name__}")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list of texts")
    return tuple(_exactly(str, item) for item in cast("list[object]", value))


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
