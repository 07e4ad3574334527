"""What can happen to a tree: one immutable event per transaction.

An event carries everything its effect needs, so that no replay ever decides anything.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from ._admissions import Caps, Kind, Outcome
from ._wallet import Unit


class Opened(NamedTuple):
    """The tree exists: its root node (id 0) and root wallet (id 0)."""

    at: float
    unit: Unit
    max: int
    released: int
    span_id: str
    deadline: float | None
    caps: Caps
    # What was spent before under the same limit, in an earlier tree that this one goes on with.
    carried_usd: int = 0
    carried_tokens: int = 0


class Admitted(NamedTuple):
    """A lease began: place, slot, wallet and span in one step."""

    at: float
    node: int
    parent: int
    name: str
    kind: Kind
    span_id: str
    deadline: float | None
    # What was carved for a wallet of its own, or None: it draws on its parent's.
    carve: int | None
    set_aside: int
    # The subagent tool whose attempt this was, or None.
    tool: str | None
    # The place in line that waited for it, or None.
    entry: int | None = None


class Refused(NamedTuple):
    """A lease was refused. Nothing but counters changed."""

    at: float
    parent: int
    code: str
    tool: str | None
    # The place in line that came to nothing, or None.
    entry: int | None = None


class EntryQueued(NamedTuple):
    """A start waits in line. The attempt of its subagent tool is counted now, and not again."""

    at: float
    entry: int
    parent: int
    name: str
    tool: str | None


class EntryLeft(NamedTuple):
    """A start left the line without an answer: whoever asked is ending."""

    at: float
    entry: int


class Parked(NamedTuple):
    """An agent gave its slot back while all it waits for are children."""

    at: float
    node: int


class ResumeQueued(NamedTuple):
    """A parked agent wants its slot back and waits for it."""

    at: float
    node: int


class ResumeLeft(NamedTuple):
    """A parked agent does not want its slot back yet after all."""

    at: float
    node: int


class Resumed(NamedTuple):
    """A parked agent has its slot again."""

    at: float
    node: int


class Queued(NamedTuple):
    """A call waits for money on ``wallet``."""

    at: float
    ticket: int
    node: int
    wallet: int


class Left(NamedTuple):
    """A waiting call left its queue: granted elsewhere, refused, cancelled or too late."""

    at: float
    ticket: int


class Held(NamedTuple):
    """Money is held for a call. ``ticket`` waited for it, or None."""

    at: float
    hold: int
    node: int
    wallet: int
    amount: int
    ticket: int | None


class SlotQueued(NamedTuple):
    """A funded call waits for a call slot."""

    at: float
    hold: int


class SlotLeft(NamedTuple):
    at: float
    hold: int


class Dispatched(NamedTuple):
    """A call took its slot and is counted. From here on it may cost money."""

    at: float
    hold: int


class Settled(NamedTuple):
    """A call ended and is charged; its hold and slot are back."""

    at: float
    hold: int
    usd: int
    tokens: int
    basis: str


class HoldReleased(NamedTuple):
    """A hold was given back by a call that was never dispatched."""

    at: float
    hold: int


class Ended(NamedTuple):
    """A lease ended: slot, carve, set-aside and span are back."""

    at: float
    node: int
    outcome: Outcome


class Restarted(NamedTuple):
    """A supervised node was started again under the same lease."""

    at: float
    node: int


class TrancheReleased(NamedTuple):
    at: float
    wallet: int
    amount: int
    reason: str


class Revoked(NamedTuple):
    at: float
    wallet: int
    reason: str


class MaxLowered(NamedTuple):
    at: float
    wallet: int
    to: int


class MaxRaised(NamedTuple):
    at: float
    wallet: int
    to: int


class CapChanged(NamedTuple):
    at: float
    name: str
    to: int | None


Event: TypeAlias = (
    Opened
    | Admitted
    | Refused
    | EntryQueued
    | EntryLeft
    | Parked
    | ResumeQueued
    | ResumeLeft
    | Resumed
    | Queued
    | Left
    | Held
    | SlotQueued
    | SlotLeft
    | Dispatched
    | Settled
    | HoldReleased
    | Ended
    | Restarted
    | TrancheReleased
    | Revoked
    | MaxLowered
    | MaxRaised
    | CapChanged
)
