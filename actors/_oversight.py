"""The framework tools by which a model looks after its background subagents.

They are offered where an agent has a background subagent, and nowhere else. Here is what they are
called, what they take, and what a call of one asks for; who carries it out is in _background.py.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs

from treewarden.protocols import JSONObject, ToolSpec

from ._schemas import shape_of_schema

_MOST_SECONDS = 86_400

_IDS: JSONObject = {
    "type": "array",
    "items": {"type": "string"},
    "description": "Which ones, by the ids that starting them gave.",
}

WAIT = ToolSpec(
    name="cave_wait",
    description=(
        "Wait for background subagents and read their results. Without ids: for all whose results "
        "you have not read. With timeout_seconds, those that still run then are shown as running."
    ),
    parameters={
        "type": "object",
        "properties": {
            "ids": _IDS,
            "timeout_seconds": {"type": "number", "minimum": 0, "maximum": _MOST_SECONDS},
        },
        "additionalProperties": False,
    },
)

STATUS = ToolSpec(
    name="cave_status",
    description="See which background subagents run and which have ended. Does not wait.",
    parameters={"type": "object", "properties": {"ids": _IDS}, "additionalProperties": False},
)

CANCEL = ToolSpec(
    name="cave_cancel",
    description="End a background subagent that is not needed any more, and read what it came to.",
    parameters={
        "type": "object",
        "properties": {
            "id": {"type": "string", "description": "The id that starting it gave."},
            "reason": {"type": "string", "description": "Why; it is put on the receipt."},
        },
        "required": ["id", "reason"],
        "additionalProperties": False,
    },
)

OVERSIGHT = {spec.name: spec for spec in (WAIT, STATUS, CANCEL)}
"""The tools by name."""


@attrs.frozen
class WaitFor:
    """Wait for these children; None: for all that were not read."""

    ids: tuple[str, ...] | None
    timeout_seconds: float | None


@attrs.frozen
class ReadStatus:
    """Say how these children are; None: all."""

    ids: tuple[str, ...] | None


@attrs.frozen
class CancelChild:
    """End this child."""

    id: str
    reason: str


Order: TypeAlias = WaitFor | ReadStatus | CancelChild


def order_of(name: str, arguments: JSONObject) -> Order:
    """What a call of one of the tools asks for.

    Raises:
        Mismatch: The arguments do not fit.
    """
    spec = OVERSIGHT[name]
    given: Any = shape_of_schema(spec.parameters, what=name).convert(dict(arguments))
    ids = tuple(given["ids"]) if "ids" in given else None
    match name:
        case WAIT.name:
            return WaitFor(ids, given.get("timeout_seconds"))
        case STATUS.name:
            return ReadStatus(ids)
        case _:
            return CancelChild(given["id"], given["reason"])


def named_by(order: Order) -> tuple[str, ...]:
    """The ids in an order."""
    return (order.id,) if isinstance(order, CancelChild) else order.ids or ()
