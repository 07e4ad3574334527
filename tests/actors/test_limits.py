"""Budgets and limits: what they mean, and what is refused with which code of the contract."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel

COUNTS = {
    "max_runs": "cave_run_limit_invalid",
    "max_subagents": "cave_subagent_invocation_limit_invalid",
    "max_concurrent_subagents": "cave_subagent_concurrency_limit_invalid",
    "max_concurrent_calls": "cave_call_concurrency_limit_invalid",
    "max_model_calls": "cave_max_model_calls_invalid",
    "max_tool_calls": "cave_max_tool_calls_invalid",
}


def limit_refusal(advice: str, **options: Any) -> str:
    with pytest.raises(tw.UsageError, match=advice) as caught:
        tw.Limits(**options)
    return caught.value.code


def budget_refusal(advice: str, **options: Any) -> str:
    with pytest.raises(tw.UsageError, match=advice) as caught:
        tw.Budget(**options)
    return caught.value.code


# ── limits ───────────────────────────────────────────────────────────────────────────────────────


def test_the_defaults_bound_depth_and_breadth_and_nothing_else() -> None:
    limits = tw.Limits()
    caps = limits.caps
    assert (caps.max_depth, caps.max_subagents, caps.max_concurrent_subagents) == (2, 50, 8)
    assert caps.max_runs is caps.max_concurrent_calls is None
    assert caps.max_model_calls is caps.max_tool_calls is None
    assert limits.deadline_seconds is None


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1_000_001, 1.0, "8", True])
def test_a_count_out_of_range_is_refused_with_its_own_code(name: str, value: Any) -> None:
    advice = f"{name} is .* Give a whole number from 1 to 1000000, or None"
    assert limit_refusal(advice, **{name: value}) == COUNTS[name]


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [1, 1_000_000, None])
def test_a_count_in_range_is_kept(name: str, value: int | None) -> None:
    assert getattr(tw.Limits(**{name: value}).caps, name) == value  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("depth", [0, 9, -1, 2.0, True, None, "2"])
def test_a_depth_is_one_to_eight(depth: Any) -> None:
    code = limit_refusal("Give a whole number from 1 to 8", max_depth=depth)
    assert code == "cave_subagent_depth_limit_invalid"


@pytest.mark.parametrize("deadline", [0, -1.5, "10", True, float("nan"), float("inf")])
def test_a_deadline_is_a_positive_time(deadline: Any) -> None:
    advice = "deadline is .* Give a positive number of seconds or a timedelta"
    assert limit_refusal(advice, deadline=deadline) == "cave_run_deadline_invalid"


def test_a_deadline_is_a_number_or_a_timedelta() -> None:
    assert tw.Limits(deadline=timedelta(minutes=2)).deadline_seconds == 120
    assert tw.Limits(deadline=0.5).deadline_seconds == 0.5


def test_a_call_may_be_silent_for_ever_and_needs_a_second_unless_it_is_said_otherwise() -> None:
    times = tw.Limits().times
    assert (times.idle_timeout_seconds, times.min_call_seconds) == (None, 1)
    times = tw.Limits(idle_timeout=timedelta(minutes=2), min_call_seconds=0).times
    assert (times.idle_timeout_seconds, times.min_call_seconds) == (120, 0)


@pytest.mark.parametrize("value", [0, -1, "5", True, float("nan")])
def test_an_idle_timeout_is_a_positive_span(value: Any) -> None:
    code = limit_refusal("idle_timeout is .*positive number of seconds", idle_timeout=value)
    assert code == "cave_run_deadline_invalid"


@pytest.mark.parametrize("value", [None, -1, "5", False])
def test_min_call_seconds_is_a_span_or_nothing_at_all(value: Any) -> None:
    code = limit_refusal("min_call_seconds is", min_call_seconds=value)
    assert code == "cave_run_deadline_invalid"


def test_to_reject_is_what_a_full_tree_does_unless_it_is_told_to_wait() -> None:
    assert tw.Limits(admission="reject") == tw.Limits()
    assert tw.Limits(admission="wait").caps.admission == "wait"
    assert limit_refusal('admission is .queue.*Use "reject" or "wait"', admission="queue")


@pytest.mark.parametrize(
    ("shorthand", "code"),
    [
        ("max_subagent_invocations", "cave_subagent_invocation_limit_invalid"),
        ("max_concurrent_subagents", "cave_subagent_concurrency_limit_invalid"),
    ],
)
async def test_the_shorthands_of_a_run_have_the_same_range(shorthand: str, code: str) -> None:
    agent = tw.agent(id="a", instructions="", model=ScriptedModel([Reply("never")]))
    with pytest.raises(tw.UsageError) as caught:
        await tw.run(agent, "go", **{shorthand: 0})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert caught.value.code == code


# ── budgets ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("amount", ["0.05", Decimal("0.05"), "5e-2"])
def test_money_is_exact(amount: Any) -> None:
    budget = tw.Budget(max_usd=amount)
    assert (budget.unit, budget.max, budget.initial) == ("usd", 50_000_000_000, 50_000_000_000)


def test_money_is_whole_dollars_as_an_int() -> None:
    assert tw.Budget(max_usd=3).max == 3 * 10**12


def test_a_budget_in_tokens_is_a_number_of_tokens() -> None:
    budget = tw.Budget(max_tokens=250_000, initial_tokens=1_000)
    assert (budget.unit, budget.max, budget.initial) == ("tokens", 250_000, 1_000)


@pytest.mark.parametrize(
    ("amount", "advice"),
    [
        (0.5, 'max_usd 0.5 is a float and cannot say an amount exactly. Write dollars as text, "0'),
        (float("nan"), "is a float"),
        (True, "max_usd True"),
        ("abc", "is not a number"),
        ("-1", "is negative"),
        ("NaN", "is not a finite number"),
        ("Infinity", "is not a finite number"),
        ("0.0000000000001", "more than 12 decimals, and nothing is rounded behind your back"),
        ("0", "a budget is above 0"),
        (0, "a budget is above 0"),
    ],
)
def test_money_that_cannot_be_a_ceiling_is_refused(amount: Any, advice: str) -> None:
    assert budget_refusal(advice, max_usd=amount) == "cave_budget_max_invalid"


@pytest.mark.parametrize("amount", [0, -5, 1.0, "100", True, 2**53])
def test_tokens_that_cannot_be_a_ceiling_are_refused(amount: Any) -> None:
    code = budget_refusal("not a positive whole number of tokens", max_tokens=amount)
    assert code == "cave_budget_max_invalid"


@pytest.mark.parametrize("given", [{}, {"max_usd": "1", "max_tokens": 100}])
def test_a_budget_has_one_denomination(given: dict[str, Any]) -> None:
    code = budget_refusal("exactly one of max_usd and max_tokens", **given)
    assert code == "cave_budget_denomination_ambiguous"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"max_usd": "1", "initial_usd": "1.01"}, "cave_budget_initial_invalid"),
        ({"max_usd": "1", "initial_usd": "0"}, "cave_budget_initial_invalid"),
        ({"max_usd": "1", "initial_usd": 0.5}, "cave_budget_initial_invalid"),
        ({"max_tokens": 5, "initial_tokens": 6}, "cave_budget_initial_invalid"),
        ({"max_tokens": 5, "initial_tokens": 0}, "cave_budget_initial_invalid"),
        ({"max_tokens": 5, "initial_usd": "1"}, "cave_budget_denomination_ambiguous"),
        ({"max_usd": "1", "initial_tokens": 5}, "cave_budget_denomination_ambiguous"),
    ],
)
def test_what_is_released_first_is_a_part_of_the_budget(given: dict[str, Any], code: str) -> None:
    assert budget_refusal("initial_", **given) == code


@pytest.mark.parametrize("floor", [0, -1, 1.5, "256", True])
def test_an_output_floor_is_a_positive_whole_number(floor: Any) -> None:
    code = budget_refusal("output_floor_tokens is", max_usd="1", output_floor_tokens=floor)
    assert code == "cave_budget_output_floor_invalid"


@pytest.mark.parametrize(
    "option", [{"on_contention": "fail"}, {"max_wait": 0}, {"max_wait": "soon"}]
)
def test_an_option_that_does_not_exist_is_quoted(option: dict[str, Any]) -> None:
    (name, value), *_ = option.items()
    assert budget_refusal(f"{name} is {value!r}", max_usd="1", **option) == "cave_option_invalid"


async def test_a_budget_in_another_denomination_than_the_trees_is_refused() -> None:
    agent = tw.agent(id="a", instructions="", model=ScriptedModel([Reply("never")]))
    async with tw.open_tree(budget=tw.Budget(max_usd="1")) as tree:
        with pytest.raises(tw.UsageError, match="the tree counts in usd, this budget in tokens"):
            await tree.run(agent, "go", budget=tw.Budget(max_tokens=100))
        tree.check()
