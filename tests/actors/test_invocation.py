"""The agent's loop: calls, tools, output, endings."""

from __future__ import annotations

from typing import Literal

import attrs
import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock


@attrs.frozen
class Answer:
    name: str
    count: int


@tw.tool(effect="read", runs="host")
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def test_a_fitting_answer_becomes_the_declared_type(anyio_backend: str) -> None:
    model = ScriptedModel([Reply('```json\n{"name": "oak", "count": 3}\n```')])
    agent = tw.agent(id="a", instructions="Count.", model=model, output=Answer)
    result = await tw.run(agent, "go")
    assert result.output == Answer("oak", 3)
    assert '"count"' in model.requests[0].system


async def test_a_mismatching_answer_is_repaired_once_on_a_line_of_its_own(
    anyio_backend: str,
) -> None:
    model = ScriptedModel([Reply('{"name": "oak"}'), Reply('{"name": "oak", "count": 3}')])
    agent = tw.agent(id="a", instructions="Count.", model=model, output=Answer)
    result = await tw.run(agent, "go")
    assert result.output == Answer("oak", 3)
    assert [line.purpose for line in result.receipt.lines] == ["model", "repair"]
    assert "missing required field `count`" in model.requests[1].last_text


async def test_an_answer_that_stays_wrong_is_an_error_with_a_receipt(anyio_backend: str) -> None:
    model = ScriptedModel([Reply("no"), Reply("still no")])
    agent = tw.agent(id="a", instructions="Count.", model=model, output=Answer)
    with pytest.raises(tw.RunError, match="cave_output_schema_invalid_json") as caught:
        await tw.run(agent, "go")
    assert caught.value.receipt.total.calls == 2


async def test_a_stop_is_not_held_against_the_output_schema(anyio_backend: str) -> None:
    model = ScriptedModel(lambda _: Reply("hm", tool_calls=[("add", {"a": 1, "b": 1})]))
    agent = tw.agent(
        id="a", instructions="", model=model, tools=[add], output=Answer, max_model_calls=3
    )
    result = await tw.run(agent, "go")
    assert (result.stop_reason, result.output) == ("call_budget_exhausted", None)
    assert len(model.requests) == 3


async def test_a_cut_off_answer_does_not_look_like_a_full_one(anyio_backend: str) -> None:
    model = ScriptedModel([Reply("x" * 4_000)], max_output=100)
    result = await tw.run(tw.agent(id="a", instructions="", model=model), "go")
    assert not result.complete
    assert result.stop_reason == "output_limit"
    assert len(result.text) == 400
    assert str(result).startswith("[stopped: output_limit")


async def test_an_answer_that_the_budget_cut_off_names_the_budget(anyio_backend: str) -> None:
    model = ScriptedModel([Reply("x" * 40_000)])
    budget = tw.Budget(max_tokens=1_000)
    result = await tw.run(tw.agent(id="a", instructions="", model=model), "go", budget=budget)
    assert result.stop_reason == "budget_exhausted"
    assert result.receipt.lines[0].clamped_from == 8_192
    assert result.receipt.total.tokens <= 1_000


async def test_on_stop_raise_turns_a_stop_into_an_error(anyio_backend: str) -> None:
    model = ScriptedModel([])
    agent = tw.agent(id="a", instructions="", model=model)
    with pytest.raises(tw.RunStopped, match="budget_exhausted") as caught:
        await tw.run(agent, "go", budget=tw.Budget(max_tokens=50), on_stop="raise")
    assert caught.value.receipt.total.calls == 0


async def test_reads_run_side_by_side_and_writes_in_order(anyio_backend: str) -> None:
    log: list[str] = []

    def logging_tool(name: str, effect: str) -> tw.Tool:
        async def work() -> str:
            import anyio

            log.append(f"{name} begins")
            await anyio.sleep(0.01)
            log.append(f"{name} ends")
            return name

        return tw.tool(work, name=name, effect=effect, runs="host")  # type: ignore[call-overload, no-any-return]

    reads = [logging_tool("r1", "read"), logging_tool("r2", "read")]
    model = ScriptedModel([Reply(tool_calls=[("r1", {}), ("r2", {})]), Reply("x")])
    await tw.run(tw.agent(id="a", instructions="", model=model, tools=reads), "go")
    assert log[:2] == ["r1 begins", "r2 begins"] or log[:2] == ["r2 begins", "r1 begins"]
    log.clear()
    mixed = [logging_tool("w1", "write"), logging_tool("r1", "read")]
    model = ScriptedModel([Reply(tool_calls=[("w1", {}), ("r1", {})]), Reply("x")])
    await tw.run(tw.agent(id="a", instructions="", model=model, tools=mixed), "go")
    assert log == ["w1 begins", "w1 ends", "r1 begins", "r1 ends"]


async def test_every_call_id_gets_exactly_one_result_in_the_order_of_the_calls(
    anyio_backend: str,
) -> None:
    calls: list[tuple[str, dict[str, object]]] = [
        ("add", {"a": 1, "b": 2}),
        ("nope", {}),
        ("add", {"a": "one", "b": 2}),
        ("add", {"a": 3, "b": 4}),
    ]
    model = ScriptedModel([Reply(tool_calls=calls), Reply("done")])
    agent = tw.agent(id="a", instructions="", model=model, tools=[add])
    result = await tw.run(agent, "go")
    results = model.requests[1].tool_results
    assert [r.call_id for r in results] == ["call-1-1", "call-1-2", "call-1-3", "call-1-4"]
    assert [r.is_error for r in results] == [False, True, True, False]
    assert [r.content for r in results][::3] == ["3", "7"]
    assert "cave_unknown_tool" in results[1].content
    assert "Expected `int`, got `str`" in results[2].content
    row = result.receipt.tools[0]
    assert (row.name, row.calls, row.errors) == ("add", 3, 1)


async def test_a_fixture_runs_only_reads_here_and_below(anyio_backend: str) -> None:
    sent: list[str] = []

    @tw.tool(effect="external", runs="host")
    async def send(text: str) -> str:
        sent.append(text)
        return "sent"

    def script(request: ScriptedRequest) -> Reply:
        if request.turn:
            return Reply(request.last_text)
        if "below" in request.agent_path:
            return Reply(tool_calls=[("send", {"text": "x"})])
        return Reply(tool_calls=[("send", {"text": "x"}), ("below", {"task": "send"})])

    model = ScriptedModel(script)
    child = tw.agent(id="child", instructions="", model=model, tools=[send])
    below = tw.subagent(name="below", description="", agent=child)
    agent = tw.agent(id="a", instructions="", model=model, tools=[send, below], sandbox="fixture")
    result = await tw.run(agent, "go")
    assert sent == []
    assert result.text.count("cave_side_effect_blocked") == 2


async def test_a_too_large_result_is_an_error_and_not_cut(anyio_backend: str) -> None:
    @tw.tool(effect="read", runs="host", max_result_bytes=10)
    async def page() -> str:
        return "x" * 11

    model = ScriptedModel([Reply(tool_calls=[("page", {})]), Reply("x")])
    await tw.run(tw.agent(id="a", instructions="", model=model, tools=[page]), "go")
    (result,) = model.requests[1].tool_results
    assert result.is_error
    assert "has 11 bytes; 10 are allowed" in result.content


async def test_a_lone_surrogate_in_a_result_cannot_spoil_the_history(anyio_backend: str) -> None:
    @tw.tool(effect="read", runs="host")
    async def odd() -> str:
        return "a\ud92cb"

    model = ScriptedModel([Reply(tool_calls=[("odd", {})]), Reply("x")])
    await tw.run(tw.agent(id="a", instructions="", model=model, tools=[odd]), "go")
    assert model.requests[1].tool_results[0].content == "a\ufffdb"


async def test_the_caller_may_refuse_a_call_with_a_reason(anyio_backend: str) -> None:
    asked: list[str] = []

    async def approve(call: tw.ToolCall) -> str | bool:
        asked.append(call.name)
        return True if call.arguments["a"] == 1 else "ones only"

    model = ScriptedModel(
        [Reply(tool_calls=[("add", {"a": 1, "b": 1}), ("add", {"a": 2, "b": 1})]), Reply("x")]
    )
    agent = tw.agent(id="a", instructions="", model=model, tools=[add])
    await tw.run(agent, "go", on_tool_call=approve)
    first, second = model.requests[1].tool_results
    assert (first.content, second.content) == ("2", "cave_tool_call_denied: ones only")
    assert asked == ["add", "add"]


async def test_a_context_tells_deps_path_and_what_is_left(anyio_backend: str) -> None:
    seen: list[object] = []

    @tw.tool(effect="read", runs="host")
    async def look(ctx: tw.Context[dict[str, int]]) -> str:
        seen.extend([ctx.deps, ctx.path, ctx.remaining, ctx.deadline])
        return "ok"

    model = ScriptedModel([Reply(tool_calls=[("look", {})]), Reply("x")])
    agent = tw.agent(id="a", instructions="", model=model, tools=[look])
    await tw.run(agent, "go", deps={"x": 1}, budget=tw.Budget(max_tokens=50_000))
    assert seen[0] == {"x": 1}
    assert seen[1] == "root/a#1/tool:look#1"
    assert seen[2] == 50_000 - model.requests[0].usage.total  # type: ignore[union-attr]
    assert isinstance(seen[3], float)  # the tool's own time-out is its deadline


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_equal_seeds_and_clocks_give_the_same_journal_to_the_byte(
    backend: Literal["asyncio", "trio"],
) -> None:
    def once() -> list[str]:
        journal: list[str] = []
        model = ScriptedModel([Reply(tool_calls=[("add", {"a": 1, "b": 1})]), Reply("x", delay=2)])
        agent = tw.agent(id="a", instructions="", model=model, tools=[add])
        clock = VirtualClock()

        async def scenario() -> tw.Result:
            return await tw.run(
                agent, "go", clock=clock, seed=7, journal=lambda e: journal.append(repr(e))
            )

        result = clock.run(scenario, backend=backend, seed=3)
        return [*journal, repr(result.receipt.to_json())]

    first = once()
    assert len(first) == 13
    assert first == once()
