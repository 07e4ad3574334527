"""What an answer costs and can cost at most, to the last unit of 10^-12 dollar."""

from __future__ import annotations

from decimal import Decimal
from typing import TypedDict, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewarden.ledgers import (
    Cost,
    Money,
    Price,
    Tier,
    UnpricedModel,
    format_usd,
    largest_output,
    measured_cost,
    usd,
    worst_case,
)
from treewarden.protocols import Usage, UsageError

# The price card P of the public reports.
P = Price(input="3", cache_read="0.30", cache_write="3.75", output="15")
HAIKU = Price(input="1", output="5", cache_read="0.1", cache_write="1.25")
FLASH = Price(input="0.3", output="2.5", cache_read="0.03")
# Twice the input and one and a half times the output for a large context.
LONG_FROM_200K = Price(
    input="2",
    output="10",
    tiers=(Tier(above_context_tokens=200_000, inclusive=True, input="4", output="15"),),
)
LONG_ABOVE_272K = Price(
    input="2", output="10", tiers=(Tier(above_context_tokens=272_000, input="4", output="15"),)
)


def cost(price: Price, usage: Usage) -> str:
    return format_usd(measured_cost(price, usage).usd)


def most(price: Price, input_tokens: int, output_tokens: int, *, writes: bool = True) -> str:
    return format_usd(
        worst_case(
            price, input_tokens=input_tokens, output_tokens=output_tokens, can_write_cache=writes
        )
    )


# A price ---------------------------------------------------------------------------------------


def test_a_rate_is_kept_as_units_per_token() -> None:
    assert Price(input="0.0375", output=Decimal("0.000001")).rates.input == 37_500
    assert Price(input=3, output="15").rates.output == 15_000_000


def test_cache_rates_that_are_not_given_are_the_input_rate() -> None:
    rates = Price(input="3", output="15").rates
    assert rates.cache_read == rates.cache_write == rates.cache_write_1h == rates.input


def test_a_write_for_an_hour_is_twice_the_input_where_writing_costs_extra() -> None:
    assert P.rates.cache_write_1h == 2 * P.rates.input
    assert Price(input="3", output="15", cache_write="1").rates.cache_write_1h == 1_000_000
    given_one = Price(input="3", output="15", cache_write="3.75", cache_write_1h="7")
    assert given_one.rates.cache_write_1h == 7_000_000


@pytest.mark.parametrize("rate", [0.3, True, "-1", "nan", "three"])
def test_a_rate_that_is_no_exact_amount_is_refused_by_its_name(rate: str) -> None:
    with pytest.raises(UsageError, match="cache_read"):
        Price(input="3", output="15", cache_read=rate)


def test_a_rate_below_the_unit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no whole number of 10\^-12 USD.* up to 6 decimals"):
        Price(input="0.0000001", output="1")


def test_tiers_are_kept_in_ascending_order() -> None:
    low = Tier(above_context_tokens=1_000, input="2", output="2")
    high = Tier(above_context_tokens=2_000, input="3", output="3")
    price = Price(input="1", output="1", tiers=(high, low))
    assert price.tiers == (low, high)
    assert [price.at(n).input for n in (1_000, 1_001, 2_001)] == [1_000_000, 2_000_000, 3_000_000]


def test_two_tiers_that_start_at_the_same_context_are_refused() -> None:
    tiers = (
        Tier(above_context_tokens=999, input="2", output="2"),
        Tier(above_context_tokens=1_000, inclusive=True, input="3", output="3"),
    )
    with pytest.raises(UsageError, match="two tiers start at a context of 1000 tokens"):
        Price(input="1", output="1", tiers=tiers)


@pytest.mark.parametrize("threshold", [-1, 2.5, True, "200k"])
def test_a_threshold_that_is_no_count_is_refused(threshold: int) -> None:
    with pytest.raises(UsageError, match="not a count of tokens"):
        Tier(above_context_tokens=threshold, input="1", output="1")


# Measured --------------------------------------------------------------------------------------


def test_every_class_of_tokens_is_paid_at_its_own_rate() -> None:
    usage = Usage(input=100, output=50, reasoning=10, cache_read=1_000, cache_write=200)
    assert cost(HAIKU, usage) == "0.0007"


def test_a_measured_cost_takes_the_plain_input_rate_and_a_hold_the_write_rate() -> None:
    assert cost(HAIKU, Usage(input=1_000, output=300)) == "0.0025"
    assert most(HAIKU, 1_000, 300) == "0.00275"
    assert cost(P, Usage(input=1_000_000)) == "3"
    assert most(P, 1_000_000, 0) == "3.75"


def test_reasoning_is_part_of_the_output_and_costs_what_output_costs() -> None:
    assert cost(HAIKU, Usage(output=1_000_000, reasoning=1_000_000)) == "5"


def test_reasoning_with_a_rate_of_its_own_replaces_the_output_rate() -> None:
    price = Price(input="2", output="8", reasoning="3")
    assert cost(price, Usage(output=1_000_000, reasoning=400_000)) == "6"


def test_what_is_written_for_an_hour_is_paid_once_at_the_hour_rate() -> None:
    usage = Usage(cache_write=1_000_000, cache_write_1h=400_000)
    assert cost(HAIKU, usage) == "1.55"  # 0.6 at 1.25 and 0.4 at 2


def test_E25_written_tokens_are_charged_once() -> None:
    usage = Usage(input=3, cache_write=12_304, output=550)
    assert cost(P, usage) == "0.054399"


def test_E26_cached_tokens_inside_the_prompt_are_not_paid_again_as_input() -> None:
    price = Price(input="0.50", cache_read="0.05", output="3.00")
    usage = Usage(input=20_212 - 16_298, cache_read=16_298, output=931)
    assert cost(price, usage) == "0.0055649"


def test_E27_read_and_written_tokens_are_taken_out_of_the_prompt_once() -> None:
    usage = Usage(input=2_000 - 500 - 300, cache_read=500, cache_write=300)
    assert cost(P, usage) == "0.004875"


def test_E28_the_same_truth_costs_the_same_whichever_way_it_was_reported() -> None:
    inside = Usage(input=10_000 - 9_000, cache_read=9_000)
    beside = Usage(input=1_000, cache_read=9_000)
    assert inside == beside
    assert cost(P, beside) == "0.0057"
    assert beside.context_tokens == 10_000


def test_E31_the_hold_is_for_the_dearest_that_may_answer_and_the_charge_for_who_did() -> None:
    asked, fallback = Price(input="10", output="50"), Price(input="5", output="25")
    free = Price(input="0", output="0")
    usage = Usage(input=412, output=264)
    assert max(most(p, 412, 264) for p in (asked, fallback)) == "0.01732"
    assert cost(fallback, usage) == "0.00866"
    assert max(most(p, 412, 264) for p in (free, fallback)) == "0.00866"


@pytest.mark.parametrize(
    ("price", "context", "is_long"),
    [
        (LONG_FROM_200K, 199_999, False),
        (LONG_FROM_200K, 200_000, True),
        (LONG_ABOVE_272K, 272_000, False),
        (LONG_ABOVE_272K, 272_001, True),
    ],
)
def test_E33_a_tier_begins_exactly_where_its_card_says(
    price: Price, context: int, is_long: bool
) -> None:
    input_rate, output_rate = (4, 15) if is_long else (2, 10)
    dollars = Decimal(context * input_rate + 1_000 * output_rate) / 1_000_000
    assert usd(cost(price, Usage(input=context, output=1_000))) == usd(dollars)


def test_E33_cached_tokens_count_towards_the_context() -> None:
    usage = Usage(input=1, cache_read=271_000, cache_write=1_000)
    assert cost(LONG_ABOVE_272K, usage) == format_usd(Money(272_001 * 4_000_000))


def test_E33_a_sum_over_requests_that_reaches_a_tier_is_an_upper_bound() -> None:
    ten_requests = Usage(input=300_000, output=1_000, is_aggregate=True)
    found = measured_cost(LONG_ABOVE_272K, ten_requests)
    assert found == Cost(usd("1.215"), is_upper_bound=True)
    one_request = measured_cost(LONG_ABOVE_272K, Usage(input=300_000, output=1_000))
    assert one_request == Cost(usd("1.215"), is_upper_bound=False)


def test_a_sum_over_requests_below_every_tier_is_a_measurement() -> None:
    usage = Usage(input=200_000, is_aggregate=True)
    assert not measured_cost(LONG_ABOVE_272K, usage).is_upper_bound


def test_a_sum_is_bounded_by_the_dearest_tier_even_if_that_is_the_first() -> None:
    cheaper_when_long = Price(
        input="4", output="10", tiers=(Tier(above_context_tokens=10, input="1", output="1"),)
    )
    found = measured_cost(cheaper_when_long, Usage(input=1_000_000, is_aggregate=True))
    assert found == Cost(usd("4"), is_upper_bound=True)


def test_a_price_that_varies_by_the_hour_gives_an_upper_bound() -> None:
    price = Price(input="1", output="1", varies_by_hour=True)
    assert measured_cost(price, Usage(input=1)).is_upper_bound


def test_what_the_provider_says_it_charged_wins_over_the_table() -> None:
    usage = Usage(input=1_000_000, reported_cost_usd=Decimal("0.0133176"))
    assert measured_cost(P, usage) == Cost(usd("0.0133176"))
    assert measured_cost(None, usage) == Cost(usd("0.0133176"))


def test_a_reported_cost_finer_than_the_unit_is_rounded_up() -> None:
    usage = Usage(reported_cost_usd=Decimal("0.0000414000000000000003"))
    assert cost(P, usage) == "0.000041400001"


@pytest.mark.parametrize("reported", ["nan", "inf", "-1", "1e999999"])
def test_a_reported_cost_that_is_no_amount_is_not_believed(reported: str) -> None:
    usage = Usage(input=1_000_000, reported_cost_usd=Decimal(reported))
    assert cost(P, usage) == "3"


def test_an_inner_answer_is_paid_at_the_price_of_its_own_model() -> None:
    usage = Usage(
        input=1_000_000,
        model="large",
        extra=(
            Usage(input=1_000_000, model="small"),
            Usage(input=1_000_000, model="large"),
            Usage(input=1_000_000),
        ),
    )
    found = measured_cost(P, usage, of_model={"small": HAIKU}.get)
    assert found == Cost(usd("10"))  # 3 + 1 + 3 + 3


def test_an_inner_answer_of_a_model_without_a_price_has_no_cost() -> None:
    usage = Usage(input=1, model="large", extra=(Usage(input=1, model="stranger"),))
    with pytest.raises(UnpricedModel, match='"stranger"') as refused:
        measured_cost(P, usage, of_model={"small": HAIKU}.get)
    assert refused.value.model == "stranger"
    with pytest.raises(UnpricedModel):
        measured_cost(P, usage)
    with pytest.raises(UnpricedModel):
        measured_cost(None, Usage(input=1))


def test_server_side_tool_requests_are_paid_by_the_thousand() -> None:
    price = Price(input="0", output="0", per_thousand={"web_search_requests": "10"})
    usage = Usage(server_tool_requests=(("web_search_requests", 3),))
    assert measured_cost(price, usage) == Cost(usd("0.03"))


def test_a_server_side_tool_without_a_price_is_named() -> None:
    usage = Usage(input=1_000_000, server_tool_requests=(("oracle_requests", 1), ("unused", 0)))
    assert measured_cost(P, usage) == Cost(usd("3"), unpriced_tools=("oracle_requests",))


def test_a_fee_for_each_request_is_in_both_the_cost_and_the_hold() -> None:
    price = Price(input="1", output="1", per_request="0.012")
    assert cost(price, Usage(input=1_000)) == "0.013"
    assert most(price, 1_000, 0) == "0.013"
    left = usd("0.014")
    assert largest_output(
        price, input_tokens=1_000, limit=9_999, can_write_cache=False, money=left
    ) == (1_000)


# Worst case ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("price", "input_tokens", "output_tokens", "dollars"),
    [
        (HAIKU, 333, 256, "0.00169625"),
        (HAIKU, 1_000, 300, "0.00275"),
        (FLASH, 10_001, 1, "0.0030028"),
        (HAIKU, 1_000_000, 1_000_000, "6.25"),
    ],
)
def test_ceilings_are_those_of_the_contract(
    price: Price, input_tokens: int, output_tokens: int, dollars: str
) -> None:
    assert most(price, input_tokens, output_tokens) == dollars


def test_input_is_held_at_the_write_rate_only_if_the_request_can_write() -> None:
    assert most(HAIKU, 1_000_000, 0, writes=False) == "1"
    assert most(HAIKU, 1_000_000, 0, writes=True) == "1.25"
    for_an_hour = worst_case(
        HAIKU, input_tokens=1_000_000, output_tokens=0, can_write_cache=True, can_write_1h=True
    )
    assert for_an_hour == usd("2")


def test_a_hold_is_at_the_dearest_tier_that_the_input_can_reach() -> None:
    assert most(LONG_FROM_200K, 199_999, 0) == "0.399998"
    assert most(LONG_FROM_200K, 200_000, 0) == "0.8"


def test_the_clamp_buys_what_the_write_rate_leaves() -> None:
    # Contract 23.1 item 3: 0.05 - 10,000 x 1.25 / 1e6 leaves 0.0375, which is 7,500 tokens.
    found = largest_output(
        HAIKU, input_tokens=10_000, limit=8_192, can_write_cache=True, money=usd("0.05")
    )
    assert found == 7_500


def test_the_clamp_never_exceeds_the_limit() -> None:
    found = largest_output(HAIKU, input_tokens=0, limit=64, can_write_cache=True, money=usd("1000"))
    assert found == 64


def test_the_clamp_is_minus_one_where_not_even_an_empty_answer_fits() -> None:
    def clamp(money: Money) -> int:
        return largest_output(
            HAIKU, input_tokens=1_000, limit=64, can_write_cache=False, money=money
        )

    assert clamp(Money(usd("0.001") - 1)) == -1
    assert clamp(usd("0.001")) == 0


# For any price and any usage -------------------------------------------------------------------

counts = st.integers(0, 3_000)
rate = st.integers(0, 10**7).map(lambda units: Decimal(units).scaleb(-6))


class GivenRates(TypedDict):
    input: Decimal
    output: Decimal
    cache_read: Decimal | None
    cache_write: Decimal | None
    cache_write_1h: Decimal | None
    reasoning: Decimal | None


maybe_rate = st.none() | rate
given_rates = st.fixed_dictionaries(
    {
        "input": rate,
        "output": rate,
        "cache_read": maybe_rate,
        "cache_write": maybe_rate,
        "cache_write_1h": maybe_rate,
        "reasoning": maybe_rate,
    }
).map(lambda rates: cast("GivenRates", rates))


@st.composite
def prices(draw: st.DrawFn) -> Price:
    starts = draw(st.sets(st.integers(1, 6_000), max_size=3))
    tiers = tuple(Tier(above_context_tokens=s, **draw(given_rates)) for s in starts)
    return Price(**draw(given_rates), tiers=tiers, per_request=draw(rate))


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    output, written = draw(counts), draw(counts)
    return Usage(
        input=draw(counts),
        output=output,
        reasoning=draw(st.integers(0, output)),
        cache_read=draw(counts),
        cache_write=written,
        cache_write_1h=draw(st.integers(0, written)),
        is_aggregate=draw(st.booleans()),
    )


@given(prices(), usages(), counts, counts)
def test_no_usage_within_the_ceilings_costs_more_than_the_worst_case(
    price: Price, usage: Usage, more_input: int, more_output: int
) -> None:
    ceiling = worst_case(
        price,
        input_tokens=usage.context_tokens + more_input,
        output_tokens=usage.output + more_output,
        can_write_cache=usage.cache_write > 0,
        can_write_1h=usage.cache_write_1h > 0,
    )
    assert measured_cost(price, usage).usd <= ceiling


@given(prices(), counts, st.integers(0, 5_000), st.integers(0, 10**11), st.booleans())
def test_the_clamp_is_exactly_the_largest_output_that_fits(
    price: Price, input_tokens: int, limit: int, money: int, writes: bool
) -> None:
    def fits(output: int) -> bool:
        most = worst_case(
            price, input_tokens=input_tokens, output_tokens=output, can_write_cache=writes
        )
        return most <= money

    found = largest_output(
        price,
        input_tokens=input_tokens,
        limit=limit,
        can_write_cache=writes,
        money=Money(money),
    )
    assert -1 <= found <= limit
    assert found == -1 or fits(found)
    assert found == limit or not fits(found + 1)


@given(prices(), counts, counts, counts)
def test_a_worst_case_never_falls_when_more_output_is_allowed(
    price: Price, input_tokens: int, output: int, more: int
) -> None:
    smaller, larger = (
        worst_case(price, input_tokens=input_tokens, output_tokens=n, can_write_cache=True)
        for n in (output, output + more)
    )
    assert smaller <= larger


@given(prices(), st.lists(usages(), max_size=5))
def test_the_cost_of_answers_is_the_sum_of_their_costs(price: Price, inner: list[Usage]) -> None:
    total = measured_cost(price, Usage(extra=tuple(inner))).usd
    outer = measured_cost(price, Usage()).usd
    assert total == outer + sum(measured_cost(price, usage).usd for usage in inner)
