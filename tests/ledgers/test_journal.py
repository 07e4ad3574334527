"""The journal: a bounded tail over a snapshot that always folds to what is so now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from treewarden.ledgers import (
    Ask,
    Caps,
    Ending,
    Event,
    Hold,
    Journal,
    Kind,
    Outcome,
    TreeLedger,
    TreeState,
    fold,
)


def events_of_a_small_tree() -> list[Event]:
    """A run with a child of its own wallet, a waiter, a charge, a lowered ceiling and a release."""
    events: list[Event] = []
    ledger = TreeLedger(
        unit="tokens", max=100, initial=80, caps=Caps(max_depth=3), sink=events.append
    )
    run = ledger.admit(ledger.root, "run", kind=Kind.RUN, at=1, set_aside=5)
    child = ledger.admit(
        run, "child", kind=Kind.AGENT, at=2, cap=30, deadline=9, tool="child", max_attempts=2
    )
    hold = ledger.fund(run, ask(40), 3)
    assert isinstance(hold, Hold)
    ledger.fund(run, ask(20), 4)
    ledger.dispatch(hold, 5)
    ledger.release_tranche(ledger.root, 10, "more", 6)
    ledger.lower_max(ledger.root, 60, 7)
    hold.progress.bytes = 80
    ledger.settle(hold, Ending.BROKEN, 8)
    ledger.revoke(child, "enough", 9)
    ledger.end(child, Outcome.CANCELLED, 10)
    return events


def ask(output: int) -> Ask:
    return Ask(input_tokens=0, output_tokens=output, price=None, clamp=False)


def test_an_event_can_be_applied_to_nothing_but_the_state_it_was_made_in() -> None:
    events = events_of_a_small_tree()
    assert fold(events).plain() == fold(events).plain()
    with pytest.raises(KeyError):
        fold(events[1:])


def test_every_prefix_is_a_valid_state() -> None:
    events = events_of_a_small_tree()
    for i in range(1, len(events) + 1):
        fold(events[:i]).check()


def test_a_state_goes_through_json_and_back() -> None:
    events = events_of_a_small_tree()
    for i in range(1, len(events) + 1):
        plain = fold(events[:i]).plain()
        again = TreeState.from_plain(json.loads(json.dumps(plain)))
        again.check()
        assert json.dumps(again.plain()) == json.dumps(plain)


def test_a_snapshot_and_what_came_after_it_make_the_same_state() -> None:
    events = events_of_a_small_tree()
    for i in range(1, len(events) + 1):
        base = fold(events[:i]).plain()
        assert fold(events[i:], onto=base).plain() == fold(events).plain()


def test_folding_onto_a_snapshot_does_not_change_the_snapshot() -> None:
    events = events_of_a_small_tree()
    base = fold(events[:5]).plain()
    before = json.dumps(base)
    fold(events[5:], onto=base)
    assert json.dumps(base) == before


def test_the_state_says_how_many_events_made_it() -> None:
    events = events_of_a_small_tree()
    assert fold(events).events == len(events)
    assert fold(events[6:], onto=fold(events[:6]).plain()).events == len(events)


# --- the bounded tail ----------------------------------------------------------------------------


def journal_of(events: list[Event], *, keep: int) -> tuple[Journal, TreeState, list[Event]]:
    seen: list[Event] = []
    state = TreeState()
    journal = Journal(state, keep=keep, sink=seen.append)
    for event in events:
        journal.record(event)
        check(journal, state)
    return journal, state, seen


def check(journal: Journal, state: TreeState) -> None:
    base: Mapping[str, Any] | None = journal.base
    assert fold(journal.tail, onto=base).plain() == state.plain()


def many_events(pairs: int) -> list[Event]:
    events: list[Event] = []
    ledger = TreeLedger(unit="tokens", max=100, sink=events.append)
    run = ledger.admit(ledger.root, "run", kind=Kind.RUN, at=0)
    for i in range(pairs):
        tool = ledger.admit(run, "tool", kind=Kind.TOOL, at=i)
        ledger.end(tool, Outcome.OK, i)
    return events


def test_a_tail_that_is_not_long_has_no_snapshot_under_it() -> None:
    journal, _, seen = journal_of(many_events(3), keep=100)
    assert journal.base is None
    assert journal.tail == seen


def test_the_tail_is_cut_when_it_is_longer_than_what_is_kept() -> None:
    journal, state, seen = journal_of(many_events(50), keep=10)
    assert journal.base is not None
    # Two nodes are alive, or three: no more than 4 events of each are worth keeping.
    assert len(journal.tail) <= 12
    assert len(seen) == state.events == 102


def test_the_sink_sees_every_event_once_and_in_order() -> None:
    events = many_events(50)
    assert journal_of(events, keep=10)[2] == events
    assert journal_of(events, keep=1)[2] == events


def test_a_wide_tree_is_not_copied_at_every_event() -> None:
    """A snapshot costs as much as there is alive, so it waits for four events for each of it."""
    events: list[Event] = []
    ledger = TreeLedger(unit="tokens", caps=Caps(max_subagents=None), sink=events.append)
    run = ledger.admit(ledger.root, "run", kind=Kind.RUN, at=0)
    for i in range(100):
        ledger.admit(run, "tool", kind=Kind.TOOL, at=i)
    journal, _, _ = journal_of(events, keep=10)
    assert len(journal.tail) > 90


def test_a_snapshot_is_not_changed_by_what_happens_later() -> None:
    state = TreeState()
    journal = Journal(state, keep=4)
    bases: list[str] = []
    events = many_events(20)
    for event in events:
        journal.record(event)
        if journal.base is not None and len(journal.tail) == 1:
            bases.append(json.dumps(journal.base))
        if journal.base is not None:
            assert json.dumps(journal.base) == bases[-1]
    assert len(bases) > 1
