"""Events as JSON: exact both ways, and nothing else is taken for an event."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewarden.ledgers import (
    Ask,
    Caps,
    Ending,
    Event,
    Hold,
    Kind,
    Opened,
    Outcome,
    Settled,
    TreeLedger,
    event_from_json,
    event_to_json,
    fold,
)
from treewarden.protocols import UsageError

# Everything that a text can hold, also what cannot be encoded.
TEXTS = st.text(st.characters(exclude_categories=()), max_size=20)
AMOUNTS = st.integers(-(10**31), 10**31)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Every value that a field of this type can have."""
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: AMOUNTS,
        str: TEXTS,
        float: st.floats(allow_nan=False),
        type(None): st.none(),
        Kind: st.sampled_from(Kind),
        Outcome: st.sampled_from(Outcome),
    }
    if hint in simple:
        return simple[hint]
    if hint is Caps:
        return st.builds(Caps, **{name: values_of(h) for name, h in get_type_hints(Caps).items()})
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    return st.one_of(*map(values_of, get_args(hint)))


def events_of(kind: Any) -> st.SearchStrategy[Event]:
    return st.builds(kind, **{name: values_of(h) for name, h in get_type_hints(kind).items()})


EVENTS = st.one_of(*map(events_of, get_args(Event)))


@given(EVENTS)
def test_an_event_of_any_type_goes_through_json_and_back_exactly(event: Event) -> None:
    again = event_from_json(event_to_json(event))
    assert type(again) is type(event)
    assert again == event
    # Equality takes 1 for 1.0 and True for 1; a journal does not.
    assert list(map(type, again)) == list(map(type, event))


@given(EVENTS)
def test_an_event_is_one_line_that_any_encoding_takes(event: Event) -> None:
    line = event_to_json(event)
    assert line.isascii()
    assert "\n" not in line
    assert event_from_json(line.encode()) == event


def test_a_journal_that_went_through_json_folds_to_the_identical_state() -> None:
    events: list[Event] = []
    ledger = TreeLedger(max=10**12, sink=events.append, carried_usd=5)
    run = ledger.admit(ledger.root, "run\ud800", kind=Kind.RUN, at=1, cap=10**6)
    ask = Ask(input_tokens=0, output_tokens=40, price=None, clamp=False)
    hold = ledger.fund(run, ask, 2.5)
    assert isinstance(hold, Hold)
    ledger.dispatch(hold, 3)
    ledger.settle(hold, Ending.FINISHED, 4)
    again = [event_from_json(event_to_json(event)) for event in events]
    assert again == events
    assert fold(again).plain() == ledger.state.plain()


def test_a_journal_from_before_trees_were_gone_on_with_carries_nothing() -> None:
    fields = json.loads(event_to_json(opened()))
    del fields["carried_usd"], fields["carried_tokens"]
    assert event_from_json(json.dumps(fields)) == opened()


def opened() -> Opened:
    return Opened(0.0, "usd", 10, 10, "0" * 16, None, Caps())


SETTLED = {"event": "Settled", "at": 1.5, "hold": 1, "usd": 7, "tokens": 8, "basis": "estimated"}


@pytest.mark.parametrize(
    "change",
    [
        {"event": "Paid"},
        {"event": None},
        {"event": ["Settled"]},
        {"usd": "7"},
        {"usd": 7.0},
        {"usd": None},
        {"usd": True},
        {"hold": [1]},
        {"at": "now"},
        {"basis": 3},
        {"tip": 1},
    ],
    ids=str,
)
def test_a_line_with_a_value_of_another_type_is_refused(change: dict[str, Any]) -> None:
    assert event_from_json(json.dumps(SETTLED)) == Settled(1.5, 1, 7, 8, "estimated")
    with pytest.raises(UsageError, match="this is no journal event") as caught:
        event_from_json(json.dumps({**SETTLED, **change}))
    assert caught.value.code == "cave_journal_invalid"


@pytest.mark.parametrize("name", attrs.fields_dict(Caps))
def test_caps_are_read_as_strictly_as_events(name: str) -> None:
    fields = json.loads(event_to_json(opened()))
    fields["caps"][name] = "8"
    with pytest.raises(UsageError, match=name):
        event_from_json(json.dumps(fields))


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "7", "null", '"Settled"', "{}", "\x00", "[" * 100_000, '{"event":"Settled"}'],
    ids=lambda line: line[:20],
)
def test_what_is_no_event_at_all_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match="this is no journal event"):
        event_from_json(line)
