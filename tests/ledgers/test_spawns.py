"""How many subagents one run may start in its life, and a tree within a minute."""

from __future__ import annotations

import json

import pytest

from treewarden.ledgers import (
    Caps,
    Entry,
    Event,
    Kind,
    Lease,
    LeaseRequest,
    Outcome,
    TreeLedger,
    TreeState,
    event_from_json,
    event_to_json,
    fold,
)
from treewarden.protocols import LedgerError, RefusedError


class Spawner:
    """A tree, and the journal it wrote."""

    def __init__(self, **caps: object) -> None:
        self.events: list[Event] = []
        limits = {"max_depth": 8, "max_subagents": None, "max_concurrent_subagents": None, **caps}
        self.ledger = TreeLedger(caps=Caps(**limits), sink=self.events.append)  # type: ignore[arg-type]

    def run(self) -> Lease:
        return self.ledger.admit(self.ledger.root, "run", kind=Kind.RUN, at=0)

    def spawn(self, parent: Lease, at: float = 0.0) -> Lease:
        lease = self.ledger.admit(parent, "child", kind=Kind.AGENT, at=at)
        self.check()
        return lease

    def refused(self, parent: Lease, at: float = 0.0) -> RefusedError:
        with pytest.raises(RefusedError) as raised:
            self.ledger.admit(parent, "child", kind=Kind.AGENT, at=at)
        self.check()
        return raised.value

    def check(self) -> None:
        self.ledger.check()
        plain = self.ledger.state.plain()
        written = [event_from_json(event_to_json(event)) for event in self.events]
        assert fold(written).plain() == plain
        assert TreeState.from_plain(json.loads(json.dumps(plain))).plain() == plain


# --- in a run's life -----------------------------------------------------------------------------


def test_a_run_starts_as_many_subagents_as_it_may_and_ended_ones_count() -> None:
    tree = Spawner(max_descendants=3)
    run = tree.run()
    for _ in range(3):
        tree.ledger.end(tree.spawn(run), Outcome.OK, 0)
    refused = tree.refused(run)
    assert refused.code == "cave_subagent_breadth_limit"
    assert refused.at == run.path
    assert "max_descendants" in str(refused)
    assert "asking again cannot help" in str(refused)
    assert tree.ledger.counters.other_rejections == 1


def test_what_a_child_starts_counts_for_its_run() -> None:
    tree = Spawner(max_descendants=3)
    run = tree.run()
    child = tree.spawn(run)
    grandchild = tree.spawn(child)
    tree.spawn(grandchild)
    assert [tree.refused(lease).at for lease in (run, child, grandchild)] == [run.path] * 3


def test_each_run_has_its_own_count() -> None:
    tree = Spawner(max_descendants=1)
    one, other = tree.run(), tree.run()
    tree.spawn(one)
    tree.refused(one)
    tree.spawn(other)


def test_a_subagent_of_a_tool_counts_for_the_run_above_the_tool() -> None:
    tree = Spawner(max_descendants=1)
    run = tree.run()
    tool = tree.ledger.admit(run, "tool", kind=Kind.TOOL, at=0)
    tree.spawn(tool)
    assert tree.refused(run).code == "cave_subagent_breadth_limit"


def test_a_lowered_limit_counts_what_was_started_before_it() -> None:
    tree = Spawner()
    run = tree.run()
    tree.spawn(run)
    tree.spawn(run)
    tree.ledger.set_cap("max_descendants", 2, 0)
    tree.refused(run)
    tree.ledger.set_cap("max_descendants", None, 0)
    tree.spawn(run)


def test_nobody_waits_in_line_for_what_his_run_has_used_up() -> None:
    tree = Spawner(max_descendants=1, max_concurrent_subagents=1, admission="wait")
    run = tree.run()
    tree.spawn(run)
    with pytest.raises(RefusedError) as raised:
        tree.ledger.enter(run, LeaseRequest("child", Kind.AGENT), 0)
    assert raised.value.code == "cave_subagent_breadth_limit"


def test_who_waits_is_refused_when_his_turn_comes_and_the_run_has_used_up_its_own() -> None:
    tree = Spawner(max_descendants=2, max_concurrent_subagents=1, admission="wait")
    run = tree.run()
    first = tree.spawn(run)
    entries = [tree.ledger.enter(run, LeaseRequest("child", Kind.AGENT), 0) for _ in range(2)]
    tree.ledger.end(first, Outcome.OK, 0)
    second, third = entries
    assert isinstance(second, Entry)
    assert isinstance(second.outcome, Lease)
    assert isinstance(third, Entry)
    tree.ledger.end(second.outcome, Outcome.OK, 0)
    assert isinstance(third.outcome, RefusedError)
    assert third.outcome.code == "cave_subagent_breadth_limit"
    tree.check()


# --- within a minute -----------------------------------------------------------------------------


def test_a_minute_holds_as_many_starts_as_it_may() -> None:
    tree = Spawner(max_spawns_per_minute=2)
    run = tree.run()
    tree.spawn(run, at=10.0)
    tree.spawn(run, at=40.0)
    assert tree.refused(run, at=69.9).code == "cave_subagent_spawn_rate_limit"
    tree.spawn(run, at=70.0)
    tree.refused(run, at=99.0)
    tree.spawn(run, at=100.0)


def test_the_minute_is_the_whole_trees() -> None:
    tree = Spawner(max_spawns_per_minute=1)
    tree.spawn(tree.run())
    refused = tree.refused(tree.run())
    assert refused.at == "the tree"
    assert "max_spawns_per_minute" in str(refused)


def test_a_refused_start_is_no_start() -> None:
    tree = Spawner(max_spawns_per_minute=1)
    run = tree.run()
    tree.spawn(run, at=0.0)
    for at in (1.0, 30.0, 59.0):
        tree.refused(run, at=at)
    tree.spawn(run, at=60.0)


def test_the_same_refusal_has_the_same_text() -> None:
    """So that a model which only repeats itself is seen to (see _breakers.py)."""
    tree = Spawner(max_spawns_per_minute=1)
    run = tree.run()
    tree.spawn(run)
    assert str(tree.refused(run, at=1.0)) == str(tree.refused(run, at=2.0))


def test_no_more_starts_are_kept_than_the_limit_needs() -> None:
    tree = Spawner(max_spawns_per_minute=3)
    run = tree.run()
    for second in range(0, 2_000, 25):
        tree.ledger.end(tree.spawn(run, at=float(second)), Outcome.OK, second)
        assert len(tree.ledger.state.spawns) <= 3


def test_without_the_limit_nothing_is_kept() -> None:
    tree = Spawner(max_spawns_per_minute=2)
    run = tree.run()
    tree.spawn(run)
    tree.ledger.set_cap("max_spawns_per_minute", None, 1)
    assert not tree.ledger.state.spawns
    for _ in range(3):
        tree.spawn(run, at=2.0)
    assert not tree.ledger.state.spawns
    tree.ledger.set_cap("max_spawns_per_minute", 1, 3)
    tree.spawn(run, at=4.0)
    tree.refused(run, at=5.0)


def test_a_limit_that_is_lowered_looks_at_the_newest_starts() -> None:
    tree = Spawner(max_spawns_per_minute=5)
    run = tree.run()
    for at in (0.0, 10.0, 20.0):
        tree.spawn(run, at=at)
    tree.ledger.set_cap("max_spawns_per_minute", 2, 21)
    tree.refused(run, at=69.0)
    tree.spawn(run, at=70.0)


@pytest.mark.parametrize("name", ["max_descendants", "max_spawns_per_minute"])
def test_a_limit_is_at_least_one(name: str) -> None:
    with pytest.raises(LedgerError):
        Spawner().ledger.set_cap(name, 0, 0)
