"""What the scenarios of public reports share: exact prices, a witness, and the check of the books.

A worst case that is a round sum comes from a price whose input is free: a call then holds its
output limit times the output price, and a reply that uses the whole limit uses the whole hold.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import attrs
import pytest

import treewarden as tw
from treewarden.ledgers import Event, TreeState, amount_of, fold
from treewarden.protocols import Line, Receipt, RunEvent
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock, run_seeded

SEEDS = 200
ENOUGH_ORDERS = 100

P = tw.Price(input="3", cache_read="0.30", cache_write="3.75", output="15")
"""The price card of the reports."""

FREE = tw.Price(input="0", cache_read="0", cache_write="0", output="0")

Backend = Literal["asyncio", "trio"]
both_backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])

# pytest's ``record_property``: what is recorded is printed at the end of the whole run.
Measured: TypeAlias = Callable[[str, object], None]

# What happened to whom, in the order it happened.
Order: TypeAlias = tuple[tuple[str, str], ...]


def price_for_worst_case(usd: str, *, output_limit: int = 1_000) -> tw.Price:
    """A price at which a call with that output limit holds exactly ``usd``."""
    output = Decimal(usd) * 1_000_000 / output_limit
    return tw.Price(input="0", cache_read="0", cache_write="0", output=output)


def model_of_worst_case(
    usd: str, script: Callable[[ScriptedRequest], Reply], *, output_limit: int = 1_000
) -> ScriptedModel:
    """A model whose every call holds exactly ``usd``."""
    price = price_for_worst_case(usd, output_limit=output_limit)
    return ScriptedModel(script, price=price, max_output=output_limit)


def free_model(script: Callable[[ScriptedRequest], Reply]) -> ScriptedModel:
    """A model that is known to cost nothing, for whoever only hands out work."""
    return ScriptedModel(script, price=FREE, id="scripted/free")


def uses_all(request: ScriptedRequest, text: str = "done", *, delay: float = 1.0) -> Reply:
    """A reply that bills every output token it was allowed.

    All of them take the same time, so whoever was started together also ends at the same instant,
    in an order that the seed decides.
    """
    return Reply(text, usage=tw.Usage(output=request.output_limit), delay=delay)


def hands_out(
    *tool_calls: tuple[str, dict[str, Any]],
) -> Callable[[ScriptedRequest], Reply]:
    """A script that asks for these calls in its first reply, and then is done."""

    def script(request: ScriptedRequest) -> Reply:
        usage = tw.Usage(output=request.output_limit)
        if request.turn == 0:
            return Reply(tool_calls=tool_calls, usage=usage)
        return Reply("all done", usage=usage)

    return script


def slowly(script: Callable[[ScriptedRequest], Reply]) -> Callable[[ScriptedRequest], Reply]:
    """The same replies, written in eight pieces: all who write at once then take turns anyhow."""

    def slowed(request: ScriptedRequest) -> Reply:
        return attrs.evolve(script(request), text="", chunks=tuple("hmmmmmmm"), chunk_delay=0.1)

    return slowed


def tasks(name: str, count: int) -> list[tuple[str, dict[str, Any]]]:
    """``count`` calls of the subagent tool ``name``."""
    return [(name, {"task": f"part {number}"}) for number in range(1, count + 1)]


# --- what a tree told ----------------------------------------------------------------------------


@attrs.define
class Witness:
    """Keeps what one tree tells: its events, its journal, and in which order they came.

    It replays the journal as it comes, so it knows the ledger's state without asking the ledger.
    """

    # Check every invariant after every event; costs as much as there is alive.
    is_thorough: bool = True
    events: list[RunEvent] = attrs.field(factory=list[RunEvent])
    journal: list[Event] = attrs.field(factory=list[Event])
    state: TreeState = attrs.field(factory=TreeState)
    # The most that was ever held on the root's wallet, in the tree's unit.
    most_held: Decimal = Decimal(0)
    _order: list[tuple[str, str]] = attrs.field(factory=list[tuple[str, str]])

    @property
    def order(self) -> Order:
        """What happened to whom, in the order it happened."""
        return tuple(self._order)

    @property
    def tree_options(self) -> dict[str, Any]:
        """What ``tw.open_tree`` and ``tw.stream`` take, in a loop of virtual time."""
        return {"journal": self.write, "clock": VirtualClock.running(), "seed": 1}

    @property
    def options(self) -> dict[str, Any]:
        """What ``tw.run`` takes, in a loop of virtual time."""
        return {**self.tree_options, "on_event": self.hear}

    def hear(self, event: RunEvent) -> None:
        self.events.append(event)
        self._order.append((type(event).__name__, event.path))

    def note(self, what: str, path: str) -> None:
        """Remember something that neither event nor journal tells, in its place in the order."""
        self._order.append((what, path))

    def write(self, event: Event) -> None:
        path = self._path_of(event)  # before it is carried out: then what ends is gone
        self.state.apply(event)
        self.journal.append(event)
        self._order.append((type(event).__name__, path or self._path_of(event)))
        if self.is_thorough:
            self.state.check()
        root = self.state.wallets[0]
        assert root.settled <= root.max, f"{root.settled} of {root.max} spent after {event}"
        self.most_held = max(self.most_held, amount_of(self.state.unit, root.held))

    def holds(self) -> list[Decimal]:
        """Every amount that was held, in the tree's unit, in order."""
        return [
            amount_of(self.state.unit, event._asdict()["amount"])
            for event in self.journal
            if type(event).__name__ == "Held"
        ]

    def charged_calls(self) -> int:
        """How many calls were charged for that had left."""
        settled = [e._asdict() for e in self.journal if type(e).__name__ == "Settled"]
        return sum(fields["basis"] != "not_dispatched" for fields in settled)

    def _path_of(self, event: Event) -> str:
        """Whom an event is about; empty while, or once, there is no such node."""
        fields, state = event._asdict(), self.state
        if (node_id := fields.get("node", fields.get("parent"))) is not None:
            return state.nodes[node_id].path if node_id in state.nodes else ""
        if (hold := state.holds.get(fields.get("hold", -1))) is not None:
            return hold.node.path
        waiting = state.waiting.get(fields.get("ticket", -1))
        return "" if waiting is None else waiting.node.path


# --- the books -----------------------------------------------------------------------------------


def check_books(
    witness: Witness, receipts: Receipt | Sequence[Receipt], *models: ScriptedModel
) -> None:
    """Assert the three rules of every scenario, once its tree is closed.

    Open holds and used slots are 0 and no span is open; what the root spent is the sum of all
    receipt lines; and that is what the providers bill, each line by itself: to the unit where it
    was measured, within its bounds where it was estimated.
    """
    tops = [receipts] if isinstance(receipts, Receipt) else list(receipts)
    check_closed(witness)
    for receipt in tops:
        receipt.check()
    below = [receipt for top in tops for receipt in top.walk()]
    lines = [line for receipt in below for line in receipt.lines]
    root = witness.state.wallets[0]
    in_usd = witness.state.unit == "usd"
    spent = sum(((line.usd if in_usd else line.tokens) for line in lines), Decimal(0))
    assert amount_of(witness.state.unit, root.settled) == spent
    _check_account(below, models)
    assert all(model.open_requests == 0 for model in models)
    if all(line.basis == "provider_reported" for line in lines):
        assert sum(line.usd for line in lines) == sum(model.billed for model in models)


def check_closed(witness: Witness) -> None:
    """Assert that nothing is left of a tree that was closed, and that its journal replays."""
    state = witness.state
    assert state.nodes == {}, [node.path for node in state.nodes.values()]
    assert list(state.wallets) == [0]
    assert state.holds == {}
    assert state.waiting == {}
    root, counters = state.wallets[0], state.counters
    assert root.held == root.carved == root.set_aside == root.queued == 0, root
    assert counters.active == counters.calls_in_flight == 0, counters
    assert counters.queued_slots == counters.queued_money == counters.open_spans == 0, counters
    assert counters.parked == counters.queued_entries == counters.queued_resumes == 0, counters
    assert state.entries == {}
    assert fold(witness.journal).plain() == state.plain()


def check_nobody_was_refused(witness: Witness) -> None:
    """Assert that no limit on breadth or depth had a say in what happened."""
    counters = witness.state.counters
    assert counters.invocation_rejections == counters.concurrency_rejections == 0, counters
    assert counters.other_rejections == 0, counters


def _check_account(receipts: Sequence[Receipt], models: Sequence[ScriptedModel]) -> None:
    for receipt in receipts:
        asked = [r for model in models for r in model.requests if r.agent_path == receipt.path]
        sent = [line for line in receipt.lines if line.basis != "not_dispatched"]
        assert len(asked) == len(sent), (receipt.path, asked, sent)
        for request, line in zip(asked, sent, strict=True):
            _check_line(request, line)


def _check_line(request: ScriptedRequest, line: Line) -> None:
    assert request.output_limit == line.output_limit, (request, line)
    assert line.low_usd <= request.billed <= line.high_usd, (request, line)
    if line.basis == "provider_reported":
        assert line.usd == request.billed, (request, line)
        assert request.usage is not None
        assert line.tokens == request.usage.total, (request, line)


# --- many orders ---------------------------------------------------------------------------------


def explore(
    scenario: Callable[[], Awaitable[Witness]],
    measured: Measured,
    what: str,
    *,
    seeds: int = SEEDS,
    enough: int = ENOUGH_ORDERS,
) -> None:
    """Run a scenario under many seeds on both backends, and see to it that the orders differed.

    ``enough`` is how many orders it must be; less where little goes on at once.
    The figure is kept as a property of the test, so that it is seen in a parallel run as well.
    """

    def order_of(witness: Witness) -> Order:
        return witness.order

    schedules = run_seeded(scenario, seeds=seeds, order_of=order_of)
    measured("measured", f"{what}: {schedules}")
    print(f"{what}: {schedules}")
    assert min(schedules.distinct.values()) >= enough, schedules
