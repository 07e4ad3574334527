"""JSON as foreign programs write it, and as they want it.

One rule keeps this file simple: a value is believed only as far as its type says. What has another
type than expected reads as absent, so no caller checks twice and nothing foreign ends a program.
Text that leaves here, either way, is text that UTF-8 can carry.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping

from ._errors import ProtocolError, UsageError
from ._messages import JSON, JSONObject
from ._text import cut_text, mend_json, mend_text

# Half of a character that needs two escapes. Only text with such an escape can hold a lone half.
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large")
    return number


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def read_json(text: str, *, parse_float: Callable[[str], object] = _finite) -> JSON:
    """Return the value of ``text``, lone surrogates in it replaced by U+FFFD.

    Raises:
        ProtocolError: It is not JSON, or holds a number or a nesting beyond all use.
    """
    try:
        value: JSON = json.loads(text, parse_float=parse_float, parse_constant=_refuse_constant)
        return mend_json(value) if _SURROGATE_ESCAPE.search(text) else value
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise ProtocolError(f"not JSON ({error}): {cut_text(text, 200)!r}") from error


def read_object(text: str, *, parse_float: Callable[[str], object] = _finite) -> JSONObject:
    """Return the JSON object in ``text``.

    Raises:
        ProtocolError: It is something else.
    """
    value = read_json(text, parse_float=parse_float)
    if not isinstance(value, Mapping):
        raise ProtocolError(f"not a JSON object: {cut_text(text, 200)!r}")
    return value


def text_of(value: JSONObject, key: str) -> str:
    """Return the text at ``key``; empty when it is absent or something else."""
    found = value.get(key)
    return found if isinstance(found, str) else ""


def object_of(value: JSONObject, key: str) -> JSONObject:
    """Return the object at ``key``; empty when it is absent or something else."""
    found = value.get(key)
    return found if isinstance(found, Mapping) else {}


def objects_of(value: JSONObject, key: str) -> list[JSONObject]:
    """Return the objects in the list at ``key``; none when it is absent or something else."""
    found = value.get(key)
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []


def index_of(value: JSONObject) -> int | None:
    """Return which of several things in a stream this is about, where it says so."""
    found = value.get("index")
    return found if type(found) is int else None


def _plain(value: object) -> object:
    """Return what ``json`` can write of a value that JSON could carry."""
    if isinstance(value, Mapping):
        return dict(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    raise TypeError(f"{type(value).__name__} is not JSON")


def encode_json(value: JSON) -> bytes:
    """Return compact JSON in insertion order, lone surrogates replaced by U+FFFD.

    Raises:
        UsageError: The value is no JSON: only settings and tool schemas of a user can be that.
    """
    try:
        text = json.dumps(
            value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a request must be JSON all through, and {error}.") from error
    return mend_text(text).encode()
