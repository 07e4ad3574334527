"""The loop's side of the breakers: cancelled at any instant, it leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel, VirtualClock, explore_cancellations


async def scenario_a_tool_that_is_away_and_a_loop() -> None:
    tries = 0

    @tw.tool(effect="read", runs="host")
    async def fetch() -> str:
        """Fetch."""
        nonlocal tries
        tries += 1
        if tries == 1:
            raise tw.ToolUnavailable("503 upstream")
        return "the page"

    twice: list[tuple[str, dict[str, Any]]] = [("fetch", {}), ("fetch", {})]
    model = ScriptedModel(lambda _: Reply(tool_calls=twice))
    agent = tw.agent(id="solo", instructions="Fetch.", model=model, tools=[fetch])
    breakers = tw.Breakers(max_tool_calls_per_turn=1)
    result = await tw.run(agent, "go", breakers=breakers, clock=VirtualClock.running())
    assert result.stop_reason == "loop_detected"
    actions = [row.action for row in result.receipt.breakers if row.action != "blocked"]
    assert actions == ["waited", "steered", "stopped"]


def test_cancelled_at_any_instant_nothing_is_left() -> None:
    found = explore_cancellations(scenario_a_tool_that_is_away_and_a_loop, times=(1,), every=2)
    found.check()


@pytest.mark.parametrize("nonsense", [0, 1, "yes", None])
def test_allow_repeat_is_yes_or_no(nonsense: object) -> None:
    with pytest.raises(tw.UsageError, match="allow_repeat"):
        tw.tool(lambda: "", name="say", effect="read", runs="host", allow_repeat=nonsense)  # type: ignore[call-overload]


@pytest.mark.parametrize("nonsense", [-1, float("nan"), float("inf"), True, "soon"])
def test_a_tool_is_away_for_a_number_of_seconds(nonsense: float) -> None:
    with pytest.raises(tw.UsageError, match="retry_after_seconds"):
        tw.ToolUnavailable("503", retry_after_seconds=nonsense)


def test_a_tool_that_is_away_is_a_tool_that_failed() -> None:
    away = tw.ToolUnavailable("503 upstream", retry_after_seconds=2)
    assert isinstance(away, tw.ToolFailed)
    assert (away.code, away.message, away.retry_after_seconds) == (
        "cave_tool_unavailable",
        "503 upstream",
        2,
    )
