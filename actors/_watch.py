"""The loop's side of the breakers: shows a judge what happened, and carries out what it says.

It reads the transcript at the gate before every model call, so it sees each turn once, whole and
in the order of the calls, whichever of them ended first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import anyio

from treewarden.ledgers import Breakers, Judge, Seen
from treewarden.protocols import (
    BreakerRow,
    Message,
    ToolCall,
    ToolResult,
    ToolUnavailable,
    user,
)

from ._definitions import Subagent, Tool
from ._gates import Blocked, Halt, Refuse, RunTool
from ._oversight import WAIT

if TYPE_CHECKING:
    from ._actor import Actor
    from ._gates import Decision
    from ._siblings import PendingCall

_SURPLUS = "cave_fan_out_cap_exceeded"
_OUT_OF_CALLS = "cave_tool_call_budget_exceeded"


class Watch:
    """Sees whether one agent goes round in circles."""

    def __init__(
        self,
        breakers: Breakers,
        offered: Mapping[str, Tool | Subagent],
        actor: Actor,
        seen: int,
    ) -> None:
        self._judge = Judge(breakers)
        self._offered, self._actor = offered, actor
        # How many messages of the transcript were looked at.
        self._seen = seen
        # Of the last reply: ids of calls that were blocked as surplus, and of those whose tool was
        # not there.
        self._surplus: set[str] = set()
        self._unavailable: set[str] = set()

    # --- the gate before a model call ------------------------------------------------------------

    def look_at(self, messages: list[Message]) -> Halt | None:
        """Judge what is new; tell the model by a message of its own, or say that the run ends."""
        new, self._seen = messages[self._seen :], len(messages)
        verdict = None
        for place, message in enumerate(new):
            if message.role != "assistant":
                continue
            if place + 1 == len(new):
                # The provider asked to go on with it: there is no turn yet to judge.
                self._judge.pass_turn()
            else:
                verdict = self._judge.judge(message.text, self._calls_of(message, new[place + 1]))
        self._surplus.clear()
        self._unavailable.clear()
        if verdict is None:
            return None
        self._note(verdict.row)
        if verdict.stops:
            return Halt(verdict.row.kind, verdict.text)
        messages.append(user(verdict.text))
        self._seen += 1
        return None

    def _calls_of(self, asked: Message, answer: Message) -> list[Seen]:
        results = [part for part in answer.parts if isinstance(part, ToolResult)]
        return [
            self._as_seen(call, result)
            for call, result in zip(asked.tool_calls, results, strict=True)
            if call.id not in self._surplus
        ]

    def _as_seen(self, call: ToolCall, result: ToolResult) -> Seen:
        item = self._offered.get(call.name)
        return Seen(
            tool=call.name,
            arguments=call.arguments if call.bad_arguments is None else call.raw_arguments,
            result=result.content,
            is_error=result.is_error,
            changes_state=isinstance(item, Subagent)
            or (item is not None and item.effect == "write"),
            may_repeat=isinstance(item, Tool) and item.allow_repeat,
            # Who waits for what goes on beside him stands still for a good reason.
            is_neutral=call.id in self._unavailable or (item is None and call.name == WAIT.name),
        )

    # --- the gate before a tool call -------------------------------------------------------------

    def allowed(self, decision: Decision, position: int) -> Decision:
        """``decision``, or a refusal where the reply has too many calls before this one."""
        if isinstance(decision, Refuse) and decision.blocked.code == _OUT_OF_CALLS:
            return decision
        verdict = self._judge.surplus(decision.call.name, position)
        if verdict is None:
            return decision
        self._note(verdict.row)
        self._surplus.add(decision.call.id)
        return Refuse(decision.call, Blocked(_SURPLUS, verdict.text))

    async def leave_alone(self, decisions: list[Decision]) -> None:
        """Wait where a tool is to be called that was not there just now.

        Nothing is held meanwhile but the agent's own place. A deadline ends it like any wait.
        """
        now = self._actor.root.clock.monotonic()
        tools = {decision.tool.name for decision in decisions if isinstance(decision, RunTool)}
        waits = {tool: self._judge.wait_seconds(tool, now) for tool in sorted(tools)}
        longest = max(waits.values(), default=0.0)
        if longest <= 0:
            return
        tool = max(waits, key=waits.__getitem__)
        why = f"{tool} was unavailable; it was left alone for {longest:.3g} s more"
        self._note(BreakerRow(kind="tool_unavailable", tool=tool, action="waited", reason=why))
        await anyio.sleep(longest)

    def hear(self, pending: PendingCall) -> None:
        """A call has its result. Never awaits: it is called while a lease is given back."""
        actor, call = pending.actor, pending.call
        if actor is None or pending.admission is not None:
            return
        error = actor.error
        if not isinstance(error, ToolUnavailable):
            self._judge.note_answer(call.name)
            return
        self._unavailable.add(call.id)
        now = self._actor.root.clock.monotonic()
        self._judge.note_unavailable(call.name, now, error.retry_after_seconds)

    def _note(self, row: BreakerRow) -> None:
        self._actor.lease.recorder.breakers.append(row)
