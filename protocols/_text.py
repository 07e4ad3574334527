"""Text that every encoding can carry, and the one place where text is cut.

Two rules. Half of a surrogate pair becomes U+FFFD on the way in, so that no history that is kept
can make every later request fail. And whatever is cut is cut between characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Literal, TypeAlias, cast

import attrs

from ._messages import JSON, JSONObject, Message, Opaque, Part, Text, Thinking, ToolCall, ToolResult

# What may be half a character in the text of a JSON value.
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"

CutUnit: TypeAlias = Literal["chars", "bytes"]
Keep: TypeAlias = Literal["head", "tail", "ends"]


def mend_text(text: str) -> str:
    """``text`` with every lone surrogate replaced by U+FFFD."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


def cut_text(text: str, limit: int, *, unit: CutUnit = "chars", keep: Keep = "head") -> str:
    """``text`` in at most ``limit`` characters or UTF-8 bytes, never with half a character.

    Args:
        keep: Which part stays: the "head", the "tail", or both "ends" around an ellipsis. An
            ellipsis that does not fit is left out, and then only the head stays.
    """
    text = mend_text(text)
    if _size(text, unit) <= limit:
        return text
    match keep:
        case "head":
            return _head(text, limit, unit)
        case "tail":
            return _tail(text, limit, unit)
        case "ends":
            room = limit - _size(ELLIPSIS, unit)
            if room < 0:
                return _head(text, limit, unit)
            tail = room // 2
            return _head(text, room - tail, unit) + ELLIPSIS + _tail(text, tail, unit)


def _size(text: str, unit: CutUnit) -> int:
    # An ASCII text is as many bytes as characters; the common case copies nothing.
    return len(text) if unit == "chars" or text.isascii() else len(text.encode())


def _head(text: str, limit: int, unit: CutUnit) -> str:
    if unit == "chars":
        return text[:limit]
    return text[:limit].encode()[:limit].decode(errors="ignore")


def _tail(text: str, limit: int, unit: CutUnit) -> str:
    start = max(0, len(text) - limit)
    if unit == "chars":
        return text[start:]
    data = text[start:].encode()
    return data[max(0, len(data) - limit) :].decode(errors="ignore")


# --- what a model or a file said ------------------------------------------------------------------


def mend_message(message: Message) -> Message:
    """``message`` without lone surrogates in any text of it; the same object if it has none."""
    if all(map(_is_plain, message.parts)):
        return message
    parts = tuple(map(_mend_part, message.parts))
    if all(new is old for new, old in zip(parts, message.parts, strict=True)):
        return message
    return attrs.evolve(message, parts=parts)


def _is_plain(part: Part) -> bool:
    """Say whether there can be nothing to mend. Quick, because it is asked of every reply."""
    match part:
        case Text():
            return part.text.isascii()
        case ToolCall():
            raw = part.raw_arguments
            return (
                part.id.isascii()
                and part.name.isascii()
                and raw.isascii()
                and "\\u" not in raw
                and all(map(_is_plain_item, part.arguments.items()))
            )
        case _:
            return False


def _is_plain_item(item: tuple[str, JSON]) -> bool:
    name, value = item
    if isinstance(value, str):
        return name.isascii() and value.isascii()
    return name.isascii() and isinstance(value, int | float | None)


def _mend_part(part: Part) -> Part:
    match part:
        case Text() | Thinking():
            text = mend_text(part.text)
            return part if text == part.text else attrs.evolve(part, text=text)
        case ToolResult():
            mended = attrs.evolve(
                part,
                call_id=mend_text(part.call_id),
                name=mend_text(part.name),
                content=mend_text(part.content),
            )
            return part if mended == part else mended
        case ToolCall():
            return _mend_call(part)
        case Opaque():
            value = cast("JSONObject", mend_json(part.value))
            return part if value == part.value else attrs.evolve(part, value=value)


def _mend_call(call: ToolCall) -> ToolCall:
    mended = attrs.evolve(
        call,
        id=mend_text(call.id),
        name=mend_text(call.name),
        arguments=cast("JSONObject", mend_json(call.arguments)),
        raw_arguments=_mend_raw(call),
    )
    return call if mended == call else mended


def _mend_raw(call: ToolCall) -> str:
    """The arguments' own text, which providers get back: an escape in it may be half a pair."""
    raw = mend_text(call.raw_arguments)
    if call.bad_arguments is not None or not _SURROGATE_ESCAPE.search(raw):
        return raw
    try:
        is_sound = mend_json(value := json.loads(raw)) == value
    except ValueError:
        is_sound = False  # a saved history may hold anything
    return raw if is_sound else json.dumps(mend_json(call.arguments), ensure_ascii=False)


def mend_json(value: JSON) -> JSON:
    """A JSON value without lone surrogates in any text or key of it."""
    match value:
        case str():
            return mend_text(value)
        case list() | tuple():
            return [mend_json(item) for item in value]
        case Mapping():
            return {mend_text(key): mend_json(item) for key, item in value.items()}
        case _:
            return value
