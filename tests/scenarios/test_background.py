"""Public reports about subagents in the background: dropped, run on, lost or counted twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Literal

import anyio
import attrs
import pytest

import treewarden as tw
from treewarden.protocols import ActorStopped, Message, Receipt, RunStarted
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from .kit import (
    FREE,
    Backend,
    Measured,
    Witness,
    both_backends,
    check_books,
    explore,
    hands_out,
    price_for_worst_case,
    tasks,
)

Policy = Literal["wait", "cancel", "forbid"]
Script = Callable[[ScriptedRequest], Reply]

BOSS = "root/boss#1"


@attrs.define
class Office:
    """A boss whose workers work in the background, and the accounts of both."""

    boss: tw.Agent
    planner: ScriptedModel
    worker: ScriptedModel

    def check(self, witness: Witness, receipt: Receipt) -> None:
        check_books(witness, receipt, self.planner, self.worker)


def office(
    plan: Script,
    work: Script,
    *,
    policy: Policy = "wait",
    price: tw.Price = FREE,
    tools: Sequence[tw.Tool] = (),
    max_model_calls: int | None = None,
    **subagent: Any,
) -> Office:
    planner = ScriptedModel(plan, price=FREE, id="scripted/planner")
    worker = ScriptedModel(work, price=price, max_output=1_000)
    agent = tw.agent(
        id="worker",
        instructions="Work.",
        model=worker,
        tools=tools,
        max_model_calls=max_model_calls,
    )
    start = tw.subagent(
        name="work", description="Works.", agent=agent, background=True, **subagent
    )
    boss = tw.agent(
        id="boss", instructions="Plan.", model=planner, tools=[start], background=policy
    )
    return Office(boss, planner, worker)


def worked(request: ScriptedRequest) -> Reply:
    """Ten seconds of work, all of what it may write."""
    return Reply("worked", usage=tw.Usage(output=request.output_limit), delay=10)


def steps(*replies: Reply) -> Script:
    """A reply for each turn of one agent; the last one for all that follow."""
    return lambda request: replies[min(request.turn, len(replies) - 1)]


def calls(*tool_calls: tuple[str, dict[str, Any]], delay: float = 0.0) -> Reply:
    return Reply(tool_calls=tool_calls, delay=delay)


def results_of(messages: Sequence[Message]) -> list[str]:
    """Every tool result in a conversation, in order."""
    parts: list[Any] = [part for m in messages if m.role == "tool" for part in m.parts]
    return [part.content for part in parts]


def handed_over(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The results that the runtime put into the conversation itself."""
    (text,) = [m.text for m in messages if m.text.startswith("Your background subagents")]
    results: list[dict[str, Any]] = json.loads(text[text.index("{") :])["results"]
    return results


def read(text: str) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads(text)["results"]
    return results


def stop_reasons(receipt: Receipt) -> list[str]:
    return [child.stop_reason for child in receipt.subagents]


# --- E48: nothing is dropped with success ----------------------------------------------------------


def three_in_the_background(policy: Policy, *later: Reply) -> Office:
    """The boss starts three, ten seconds each, and gives its answer after one second."""
    answer = Reply("my answer", delay=1)
    plan = steps(calls(*tasks("work", 3)), answer, *later)
    return office(plan, worked, policy=policy)


def test_E48_wait_is_complete_after_ten_seconds_with_three_results_handed_over(
    record_property: Measured,
) -> None:
    async def scenario() -> Witness:
        made, witness = three_in_the_background("wait", Reply("all in all")), Witness()
        result = await tw.run(made.boss, "go", **witness.options)
        assert VirtualClock.running().monotonic() == 10.0
        assert (result.complete, result.text) == (True, "all in all")
        told = handed_over(result.messages)
        assert [(one["id"], one["text"]) for one in told] == [
            ("work#1", "worked"),
            ("work#2", "worked"),
            ("work#3", "worked"),
        ]
        assert stop_reasons(result.receipt) == ["complete"] * 3
        assert [row.was_read for row in result.receipt.background] == [True] * 3
        made.check(witness, result.receipt)
        return witness

    explore(scenario, record_property, "E48 wait")
