"""A purse is a second bound on some calls: it moves in the same transactions as their holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewarden.ledgers import Ask, Ending, Hold, Kind, Outcome, Purse, Stop, Ticket, TreeLedger
from treewarden.protocols import Usage


def ask(purse: Purse | None, *, output: int = 90, clamp: bool = True) -> Ask:
    return Ask(
        input_tokens=10,
        output_tokens=output,
        price=None,
        output_floor_tokens=20,
        purse=purse,
        clamp=clamp,
    )


def opened(purse_limit: int, max: int = 1_000) -> tuple[TreeLedger, Purse]:
    return TreeLedger(unit="tokens", max=max), Purse(purse_limit)


def test_a_call_is_made_smaller_to_fit_its_purse() -> None:
    ledger, purse = opened(60)
    hold = ledger.fund(ledger.root, ask(purse), 0.0)
    assert isinstance(hold, Hold)
    assert (hold.amount, hold.output_tokens, hold.clamped_from) == (60, 50, 90)
    assert (purse.held, purse.free) == (60, 0)
    ledger.check()


def test_below_the_floor_the_purse_says_no_and_the_wallet_is_not_asked() -> None:
    ledger, purse = opened(29)
    stop = ledger.fund(ledger.root, ask(purse), 0.0)
    assert isinstance(stop, Stop)
    assert (stop.reason, stop.refusal.code) == ("retry_budget", "retry-budget")
    assert stop.refusal.left == "29"
    assert purse.held == 0


def test_who_may_not_be_made_smaller_is_refused() -> None:
    ledger, purse = opened(99)
    assert isinstance(ledger.fund(ledger.root, ask(purse, clamp=False), 0.0), Stop)


def test_calls_without_the_purse_do_not_see_it() -> None:
    ledger, purse = opened(0)
    assert isinstance(ledger.fund(ledger.root, ask(None), 0.0), Hold)
    assert purse.held == 0


def test_a_release_gives_back_and_a_charge_is_kept() -> None:
    ledger, purse = opened(100)
    hold = ledger.fund(ledger.root, ask(purse), 0.0)
    assert isinstance(hold, Hold)
    ledger.release(hold, 0.0)
    assert purse.free == 100
    hold = ledger.fund(ledger.root, ask(purse), 0.0)
    assert isinstance(hold, Hold)
    assert ledger.dispatch(hold, 0.0) is True
    hold.is_sent = True
    hold.progress.usage = Usage(input=10, output=5)
    ledger.settle(hold, Ending.FINISHED, 0.0)
    assert (purse.settled, purse.held, purse.free) == (15, 0, 85)


def test_a_lease_that_ends_settles_its_purse_too() -> None:
    ledger, purse = opened(100)
    lease = ledger.admit(ledger.root, "worker", kind=Kind.AGENT, at=0.0)
    hold = ledger.fund(lease, ask(purse), 0.0)
    assert isinstance(hold, Hold)
    assert ledger.dispatch(hold, 0.0) is True
    hold.is_sent = True
    ledger.end(lease, Outcome.CANCELLED, 1.0)
    assert purse.held == 0
    assert purse.settled == 100 - purse.free > 0


def test_a_call_that_waited_for_money_asks_the_purse_again() -> None:
    ledger, purse = opened(100, max=100)
    first = ledger.fund(ledger.root, ask(None), 0.0)
    assert isinstance(first, Hold)
    ticket = ledger.fund(ledger.root, ask(purse), 0.0)
    assert isinstance(ticket, Ticket)
    purse.settle(0, 90)  # somebody else's retries came to this meanwhile
    ledger.release(first, 1.0)
    assert isinstance(ticket.outcome, Stop)
    assert ticket.outcome.reason == "retry_budget"
    ledger.check()


@given(
    limit=st.integers(0, 300),
    outer=st.integers(0, 300),
    steps=st.lists(st.tuples(st.sampled_from("fund release settle".split()), st.integers(0, 200))),
)
def test_whatever_happens_what_is_held_and_spent_fits_both_purses(
    limit: int, outer: int, steps: list[tuple[str, int]]
) -> None:
    ledger = TreeLedger(unit="tokens", max=10_000)
    above = Purse(outer)
    purse, open_holds = Purse(limit, above), list[Hold]()
    for step, size in steps:
        if step == "fund":
            funded = ledger.fund(ledger.root, ask(purse, output=size), 0.0)
            if isinstance(funded, Hold):
                open_holds.append(funded)
        elif open_holds:
            hold = open_holds.pop(size % len(open_holds))
            if step == "release":
                ledger.release(hold, 0.0)
            else:
                assert ledger.dispatch(hold, 0.0) is True
                hold.progress.usage = Usage(input=10, output=min(size, hold.output_tokens))
                ledger.settle(hold, Ending.FINISHED, 0.0)
        ledger.check()
        assert purse.held == sum(hold.amount for hold in open_holds) == above.held
        assert purse.held + purse.settled <= min(limit, outer)


@pytest.mark.parametrize("field", ["limit", "held", "settled"])
def test_a_purse_that_cannot_be_is_noticed(field: str) -> None:
    purse = Purse(1)
    setattr(purse, field, -1)
    with pytest.raises(AssertionError):
        purse.check()
