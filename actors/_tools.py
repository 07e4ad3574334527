"""Running one tool call as an actor."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from treewarden.ledgers import Kind, Outcome, amount_of
from treewarden.protocols import RunError, ToolFailed, ToolResult, mend_text

from ._actor import Actor, StopKind
from ._definitions import Context, Tool
from ._gates import RunTool
from ._schemas import plain_json
from ._threads import run_in_daemon_thread

if TYPE_CHECKING:
    from ._settings import RunSettings


class ToolRun:
    """The body of a tool actor, and what becomes of it."""

    def __init__(
        self, decision: RunTool, settings: RunSettings, answer: Callable[[ToolResult], None]
    ) -> None:
        self._decision = decision
        self._settings = settings
        # Called once, when the actor has ended.
        self._answer = answer

    def start(self, parent: Actor) -> Actor:
        """Start the tool's actor.

        Raises:
            RefusedError: The tree has no tool calls left; nothing was started.
        """
        tool = self._decision.tool
        return parent.root.start(
            parent,
            f"tool:{tool.name}",
            self._run,
            kind=Kind.TOOL,
            on_end=self._conclude,
            seconds=tool.timeout_seconds,
        )

    async def _run(self, actor: Actor) -> str:
        tool = self._decision.tool
        arguments = dict(self._decision.arguments)
        if tool.context_name is not None:
            arguments[tool.context_name] = self._context(actor)
        if tool.is_async:
            return _as_text(tool, await tool.function(**arguments))
        value = await run_in_daemon_thread(
            functools.partial(tool.function, **arguments),
            name=actor.path,
            on_abandon=functools.partial(_report_abandoned, actor),
        )
        if inspect.isawaitable(value):  # a callable object whose call is async
            value = await value
        return _as_text(tool, value)

    def _context(self, actor: Actor) -> Context[Any]:
        ledger, wallet = actor.root.ledger, actor.lease.node.wallet

        def remaining() -> Decimal | None:
            return amount_of(ledger.unit, wallet.free) if wallet.is_bounded else None

        return Context(self._settings.deps, actor.path, remaining, actor.lease.node.deadline)

    def _conclude(self, actor: Actor) -> None:
        if actor.parent is not None and actor.lease.has_record:
            # Runs that the tool started, and what went wrong, belong to whoever called it.
            mine, above = actor.lease.recorder, actor.parent.lease.recorder
            above.subagents.extend(mine.subagents)
            above.faults.extend(mine.faults)
        self._answer(self._result(actor))

    def _result(self, actor: Actor) -> ToolResult:
        call = self._decision.call
        if actor.outcome is Outcome.OK:
            return ToolResult(call.id, call.name, actor.value)
        return ToolResult(call.id, call.name, why_it_failed(actor), is_error=True)


def why_it_failed(actor: Actor) -> str:
    """The text that tells a model why an actor gave no result."""
    if actor.outcome is Outcome.FAILED:
        error = actor.error
        if isinstance(error, (ToolFailed, RunError)):
            return mend_text(str(error))
        return mend_text(f"{type(error).__name__}: {error}")
    asked = actor.stop_asked
    if asked is None:
        return "cave_run_aborted: it was cancelled before it started"
    if asked.kind is StopKind.DEADLINE:
        return f"cave_tool_timeout: {asked.reason}"
    return f"cave_run_aborted: {asked.reason}"


def _as_text(tool: Tool, value: Any) -> str:
    try:
        text = mend_text(plain_json(value))
    except TypeError as error:
        raise ToolFailed(
            "cave_tool_result_invalid", f"{tool.name} returned what has no JSON form: {error}"
        ) from None
    size = len(text.encode())
    if size > tool.max_result_bytes:
        raise ToolFailed(
            "cave_tool_result_inline_limit",
            f"the result of {tool.name} has {size} bytes; {tool.max_result_bytes} are allowed "
            "(max_result_bytes). Ask for a smaller part.",
        )
    return text


def _report_abandoned(actor: Actor) -> None:
    actor.root.fault(
        actor,
        f"{actor.path}: its thread did not stop and was abandoned; a late result is dropped",
    )
