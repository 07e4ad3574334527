"""A boss whose workers work in the background: the scene of every test about them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import attrs

import treewarden as tw
from treewarden.protocols import Message, Receipt
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest

from .kit import FREE, Witness, check_books

Policy: TypeAlias = Literal["wait", "cancel", "forbid"]
Script: TypeAlias = Callable[[ScriptedRequest], Reply]

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
    start = tw.subagent(name="work", description="Works.", agent=agent, background=True, **subagent)
    boss = tw.agent(
        id="boss", instructions="Plan.", model=planner, tools=[start], background=policy
    )
    return Office(boss, planner, worker)


def worked(request: ScriptedRequest) -> Reply:
    """Ten seconds of work, written bit by bit, all of what it may write."""
    usage = tw.Usage(output=request.output_limit)
    return Reply(chunks=tuple("it worked."), usage=usage, delay=1, chunk_delay=1)


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
    (text,) = [
        m.text for m in messages if m.text.startswith("Results of your background subagents")
    ]
    results: list[dict[str, Any]] = json.loads(text[text.index("{") :])["results"]
    return results


def read(text: str) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads(text)["results"]
    return results


def stop_reasons(receipt: Receipt) -> list[str]:
    return [child.stop_reason for child in receipt.subagents]
