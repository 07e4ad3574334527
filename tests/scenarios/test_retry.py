"""Public reports about calls that fail and are made again: storms, layers, unpaid retries."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal

import anyio
import pytest

import treewarden as tw
from treewarden.protocols import CallRetried
from treewarden.testing import (
    Exchange,
    ReplayServer,
    Reply,
    ScriptedModel,
    ScriptedRequest,
    VirtualClock,
    explore_cancellations,
)

from ..wire._replays import Witness as WireWitness
from ..wire._replays import haiku, refuses, says, streamed, writer
from ..wire._streams import started, text_block, tool_block
from .kit import Backend, P, Witness, both_backends, check_books, free_model, hands_out, tasks

DOLLAR = tw.Budget(max_usd="1.00")
OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
AT_ONCE = tw.Retry(backoff_seconds=0)


def worker(model: ScriptedModel, id: str = "worker", **options: object) -> tw.Agent:
    return tw.agent(id=id, instructions="Work.", model=model, **options)  # type: ignore[arg-type]


# --- E20: what was tried before counts -----------------------------------------------------------


@both_backends
def test_E20_every_attempt_at_an_answer_is_on_the_bill(backend: Backend) -> None:
    usage = tw.Usage(input=1_000, output=200)
    texts = ["{oh", "{dear", '{"city": "Oslo"}']
    model = ScriptedModel([Reply(text, usage=usage) for text in texts], price=P)
    shape = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    agent = worker(model, output=tw.output(schema=shape, retries=2))
    witness = Witness()

    async def main() -> tw.Result:
        return await tw.run(agent, "where?", budget=DOLLAR, **witness.options)

    receipt = VirtualClock().run(main, backend=backend).receipt
    assert sum(line.input_tokens for line in receipt.lines) == 3_000
    assert sum(line.output_tokens for line in receipt.lines) == 600
    assert receipt.total.usd == Decimal("0.018")
    # An answer that did not fit is repaired; only a request that failed is retried.
    assert [line.purpose for line in receipt.lines] == ["model", "repair", "repair"]
    check_books(witness, receipt, model)


@both_backends
def test_E20_requests_that_failed_after_they_were_billed_count_too(backend: Backend) -> None:
    usage = tw.Usage(input=1_000, output=200)

    def billed() -> Reply:
        return Reply(error=tw.ProviderError("no", provider="scripted", status=500, usage=usage))

    model = ScriptedModel([billed(), billed(), Reply("good", usage=usage)], price=P)
    witness = Witness()

    async def main() -> tw.Result:
        agent = worker(model)
        return await tw.run(agent, "go", budget=DOLLAR, retry=AT_ONCE, **witness.options)

    receipt = VirtualClock().run(main, backend=backend).receipt
    assert (receipt.total.tokens, receipt.total.usd) == (3_600, Decimal("0.018"))
    assert [line.purpose for line in receipt.lines] == ["model", "retry", "retry"]
    check_books(witness, receipt, model)


# --- E69: one layer retries, with a purse --------------------------------------------------------


async def test_E69_four_attempts_are_four_requests_on_the_wire() -> None:
    witness = WireWitness()
    always = [refuses(429, "rate_limit_error", "slow down")] * 5
    with ReplayServer(always) as server:
        with pytest.raises(tw.RunError) as caught:
            await witness.run(writer(haiku(server)), "hello", budget=DOLLAR, retry=AT_ONCE)
        assert len(server.requests) == 4
    assert caught.value.code == "cave_provider_terminal_error"


async def test_E69_without_retries_one_request_is_one_request() -> None:
    with ReplayServer([refuses(429, "rate_limit_error", "slow down")] * 2) as server:
        with pytest.raises(tw.RunError):
            await WireWitness().run(writer(haiku(server)), "hello", budget=DOLLAR)
        assert len(server.requests) == 1


@both_backends
def test_E69_the_purse_ends_what_attempts_would_allow(backend: Backend) -> None:
    prompt = tw.Usage(input=2_000)  # 0.008 USD
    price = tw.Price(input="4", cache_read="4", cache_write="4", output="4")
    billed = tw.ProviderError("too many", provider="scripted", status=429, usage=prompt)
    model = ScriptedModel(lambda _: Reply(error=billed), price=price)
    witness = Witness()
    retry = tw.Retry(max_attempts=10, max_spend_usd="0.02")

    async def main() -> tw.RunError:
        with pytest.raises(tw.RunError) as caught:
            await tw.run(worker(model), "x" * 1_900, budget=DOLLAR, retry=retry, **witness.options)
        return caught.value

    error = VirtualClock().run(main, backend=backend)
    assert len(model.requests) == 1 + 2
    assert error.code == "retry-budget"
    assert isinstance(error.__cause__, tw.RetryBudgetSpent)
    assert error.__cause__.status == 429
    kinds = [row.kind for row in error.receipt.breakers]
    assert kinds == ["retry_attempted", "retry_attempted", "retry_exhausted"]
    spends = [row.measured_spend for row in error.receipt.breakers[:2]]
    assert spends == [Decimal("0.008")] * 2
    assert error.receipt.total.usd == Decimal("0.024")
    check_books(witness, error.receipt, model)


@both_backends
def test_E69_a_purse_is_not_exceeded_by_children_that_retry_at_the_same_time(
    backend: Backend,
) -> None:
    prompt = tw.Usage(input=2_000)  # 0.008 USD
    price = tw.Price(input="4", cache_read="4", cache_write="4", output="4")
    billed = tw.ProviderError("a fault", provider="scripted", status=500, usage=prompt)
    child = ScriptedModel(lambda _: Reply(error=billed, delay=1), price=price)
    spawn = tw.subagent(name="spawn", description="Works.", agent=worker(child))
    boss = worker(
        free_model(hands_out(*[("spawn", {"task": "y" * 1_900})] * 6)), "boss", tools=[spawn]
    )
    retry = tw.Retry(max_attempts=10, max_spend_usd="0.02", backoff_seconds=1)
    witness = Witness()

    async def main() -> tw.Result:
        return await tw.run(boss, "go", budget=DOLLAR, retry=retry, **witness.options)

    receipt = VirtualClock().run(main, backend=backend).receipt
    rows = [row for below in receipt.walk() for row in below.breakers]
    spent = sum(row.measured_spend or 0 for row in rows)
    assert Decimal("0") < spent <= Decimal("0.02")
    assert len(child.requests) == 6 + 2
    lines = [line for below in receipt.walk() for line in below.lines if line.purpose == "retry"]
    assert sum(line.usd for line in lines) == spent


# --- E70: one pause for all ----------------------------------------------------------------------

BUSY_SECONDS = 300.0


def busy_provider(sent: list[float]) -> ScriptedModel:
    """A provider that turns everybody away for five minutes, and asks for thirty seconds."""
    refused = tw.ProviderError(
        "busy", provider="scripted", status=429, retry_after_seconds=30, kind="rate_limit_error"
    )

    def script(_: ScriptedRequest) -> Reply:
        sent.append(now := anyio.current_time())
        is_busy = now < BUSY_SECONDS
        return Reply(error=refused) if is_busy else Reply("done", usage=tw.Usage(input=10))

    return ScriptedModel(script, price=P)


@both_backends
def test_E70_fifteen_children_wait_for_one_provider_together(backend: Backend) -> None:
    sent: list[float] = []
    model = busy_provider(sent)
    spawn = tw.subagent(name="spawn", description="Works.", agent=worker(model))
    planner = free_model(hands_out(*tasks("spawn", 15)))
    boss = worker(planner, "boss", tools=[spawn])
    witness = Witness()

    async def main() -> tw.Result:
        return await tw.run(
            boss,
            "go",
            budget=DOLLAR,
            retry=tw.Retry(),
            limits=tw.Limits(deadline=7_200, max_concurrent_subagents=15),
            **witness.options,
        )

    receipt = VirtualClock().run(main, backend=backend).receipt
    assert receipt.stop_reason == "complete"
    assert [child.stop_reason for child in receipt.subagents] == ["complete"] * 15
    # All ask once before anybody knows; then one asks in each pause, and is answered in the tenth.
    probes = [at for at in sent if 0 < at < BUSY_SECONDS]
    assert sent.count(0.0) == 15
    assert len(probes) == 9
    assert sorted(Counter(sent).items())[:-1] == [(0.0, 15), *((30.0 * n, 1) for n in range(1, 10))]
    assert len(sent) == 15 + 9 + 15
    check_books(witness, receipt, model, planner)


@both_backends
def test_E70_a_fault_of_one_request_makes_nobody_else_wait(backend: Backend) -> None:
    sent: list[tuple[str, float]] = []

    def script(request: ScriptedRequest) -> Reply:
        sent.append((request.agent_path, anyio.current_time()))
        fails = request.agent_path.endswith("#1") and len(sent) < 4
        return Reply(error=500) if fails else Reply("done", usage=tw.Usage(input=1), delay=0.5)

    model = ScriptedModel(script, price=P)
    spawn = tw.subagent(name="spawn", description="Works.", agent=worker(model))
    one_by_one = [[call] for call in tasks("spawn", 3)]
    boss_model = free_model(hands_out(*[call for calls in one_by_one for call in calls]))
    boss = worker(boss_model, "boss", tools=[spawn])
    witness = Witness()

    async def main() -> tw.Result:
        retry = tw.Retry(backoff_seconds=10)
        return await tw.run(boss, "go", budget=DOLLAR, retry=retry, **witness.options)

    receipt = VirtualClock().run(main, backend=backend).receipt
    assert [child.stop_reason for child in receipt.subagents] == ["complete"] * 3
    assert sorted(at for _, at in sent) == [0, 0, 0, 10]
    retried = [event for event in witness.events if isinstance(event, CallRetried)]
    assert [(event.attempt, event.after_seconds) for event in retried] == [(1, 10)]


@both_backends
def test_E70_a_pause_that_ends_after_the_deadline_is_not_waited_for(backend: Backend) -> None:
    sent: list[float] = []
    model = busy_provider(sent)
    witness = Witness()
    limits = tw.Limits(deadline=20)

    async def main() -> tuple[tw.Result, float]:
        result = await tw.run(
            worker(model), "go", budget=DOLLAR, retry=tw.Retry(), limits=limits, **witness.options
        )
        return result, anyio.current_time()

    result, at = VirtualClock().run(main, backend=backend)
    assert (result.stop_reason, at) == ("deadline", 0)
    assert "30 s" in result.stop_detail
    assert sent == [0]


@both_backends
@pytest.mark.parametrize(
    "error",
    [
        tw.ProviderError("a bad request", provider="scripted", status=400),
        tw.ProviderError("pay", provider="scripted", status=429, kind="insufficient_quota"),
        tw.CredentialsError("who are you", provider="scripted", status=401),
    ],
)
def test_E70_what_will_not_pass_is_not_asked_again(
    backend: Backend, error: tw.ProviderError
) -> None:
    model = ScriptedModel([Reply(error=error)], price=P)
    witness = Witness()

    async def main() -> tw.RunError:
        with pytest.raises(tw.RunError) as caught:
            await tw.run(worker(model), "go", budget=DOLLAR, retry=tw.Retry(), **witness.options)
        return caught.value

    failed = VirtualClock().run(main, backend=backend)
    assert failed.__cause__ is error
    assert failed.receipt.breakers == ()


# --- E100: what the reader has seen is not said twice --------------------------------------------


async def test_E100_overloaded_before_the_first_token_is_made_again() -> None:
    overloaded = streamed(started(), OVERLOADED)
    with ReplayServer([overloaded, says("hello")]) as server:
        result = await WireWitness().run(writer(haiku(server)), "hi", budget=DOLLAR, retry=AT_ONCE)
        assert len(server.requests) == 2
    assert result.text == "hello"
    assert [line.purpose for line in result.receipt.lines] == ["model", "retry"]


@pytest.mark.parametrize(
    "answer",
    [
        streamed(started(), *text_block(0, *["word "] * 40), OVERLOADED),
        streamed(started(), *tool_block(0, '{"path":"/tm')[:-1], OVERLOADED),
        streamed(started(), *text_block(0, "half")[:-1]),
    ],
    ids=["after 40 tokens", "after half a tool call", "the stream just ends"],
)
async def test_E100_after_the_first_token_nothing_is_replayed(answer: Exchange) -> None:
    with ReplayServer([answer, says("never")]) as server:
        with pytest.raises(tw.RunError) as caught:
            await WireWitness().run(writer(haiku(server)), "hi", budget=DOLLAR, retry=AT_ONCE)
        assert len(server.requests) == 1
    assert caught.value.code == "provider-interrupted"
    assert caught.value.receipt.breakers == ()
    assert caught.value.receipt.total.usd > 0


# --- who is cancelled meanwhile ------------------------------------------------------------------


async def scenario_retries() -> None:
    """Children that retry in a common pause, one of them out of purse; a run inside a tool."""
    refused = tw.ProviderError("busy", provider="scripted", status=429, usage=tw.Usage(input=50))

    def script(request: ScriptedRequest) -> Reply:
        if anyio.current_time() < 3:
            return Reply(error=refused, delay=0.2)
        return Reply(chunks=("do", "ne"), chunk_delay=0.2, usage=tw.Usage(input=10, output=2))

    price = tw.Price(input="4", cache_read="4", cache_write="4", output="4")
    child = worker(ScriptedModel(script, price=price, max_output=500))
    spawn = tw.subagent(name="spawn", description="Works.", agent=child)
    boss = worker(free_model(hands_out(*tasks("spawn", 3))), "boss", tools=[spawn])
    retry = tw.Retry(max_attempts=5, max_spend_usd="0.01", backoff_seconds=0.5)
    clock = VirtualClock.running()
    await tw.run(boss, "go", budget=DOLLAR, retry=retry, limits=tw.Limits(deadline=60), clock=clock)


@pytest.mark.slow
def test_retries_leave_nothing_wherever_somebody_cancels() -> None:
    found = explore_cancellations(scenario_retries)
    print(found)
    found.check()
