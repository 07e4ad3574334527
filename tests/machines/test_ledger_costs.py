"""W9 and W10: what an operation costs does not grow with the tree, and what is closed is forgotten.

Costs are counted in function calls, of Python and of C, so a busy machine changes nothing.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import pytest

from treewarden.ledgers import (
    Ask,
    Caps,
    Ending,
    Hold,
    Kind,
    Lease,
    Outcome,
    Stop,
    Ticket,
    TreeLedger,
    Unit,
)
from treewarden.protocols import RefusedError

UNLIMITED = Caps(max_depth=8, max_subagents=None, max_concurrent_subagents=None)
ALL_OUT = 10**9
MANY = 100_000


def ask(output: int, *, wait: bool = True) -> Ask:
    return Ask(input_tokens=0, output_tokens=output, price=None, clamp=False, wait=wait)


@contextmanager
def counted() -> Generator[list[int], None, None]:
    """Counts the calls made within, into the only item."""
    count = [0]

    def see(frame: FrameType, event: str, arg: object) -> None:
        count[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        yield count
    finally:
        sys.setprofile(before)


class Tree:
    """A tree of so many idle agents, and one run deep in it that does something."""

    def __init__(self, *, width: int = 0, history: int = 0, waiters: int = 0) -> None:
        self.ledger = TreeLedger(unit="tokens", max=ALL_OUT, caps=UNLIMITED)
        self.at = 0.0
        crowd = self.admit(self.ledger.root, kind=Kind.RUN)
        for _ in range(width):
            self.admit(crowd)
        for _ in range(history):
            self.ledger.end(self.admit(crowd), Outcome.OK, self.at)
        for _ in range(waiters):
            self.wait(self.admit(crowd, cap=10))
        self.actor = self.ledger.root
        for _ in range(8):
            self.actor = self.admit(self.actor)

    def admit(self, parent: Lease, *, kind: Kind = Kind.AGENT, cap: int | None = None) -> Lease:
        self.at += 1
        return self.ledger.admit(parent, "agent", kind=kind, at=self.at, cap=cap)

    def hold(self, lease: Lease, output: int) -> Hold:
        hold = self.ledger.fund(lease, ask(output), self.at)
        assert isinstance(hold, Hold)
        return hold

    def wait(self, lease: Lease) -> Ticket:
        """Someone holds most of its wallet, so that the next has to wait."""
        self.hold(lease, lease.node.wallet.free - 1)
        ticket = self.ledger.fund(lease, ask(10), self.at)
        assert isinstance(ticket, Ticket)
        return ticket

    def admit_and_end(self) -> None:
        self.ledger.end(self.admit(self.actor, kind=Kind.TOOL), Outcome.OK, self.at)

    def carve_and_end(self) -> None:
        self.ledger.end(self.admit(self.actor, kind=Kind.TOOL, cap=100), Outcome.OK, self.at)

    def call(self) -> None:
        hold = self.hold(self.actor, 100)
        assert self.ledger.dispatch(hold, self.at) is True
        hold.is_sent = True
        self.ledger.settle(hold, Ending.BROKEN, self.at)

    def be_refused(self) -> None:
        with pytest.raises(RefusedError):
            self.admit(self.actor, kind=Kind.TOOL, cap=ALL_OUT + 1)

    def be_stopped(self) -> None:
        assert isinstance(self.ledger.fund(self.actor, ask(ALL_OUT + 1, wait=False), 0), Stop)

    def wait_and_leave(self) -> None:
        lease = self.admit(self.actor, kind=Kind.TOOL, cap=100)
        self.ledger.leave(self.wait(lease), self.at)
        self.ledger.end(lease, Outcome.CANCELLED, self.at)

    def be_revoked(self) -> None:
        lease = self.admit(self.actor, kind=Kind.TOOL, cap=100)
        ticket = self.wait(lease)
        self.ledger.revoke(lease, "enough", self.at)
        assert isinstance(ticket.outcome, Stop)
        self.ledger.end(lease, Outcome.CANCELLED, self.at)

    def be_lowered(self) -> None:
        lease = self.admit(self.actor, kind=Kind.TOOL, cap=100)
        self.ledger.lower_max(lease, 50, self.at)
        self.ledger.raise_max(lease, 80, self.at)
        self.ledger.end(lease, Outcome.CANCELLED, self.at)


OPERATIONS: dict[str, Callable[[Tree], None]] = {
    "admit and end": Tree.admit_and_end,
    "carve and end": Tree.carve_and_end,
    "fund, dispatch and settle": Tree.call,
    "refuse a wallet": Tree.be_refused,
    "refuse a call": Tree.be_stopped,
    "wait and leave": Tree.wait_and_leave,
    "revoke with one waiter": Tree.be_revoked,
    "lower and raise": Tree.be_lowered,
}


def costs(tree: Tree) -> dict[str, int]:
    def cost(operation: Callable[[Tree], None]) -> int:
        operation(tree)  # what is made at the first time is no part of it
        # A long tail is cut, or found too short to be cut, at every event: see the next test.
        tree.ledger.journal.tail.clear()
        with counted() as count:
            operation(tree)
        return count[0]

    return {name: cost(operation) for name, operation in OPERATIONS.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "few", "many"),
    [
        ("width", 10, MANY),
        ("history", 10, MANY),
        # A refusal looks at 64 holders at most to name three.
        ("waiters", 64, MANY // 50),
    ],
)
def test_an_operation_costs_the_same_in_a_large_tree(
    what: str, few: int, many: int, record_property: Callable[[str, object], None]
) -> None:
    small, large = costs(Tree(**{what: few})), costs(Tree(**{what: many}))
    ratios = {name: large[name] / small[name] for name in OPERATIONS}
    name = max(ratios, key=lambda name: ratios[name])
    record_property(
        "measured",
        f"ledger operations with {what} {many:,} instead of {few}: {ratios[name]:.2f} x the calls "
        f"at most ({name}: {large[name]})",
    )
    assert ratios[name] <= 1.2, ratios


@pytest.mark.slow
def test_snapshots_of_the_journal_cost_a_fixed_share_of_each_event() -> None:
    """Cuts included, an event costs the same whatever is alive."""

    def cost_of_a_pair(width: int) -> float:
        tree = Tree(width=width)
        pairs = 2 * 4 * width  # so many events that the tail is cut twice
        with counted() as count:
            for _ in range(pairs):
                tree.admit_and_end()
        return count[0] / pairs

    assert cost_of_a_pair(10_000) <= 1.2 * cost_of_a_pair(2_000)


def queue_of(waiters: int) -> tuple[Tree, Lease]:
    tree = Tree()
    lease = tree.admit(tree.actor, kind=Kind.TOOL, cap=10)
    tree.hold(lease, 8)
    for _ in range(waiters):
        assert isinstance(tree.ledger.fund(lease, ask(8), 0), Ticket)
    return tree, lease


@pytest.mark.slow
def test_a_queue_of_many_costs_each_waiter_the_same() -> None:
    def calls_a_waiter(waiters: int) -> float:
        tree, lease = queue_of(waiters)
        with counted() as count:
            tree.ledger.revoke(lease, "enough", 0)
        return count[0] / waiters

    assert calls_a_waiter(5_000) <= 1.2 * calls_a_waiter(50)


@pytest.mark.slow
def test_the_head_of_a_long_queue_is_found_at_once() -> None:
    """In seconds of CPU, because walking over what has left a dict is no call of anything."""

    def seconds_a_waiter(waiters: int) -> float:
        tree, lease = queue_of(waiters)
        gc.disable()
        try:
            begin = time.process_time()
            tree.ledger.revoke(lease, "enough", 0)
            return (time.process_time() - begin) / waiters
        finally:
            gc.enable()

    # Five times as much at this length, if the head is looked for.
    assert seconds_a_waiter(60_000) <= 2.5 * min(seconds_a_waiter(4_000) for _ in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["usd", "tokens"])
def test_what_has_ended_is_forgotten(unit: Unit) -> None:
    agents, seen = 2 * MANY, [0]

    def sink(event: object) -> None:
        seen[0] += 1

    ledger = TreeLedger(unit=unit, max=10**15, caps=UNLIMITED, sink=sink)
    run = ledger.admit(ledger.root, "run", kind=Kind.RUN, at=0)
    for i in range(agents):
        agent = ledger.admit(run, "agent", kind=Kind.AGENT, at=i, cap=1000 if i % 10 else None)
        if i % 20 == 0:
            hold = ledger.fund(agent, ask(10), i)
            assert isinstance(hold, Hold) and ledger.dispatch(hold, i) is True
            hold.is_sent = True
        ledger.end(agent, Outcome.OK, i)
    assert seen[0] > 2 * agents
    assert set(ledger.state.nodes) == {0, run.id}
    assert set(ledger.state.wallets) == {0}
    assert not ledger.state.holds and not ledger.state.waiting
    assert len(ledger.journal.tail) <= 4096
    assert ledger.counters.admitted == agents and ledger.counters.peak == 1
    ledger.end(run, Outcome.OK, agents)
    ledger.check_closed()
