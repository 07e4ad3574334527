"""What may happen next in an agent's loop, as pure decisions.

Two gates: one before every model call, one before every tool call. They look at values and return
values; the loop carries them out. The order of the checks is the contract's (2.5 and 2.7).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import attrs

from treewarden.protocols import BadArguments, ToolCall

from ._definitions import Agent, BackgroundPolicy, Subagent, Tool
from ._oversight import OVERSIGHT, Order, order_of
from ._schemas import Mismatch

DEFAULT_CALLS = 64
"""Model calls, and tool calls, of one invocation where nobody says otherwise."""


@attrs.frozen
class Halt:
    """The loop ends here, in order, with this stop reason."""

    stop_reason: str
    detail: str


@attrs.frozen
class Blocked:
    """The call is not run; the model gets this as its error result."""

    code: str
    message: str

    @property
    def text(self) -> str:
        return f"{self.code}: {self.message}"


@attrs.frozen
class RunTool:
    """Run the tool with these converted arguments."""

    call: ToolCall
    tool: Tool
    arguments: Any


@attrs.frozen
class Delegate:
    """Start the subagent with this task."""

    call: ToolCall
    subagent: Subagent
    task: str
    # The id of an ended background child whose conversation the task goes on with, or None.
    resume: str | None = None


@attrs.frozen
class Oversee:
    """Carry out what the model wants of its background subagents."""

    call: ToolCall
    order: Order


@attrs.frozen
class Refuse:
    call: ToolCall
    blocked: Blocked


Decision: TypeAlias = RunTool | Delegate | Oversee | Refuse


def own_limit(declared: int | None, tree_limit: int | None) -> int:
    """How many calls one invocation may make.

    The tree's limit is kept by the ledger; here it only lifts the default.
    """
    if declared is not None:
        return declared
    return DEFAULT_CALLS if tree_limit is None else max(DEFAULT_CALLS, tree_limit)


def call_gate(*, calls_made: int, limit: int) -> Halt | None:
    """Say whether another model call may be asked for. Money and slots are the ledger's answer."""
    if calls_made >= limit:
        return Halt("call_budget_exhausted", f"this run made all of its {limit} model calls")
    return None


def deadline_gate(left_seconds: float, min_call_seconds: float) -> Halt | None:
    """Say whether there is time for a call."""
    return None if left_seconds >= min_call_seconds else too_late(left_seconds, min_call_seconds)


def too_late(left_seconds: float, min_call_seconds: float, *, waited_for: str = "") -> Halt:
    """The end of a run that has no time for its next call, or lost it while it waited."""
    why = (
        f"{max(0.0, left_seconds):.3g} s are left before the deadline, and no call is sent with "
        f"less than {min_call_seconds:g} s (min_call_seconds)"
    )
    return Halt("deadline", f"{why}; it waited for {waited_for}" if waited_for else why)


def tool_gate(
    call: ToolCall,
    *,
    agent: Agent,
    offered: dict[str, Tool | Subagent],
    is_fixture: bool,
    calls_started: int,
    limit: int,
    was_clamped: bool,
) -> Decision:
    """Decide about one call of a reply. Every call gets exactly one decision.

    Args:
        calls_started: Calls before this one in the invocation, blocked ones included.
        was_clamped: The reply's output limit had been cut to fit the wallet.
    """
    if calls_started >= limit:
        return _refuse(
            call, "cave_tool_call_budget_exceeded", f"this run used all of its {limit} tool calls"
        )
    item = offered.get(call.name)
    if item is None and agent.has_background and call.name in OVERSIGHT:
        return _oversee(call, was_clamped)
    if item is None:
        names = ", ".join(spec.name for spec in agent.specs) or "none"
        return _refuse(call, "cave_unknown_tool", f"there is no tool {call.name!r}; known: {names}")
    if call.bad_arguments is not None:
        return Refuse(call, _bad_arguments(call.bad_arguments, was_clamped))
    if isinstance(item, Subagent):
        return _delegate(call, item)
    if is_fixture and item.effect != "read":
        return _refuse(
            call,
            "cave_side_effect_blocked",
            f"{item.name} has effect {item.effect}, and this run is a fixture: only reads run",
        )
    try:
        arguments = item.shape.convert(dict(call.arguments))
    except Mismatch as mismatch:
        return _refuse(call, f"cave_tool_input_schema_mismatch:{item.name}", str(mismatch))
    return RunTool(call, item, arguments)


def runs_side_by_side(decisions: list[Decision]) -> bool:
    """Calls of one reply run concurrently only when all of them merely read."""
    return all(
        not isinstance(decision, RunTool) or decision.tool.effect == "read"
        for decision in decisions
    )


AtAnswer: TypeAlias = Literal["accept", "hand over", "drop", "insist"]


def answer_gate(
    policy: BackgroundPolicy, *, running: int, unread: int, has_tool_calls_left: bool
) -> AtAnswer:
    """Say what becomes of a final answer while background subagents run or were not read.

    Args:
        unread: How many have a result that nobody read, or will have one.
        has_tool_calls_left: The model can still wait or cancel, if it is told to.
    """
    if not unread:
        return "accept"
    if policy == "cancel":
        return "drop"
    if policy == "forbid" and running and has_tool_calls_left:
        return "insist"
    return "hand over"


def _oversee(call: ToolCall, was_clamped: bool) -> Oversee | Refuse:
    if call.bad_arguments is not None:
        return Refuse(call, _bad_arguments(call.bad_arguments, was_clamped))
    try:
        return Oversee(call, order_of(call.name, call.arguments))
    except Mismatch as mismatch:
        return _refuse(call, f"cave_tool_input_schema_mismatch:{call.name}", str(mismatch))


def _delegate(call: ToolCall, item: Subagent) -> Delegate | Refuse:
    task, resume = call.arguments.get("task"), call.arguments.get("resume")
    names = {"task", "resume"} if item.background and isinstance(resume, str) else {"task"}
    if not isinstance(task, str) or set(call.arguments) != names:
        takes = '"task": "…", "resume": "id"' if item.background else '"task": "…"'
        return _refuse(
            call, "cave_subagent_arguments_invalid", f"{item.name} takes {{{takes}}} and no more"
        )
    units = len(task.encode("utf-16-le", "surrogatepass")) // 2
    if units > item.max_input_chars:
        return _refuse(
            call,
            "cave_subagent_input_limit",
            f"the task has {units} characters; {item.name} takes {item.max_input_chars}",
        )
    return Delegate(call, item, task, resume if isinstance(resume, str) else None)


def _bad_arguments(why: BadArguments, was_clamped: bool) -> Blocked:
    match why:
        case BadArguments.CUT_OFF:
            cause = (
                "the output limit, which was lowered to what the budget still pays for"
                if was_clamped
                else "the output limit"
            )
            return Blocked(
                "cave_tool_arguments_invalid",
                f"the reply was cut off by {cause}, so this call was not run. Ask again with a "
                "shorter reply.",
            )
        case BadArguments.NOT_JSON:
            return Blocked("cave_tool_arguments_invalid", "the arguments are not valid JSON")
        case BadArguments.NOT_AN_OBJECT:
            return Blocked("cave_tool_arguments_invalid", "the arguments are not a JSON object")


def _refuse(call: ToolCall, code: str, message: str) -> Refuse:
    return Refuse(call, Blocked(code, message))
