"""The state of a tree, as the fold of its events.

One rule: the only code that changes a tree's state is in this file. The ledger decides, writes an
event down and has it applied here; a replay applies the same events with the same code (W8).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import attrs

from ._admissions import Caps, Counters, Kind, Node, top_of
from ._events import (
    Admitted,
    CapChanged,
    Dispatched,
    Ended,
    EntryLeft,
    EntryQueued,
    Event,
    Held,
    HoldReleased,
    Left,
    MaxLowered,
    MaxRaised,
    Opened,
    Parked,
    Queued,
    Refused,
    Restarted,
    Resumed,
    ResumeLeft,
    ResumeQueued,
    Revoked,
    Settled,
    SlotLeft,
    SlotQueued,
    TrancheReleased,
)
from ._wallet import Unit, Wallet

# Every actor's start and end asks for its kind several times, and on Python 3.11 `Kind.AGENT` costs
# as much as a function call.
_AGENT, _TOOL, _RUN = Kind.AGENT, Kind.TOOL, Kind.RUN

MINUTE = 60
"""What ``max_spawns_per_minute`` looks back on, in the caller's seconds."""


class OpenHold(NamedTuple):
    """Money held for a call that is not settled."""

    node: Node
    wallet: Wallet
    amount: int
    is_dispatched: bool
    waits_for_slot: bool


class Waiting(NamedTuple):
    """A call in a money queue."""

    node: Node
    wallet: Wallet


class WaitingEntry(NamedTuple):
    """A start that waits in line."""

    parent: Node
    name: str


class Tranche(NamedTuple):
    wallet: str
    amount: int
    reason: str
    at_call: int


@attrs.define(eq=False, slots=True)
class TreeState:
    """Everything the ledger knows, as the fold of its events."""

    unit: Unit = "usd"
    caps: Caps = attrs.field(factory=Caps)
    counters: Counters = attrs.field(factory=Counters)
    # Live nodes and wallets. A closed one has folded its totals into its parent and is gone.
    nodes: dict[int, Node] = attrs.field(factory=dict[int, Node])
    wallets: dict[int, Wallet] = attrs.field(factory=dict[int, Wallet])
    holds: dict[int, OpenHold] = attrs.field(factory=dict[int, OpenHold])
    waiting: dict[int, Waiting] = attrs.field(factory=dict[int, Waiting])
    entries: dict[int, WaitingEntry] = attrs.field(factory=dict[int, WaitingEntry])
    tranches: list[Tranche] = attrs.field(factory=list[Tranche])
    # When subagents were started in the last minute, oldest first; kept while that is limited.
    spawns: deque[float] = attrs.field(factory=deque[float])
    # How many holds were ever taken: the `at_call` of tranches (contract Q28).
    holds_taken: int = 0
    # How many events made this state.
    events: int = 0

    def apply(self, event: Event) -> None:
        """Carry out one event. The only mutator of everything reachable from here."""
        _APPLY[type(event)](self, event)
        self.events += 1

    # --- looking at it ---------------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """The whole state as JSON-ready values; equal states give equal values."""
        return self.copy().plain()

    def copy(self) -> StateCopy:
        """What is so now, whatever happens later. O(live nodes), but a small part of ``plain``."""
        return StateCopy(
            unit=self.unit,
            caps=self.caps,
            counters=attrs.evolve(self.counters),
            nodes=tuple(map(_node_row, self.nodes.values())),
            wallets=tuple(map(_wallet_row, self.wallets.values())),
            holds={
                str(i): [h.node.id, h.wallet.id, h.amount, h.is_dispatched, h.waits_for_slot]
                for i, h in self.holds.items()
            },
            waiting={str(i): [w.node.id, w.wallet.id] for i, w in self.waiting.items()},
            entries={str(i): [e.parent.id, e.name] for i, e in self.entries.items()},
            tranches=tuple(self.tranches),
            spawns=tuple(self.spawns),
            holds_taken=self.holds_taken,
            events=self.events,
        )

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> TreeState:
        """The state that ``plain`` was made from."""
        state = cls(
            unit=plain["unit"],
            caps=Caps(**plain["caps"]),
            counters=Counters(**plain["counters"]),
            tranches=[Tranche(*t) for t in plain["tranches"]],
            spawns=deque(plain["spawns"]),
            holds_taken=plain["holds_taken"],
            events=plain["events"],
        )
        for fields in plain["wallets"].values():
            parent = fields["parent"]
            above = None if parent is None else state.wallets[parent]
            columns: dict[str, Any] = {**fields, "parent": above}
            wallet = Wallet(**columns)
            state.wallets[wallet.id] = wallet
        for fields in plain["nodes"].values():
            state._add_plain_node(fields)
        for key, (node_id, wallet_id, amount, is_dispatched, waits) in plain["holds"].items():
            node, wallet = state.nodes[node_id], state.wallets[wallet_id]
            state.holds[int(key)] = OpenHold(node, wallet, amount, is_dispatched, waits)
        for key, (node_id, wallet_id) in plain["waiting"].items():
            state.waiting[int(key)] = Waiting(state.nodes[node_id], state.wallets[wallet_id])
        for key, (node_id, name) in plain["entries"].items():
            state.entries[int(key)] = WaitingEntry(state.nodes[node_id], name)
        return state

    def _add_plain_node(self, fields: Mapping[str, Any]) -> None:
        parent = fields["parent"]
        columns: dict[str, Any] = {
            **fields,
            "parent": None if parent is None else self.nodes[parent],
            "kind": Kind(fields["kind"]),
            "wallet": self.wallets[fields["wallet"]],
            "attempts": None if fields["attempts"] is None else dict(fields["attempts"]),
            "holds": dict.fromkeys(fields["holds"]),  # empty and absent mean the same
            "tickets": dict.fromkeys(fields["tickets"]),
            "entries": dict.fromkeys(fields["entries"]),
        }
        node = Node(**columns)
        self.nodes[node.id] = node

    def check(self) -> None:
        """Assert W1 to W4 and W7's bookkeeping. O(live nodes)."""
        self.counters.check(self.caps)
        for wallet in self.wallets.values():
            wallet.check()
        self._check_totals()
        self._check_columns()
        self._check_spawns()

    def _check_totals(self) -> None:
        below = {node_id: [0, 0, 0] for node_id in self.nodes}
        for node in self.nodes.values():
            if node.parent is not None:
                sums = below[node.parent.id]
                sums[0] += node.usd
                sums[1] += node.tokens
                sums[2] += 1
        for node in self.nodes.values():
            usd, tokens, live = below[node.id]
            assert node.usd == node.own_usd + node.closed_usd + usd, node
            assert node.tokens == node.own_tokens + node.closed_tokens + tokens, node
            assert node.live_children == live, node
            if node.owns_wallet:
                settled = node.usd if self.unit == "usd" else node.tokens
                assert node.wallet.settled == settled, node

    def _check_columns(self) -> None:
        held: dict[int, list[int]] = {i: [0, 0, 0, 0, 0] for i in self.wallets}
        for hold in self.holds.values():
            held[hold.wallet.id][0] += hold.amount
            held[hold.wallet.id][1] += 1
        for wallet in self.wallets.values():
            if wallet.parent is not None:
                held[wallet.parent.id][2] += wallet.carve_left
                held[wallet.parent.id][3] += 1
        for waiting in self.waiting.values():
            held[waiting.wallet.id][4] += 1
        for wallet in self.wallets.values():
            is_so = [
                wallet.held,
                wallet.open_holds,
                wallet.carved,
                wallet.live_carves,
                wallet.queued,
            ]
            assert is_so == held[wallet.id], (wallet, held[wallet.id])
        in_flight = sum(h.is_dispatched for h in self.holds.values())
        assert self.counters.calls_in_flight == in_flight, self.counters
        assert self.counters.queued_money == len(self.waiting), self.counters
        assert self.counters.open_spans == len(self.nodes), self.counters
        parked = [node for node in self.nodes.values() if node.is_parked]
        assert self.counters.parked == len(parked), self.counters
        assert self.counters.queued_resumes == sum(n.waits_for_slot for n in parked), parked
        assert self.counters.queued_entries == len(self.entries), self.counters
        of_nodes = sum(len(node.entries or ()) for node in self.nodes.values())
        assert of_nodes == len(self.entries), self.entries

    def _check_spawns(self) -> None:
        alive = dict.fromkeys(self.nodes, 0)
        for node in self.nodes.values():
            if node.kind is _AGENT:
                alive[top_of(node).id] += 1
        for node in self.nodes.values():
            is_top = node.kind is _RUN or node.parent is None
            assert alive[node.id] <= node.descendants and (is_top or not node.descendants), node
        below = sum(node.descendants for node in self.nodes.values())
        assert below <= self.counters.admitted, (below, self.counters)
        spawns = list(self.spawns)
        assert not spawns or self.caps.max_spawns_per_minute is not None, spawns
        assert spawns == sorted(spawns), spawns
        assert not spawns or spawns[-1] - spawns[0] < MINUTE, spawns
        assert len(spawns) <= self.counters.admitted, spawns


@attrs.frozen(kw_only=True)
class StateCopy:
    """A state as it was at one instant, in the least form that ``plain`` can be made from."""

    unit: Unit
    caps: Caps
    counters: Counters
    nodes: tuple[tuple[Any, ...], ...]
    wallets: tuple[tuple[Any, ...], ...]
    holds: dict[str, list[Any]]
    waiting: dict[str, list[Any]]
    entries: dict[str, list[Any]]
    tranches: tuple[Tranche, ...]
    spawns: tuple[float, ...]
    holds_taken: int
    events: int

    def plain(self) -> dict[str, Any]:
        """The state as JSON-ready values."""
        nodes, wallets = map(_plain_node, self.nodes), map(_plain_wallet, self.wallets)
        return {
            "unit": self.unit,
            "caps": attrs.asdict(self.caps),
            "counters": attrs.asdict(self.counters),
            "nodes": {str(node["id"]): node for node in nodes},
            "wallets": {str(wallet["id"]): wallet for wallet in wallets},
            "holds": {key: list(hold) for key, hold in self.holds.items()},
            "waiting": {key: list(waiting) for key, waiting in self.waiting.items()},
            "entries": {key: list(entry) for key, entry in self.entries.items()},
            "tranches": [list(tranche) for tranche in self.tranches],
            "spawns": list(self.spawns),
            "holds_taken": self.holds_taken,
            "events": self.events,
        }


# --- leases ----------------------------------------------------------------------------------


def _opened(state: TreeState, e: Opened) -> None:
    state.unit, state.caps = e.unit, e.caps
    wallet = Wallet(0, "root", None, e.max, e.released)
    wallet.carry_in(e.carried_usd if e.unit == "usd" else e.carried_tokens)
    state.wallets[0] = wallet
    root = Node(0, None, "root", Kind.ROOT, wallet, True, -1, e.deadline, e.at, e.span_id)
    # To the books an earlier tree is a child that has ended.
    root.usd = root.closed_usd = e.carried_usd
    root.tokens = root.closed_tokens = e.carried_tokens
    state.nodes[0] = root
    state.counters.open_spans = 1


def _admitted(state: TreeState, e: Admitted) -> None:
    at, node_id, parent_id, name, kind, span_id, deadline, carve, set_aside, tool, entry = e
    parent = state.nodes[parent_id]
    if entry is not None:
        _pop_entry(state, entry)
    parent.children += 1
    parent.live_children += 1
    path = f"{parent.path}/{name}#{parent.children}"
    counters = state.counters
    counters.open_spans += 1
    depth = parent.depth
    if kind is _AGENT:
        depth += 1
        counters.admitted += 1
        counters.active += 1
        if counters.active > counters.peak:
            counters.peak = counters.active
        top_of(parent).descendants += 1
        if state.caps.max_spawns_per_minute is not None:
            _note_spawn(state.spawns, at)
        if tool is not None:
            # A subagent tool's call is a tool call too; its own calls count beside it.
            parent.tool_calls += 1
            counters.tool_calls += 1
            if entry is None:
                _count_attempt(parent, tool)
    elif kind is _TOOL:
        parent.tool_calls += 1
        counters.tool_calls += 1
    elif kind is _RUN:
        depth = 0
        counters.runs += 1
    owns = carve is not None
    wallet = parent.wallet
    if carve is not None:
        own = Wallet(node_id, path, wallet, carve, carve)
        wallet.carve(own, carve)
        state.wallets[node_id] = wallet = own
    state.nodes[node_id] = node = Node(
        node_id, parent, path, kind, wallet, owns, depth, deadline, at, span_id
    )
    if set_aside:
        wallet.reserve(set_aside)
        node.set_aside = set_aside


def _note_spawn(spawns: deque[float], at: float) -> None:
    while spawns and at - spawns[0] >= MINUTE:
        spawns.popleft()
    spawns.append(at)


def _refused(state: TreeState, e: Refused) -> None:
    counters = state.counters
    if e.code == "cave_subagent_invocation_limit":
        counters.invocation_rejections += 1
    elif e.code == "cave_subagent_concurrency_limit":
        counters.concurrency_rejections += 1
    else:
        counters.other_rejections += 1
    if e.entry is not None:
        _pop_entry(state, e.entry)
    elif e.tool is not None:
        _count_attempt(state.nodes[e.parent], e.tool)


def _entry_queued(state: TreeState, e: EntryQueued) -> None:
    parent = state.nodes[e.parent]
    if parent.entries is None:
        parent.entries = {}
    parent.entries[e.entry] = None
    state.entries[e.entry] = WaitingEntry(parent, e.name)
    state.counters.queued_entries += 1
    if e.tool is not None:
        _count_attempt(parent, e.tool)


def _entry_left(state: TreeState, e: EntryLeft) -> None:
    _pop_entry(state, e.entry)


def _pop_entry(state: TreeState, entry: int) -> None:
    entries = state.entries.pop(entry).parent.entries
    assert entries is not None, entry
    del entries[entry]
    state.counters.queued_entries -= 1


def _parked(state: TreeState, e: Parked) -> None:
    node, counters = state.nodes[e.node], state.counters
    assert node.kind is _AGENT and not node.is_parked, node
    node.is_parked = True
    counters.active -= 1
    counters.parked += 1


def _resume_queued(state: TreeState, e: ResumeQueued) -> None:
    state.nodes[e.node].waits_for_slot = True
    state.counters.queued_resumes += 1


def _resume_left(state: TreeState, e: ResumeLeft) -> None:
    state.nodes[e.node].waits_for_slot = False
    state.counters.queued_resumes -= 1


def _resumed(state: TreeState, e: Resumed) -> None:
    node, counters = state.nodes[e.node], state.counters
    _unpark(node, counters)
    counters.active += 1
    if counters.active > counters.peak:
        counters.peak = counters.active


def _unpark(node: Node, counters: Counters) -> None:
    assert node.is_parked, node
    if node.waits_for_slot:
        node.waits_for_slot = False
        counters.queued_resumes -= 1
    node.is_parked = False
    counters.parked -= 1


def _ended(state: TreeState, e: Ended) -> None:
    node = state.nodes.pop(e.node)
    assert not node.holds and not node.tickets and not node.entries, node
    wallet = node.wallet
    if node.set_aside:
        wallet.end_reserve(node.set_aside)
    if node.owns_wallet and node.parent is not None:
        # The root's wallet stays to be looked at when the tree is closed.
        wallet.end_carve()
        del state.wallets[wallet.id]
    counters = state.counters
    counters.open_spans -= 1
    if node.kind is _AGENT:
        counters.released += 1
        if node.is_parked:
            _unpark(node, counters)
        else:
            counters.active -= 1
    parent = node.parent
    if parent is not None:
        parent.live_children -= 1
        parent.closed_usd += node.usd
        parent.closed_tokens += node.tokens


def _restarted(state: TreeState, e: Restarted) -> None:
    assert e.node in state.nodes, e
    state.counters.restarts += 1


# --- money -----------------------------------------------------------------------------------


def _queued(state: TreeState, e: Queued) -> None:
    node, wallet = state.nodes[e.node], state.wallets[e.wallet]
    if node.tickets is None:
        node.tickets = {}
    node.tickets[e.ticket] = None
    wallet.queued += 1
    state.counters.queued_money += 1
    state.waiting[e.ticket] = Waiting(node, wallet)


def _left(state: TreeState, e: Left) -> None:
    waiting = state.waiting.pop(e.ticket)
    tickets = waiting.node.tickets
    assert tickets is not None, waiting
    del tickets[e.ticket]
    waiting.wallet.queued -= 1
    state.counters.queued_money -= 1


def _held(state: TreeState, e: Held) -> None:
    if e.ticket is not None:
        _left(state, Left(e.at, e.ticket))
    node, wallet = state.nodes[e.node], state.wallets[e.wallet]
    assert e.amount >= 0, e
    wallet.hold(e.amount)
    if node.holds is None:
        node.holds = {}
    node.holds[e.hold] = None
    state.holds_taken += 1
    state.holds[e.hold] = OpenHold(node, wallet, e.amount, False, False)


def _slot_queued(state: TreeState, e: SlotQueued) -> None:
    state.holds[e.hold] = state.holds[e.hold]._replace(waits_for_slot=True)
    state.counters.queued_slots += 1


def _slot_left(state: TreeState, e: SlotLeft) -> None:
    state.holds[e.hold] = state.holds[e.hold]._replace(waits_for_slot=False)
    state.counters.queued_slots -= 1


def _dispatched(state: TreeState, e: Dispatched) -> None:
    node, wallet, amount, _, waited = state.holds[e.hold]
    state.holds[e.hold] = OpenHold(node, wallet, amount, True, False)
    counters = state.counters
    if waited:
        counters.queued_slots -= 1
    node.model_calls += 1
    counters.model_calls += 1
    counters.calls_in_flight += 1
    if counters.calls_in_flight > counters.peak_calls:
        counters.peak_calls = counters.calls_in_flight


def _settled(state: TreeState, e: Settled) -> None:
    node, wallet, amount, was_dispatched, _ = _pop_hold(state, e.hold)
    if was_dispatched:
        state.counters.calls_in_flight -= 1
        if e.basis == "not_dispatched":
            # Its request never left, so it was no call.
            state.counters.model_calls -= 1
            node.model_calls -= 1
    usd, tokens = e.usd, e.tokens
    assert usd >= 0 <= tokens, e  # nothing is ever paid back
    wallet.charge(usd if state.unit == "usd" else tokens, through_hold=amount)
    node.own_usd += usd
    node.own_tokens += tokens
    up: Node | None = node
    while up is not None:
        up.usd += usd
        up.tokens += tokens
        up = up.parent


def _hold_released(state: TreeState, e: HoldReleased) -> None:
    _, wallet, amount, _, waited = _pop_hold(state, e.hold)
    if waited:
        state.counters.queued_slots -= 1
    wallet.drop_hold(amount)


def _pop_hold(state: TreeState, hold_id: int) -> OpenHold:
    hold = state.holds.pop(hold_id)
    assert hold.node.holds is not None, hold
    del hold.node.holds[hold_id]
    return hold


# --- limits ----------------------------------------------------------------------------------


def _tranche_released(state: TreeState, e: TrancheReleased) -> None:
    wallet = state.wallets[e.wallet]
    wallet.release(e.amount)
    state.tranches.append(Tranche(wallet.path, e.amount, e.reason, state.holds_taken))


def _revoked(state: TreeState, e: Revoked) -> None:
    state.wallets[e.wallet].is_revoked = True


def _max_lowered(state: TreeState, e: MaxLowered) -> None:
    state.wallets[e.wallet].lower_max(e.to)


def _max_raised(state: TreeState, e: MaxRaised) -> None:
    state.wallets[e.wallet].raise_max(e.to)


def _cap_changed(state: TreeState, e: CapChanged) -> None:
    changed: dict[str, Any] = {e.name: e.to}
    state.caps = attrs.evolve(state.caps, **changed)
    if state.caps.max_spawns_per_minute is None:
        state.spawns.clear()


def _count_attempt(parent: Node, tool: str) -> None:
    if parent.attempts is None:
        parent.attempts = {}
    parent.attempts[tool] = parent.attempts.get(tool, 0) + 1


# A row is what does not change by itself: the journal takes one of every live node and wallet at
# each cut, so a row is a tuple, which costs a tenth of a dict and nothing at the next collection.
_NODE_LINKS = ("parent", "kind", "wallet", "attempts", "holds", "tickets", "entries")
_NODE_COLUMNS = tuple(name for name in attrs.fields_dict(Node) if name not in _NODE_LINKS)
_WALLET_COLUMNS = tuple(name for name in attrs.fields_dict(Wallet) if name != "parent")
_node_columns = attrgetter(*_NODE_COLUMNS)
_wallet_columns = attrgetter(*_WALLET_COLUMNS)


def _node_row(node: Node) -> tuple[Any, ...]:
    parent, attempts = node.parent, node.attempts
    return (
        None if parent is None else parent.id,
        node.kind.value,
        node.wallet.id,
        None if attempts is None else dict(attempts),
        tuple(node.holds or ()),
        tuple(node.tickets or ()),
        tuple(node.entries or ()),
        *_node_columns(node),
    )


def _wallet_row(wallet: Wallet) -> tuple[Any, ...]:
    parent = wallet.parent
    return (None if parent is None else parent.id, *_wallet_columns(wallet))


def _plain_node(row: tuple[Any, ...]) -> dict[str, Any]:
    fields = dict(zip((*_NODE_LINKS, *_NODE_COLUMNS), row, strict=True))
    if fields["attempts"] is not None:
        fields["attempts"] = dict(fields["attempts"])
    for name in ("holds", "tickets", "entries"):
        fields[name] = list(fields[name])
    return fields


def _plain_wallet(row: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("parent", *_WALLET_COLUMNS), row, strict=True))


_APPLY: dict[type, Callable[[TreeState, Any], None]] = {
    Opened: _opened,
    Admitted: _admitted,
    Refused: _refused,
    EntryQueued: _entry_queued,
    EntryLeft: _entry_left,
    Parked: _parked,
    ResumeQueued: _resume_queued,
    ResumeLeft: _resume_left,
    Resumed: _resumed,
    Queued: _queued,
    Left: _left,
    Held: _held,
    SlotQueued: _slot_queued,
    SlotLeft: _slot_left,
    Dispatched: _dispatched,
    Settled: _settled,
    HoldReleased: _hold_released,
    Ended: _ended,
    Restarted: _restarted,
    TrancheReleased: _tranche_released,
    Revoked: _revoked,
    MaxLowered: _max_lowered,
    MaxRaised: _max_raised,
    CapChanged: _cap_changed,
}
