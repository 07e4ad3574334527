"""The contract's lines about paid retries (22.3 and 23.5), on whole runs.

Two lines do not apply as written: what retries may come to is what they cost and not the sum of
what they held, so endless failures that cost nothing end with the attempts (22.3, line 12), and
the third attempt of 23.5.26 is made.
"""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

import anyio
import pytest

import treewarden as tw
from treewarden.protocols import BreakerRow
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from ..scenarios.kit import FREE, Backend, Witness, both_backends, check_books

FAILS = Reply(error="the transport fails")


def agent_of(model: ScriptedModel, **options: Any) -> tw.Agent:
    return tw.agent(id="worker", instructions="Work.", model=model, **options)


def run(backend: Backend, agent: tw.Agent, **options: Any) -> tuple[tw.Receipt, Witness, str]:
    """The receipt of a run, what it told, and the code of the error it failed with, if it did."""
    witness = Witness()

    async def main() -> tuple[tw.Receipt, str]:
        try:
            return (await tw.run(agent, "go", **options, **witness.options)).receipt, ""
        except tw.RunError as error:
            return error.receipt, error.code

    receipt, code = VirtualClock().run(main, backend=backend)
    return receipt, witness, code


def retries(receipt: tw.Receipt) -> list[BreakerRow]:
    return [row for row in receipt.breakers if row.kind == "retry_attempted"]


TOKENS = tw.Budget(max_tokens=100_000)


def test_line_7_retry_without_a_budget_is_refused() -> None:
    model = ScriptedModel([Reply("never")])
    with pytest.raises(tw.UsageError) as caught:
        tw.run_sync(agent_of(model), "go", retry=tw.Retry())
    assert caught.value.code == "cave_breaker_retry_requires_budget"
    assert model.requests == []


@both_backends
def test_line_7_two_failures_and_a_success_on_the_third_try(backend: Backend) -> None:
    model = ScriptedModel([FAILS, FAILS, Reply("ok", usage=tw.Usage(input=100, output=10))])
    receipt, witness, _ = run(backend, agent_of(model), budget=TOKENS, retry=tw.Retry())
    assert [row.count for row in retries(receipt)] == [1, 2]
    assert [row.measured_spend for row in retries(receipt)] == [0, 110]
    bases = [row.spend_basis for row in retries(receipt)]
    assert bases == ["pre_stream_no_usage", "provider_reported"]
    assert receipt.spent == 110
    check_books(witness, receipt, model)


@both_backends
def test_line_8_they_make_one_charged_call(backend: Backend) -> None:
    model = ScriptedModel([FAILS, FAILS, Reply("ok", usage=tw.Usage(input=100, output=10))])
    receipt, _, _ = run(backend, agent_of(model), budget=TOKENS, retry=tw.Retry())
    assert [line.tokens for line in receipt.lines if line.tokens] == [110]
    assert [line.purpose for line in receipt.lines] == ["model", "retry", "retry"]


@both_backends
def test_line_9_attempts_are_counted_for_each_call_anew(backend: Backend) -> None:
    @tw.tool(runs="host", effect="read")
    async def look() -> str:
        return "seen"

    calls = [Reply(tool_calls=[("look", {})], usage=tw.Usage(input=200, output=20))]
    answer = [Reply("ok", usage=tw.Usage(input=100, output=10))]
    model = ScriptedModel([FAILS, *calls, FAILS, *answer])
    agent = agent_of(model, tools=[look])
    receipt, _, _ = run(backend, agent, budget=TOKENS, retry=tw.Retry())
    assert [row.count for row in retries(receipt)] == [1, 1]
    assert [row.measured_spend for row in retries(receipt)] == [220, 110]


@both_backends
def test_line_10_an_abort_during_the_first_attempt_leaves_no_retry(backend: Backend) -> None:
    async def slow(_: ScriptedRequest) -> Reply:
        return Reply(error=503, delay=60)

    model, witness = ScriptedModel(slow), Witness()

    async def main() -> tw.Receipt:
        agent = agent_of(model)
        async with tw.stream(
            agent, "go", budget=TOKENS, retry=tw.Retry(), **witness.tree_options
        ) as run:
            async for event in run:
                if type(event).__name__ == "CallStarted":
                    run.cancel("enough")
            with pytest.raises(tw.RunCancelled) as caught:
                await run.result()
        return caught.value.receipt

    receipt = VirtualClock().run(main, backend=backend)
    assert receipt.breakers == ()
    check_books(witness, receipt, model)


@both_backends
def test_line_11_a_pause_past_the_deadline_is_not_begun(backend: Backend) -> None:
    model = ScriptedModel([FAILS, Reply("never")])
    receipt, _, _ = run(
        backend,
        agent_of(model),
        budget=TOKENS,
        retry=tw.Retry(backoff_seconds=0.2),
        limits=tw.Limits(deadline=0.1, min_call_seconds=0),
    )
    assert receipt.stop_reason == "deadline"
    assert len(model.requests) == 1
    (row,) = retries(receipt)
    assert row.measured_spend == 0
    assert row.spend_basis == "pre_stream_no_usage"


@both_backends
def test_line_12_endless_failures_end_with_the_attempts(backend: Backend) -> None:
    model = ScriptedModel(lambda _: FAILS)
    retry = tw.Retry(max_spend_tokens=40_000)
    receipt, _, code = run(backend, agent_of(model), budget=TOKENS, retry=retry)
    assert len(model.requests) == 4
    assert [row.kind for row in receipt.breakers] == [*["retry_attempted"] * 3, "retry_exhausted"]
    assert receipt.spent == 0
    assert code == "cave_provider_terminal_error"


@pytest.mark.parametrize("spend", [0, -1, 1.5, True, "many"])
def test_line_13_a_purse_is_a_positive_number(spend: Any) -> None:
    with pytest.raises(tw.UsageError) as caught:
        tw.Retry(max_spend_tokens=spend)
    assert caught.value.code == "cave_breaker_retry_spend_invalid"


@pytest.mark.parametrize("spend", ["0", "-1", 0, 1.5, "nan"])
def test_line_13_a_purse_in_money_is_exact_and_positive(spend: Any) -> None:
    with pytest.raises(tw.UsageError) as caught:
        tw.Retry(max_spend_usd=spend)
    assert caught.value.code == "cave_breaker_retry_spend_invalid"


@pytest.mark.parametrize("backoff", [-0.1, float("nan"), float("inf"), True, "soon"])
def test_line_13_a_backoff_is_zero_or_more_seconds(backoff: Any) -> None:
    with pytest.raises(tw.UsageError) as caught:
        tw.Retry(backoff_seconds=backoff)
    assert caught.value.code == "cave_breaker_retry_backoff_invalid"


@pytest.mark.parametrize("attempts", [0, -1, 101, 2.0, True, None])
def test_attempts_are_a_whole_number(attempts: Any) -> None:
    with pytest.raises(tw.UsageError):
        tw.Retry(max_attempts=attempts)


def test_a_purse_in_the_other_denomination_is_refused() -> None:
    model = ScriptedModel([Reply("never")], price=FREE)
    with pytest.raises(tw.UsageError, match="max_spend_usd"):
        tw.run_sync(
            agent_of(model),
            "go",
            budget=tw.Budget(max_usd="1"),
            retry=tw.Retry(max_spend_tokens=5),
        )
    assert model.requests == []


@both_backends
def test_23_5_26_pauses_double_and_the_providers_own_error_comes_out(backend: Backend) -> None:
    sent: list[float] = []

    def script(_: ScriptedRequest) -> Reply:
        sent.append(anyio.current_time())
        return FAILS

    model = ScriptedModel(script, price=FREE, max_output=16_384)
    retry = tw.Retry(max_spend_tokens=40_000)
    receipt, _, code = run(backend, agent_of(model), budget=TOKENS, retry=retry)
    pauses = [round(b - a, 6) for a, b in itertools.pairwise(sent)]
    assert pauses == [0.25, 0.5, 1.0]
    assert (code, receipt.spent) == ("cave_provider_terminal_error", Decimal(0))
    assert receipt.breakers[-1].reason == "all 4 attempts failed"
