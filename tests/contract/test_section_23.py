"""The contract's subtle numbers about holds, delegation and stops (23.1 to 23.3), on whole runs."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import attrs
import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from ..scenarios.kit import FREE, Backend, Witness, both_backends, tasks


def model(*said: Any) -> ScriptedModel:
    """A free model that answers turn by turn: a text, or a list of tool calls; the last repeats."""

    def script(request: ScriptedRequest) -> Reply:
        this = said[min(request.turn, len(said) - 1)]
        usage = tw.Usage(input=10, output=1)
        if isinstance(this, str):
            return Reply(this, usage=usage)
        return Reply(tool_calls=this, usage=usage)

    return ScriptedModel(script, price=FREE)


def run(backend: Backend, agent: tw.Agent, **options: Any) -> tuple[tw.Result, Witness]:
    witness = Witness()

    async def main() -> tw.Result:
        return await tw.run(agent, "go", **options, **witness.options)

    return VirtualClock().run(main, backend=backend), witness


def codes(receipt: tw.Receipt) -> list[str]:
    return [refusal.code for refusal in receipt.refusals]


@both_backends
def test_23_2_11_a_call_that_was_refused_for_money_has_used_up_its_turn(backend: Backend) -> None:
    child = tw.agent(id="child", instructions="Work.", model=model("done"))
    work = tw.subagent(
        name="work", description="Works.", agent=child, max_usd="5", max_calls=1, max_input_chars=20
    )
    too_long = [("work", {"task": "x" * 21})]
    boss = model(too_long, tasks("work", 1), tasks("work", 1), "done")
    boss_agent = tw.agent(id="boss", instructions="Plan.", model=boss, tools=[work])
    result, _ = run(backend, boss_agent, budget=tw.Budget(max_usd="4"))
    assert codes(result.receipt) == [
        "cave_subagent_input_limit",
        "cave_subagent_wallet_unavailable",
        "cave_subagent_call_budget",
    ]


@both_backends
def test_23_2_13_the_total_is_never_given_back_and_concurrency_is(backend: Backend) -> None:
    def child_script(request: ScriptedRequest) -> Reply:
        fails = request.agent_path.endswith("work#1")
        return Reply(error="it breaks") if fails else Reply("done", usage=tw.Usage(input=1))

    child = tw.agent(
        id="child", instructions="Work.", model=ScriptedModel(child_script, price=FREE)
    )
    work = tw.subagent(name="work", description="Works.", agent=child)
    one = tasks("work", 1)
    boss = tw.agent(id="boss", instructions="Plan.", model=model(one, one, one, "ok"), tools=[work])
    limits = tw.Limits(max_subagents=2, max_concurrent_subagents=1)
    result, witness = run(backend, boss, limits=limits)
    assert [child.stop_reason for child in result.receipt.subagents] == ["failed", "complete"]
    counters = witness.state.counters
    assert (counters.admitted, counters.peak) == (2, 1)
    assert (counters.invocation_rejections, counters.concurrency_rejections) == (1, 0)


@pytest.mark.parametrize(("depth", "levels"), [(2, 3), (1, 2)])
@both_backends
def test_23_2_14_depth_counts_edges(depth: int, levels: int, backend: Backend) -> None:
    agent = tw.agent(id="level4", instructions="Work.", model=model("deep"))
    for level in (3, 2, 1):
        down = tw.subagent(name="down", description="Goes down.", agent=agent)
        agent = tw.agent(
            id=f"level{level}",
            instructions="Work.",
            model=model(tasks("down", 1), "done"),
            tools=[down],
        )
    result, _ = run(backend, agent, limits=tw.Limits(max_depth=depth))
    below = list(result.receipt.walk())
    assert len(below) == levels
    assert codes(below[-1]) == ["cave_subagent_depth_limit"]


@both_backends
def test_23_2_15_a_deadline_is_an_instant_for_all_below(backend: Backend) -> None:
    clock: list[VirtualClock] = []

    async def wait(seconds: float) -> str:
        import anyio

        await anyio.sleep(seconds)
        return "later"

    pause = tw.tool(wait, effect="read", runs="host", timeout_seconds=None)
    slow = ScriptedModel([Reply("too slow", delay=30.0)], price=FREE)
    child = tw.agent(id="child", instructions="Work.", model=slow)
    work = tw.subagent(name="work", description="Works.", agent=child)
    boss = tw.agent(
        id="boss",
        instructions="Plan.",
        model=model([("wait", {"seconds": 50.0})], tasks("work", 1), "done"),
        tools=[pause, work],
    )
    ended: list[float] = []

    async def main() -> None:
        running = VirtualClock.running()
        clock.append(running)
        began = running.monotonic()
        result = await tw.run(boss, "go", limits=tw.Limits(deadline=60.0), clock=running, seed=1)
        ended.append(running.monotonic() - began)
        assert result.stop_reason == "deadline"
        assert [child.stop_reason for child in result.receipt.subagents] == ["deadline"]

    VirtualClock().run(main, backend=backend)
    assert ended == [60.0]


@both_backends
def test_23_3_16_a_ceiling_of_three_calls_is_three_calls(backend: Backend) -> None:
    @tw.tool(effect="read", runs="host")
    async def look() -> str:
        return "nothing yet"

    boss_model = model([("look", {})])
    boss = tw.agent(
        id="boss", instructions="Look.", model=boss_model, tools=[look], max_model_calls=3
    )
    result, _ = run(backend, boss)
    assert result.stop_reason == "call_budget_exhausted"
    assert len(boss_model.requests) == 3
    assert not result.complete


@both_backends
def test_23_3_17_a_refused_turn_leaves_no_trace_in_the_accounts(backend: Backend) -> None:
    @tw.tool(effect="read", runs="host")
    async def look() -> str:
        return "nothing yet"

    boss = tw.agent(
        id="boss",
        instructions="Look.",
        model=model([("look", {})]),
        tools=[look],
        max_model_calls=3,
    )
    result, _ = run(backend, boss)
    assert len(result.receipt.lines) == 3
    assert sum(message.role == "assistant" for message in result.messages) == 3
    assert result.receipt.total.tokens == 33


@both_backends
def test_23_3_18_missing_usage_on_the_last_turn_is_no_failure(backend: Backend) -> None:
    silent = ScriptedModel([Reply("an answer", usage=None)], price=FREE)
    agent = tw.agent(id="boss", instructions="Say.", model=silent)
    result, _ = run(backend, agent, budget=tw.Budget(max_tokens=100_000))
    (line,) = result.receipt.lines
    assert result.complete
    assert line.basis == "estimated"
    assert line.low_tokens == 0
    assert result.receipt.spent == line.tokens > 0


@both_backends
def test_23_1_4_an_allowance_below_the_floor_is_never_clamped(backend: Backend) -> None:
    """Declared output 64, floor 256: it fits as a whole, or the run stops."""
    free_input = tw.Price(input="0", cache_read="0", cache_write="0", output="1000")
    for dollars, calls in (("0.064", 1), ("0.063", 0)):
        said = ScriptedModel([Reply("ok", usage=tw.Usage(output=64))], price=free_input)
        agent = tw.agent(
            id="boss", instructions="Say.", model=said, output=tw.output(max_tokens=64)
        )
        result, _ = run(backend, agent, budget=tw.Budget(max_usd=dollars))
        assert [request.output_limit for request in said.requests] == [64] * calls
        assert result.stop_reason == ("complete" if calls else "budget_exhausted")


@both_backends
def test_23_1_9_a_breach_is_flagged_up_and_its_amount_is_not(backend: Backend) -> None:
    """Parent 2, wallet 1, the child really spends 5: overspent 4 and 3, never 7."""
    price = tw.Price(input="0", cache_read="0", cache_write="0", output="1000")
    rude = ScriptedModel(
        [Reply("a lot", usage=tw.Usage(output=5_000))],
        price=price,
        max_output=1_000,
        honours_max_output=False,
    )
    child = tw.agent(id="child", instructions="Work.", model=rude)
    work = tw.subagent(name="work", description="Works.", agent=child, max_usd="1")
    boss = tw.agent(
        id="boss", instructions="Plan.", model=model(tasks("work", 1), "done"), tools=[work]
    )
    result: list[tw.Result] = []

    async def main() -> None:
        clock = VirtualClock.running()
        result.append(await tw.run(boss, "go", budget=tw.Budget(max_usd="2"), clock=clock, seed=1))

    VirtualClock().run(main, backend=backend)
    receipt = result[0].receipt
    (below,) = receipt.subagents
    assert (below.overspent, receipt.overspent) == (Decimal(4), Decimal(3))
    assert below.cap_breached
    assert receipt.cap_breached
    assert result[0].stop_reason == "budget_exhausted"


@both_backends
def test_23_1_6_token_budgets_count_what_was_read_from_the_cache(backend: Backend) -> None:
    usage = tw.Usage(input=500, output=800, cache_read=20_000, reasoning=300)
    said = ScriptedModel([Reply("ok", usage=usage)], price=FREE)
    agent = tw.agent(id="boss", instructions="Say.", model=said)
    result, _ = run(backend, agent, budget=tw.Budget(max_tokens=50_000))
    assert result.receipt.spent == 21_300
    assert attrs.asdict(result.receipt.total)["tokens"] == 21_300
