"""What a run tells while it goes on. ``path`` says which actor of the tree speaks.

The last event of a run is ``RunEnded`` or ``RunFailed``, and it comes after everything the run held
was released.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs

from ._receipts import Line, Receipt


@attrs.frozen
class RunStarted:
    """A run or a subagent began."""

    path: str
    run_id: str
    agent_id: str
    # It goes on beside the agent that started it, which did not wait for it.
    is_in_background: bool = False


@attrs.frozen
class CallStarted:
    """A model request is about to leave, with its money held."""

    path: str
    model: str
    output_limit: int


@attrs.frozen
class TextWritten:
    """The model wrote ``text``. What a slow reader has not read yet is merged into one event."""

    path: str
    text: str


@attrs.frozen
class ThoughtWritten:
    path: str
    text: str


@attrs.frozen
class CallRetried:
    """A model call failed and is made once more, after a pause."""

    path: str
    # 1 for the first retry.
    attempt: int
    after_seconds: float
    reason: str


@attrs.frozen
class CallIdle:
    """A model call has been silent for most of the time it may be; said once for each silence."""

    path: str
    silent_seconds: float
    # After this long it is ended.
    idle_timeout_seconds: float


@attrs.frozen
class CallEnded:
    """A model call was charged."""

    path: str
    line: Line


@attrs.frozen
class ToolStarted:
    path: str
    call_id: str
    name: str


@attrs.frozen
class ToolEnded:
    """A tool call has its result. ``is_error``: it failed, or was refused before it started."""

    path: str
    call_id: str
    name: str
    is_error: bool


@attrs.frozen
class SubagentEnded:
    path: str
    agent_id: str
    stop_reason: str
    receipt: Receipt


@attrs.frozen
class RunEnded:
    """The run has a result. Everything it held is released."""

    path: str
    stop_reason: str
    receipt: Receipt


@attrs.frozen
class RunFailed:
    """The run failed or was cancelled. Everything it held is released."""

    path: str
    code: str
    message: str
    receipt: Receipt


RunEvent: TypeAlias = (
    RunStarted
    | CallStarted
    | TextWritten
    | ThoughtWritten
    | CallIdle
    | CallRetried
    | CallEnded
    | ToolStarted
    | ToolEnded
    | SubagentEnded
    | RunEnded
    | RunFailed
)
