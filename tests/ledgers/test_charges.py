"""What every ending of a call costs, and between which bounds the truth lies.

Prices: haiku is 1 in, 5 out, 0.10 cache read, 1.25 cache write, in USD per million tokens; sonnet
is 3, 15, 0.30, 3.75.
"""

from __future__ import annotations

from decimal import Decimal

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewarden.ledgers import (
    Ask,
    Charge,
    Ending,
    Price,
    PriceOf,
    Progress,
    charge_for,
    usd,
)
from treewarden.protocols import Usage

HAIKU = Price(input="1", output="5", cache_read="0.10", cache_write="1.25")
SONNET = Price(input="3", output="15", cache_read="0.30", cache_write="3.75")
OPUS = Price(input="15", output="75", cache_read="1.50", cache_write="18.75")
SEARCHING = Price(input="1", output="5", per_thousand={"web_search_requests": "10"})


def ask(input: int = 10_000, output: int = 500, *, price: Price | None = HAIKU) -> Ask:
    """By default a call whose hold is 0.0125 USD, or 10,500 tokens."""
    return Ask(input_tokens=input, output_tokens=output, price=price)


# --- how large a hold is, and how small it can be made (agent contract, 23.1) --------------------


def test_a_token_hold_is_the_input_ceiling_and_the_output_limit() -> None:
    assert ask(1_000, 8_000).amount("tokens", 8_000) == 9_000


@pytest.mark.parametrize(
    ("left", "output"),
    [
        (9_000, 8_000),
        (5_000, 4_000),
        (1_256, 256),
        (1_255, None),  # 255 is below the floor
        (1_100, None),
        (0, None),
    ],
)
def test_a_token_hold_is_cut_to_what_is_left_but_not_below_the_floor(
    left: int, output: int | None
) -> None:
    assert ask(1_000, 8_000).largest_output("tokens", left) == output


def test_a_dollar_hold_is_cut_with_the_input_at_the_write_rate() -> None:
    """0.0125 of the 0.05 USD go to the input, and the rest buys 7,500 tokens, not one more."""
    writing = attrs.evolve(ask(10_000, 8_000), can_write_cache=True)
    assert writing.largest_output("usd", usd("0.05")) == 7_500
    assert writing.usd(7_500) == usd("0.05")
    assert writing.usd(7_501) > usd("0.05")


@pytest.mark.parametrize("left", [1_064, 1_063, 1_000, 0])
def test_an_allowance_below_the_floor_is_taken_whole_or_not_at_all(left: int) -> None:
    small = ask(1_000, 64)
    assert small.output_floor_tokens == 256
    assert small.largest_output("tokens", left) is None


def test_without_a_price_dollars_cut_nothing_and_hold_nothing() -> None:
    unpriced = ask(price=None)
    assert unpriced.usd(500) == 0
    assert unpriced.largest_output("usd", 0) == 500


@pytest.mark.parametrize(
    ("price", "input", "output", "hold"),
    [
        (HAIKU, 1_000, 300, "0.00275"),
        (SONNET, 1_000_000, 0, "3.75"),
        (HAIKU, 1_000_000, 1_000_000, "6.25"),
    ],
)
def test_a_hold_takes_the_input_at_its_dearest(
    price: Price, input: int, output: int, hold: str
) -> None:
    writing = attrs.evolve(ask(input, output, price=price), can_write_cache=True)
    assert writing.usd(output) == usd(hold)


@given(
    input=st.integers(0, 50_000),
    limit=st.integers(1, 9_000),
    floor=st.integers(1, 600),
    left=st.integers(0, 60_000),
    can_write_cache=st.booleans(),
)
def test_a_cut_hold_fits_and_one_more_token_would_not(
    input: int, limit: int, floor: int, left: int, can_write_cache: bool
) -> None:
    its = attrs.evolve(
        ask(input, limit), output_floor_tokens=floor, can_write_cache=can_write_cache
    )
    for unit, free in (("tokens", left), ("usd", left * 1_000_000)):
        output = its.largest_output(unit, free)  # type: ignore[arg-type]
        amount = its.amount
        if output is None:
            assert limit < floor or amount(unit, floor) > free  # type: ignore[arg-type]
        else:
            assert floor <= output <= limit
            assert amount(unit, output) <= free  # type: ignore[arg-type]
            assert output == limit or amount(unit, output + 1) > free  # type: ignore[arg-type]


# --- what was measured ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("price", "usage", "cost"),
    [
        (HAIKU, Usage(input=1_000, output=300), "0.0025"),
        (SONNET, Usage(input=1_000_000), "3"),
        (
            HAIKU,
            Usage(input=100, output=50, reasoning=10, cache_read=1_000, cache_write=200),
            "0.0007",
        ),
    ],
)
def test_a_measured_cost_has_each_class_at_its_own_rate(
    price: Price, usage: Usage, cost: str
) -> None:
    assert finished(usage, price=price).usd == usd(cost)


def test_tokens_count_cache_reads_and_writes_and_no_reasoning_twice() -> None:
    assert finished(Usage(input=500, output=800, cache_read=20_000)).tokens == 21_300
    assert finished(Usage(input=1, output=50, reasoning=50, cache_write=2)).tokens == 53


def finished(usage: Usage | None, *, price: Price | None = HAIKU) -> Charge:
    return charge_for(Ending.FINISHED, ask(price=price), 500, Progress(usage))


# --- every row of the table (architecture, section 4) --------------------------------------------

SO_FAR = Usage(input=9_000, output=1)
UNREADABLE = Usage(input=9_000, output=10, reasoning=11)
HOLD = ("0.0125", 10_500)
NOTHING = ("0", 0)

Row = tuple[Ending, Progress, str, tuple[str, int], str, tuple[str, int], tuple[str, int]]

ROWS: dict[str, Row] = {
    "failed before the request left": (
        Ending.NOT_SENT, Progress(), "",
        NOTHING, "not_dispatched", NOTHING, NOTHING,
    ),
    "never left, whatever was reported": (
        Ending.NOT_SENT, Progress(SO_FAR, 10, 100), "blind",
        NOTHING, "not_dispatched", NOTHING, NOTHING,
    ),
    "an error without usage": (
        Ending.PROVIDER_ERROR, Progress(), "",
        NOTHING, "pre_stream_no_usage", NOTHING, NOTHING,
    ),
    "an error with usage": (
        Ending.PROVIDER_ERROR, Progress(Usage(input=100)), "",
        ("0.0001", 100), "provider_reported", ("0.0001", 100), ("0.0001", 100),
    ),
    "an error in the middle of an answer": (
        Ending.PROVIDER_ERROR, Progress(SO_FAR, 100, 0), "",
        ("0.0095", 9_100), "estimated", ("0.009005", 9_001), HOLD,
    ),
    "broken, nothing reported: input and what was received": (
        Ending.BROKEN, Progress(None, 10, 100), "",
        ("0.010125", 10_025), "estimated", NOTHING, HOLD,
    ),
    "broken, and every delta is a token at least": (
        Ending.BROKEN, Progress(None, 30, 100), "",
        ("0.01015", 10_030), "estimated", NOTHING, HOLD,
    ),
    "broken, usage reported so far": (
        Ending.BROKEN, Progress(SO_FAR, 0, 0), "",
        ("0.009005", 9_001), "estimated", ("0.009005", 9_001), HOLD,
    ),
    "broken after usage was reported": (
        Ending.BROKEN, Progress(SO_FAR, 100, 399), "",
        ("0.0095", 9_100), "estimated", ("0.009005", 9_001), HOLD,
    ),
    "broken, and what was reported makes no sense": (
        Ending.BROKEN, Progress(UNREADABLE, 100, 0), "",
        ("0.0105", 10_100), "estimated", NOTHING, HOLD,
    ),
    "broken on a route that goes on billing": (
        Ending.BROKEN, Progress(None, 10, 100), "bills on",
        HOLD, "unavailable_worst_case", NOTHING, HOLD,
    ),
    "broken, and it reasons where nobody sees": (
        Ending.BROKEN, Progress(SO_FAR, 10, 100), "blind",
        HOLD, "unavailable_worst_case", ("0.009005", 9_001), HOLD,
    ),
    "finished": (
        Ending.FINISHED, Progress(Usage(input=9_000, output=300), 1, 1), "blind",
        ("0.0105", 9_300), "provider_reported", ("0.0105", 9_300), ("0.0105", 9_300),
    ),
    "finished without usage": (
        Ending.FINISHED, Progress(None, 40, 120), "",
        ("0.0102", 10_040), "estimated", NOTHING, HOLD,
    ),
    "finished without usage on a route that goes on billing": (
        Ending.FINISHED, Progress(None, 40, 120), "bills on",
        ("0.0102", 10_040), "estimated", NOTHING, HOLD,
    ),
    "finished with usage that makes no sense": (
        Ending.FINISHED, Progress(UNREADABLE, 40, 200), "",
        ("0.01025", 10_050), "estimated", NOTHING, HOLD,
    ),
    "finished without usage, and it reasons where nobody sees": (
        Ending.FINISHED, Progress(None, 40, 120), "blind",
        HOLD, "unavailable_worst_case", NOTHING, HOLD,
    ),
    "more received than the limit on the wire": (
        Ending.BROKEN, Progress(None, 600, 0), "",
        ("0.013", 10_600), "estimated", NOTHING, ("0.013", 10_600),
    ),
    "usage above the hold": (
        Ending.FINISHED, Progress(Usage(input=12_000, output=600)), "",
        ("0.015", 12_600), "provider_reported", ("0.015", 12_600), ("0.015", 12_600),
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_an_ending_has_its_price(row: str) -> None:
    ending, progress, kind, charged, basis, low, high = ROWS[row]
    its = attrs.evolve(
        ask(), reasons_invisibly=kind == "blind", bills_after_disconnect=kind == "bills on"
    )
    charge = charge_for(ending, its, 500, progress)
    assert (charge.usd, charge.tokens) == (usd(charged[0]), charged[1])
    assert charge.basis == basis
    assert (charge.low_usd, charge.low_tokens) == (usd(low[0]), low[1])
    assert (charge.high_usd, charge.high_tokens) == (usd(high[0]), high[1])


def test_of_several_reports_the_last_is_charged_once() -> None:
    progress = Progress()
    for output in (1, 120, 300):
        progress.usage = Usage(input=9_000, output=output)
    assert charge_for(Ending.FINISHED, ask(), 500, progress).usd == usd("0.0105")


def test_a_clamped_call_is_bounded_by_the_limit_on_the_wire() -> None:
    charge = charge_for(Ending.BROKEN, ask(output=8_000), 500, Progress())
    assert (charge.high_usd, charge.high_tokens) == (usd("0.0125"), 10_500)


usages = st.builds(
    Usage,
    input=st.integers(0, 20_000),
    output=st.integers(0, 900),
    cache_read=st.integers(0, 9_000),
    cache_write=st.integers(0, 900),
)


@given(
    ending=st.sampled_from(Ending),
    usage=st.none() | st.just(UNREADABLE) | usages,
    deltas=st.integers(0, 900),
    bytes=st.integers(0, 4_000),
    blind=st.booleans(),
    bills=st.booleans(),
    price=st.sampled_from([HAIKU, None]),
    answered_by=st.sampled_from([None, SONNET]),
)
def test_a_charge_lies_between_its_bounds_and_only_estimates_have_room(
    ending: Ending,
    usage: Usage | None,
    deltas: int,
    bytes: int,
    blind: bool,
    bills: bool,
    price: Price | None,
    answered_by: Price | None,
) -> None:
    its = attrs.evolve(ask(price=price), reasons_invisibly=blind, bills_after_disconnect=bills)
    charge = charge_for(ending, its, 500, Progress(usage, deltas, bytes), answered_by=answered_by)
    assert 0 <= charge.low_usd <= charge.usd <= charge.high_usd
    assert 0 <= charge.low_tokens <= charge.tokens <= charge.high_tokens
    if charge.basis in ("provider_reported", "not_dispatched", "pre_stream_no_usage"):
        assert charge.low_usd == charge.high_usd
        assert charge.low_tokens == charge.high_tokens
    else:
        assert charge.high_usd >= its.usd(500)
        assert charge.high_tokens >= 10_500


# --- another model answers -----------------------------------------------------------------------


def test_an_answer_of_another_model_is_charged_at_that_models_price() -> None:
    progress = Progress(Usage(input=1_000, output=300))
    charge = charge_for(Ending.FINISHED, ask(price=OPUS), 500, progress, answered_by=HAIKU)
    assert charge.usd == usd("0.0025")


def test_the_low_bound_of_a_broken_answer_is_at_the_price_of_who_gave_it() -> None:
    """Opus was asked and haiku answers: 0.135 USD would be fifteen times what it can have been."""
    progress = Progress(SO_FAR, 100, 0)
    charge = charge_for(Ending.BROKEN, ask(price=OPUS), 500, progress, answered_by=HAIKU)
    assert charge.low_usd == usd("0.009005")
    assert charge.usd == usd("0.0095")
    assert charge.high_usd == usd("0.1875")  # the hold


def nobodys_price(model: str) -> Price | None:
    return None


def with_inner(model: str | None) -> Progress:
    inner = Usage(input=1_000, output=100, model=model)
    return Progress(Usage(input=1_000, output=300, extra=(inner,)))


@pytest.mark.parametrize("ending", [Ending.FINISHED, Ending.BROKEN])
def test_inner_answers_are_charged_at_their_models_price(ending: Ending) -> None:
    prices: PriceOf = {"sonnet": SONNET}.get
    charge = charge_for(ending, ask(), 500, with_inner("sonnet"), price_of=prices)
    assert charge.usd == usd("0.0025") + usd("0.0045")
    assert charge.tokens == 2_400
    assert not charge.is_unpriced


@pytest.mark.parametrize("ending", [Ending.FINISHED, Ending.BROKEN])
def test_an_inner_answer_without_a_price_costs_the_hold_at_least(ending: Ending) -> None:
    """Unknown is not free: else a tree could spend without end through a model nobody knows."""
    charge = charge_for(ending, ask(), 500, with_inner("nobody"), price_of=nobodys_price)
    assert charge.usd == usd(HOLD[0])
    assert charge.basis == "unavailable_worst_case"
    assert charge.is_unpriced
    assert charge.low_usd == usd("0.0025")  # what is known of it
    assert charge.tokens == 2_400


def test_an_inner_answer_without_a_price_never_costs_less_than_what_is_known() -> None:
    progress = with_inner("nobody")
    charge = charge_for(Ending.FINISHED, ask(10, 10), 10, progress, price_of=nobodys_price)
    assert charge.usd == usd("0.0025") > ask(10, 10).usd(10)


def test_without_a_price_dollars_are_unknown_and_tokens_exact() -> None:
    charge = finished(Usage(input=1_000, output=300), price=None)
    assert (charge.usd, charge.tokens, charge.is_unpriced) == (0, 1_300, True)
    assert charge.basis == "provider_reported"


def test_what_a_provider_says_it_charged_wins_over_the_table() -> None:
    usage = Usage(input=1_000, output=300, reported_cost_usd=Decimal("0.004"))
    assert finished(usage).usd == usd("0.004")
    assert finished(usage, price=None).usd == usd("0.004")


def test_a_tools_fee_without_a_price_leaves_the_answer_measured() -> None:
    usage = Usage(input=1_000, output=300, server_tool_requests=(("web_search_requests", 2),))
    priced, unpriced = finished(usage, price=SEARCHING), finished(usage)
    assert (priced.usd, priced.is_unpriced) == (usd("0.0225"), False)
    assert (unpriced.usd, unpriced.is_unpriced) == (usd("0.0025"), True)
    assert unpriced.basis == "provider_reported"
