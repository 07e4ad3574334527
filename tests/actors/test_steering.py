"""A running agent is told something, asked to wrap up, or given another ceiling."""

from __future__ import annotations

import gc
from decimal import Decimal

import anyio
import pytest

import treewarden as tw
from treewarden.protocols import ActorStopped, CallStarted, LedgerError, TextWritten
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest

PER_OUTPUT = tw.Price(input="0", cache_read="0", cache_write="0", output="100")


@tw.tool(effect="read", runs="host")
async def look() -> str:
    """Look."""
    await anyio.sleep(0.01)
    return "nothing"


def looker(model: ScriptedModel) -> tw.Agent:
    return tw.agent(id="looker", instructions="Look.", model=model, tools=[look])


async def test_what_is_sent_is_read_before_the_next_call(anyio_backend: str) -> None:
    model = ScriptedModel([Reply(tool_calls=[("look", {})]), Reply("seen")])
    async with tw.stream(looker(model), "go") as run:
        async for event in run:
            if isinstance(event, CallStarted):
                run.send("look behind the door too")
                break
        result = await run.result()
    assert model.requests[1].last_text == "look behind the door too"
    assert [m.role for m in result.messages] == ["user", "assistant", "tool", "user", "assistant"]


async def test_what_is_sent_before_the_answer_is_out_is_answered_too(anyio_backend: str) -> None:
    model = ScriptedModel([Reply("first", delay=0.01), Reply("second")])
    async with tw.stream(looker(model), "go") as run:
        async for event in run:
            if isinstance(event, CallStarted):
                run.send("and another thing")
                break
        assert (await run.result()).text == "second"


async def test_an_ended_run_takes_no_messages(anyio_backend: str) -> None:
    async with tw.stream(looker(ScriptedModel([Reply("done")])), "go") as run:
        await run.result()
        with pytest.raises(ActorStopped, match="has ended"):
            run.send("too late")


@pytest.mark.parametrize("max_usd", ["0.01", "5.00"])
async def test_the_ceiling_of_a_run_that_is_over_cannot_be_moved(
    max_usd: str, anyio_backend: str
) -> None:
    async with tw.open_tree(budget=tw.Budget(max_usd="9.00")) as tree:
        budget = tw.Budget(max_usd="1.00")
        async with tree.stream(looker(ScriptedModel([Reply("x")])), "go", budget=budget) as run:
            await run.result()
            with pytest.raises(tw.ActorStopped):
                run.set_budget(max_usd=max_usd)
        tree.check()


async def test_a_run_that_does_not_read_takes_sixty_four_messages(anyio_backend: str) -> None:
    model = ScriptedModel([Reply("first", delay=0.01), Reply("second")])
    async with tw.stream(looker(model), "go") as run:
        for number in range(64):
            run.send(f"message {number}")
        with pytest.raises(tw.MailboxFull, match="64 unread messages"):
            run.send("one too many")
        result = await run.result()
    sent = [message.text for message in result.messages if message.text.startswith("message")]
    assert sent == [f"message {number}" for number in range(64)]


async def test_wrapping_up_gives_one_last_answer(anyio_backend: str) -> None:
    def script(request: ScriptedRequest) -> Reply:
        if "Wrap up now: closing time" in request.last_text:
            return Reply("what I have")
        return Reply(tool_calls=[("look", {})])

    model = ScriptedModel(script)
    async with tw.stream(looker(model), "go") as run:
        async for event in run:
            if isinstance(event, CallStarted) and len(model.requests) == 3:
                run.wrap_up("closing time")
                break
        result = await run.result()
    assert (result.stop_reason, result.text) == ("complete", "what I have")
    assert result.receipt.lines[-1].purpose == "final"
    assert len(model.requests) <= 5


async def test_a_model_that_wants_tools_instead_of_wrapping_up_does_not_get_them(
    anyio_backend: str,
) -> None:
    model = ScriptedModel(lambda _: Reply("hm", tool_calls=[("look", {})]))
    async with tw.stream(looker(model), "go") as run:
        async for event in run:
            if isinstance(event, CallStarted):
                run.wrap_up("enough")
                break
        result = await run.result()
    assert result.stop_reason == "wrapped_up"
    assert len(model.requests) == 2
    # Every call id has its result, so that the history can be used again.
    last = result.messages[-1]
    assert last.role == "tool"
    assert "cave_run_wrapped_up" in last.parts[0].content  # type: ignore[union-attr]


async def test_a_lowered_ceiling_stops_the_next_call_and_breaches_nothing(
    anyio_backend: str,
) -> None:
    model = ScriptedModel(
        lambda _: Reply(tool_calls=[("look", {})], usage=tw.Usage(output=1_000)), price=PER_OUTPUT
    )
    budget = tw.Budget(max_usd="100", clamp=False)
    async with tw.stream(looker(model), "go", budget=budget) as run:
        async for event in run:
            if isinstance(event, CallStarted) and len(model.requests) == 2:
                run.set_budget(max_usd="0.25")
                break
        result = await run.result()
    assert result.stop_reason == "budget_exhausted"
    assert result.receipt.max == max(Decimal("0.25"), result.receipt.spent)
    assert result.receipt.overspent == 0
    result.receipt.check()


async def test_a_raised_ceiling_funds_a_call_that_waits_for_money(anyio_backend: str) -> None:
    # Two children, and money for one call at a time: each holds 8,192 x $100 per million.
    def script(request: ScriptedRequest) -> Reply:
        if "child" in request.agent_path:
            return Reply("x", delay=0.05, usage=tw.Usage(output=10))
        if request.turn == 0:
            return Reply(
                tool_calls=[("child", {"task": "a"}), ("child", {"task": "b"})],
                usage=tw.Usage(output=1),
            )
        return Reply("done", usage=tw.Usage(output=1))

    model = ScriptedModel(script, price=PER_OUTPUT)
    child = tw.agent(id="child", instructions="", model=model)
    root = tw.agent(
        id="root",
        instructions="",
        model=model,
        tools=[tw.subagent(name="child", description="", agent=child)],
    )
    queued = anyio.Event()

    def journal(event: object) -> None:
        if type(event).__name__ == "Queued":
            queued.set()

    budget = tw.Budget(max_usd="0.9", clamp=False)
    async with tw.open_tree(budget=budget, journal=journal) as tree:
        async with tree.stream(root, "go") as run:
            await queued.wait()
            tree.set_budget(max_usd="5")
            assert tree.snapshot()["waiters"] == []
            assert (await run.result()).complete


async def test_a_tree_limit_can_be_changed_while_it_runs(anyio_backend: str) -> None:
    async with tw.open_tree() as tree:
        tree.set_limit("max_model_calls", 1)
        model = ScriptedModel(lambda _: Reply(tool_calls=[("look", {})]))
        result = await tree.run(looker(model), "go")
        assert result.stop_reason == "call_budget_exhausted"
        tree.set_limit("max_model_calls", None)
        assert (await tree.run(looker(ScriptedModel([Reply("x")])), "go")).complete
        with pytest.raises(LedgerError, match="there is no cap 'speed'"):
            tree.set_limit("speed", 3)


async def test_a_dropped_stream_is_settled_without_anybody_closing_it(anyio_backend: str) -> None:
    model = ScriptedModel([Reply("a b", chunks=2, chunk_delay=3_600)])
    events: list[object] = []

    async def read_a_little() -> None:
        stream = tw.stream(looker(model), "go", journal=events.append)
        run = await stream.__aenter__()
        async for event in run:
            if isinstance(event, TextWritten):
                return

    await read_a_little()
    gc.collect()
    for _ in range(50):
        await anyio.sleep(0.001)
        if model.requests[0].ended is not None:
            break
    assert model.requests[0].ended == "cancelled"
    await anyio.sleep(0.01)
    assert type(events[-1]).__name__ == "Ended"
    assert events[-1].node == 0  # type: ignore[attr-defined]
