"""One spelling for one JSON value, so that equal values have equal digests on every machine.

The spelling is ECMAScript's ``JSON.stringify`` with sorted keys and no blanks. Digests made here
can be checked by any program that writes JSON that way, whatever its language.

What has no such spelling is refused, never repaired: a digest over something that was quietly
changed proves nothing.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from json import JSONEncoder
from typing import cast

from ._errors import UsageError
from ._messages import JSON

_quote = JSONEncoder(ensure_ascii=False).encode
_SURROGATE = re.compile("[\ud800-\udfff]")

# From this power of ten on, ECMAScript writes a float with an exponent.
_FIRST_WITH_EXPONENT = 21
# Down to this one it writes zeros behind the point.
_LAST_WITH_ZEROS = -7


def canonical_json(value: JSON) -> bytes:
    """The one spelling of ``value``, in UTF-8.

    Keys are sorted by their UTF-16 code units. Ints are written with all their digits and floats
    as ECMAScript writes them (``1.0`` is ``1``, ``1e21`` is ``1e+21``).

    Raises:
        UsageError: There is something that JSON cannot say: NaN, infinity, a key that is no text,
            a type of another kind. The text says where.
    """
    try:
        return "".join(_pieces(value, "")).encode()
    except RecursionError:
        raise UsageError("the value is nested too deeply to be written as JSON") from None


def digest(value: JSON) -> str:
    """The SHA-256 of the canonical spelling, as 64 hex digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _pieces(value: object, where: str) -> Iterator[str]:
    # The type says JSON, but values come from providers and tools: check, do not trust.
    match value:
        case None:
            yield "null"
        case bool():
            yield "true" if value else "false"
        case str():
            yield _text(value)
        case int():
            yield int.__repr__(value)
        case float():
            yield _float(value, where)
        case Mapping():
            yield from _object(cast("Mapping[object, object]", value), where)
        case list() | tuple():
            yield from _array(cast("Sequence[object]", value), where)
        case _:
            raise _refused(value, where, "is not a JSON value")


def _object(value: Mapping[object, object], where: str) -> Iterator[str]:
    members = {_key(key, where): content for key, content in value.items()}
    if len(members) < len(value):
        raise UsageError(f"two keys of the object {_at(where)} are the same in UTF-16")
    separator = "{"
    for key in sorted(members, key=_utf_16):
        yield f"{separator}{_text(key)}:"
        yield from _pieces(members[key], f"{where}.{key}")
        separator = ","
    yield "}" if members else "{}"


def _array(value: Sequence[object], where: str) -> Iterator[str]:
    separator = "["
    for index, content in enumerate(value):
        yield separator
        yield from _pieces(content, f"{where}[{index}]")
        separator = ","
    yield "]" if value else "[]"


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise _refused(key, where, "is the key of an object but not text")
    return _joined(key)


def _utf_16(text: str) -> bytes:
    # Big-endian bytes sort as code units do. Python's own order differs for characters beyond
    # U+FFFF, whose first code unit is below U+E000.
    return text.encode("utf-16-be", "surrogatepass")


def _joined(text: str) -> str:
    """The text with each pair of surrogates made the one character that it means."""
    if _SURROGATE.search(text) is None:
        return text
    return _utf_16(text).decode("utf-16-be", "surrogatepass")


def _text(text: str) -> str:
    # A surrogate without its partner has no UTF-8: it is the one thing that must be escaped.
    return _SURROGATE.sub(lambda lone: f"\\u{ord(lone[0]):04x}", _quote(_joined(text)))


def _float(number: float, where: str) -> str:
    """A float as ECMAScript's Number::toString writes it."""
    if not math.isfinite(number):
        raise _refused(number, where, "has no JSON")
    if number == 0:
        return "0"  # also for -0.0
    sign = "-" if number < 0 else ""
    # Both languages find the shortest digits that read back as the same float; they differ only
    # in where they put the point and how they write the exponent.
    mantissa, _, exponent = repr(abs(number)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    point = len(whole) + int(exponent or 0)
    digits = (whole + fraction).lstrip("0")
    point -= len(whole + fraction) - len(digits)
    return sign + _placed(digits.rstrip("0"), point)


def _placed(digits: str, point: int) -> str:
    """``0.digits`` times ten to the power of ``point``."""
    if len(digits) <= point <= _FIRST_WITH_EXPONENT:
        return digits.ljust(point, "0")
    if 0 < point <= _FIRST_WITH_EXPONENT:
        return f"{digits[:point]}.{digits[point:]}"
    if _LAST_WITH_ZEROS < point - 1 < 0:
        return f"0.{'0' * -point}{digits}"
    return f"{digits[:1]}{'.' if digits[1:] else ''}{digits[1:]}e{point - 1:+d}"


def _refused(value: object, where: str, reason: str) -> UsageError:
    return UsageError(f"{value!r} ({type(value).__name__}) {_at(where)} {reason}")


def _at(where: str) -> str:
    return f"at {where.removeprefix('.')}" if where else "at the top"
