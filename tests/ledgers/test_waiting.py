"""Waiting for an agent's slot, and giving it back while all that runs are children."""

from __future__ import annotations

from typing import Any

import pytest

from treewarden.ledgers import (
    Ask,
    Caps,
    Entry,
    Event,
    Hold,
    Kind,
    Lease,
    LeaseRequest,
    Outcome,
    Ticket,
    TreeLedger,
    event_from_json,
    event_to_json,
    fold,
)
from treewarden.protocols import LedgerError, RefusedError


class Tree:
    """A tree whose starts wait, and who was told what, in order."""

    def __init__(self, cap: int | None, *, max: int = 1_000, **caps: Any) -> None:
        self.events: list[Event] = []
        limits = Caps(max_concurrent_subagents=cap, admission="wait", **caps)
        self.ledger = TreeLedger(unit="tokens", max=max, caps=limits, sink=self.events.append)
        self.told: list[str] = []
        self.run = self.ledger.admit(self.ledger.root, "run", kind=Kind.RUN, at=0)

    def enter(
        self, name: str, parent: Lease | None = None, *, attempts: int | None = None, **options: Any
    ) -> Lease | Entry:
        request = LeaseRequest(name, Kind.AGENT, **options)
        got = self.ledger.enter(parent or self.run, request, 1, max_attempts=attempts)
        if isinstance(got, Entry):
            got.on_ready = lambda: self.told.append(name)
        return got

    def begin(self, name: str, parent: Lease | None = None, **options: Any) -> Lease:
        got = self.enter(name, parent, **options)
        assert isinstance(got, Lease), got
        return got

    def line_up(self, name: str, parent: Lease | None = None, **options: Any) -> Entry:
        got = self.enter(name, parent, **options)
        assert isinstance(got, Entry), got
        return got

    def end(self, lease: Lease | RefusedError | None) -> None:
        assert isinstance(lease, Lease), lease
        self.ledger.end(lease, Outcome.OK, 2)
        self.ledger.check()

    def park(self, lease: Lease) -> None:
        self.ledger.park(lease, 1)
        self.ledger.check()

    def hold(self, tokens: int, lease: Lease | None = None) -> Hold | Ticket:
        ask = Ask(input_tokens=0, output_tokens=tokens, price=None, can_write_cache=False)
        got = self.ledger.fund(lease or self.run, ask, 1)
        assert isinstance(got, (Hold, Ticket)), got
        return got


def test_a_full_tree_is_waited_for_and_the_first_to_come_goes_first() -> None:
    tree = Tree(1)
    first = tree.begin("first")
    second, third = tree.line_up("second"), tree.line_up("third")
    assert tree.ledger.counters.queued_entries == 2
    assert tree.ledger.counters.admitted == 1
    assert [row["path"] for row in tree.ledger.snapshot()["waiters"]] == [
        "root/run#1/second",
        "root/run#1/third",
    ]
    tree.end(first)
    assert tree.told == ["second"]
    assert isinstance(second.outcome, Lease)
    assert second.outcome.path == "root/run#1/second#2"
    assert third.outcome is None
    tree.end(second.outcome)
    tree.end(third.outcome)
    tree.end(tree.run)
    tree.ledger.end(tree.ledger.root, Outcome.OK, 3)
    tree.ledger.check_closed()
    assert tree.ledger.counters.concurrency_rejections == 0
    assert tree.ledger.counters.peak == 1


def test_a_parked_parent_lets_its_child_go_first_and_then_goes_on_before_others() -> None:
    tree = Tree(1)
    parent = tree.begin("parent")
    other = tree.line_up("other")
    child = tree.line_up("child", parent)
    tree.park(parent)
    # The deeper goes first, though it came later.
    assert tree.told == ["child"]
    assert not tree.ledger.resume(parent, 1)
    parent.on_slot = lambda: tree.told.append("parent is back")
    tree.end(child.outcome)
    assert tree.told == ["child", "parent is back"]
    assert other.outcome is None
    tree.end(parent)
    assert isinstance(other.outcome, Lease)


def test_a_parked_agent_that_no_longer_wants_its_slot_stops_waiting() -> None:
    tree = Tree(1)
    parent = tree.begin("parent")
    other = tree.line_up("other")
    tree.park(parent)
    assert not tree.ledger.resume(parent, 1)
    tree.park(parent)
    assert tree.ledger.counters.queued_resumes == 0
    tree.end(other.outcome)
    assert parent.node.is_parked
    assert tree.ledger.resume(parent, 1)
    assert tree.ledger.counters.active == 1


def test_the_oldest_run_goes_first() -> None:
    tree = Tree(1)
    younger = tree.ledger.admit(tree.ledger.root, "younger", kind=Kind.RUN, at=0)
    running = tree.begin("running", younger)
    tree.line_up("young", younger)
    tree.line_up("old")
    tree.end(running)
    assert tree.told == ["old"]


def test_a_carve_waits_while_calls_wait_for_that_money_and_the_turn_goes_to_the_next() -> None:
    tree = Tree(1, max=100)
    running = tree.begin("running")
    carving, plain = tree.line_up("carving", cap=10), tree.line_up("plain")
    hold, ticket = tree.hold(90), tree.hold(50)
    assert isinstance(hold, Hold)
    assert isinstance(ticket, Ticket)
    tree.end(running)
    assert tree.told == ["plain"]
    assert carving.outcome is None
    tree.end(plain.outcome)
    assert carving.outcome is None  # a slot is free, but calls wait for its money
    tree.ledger.release(hold, 2)
    assert isinstance(ticket.outcome, Hold)
    assert isinstance(carving.outcome, Lease)
    assert carving.outcome.node.wallet.max == 10
    tree.ledger.check()


def test_money_is_looked_at_when_the_turn_comes_and_not_before() -> None:
    tree = Tree(1, max=100)
    running = tree.begin("running", cap=80)
    later, never = tree.line_up("later", cap=50), tree.line_up("never", cap=101)
    tree.end(running)
    assert isinstance(later.outcome, Lease)
    tree.end(later.outcome)
    assert isinstance(never.outcome, RefusedError)
    assert never.outcome.code == "cave_subagent_wallet_unavailable"
    assert tree.told == ["later", "never"]
    assert tree.ledger.counters.other_rejections == 1


def test_what_no_waiting_helps_is_refused_at_once() -> None:
    tree = Tree(1, max_depth=1, max_subagents=3)
    first = tree.begin("first")
    with pytest.raises(RefusedError, match="cave_subagent_depth_limit"):
        tree.enter("too deep", first)
    second, third, fourth = (tree.line_up(name) for name in ("second", "third", "fourth"))
    tree.end(first)
    tree.end(second.outcome)
    tree.end(third.outcome)
    assert isinstance(fourth.outcome, RefusedError)
    assert fourth.outcome.code == "cave_subagent_invocation_limit"
    with pytest.raises(RefusedError, match="cave_subagent_invocation_limit"):
        tree.enter("fifth")


def test_a_wallet_that_funds_nothing_is_not_waited_for() -> None:
    tree = Tree(1)
    tree.begin("first")
    tree.ledger.revoke(tree.ledger.root, "enough", 1)
    with pytest.raises(RefusedError, match="cave_subagent_wallet_unavailable"):
        tree.enter("penniless", cap=5)


def test_an_attempt_counts_once_before_it_waits() -> None:
    tree = Tree(1)
    first = tree.begin("research", tool="research", attempts=2)
    second = tree.line_up("research", tool="research", attempts=2)
    with pytest.raises(RefusedError, match="cave_subagent_call_budget"):
        tree.enter("research", tool="research", attempts=2)
    tree.end(first)
    assert isinstance(second.outcome, Lease)
    assert tree.run.node.attempts == {"research": 2}
    assert tree.run.node.tool_calls == 2


def test_whoever_leaves_or_ends_leaves_no_trace_in_line() -> None:
    tree = Tree(1)
    first = tree.begin("first")
    gone, stays = tree.line_up("gone"), tree.line_up("stays")
    tree.ledger.leave_line(gone, 1)
    tree.ledger.leave_line(gone, 1)
    parent = tree.line_up("parent")
    tree.end(first)
    tree.end(stays.outcome)
    assert isinstance(parent.outcome, Lease)
    waiting = tree.line_up("waits below it", parent.outcome)
    tree.end(parent.outcome)
    assert waiting.outcome is None
    assert tree.ledger.counters.queued_entries == 0
    # One that left by itself knows it; one whose parent ended is told that nothing comes of it.
    assert tree.told == ["stays", "parent", "waits below it"]


def test_nothing_more_starts_below_a_lease_that_takes_no_more() -> None:
    tree = Tree(1)
    first = tree.begin("first")
    stopping = tree.ledger.admit(tree.run, "stopping", kind=Kind.TOOL, at=1)
    below, beside = tree.line_up("below", stopping), tree.line_up("beside")
    stopping.takes_no_more = True
    tree.end(first)
    assert tree.told == ["below", "beside"]
    assert below.outcome is None
    assert isinstance(beside.outcome, Lease)
    assert tree.ledger.counters.admitted == 2


def test_a_raised_cap_admits_who_waits_and_a_lowered_one_may_stay_exceeded() -> None:
    tree = Tree(2)
    first, second = tree.begin("first"), tree.begin("second")
    tree.line_up("third")
    tree.line_up("fourth")
    tree.ledger.set_cap("max_concurrent_subagents", 3, 1)
    assert tree.told == ["third"]
    tree.ledger.set_cap("max_concurrent_subagents", 1, 1)
    tree.end(first)
    tree.end(second)
    assert tree.told == ["third"]
    tree.ledger.set_cap("max_concurrent_subagents", None, 1)
    assert tree.told == ["third", "fourth"]
    with pytest.raises(LedgerError):
        tree.ledger.set_cap("admission", 1, 1)


def test_every_event_of_waiting_survives_json_and_folds_to_the_state() -> None:
    tree = Tree(1)
    parent = tree.begin("parent")
    gone = tree.line_up("gone")
    child = tree.line_up("child", parent)
    tree.ledger.leave_line(gone, 1)
    tree.park(parent)
    tree.ledger.resume(parent, 1)
    tree.park(parent)
    tree.ledger.resume(parent, 1)
    tree.line_up("too much", cap=10**9)
    tree.end(child.outcome)
    tree.end(parent)
    kinds = {type(event).__name__ for event in tree.events}
    line = {"EntryQueued", "EntryLeft", "Parked", "ResumeQueued", "ResumeLeft", "Resumed"}
    assert line <= kinds
    read = [event_from_json(event_to_json(event)) for event in tree.events]
    assert read == tree.events
    for number in range(1, len(read) + 1):
        state = fold(read[:number])
        state.check()
        assert fold(read[number:], onto=state.plain()).plain() == tree.ledger.state.plain()
