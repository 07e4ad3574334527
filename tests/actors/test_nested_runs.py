"""Runs that start inside a tool are children of it: its wallet, depth, deadline and receipt."""

from __future__ import annotations

from decimal import Decimal

import anyio
import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

FREE_INPUT = tw.Price(input="0", cache_read="0", cache_write="0", output="10")


def inner_agent(model: ScriptedModel) -> tw.Agent:
    return tw.agent(id="inner", instructions="Answer.", model=model)


def outer_agent(tool: tw.Tool) -> tuple[tw.Agent, ScriptedModel]:
    def script(request: ScriptedRequest) -> Reply:
        if request.turn == 0:
            return Reply(tool_calls=[(tool.name, {})])
        return Reply(request.last_text)

    model = ScriptedModel(script)
    return tw.agent(id="outer", instructions="Use the tool.", model=model, tools=[tool]), model


async def test_a_nested_run_spends_from_its_callers_budget_and_is_on_its_receipt(
    anyio_backend: str,
) -> None:
    inner_model = ScriptedModel([Reply("found")])

    @tw.tool(effect="read", runs="host")
    async def ask() -> str:
        return (await tw.run(inner_agent(inner_model), "where?")).text

    agent, model = outer_agent(ask)
    result = await tw.run(agent, "go", budget=tw.Budget(max_usd="1"))
    paths = [receipt.path for receipt in result.receipt.walk()]
    assert paths == ["root/outer#1", "root/outer#1/tool:ask#1/inner#1"]
    assert result.text == "found"
    assert result.cost_usd == model.billed + inner_model.billed
    assert result.receipt.spent == result.cost_usd
    result.receipt.check()


async def test_a_nested_budget_is_carved_from_the_callers_wallet(anyio_backend: str) -> None:
    inner_model = ScriptedModel([Reply(usage=tw.Usage(output=8_000))], price=FREE_INPUT)

    @tw.tool(effect="read", runs="host")
    async def ask() -> str:
        result = await tw.run(
            inner_agent(inner_model), "x", budget=tw.Budget(max_usd="0.05", clamp=False)
        )
        return f"{result.stop_reason} {result.receipt.max}"

    agent, _ = outer_agent(ask)
    result = await tw.run(agent, "go", budget=tw.Budget(max_usd="1"))
    # 8,192 tokens of output at $10 per million do not fit $0.05, and nothing may be cut.
    assert result.text == "budget_exhausted 0.05"
    assert inner_model.requests == []


async def test_a_nested_budget_in_another_denomination_is_refused(anyio_backend: str) -> None:
    inner_model = ScriptedModel([])

    @tw.tool(effect="read", runs="host")
    async def ask() -> str:
        await tw.run(inner_agent(inner_model), "x", budget=tw.Budget(max_tokens=10))
        return "never"

    agent, _ = outer_agent(ask)
    result = await tw.run(agent, "go", budget=tw.Budget(max_usd="1"))
    assert "cave_budget_denomination_ambiguous" in result.text


async def test_a_nested_run_counts_as_a_subagent_and_towards_the_depth(anyio_backend: str) -> None:
    inner_model = ScriptedModel([Reply("x")])

    @tw.tool(effect="read", runs="host")
    async def ask() -> str:
        return (await tw.run(inner_agent(inner_model), "x")).text

    # Two nested runs of one tool: the second invocation of `ask` is over the tree's one subagent.
    asked_twice = ScriptedModel([Reply(tool_calls=[("ask", {}), ("ask", {})]), Reply("over")])
    twice = tw.agent(id="twice", instructions="", model=asked_twice, tools=[ask])
    result = await tw.run(twice, "go", limits=tw.Limits(max_subagents=1))
    results = asked_twice.requests[-1].tool_results
    # Which of the two came first is the scheduler's choice.
    assert sorted(r.is_error for r in results) == [False, True]
    (refused,) = [r.content for r in results if r.is_error]
    assert "cave_subagent_invocation_limit" in refused
    assert result.receipt.descendants.calls == 1


async def test_limits_of_the_whole_tree_cannot_be_set_by_a_nested_run(anyio_backend: str) -> None:
    @tw.tool(effect="read", runs="host")
    async def ask() -> str:
        limits = tw.Limits(max_depth=8)
        return (await tw.run(inner_agent(ScriptedModel([])), "x", limits=limits)).text

    agent, _ = outer_agent(ask)
    result = await tw.run(agent, "go")
    assert "limits of the whole tree" in result.text


async def test_a_detached_run_has_a_tree_of_its_own_and_says_so(anyio_backend: str) -> None:
    inner_model = ScriptedModel([Reply("apart")])
    receipts: list[tw.Receipt] = []

    @tw.tool(effect="read", runs="host")
    async def ask() -> str:
        result = await tw.run(inner_agent(inner_model), "x", detached=True)
        receipts.append(result.receipt)
        return result.text

    agent, model = outer_agent(ask)
    result = await tw.run(agent, "go", budget=tw.Budget(max_usd="1"))
    assert result.cost_usd == model.billed
    assert receipts[0].is_detached
    assert receipts[0].path == "root/inner#1"


async def test_a_nested_run_from_a_tools_thread_joins_the_tree(anyio_backend: str) -> None:
    inner_model = ScriptedModel([Reply("from below")])

    @tw.tool(effect="read", runs="host")
    def ask() -> str:
        return tw.run_sync(inner_agent(inner_model), "x").text

    agent, model = outer_agent(ask)
    result = await tw.run(agent, "go")
    assert result.text == "from below"
    assert result.cost_usd == model.billed + inner_model.billed
    assert len(result.receipt.subagents) == 1


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_nested_run_ends_with_its_callers_deadline(backend: str) -> None:
    slow = ScriptedModel([Reply("late", delay=3_600)])

    @tw.tool(effect="read", runs="host", timeout_seconds=None)
    async def ask() -> str:
        return (await tw.run(inner_agent(slow), "x")).text

    agent, _ = outer_agent(ask)
    clock = VirtualClock()
    result = tw.run_sync(agent, "go", limits=tw.Limits(deadline=10), clock=clock, backend=backend)
    assert result.stop_reason == "deadline"
    assert clock.monotonic() < 11 + 1e6
    (inner,) = result.receipt.subagents
    assert inner.stop_reason == "deadline"
    assert inner.lines[0].basis == "estimated"


async def test_a_nested_run_inside_a_cancelled_scope_of_the_tool_is_settled(
    anyio_backend: str,
) -> None:
    slow = ScriptedModel([Reply("late", delay=3_600)])

    @tw.tool(effect="read", runs="host")
    async def ask() -> str:
        with anyio.move_on_after(0.01):
            await tw.run(inner_agent(slow), "x")
        return "gave up"

    agent, _ = outer_agent(ask)
    result = await tw.run(agent, "go")
    assert result.text == "gave up"
    (inner,) = result.receipt.subagents
    assert (inner.stop_reason, inner.reason) == ("cancelled", "the caller of run was cancelled")
    assert slow.requests[0].ended == "cancelled"
    assert inner.total.low_usd <= slow.billed <= inner.total.high_usd
    assert inner.total.usd > Decimal(0)


@pytest.mark.parametrize("detached", [False, True])
async def test_a_fixture_holds_for_what_its_tools_start(detached: bool, anyio_backend: str) -> None:
    sent: list[str] = []

    @tw.tool(effect="external", runs="host")
    async def send() -> str:
        sent.append("mail")
        return "sent"

    sender = ScriptedModel([Reply(tool_calls=[("send", {})]), Reply("done")])

    @tw.tool(effect="read", runs="host")
    async def ask() -> str:
        inner = tw.agent(id="inner", instructions="", model=sender, tools=[send])
        return (await tw.run(inner, "x", detached=detached)).text

    asker = ScriptedModel([Reply(tool_calls=[("ask", {})]), Reply("over")])
    outer = tw.agent(id="outer", instructions="", model=asker, tools=[ask], sandbox="fixture")
    await tw.run(outer, "go")
    assert sent == []
    assert "cave_side_effect_blocked" in sender.requests[1].last_text
