"""Who is alive in the tree: nodes, and the counters that bound breadth, depth and calls.

A node is one lease's place in the tree. Its totals are kept up to date at every charge, so that
closing it needs no sum over its history (W10: what is closed is forgotten).
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

import attrs

from ._wallet import Wallet


class Kind(Enum):
    """What a lease is for. Only agents count as subagents."""

    ROOT = "root"
    RUN = "run"
    AGENT = "agent"
    TOOL = "tool"
    COMPACTION = "compaction"
    # A supervised service of the tree itself: a pool, a relay.
    SERVICE = "service"


# Looked up once; see _state.py.
_RUN = Kind.RUN


class Outcome(Enum):
    """How a node's life ended."""

    OK = "ok"
    STOPPED = "stopped"
    FAILED = "failed"
    CANCELLED = "cancelled"
    FAILED_TO_START = "failed_to_start"


@attrs.frozen(kw_only=True)
class Caps:
    """The tree's limits that the ledger enforces. None: no limit."""

    max_runs: int | None = None
    max_depth: int = 2
    max_subagents: int | None = 50
    max_concurrent_subagents: int | None = 8
    max_concurrent_calls: int | None = None
    max_model_calls: int | None = None
    max_tool_calls: int | None = None
    # Subagents ever started below one top-level run, and in the whole tree within any minute.
    max_descendants: int | None = None
    max_spawns_per_minute: int | None = None
    # What a start does when every subagent slot is taken.
    admission: Literal["reject", "wait"] = "reject"


@attrs.define(eq=False, slots=True)
class Node:
    """One live lease's place, depth, deadline and totals."""

    id: int
    parent: Node | None
    path: str
    kind: Kind
    # The wallet it draws on: its own, or the nearest ancestor's.
    wallet: Wallet
    owns_wallet: bool
    # Agent invocations between the top-level run (0) and this node.
    depth: int
    # The instant (clock seconds) after which nothing may be open here, or None.
    deadline: float | None
    started_at: float
    # Span id, 16 hex digits. Open as long as the node is alive.
    span_id: str
    # What this node's own calls cost.
    own_usd: int = 0
    own_tokens: int = 0
    # The same for this node and everything that ever was below it (W3).
    usd: int = 0
    tokens: int = 0
    # What closed children had cost: usd == own_usd + closed_usd + sum of live children's usd.
    closed_usd: int = 0
    closed_tokens: int = 0
    live_children: int = 0
    # Children ever started: the number in their paths.
    children: int = 0
    # Of a top-level run (or of the root, for what has none above): subagents ever started below it.
    descendants: int = 0
    # What this node set aside on its wallet for a last call.
    set_aside: int = 0
    # Attempts per subagent tool, refused ones included (W5).
    attempts: dict[str, int] | None = None
    # Open holds and waiting tickets by id, made at the first of them: most nodes are tools, which
    # never have any.
    holds: dict[int, None] | None = None
    tickets: dict[int, None] | None = None
    # Own calls in all, for the limits per invocation.
    model_calls: int = 0
    tool_calls: int = 0
    # Starts below it that wait in line, by id, made at the first.
    entries: dict[int, None] | None = None
    # An agent that gave its slot back while it waits for children, and wants it back.
    is_parked: bool = False
    waits_for_slot: bool = False


def top_of(node: Node) -> Node:
    """The top-level run that a node belongs to, or the root where there is none."""
    while node.kind is not _RUN and node.parent is not None:
        node = node.parent
    return node


@attrs.define(slots=True)
class Counters:
    """Tree-wide figures. ``admitted`` and the rejections only grow."""

    runs: int = 0
    admitted: int = 0
    active: int = 0
    # Actives that gave their slot back while they wait for a child.
    parked: int = 0
    # The highest `active` ever.
    peak: int = 0
    released: int = 0
    invocation_rejections: int = 0
    concurrency_rejections: int = 0
    other_rejections: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    # Provider calls in flight, and the most there ever were.
    calls_in_flight: int = 0
    peak_calls: int = 0
    queued_slots: int = 0
    queued_money: int = 0
    # Starts that wait for a slot, and parked agents that want theirs back.
    queued_entries: int = 0
    queued_resumes: int = 0
    open_spans: int = 0
    restarts: int = 0

    def check(self, caps: Caps) -> None:
        for name in attrs.fields_dict(Counters):
            assert getattr(self, name) >= 0, (name, self)
        assert self.active == self.admitted - self.released - self.parked, self
        assert self.active <= self.peak, self
        assert self.queued_resumes <= self.parked, self
        assert self.calls_in_flight <= self.peak_calls, self
        if caps.max_subagents is not None:
            assert self.admitted <= caps.max_subagents or self.active <= self.peak, self
