"""Events as JSON and back, exactly: what a journal on disk is made of.

Amounts are integers and stay integers, so a journal that was written and read again folds to the
identical state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs

from treewarden.protocols import UsageError, cut_text

from ._admissions import Caps, Kind, Outcome
from ._events import Event

_TYPES: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}
# The types of the fields of everything that is read.
_HINTS = {kind.__name__: get_type_hints(kind) for kind in (*_TYPES.values(), Caps)}


def event_to_json(event: Event) -> str:
    """One line of JSON in ASCII, without a line end.

    Text that a model wrote may hold half of a surrogate pair, which no encoding but this takes.
    """
    fields: dict[str, Any] = {"event": type(event).__name__}
    for name, value in event._asdict().items():
        if isinstance(value, Kind | Outcome):
            value = value.value
        elif isinstance(value, Caps):
            value = attrs.asdict(value)
        fields[name] = value
    return json.dumps(fields, separators=(",", ":"))


def event_from_json(line: str | bytes) -> Event:
    """The event that a line holds.

    Raises:
        UsageError: It is no event of this version's journal.
    """
    try:
        fields: dict[str, Any] = json.loads(line)
        kind = _TYPES[fields.pop("event")]
        event = kind(**_values(fields))
        _check_types(event, event._asdict())
        return event  # type: ignore[no-any-return]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        shown = cut_text(line if isinstance(line, str) else line.decode(errors="replace"), 80)
        raise UsageError(
            f"this is no journal event: {shown!r} ({error}). Give a file that a journal sink of "
            "this version wrote.",
            code="cave_journal_invalid",
        ) from None


def _values(fields: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(fields)
    if "kind" in values:
        values["kind"] = Kind(values["kind"])
    if "outcome" in values:
        values["outcome"] = Outcome(values["outcome"])
    if "caps" in values:
        values["caps"] = caps = Caps(**values["caps"])
        _check_types(caps, attrs.asdict(caps))
    return values


def _check_types(of: object, fields: Mapping[str, Any]) -> None:
    """An amount that is a text or a fraction would be found out much later, or never."""
    hints = _HINTS[type(of).__name__]
    for name, value in fields.items():
        if not _fits(value, hints[name]):
            raise TypeError(f"{name} is {value!r}")


def _fits(value: object, hint: Any) -> bool:
    if hint is float:
        return type(value) in (int, float)
    if isinstance(hint, type) and not get_args(hint):
        return type(value) is hint
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return any(_fits(value, one) for one in get_args(hint))
