"""The contract's lines about breakers (22.3, 23.5, 23.7), on whole runs.

The number behind ``22_3`` is the line's place in its list. Here a repeat is a call *with its
result*, and the model is told first; where that changes a line, its test says how.
Lines 7 to 12 are about retries, and line 5 about a memory that does not exist yet.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from ..scenarios.kit import FREE, Backend, Witness, both_backends, tasks

Calls = list[tuple[str, dict[str, Any]]]


def model(*said: Calls | str) -> ScriptedModel:
    """A free model that says these turn by turn; the last repeats."""

    def script(request: ScriptedRequest) -> Reply:
        this = said[min(request.turn, len(said) - 1)]
        usage = tw.Usage(input=10, output=1)
        return (
            Reply(this, usage=usage)
            if isinstance(this, str)
            else Reply(tool_calls=this, usage=usage)
        )

    return ScriptedModel(script, price=FREE)


def tool(name: str, *said: str | Exception, effect: Any = "read", **options: Any) -> tw.Tool:
    """A tool that says these call by call; the last repeats."""
    count = 0

    async def say() -> str:
        nonlocal count
        this = said[min(count, len(said) - 1)]
        count += 1
        if isinstance(this, Exception):
            raise this
        return this

    return tw.tool(say, name=name, description="Says.", effect=effect, runs="host", **options)


def run(
    backend: Backend,
    said: ScriptedModel,
    *tools: tw.Tool,
    breakers: tw.Breakers | None,
    **options: Any,
) -> tw.Result:
    agent = tw.agent(id="solo", instructions="Work.", model=said, tools=list(tools), **options)
    witness = Witness()

    async def main() -> tw.Result:
        return await tw.run(agent, "go", breakers=breakers, **witness.options)

    return VirtualClock().run(main, backend=backend)


def at_once(**thresholds: int | None) -> tw.Breakers:
    """Breakers that stop without a word, as the contract's do."""
    return tw.Breakers(steer=False, **thresholds)


LOOK: Calls = [("look", {})]


@both_backends
def test_22_3_1_three_identical_calls_are_a_loop(backend: Backend) -> None:
    """As it is here the third call runs, because its result decides, and the run ends after it."""
    said = model(LOOK)
    result = run(backend, said, tool("look", "same"), breakers=at_once())
    assert result.stop_reason == "loop_detected"
    (row,) = result.receipt.breakers
    assert (row.kind, row.tool, row.count) == ("loop_detected", "look", 3)
    assert re.fullmatch("[0-9a-f]{64}", row.signature or "")
    (tool_row,) = result.receipt.tools
    assert (tool_row.calls, tool_row.errors) == (3, 0)


@both_backends
def test_22_3_2_a_tool_that_may_repeat_is_no_loop_and_can_stand_still(backend: Backend) -> None:
    look = tool("look", "same", allow_repeat=True)
    result = run(backend, model(LOOK), look, breakers=at_once())
    assert result.stop_reason == "no_progress"
    (row,) = result.receipt.breakers
    assert (row.kind, row.tool, row.count) == ("no_progress", None, 3)


@both_backends
def test_22_3_3_without_breakers_nothing_changes(backend: Backend) -> None:
    said = model(*[LOOK] * 20, "done")
    result = run(backend, said, tool("look", "same"), breakers=None)
    assert result.complete
    assert result.receipt.breakers == ()
    assert len(said.requests) == 21


@both_backends
def test_22_3_4_two_successful_writes_are_progress(backend: Backend) -> None:
    write = tool("write", "ok", effect="write")
    said = model([("write", {})], [("write", {})], "done")
    result = run(backend, said, write, breakers=at_once(no_progress_turns=2))
    assert result.complete
    assert result.receipt.breakers == ()


@both_backends
def test_22_3_4_two_equal_reads_are_none(backend: Backend) -> None:
    said = model(LOOK, LOOK, "done")
    result = run(backend, said, tool("look", "same"), breakers=at_once(no_progress_turns=2))
    assert result.stop_reason == "no_progress"


@both_backends
def test_22_3_6_of_a_reply_with_four_calls_two_run(backend: Backend) -> None:
    """And 23.5.25: the surplus has its place as count, and is in no history."""
    said = model(LOOK * 4, "done")
    breakers = at_once(max_tool_calls_per_turn=2)
    result = run(backend, said, tool("look", "same"), breakers=breakers)
    assert result.complete
    rows = [(row.kind, row.tool, row.count, row.action) for row in result.receipt.breakers]
    assert rows == [
        ("fan_out_blocked", "look", 3, "blocked"),
        ("fan_out_blocked", "look", 4, "blocked"),
    ]
    (tool_row,) = result.receipt.tools
    assert (tool_row.calls, tool_row.errors) == (4, 2)
    results = said.requests[-1].tool_results
    assert [each.is_error for each in results] == [False, False, True, True]
    assert all(each.content.startswith("cave_fan_out_cap_exceeded: ") for each in results[2:])


@both_backends
def test_22_3_6_as_many_calls_as_may_be_all_run(backend: Backend) -> None:
    said = model(LOOK * 2, "done")
    breakers = at_once(max_tool_calls_per_turn=2)
    result = run(backend, said, tool("look", "same"), breakers=breakers)
    assert result.complete
    assert result.receipt.breakers == ()


@pytest.mark.parametrize(
    "field",
    [
        "repeated_tool_calls",
        "repeated_tool_call_window_turns",
        "no_progress_turns",
        "max_tool_calls_per_turn",
    ],
)
@pytest.mark.parametrize("nonsense", [0, -3, 2.5, True, 2**53])
def test_22_3_13_nonsense_is_refused_before_anything_runs(field: str, nonsense: Any) -> None:
    with pytest.raises(tw.UsageError) as raised:
        tw.Breakers(**{field: nonsense})
    assert raised.value.code == "cave_breaker_threshold_invalid"


@pytest.mark.parametrize("nonsense", [{}, 3, True])
@both_backends
def test_22_3_13_breakers_are_breakers_or_none(nonsense: Any, backend: Backend) -> None:
    said = model("done")
    with pytest.raises(tw.UsageError) as raised:
        run(backend, said, breakers=nonsense)
    assert raised.value.code == "cave_option_invalid"
    assert not said.requests


@both_backends
def test_22_3_14_of_a_failure_and_two_successes_only_the_third_trips(backend: Backend) -> None:
    """Here the failure is another call, because its result is another; it clears nothing."""
    look = tool("look", RuntimeError("not yet"), "same")
    said = model(LOOK)
    result = run(backend, said, look, breakers=at_once(repeated_tool_calls=2))
    assert result.stop_reason == "loop_detected"
    assert [row.count for row in result.receipt.breakers] == [2]
    assert len(said.requests) == 3


@both_backends
def test_22_3_15_calls_that_are_far_apart_are_no_loop(backend: Backend) -> None:
    numbers = [str(n) for n in range(200)]
    between: list[Calls] = [[("other", {})]] * 40
    said = model(LOOK, *between, LOOK, *between, LOOK, "done")
    result = run(
        backend,
        said,
        tool("look", "same"),
        tool("other", *numbers),
        breakers=at_once(repeated_tool_call_window_turns=3),
        max_model_calls=200,
        max_tool_calls=200,
    )
    assert result.complete
    assert result.receipt.breakers == ()


@both_backends
def test_22_3_16_calls_in_turns_that_follow_are_a_loop_at_the_third(backend: Backend) -> None:
    said = model(LOOK)
    breakers = at_once(repeated_tool_call_window_turns=5)
    result = run(backend, said, tool("look", "same"), breakers=breakers)
    assert result.stop_reason == "loop_detected"
    assert len(said.requests) == 3


@pytest.mark.parametrize(("last", "reason"), [(8, "loop_detected"), (9, "complete")])
@both_backends
def test_23_5_24_the_window_has_edges(last: int, reason: str, backend: Backend) -> None:
    """Turns 1, 5 and 8 are within eight turns; of 1, 5 and 9 the first has left."""
    numbers = [str(n) for n in range(20)]
    turns: list[Calls] = [
        LOOK if turn in (1, 5, last) else [("other", {})] for turn in range(1, last + 1)
    ]
    said = model(*turns, "done")
    look, other = tool("look", "same"), tool("other", *numbers)
    assert run(backend, said, look, other, breakers=at_once()).stop_reason == reason


@both_backends
def test_23_5_24_three_equal_calls_of_one_reply_are_a_loop(backend: Backend) -> None:
    """Here all three run, because they may run side by side and their results decide."""
    said = model(LOOK * 3)
    result = run(backend, said, tool("look", "same"), breakers=at_once())
    assert result.stop_reason == "loop_detected"
    assert len(said.requests) == 1


@both_backends
def test_23_5_25_the_surplus_is_in_no_history(backend: Backend) -> None:
    """Two calls run in two turns, and two are blocked: two equal calls are no loop of three."""
    said = model(LOOK * 2, LOOK * 2, "done")
    breakers = at_once(max_tool_calls_per_turn=1, no_progress_turns=None)
    result = run(backend, said, tool("look", "same"), breakers=breakers)
    assert result.complete
    assert [row.kind for row in result.receipt.breakers] == ["fan_out_blocked"] * 2


@both_backends
def test_23_7_42_what_was_blocked_counts_as_started(backend: Backend) -> None:
    """And 2.7: who is out of tool calls is told so, not that his reply has too many."""
    said = model(LOOK * 6, LOOK * 2, "done")
    result = run(
        backend,
        said,
        tool("look", *map(str, range(9))),
        breakers=at_once(max_tool_calls_per_turn=1),
        max_tool_calls=7,
    )
    codes = [refusal.code for refusal in result.receipt.refusals]
    assert codes == ["cave_fan_out_cap_exceeded"] * 5 + ["cave_tool_call_budget_exceeded"]
    assert len(result.receipt.breakers) == 5


@both_backends
def test_6_3_a_subagent_is_progress_and_a_failed_one_is_none(backend: Backend) -> None:
    def of(child: ScriptedModel) -> tw.Result:
        agent = tw.agent(id="child", instructions="Work.", model=child)
        work = tw.subagent(name="work", description="Works.", agent=agent)
        boss = tw.agent(
            id="boss",
            instructions="Plan.",
            model=model(*[tasks("work", 1)] * 5, "ok"),
            tools=[work],
        )
        witness = Witness()
        breakers = at_once(repeated_tool_calls=None)

        async def main() -> tw.Result:
            return await tw.run(boss, "go", breakers=breakers, **witness.options)

        return VirtualClock().run(main, backend=backend)

    assert of(model("done")).complete
    broken = ScriptedModel(lambda request: Reply(error="it breaks"), price=FREE)
    assert of(broken).stop_reason == "no_progress"
