"""The tool calls of one reply: each gets exactly one result, whatever becomes of the others.

What a failed call means for its siblings is the agent's policy. A call fails when it was started
and came to an error; one that was refused never began, and harms nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from treewarden.protocols import ToolCall, ToolResult

from ._actor import Actor, StopKind
from ._admission import Admission
from ._gates import Blocked, Refuse

if TYPE_CHECKING:
    from ._definitions import SiblingPolicy
    from ._gates import Decision


@attrs.define(eq=False)
class PendingCall:
    """A tool call that was decided, and the result it gets exactly once."""

    call: ToolCall
    # What it waits for; None where it was refused, or goes on in the background.
    actor: Actor | None = None
    # The way to that actor, where it is a subagent.
    admission: Admission | None = None
    result: ToolResult | None = None

    @property
    def in_slot(self) -> object:
        """What its agent's slot knows it by: a tool's actor, or the call that only waits."""
        return self.actor if self.admission is None else self

    @property
    def has_failed(self) -> bool:
        has_run = self.actor is not None or (
            self.admission is not None and self.admission.actor is not None
        )
        return has_run and self.result is not None and self.result.is_error

    def stop(self, reason: str) -> None:
        """Ask what it waits for to end, or not to begin."""
        if self.admission is not None:
            self.admission.stop(reason)
        elif self.actor is not None:
            self.actor.stop(StopKind.CANCELLED, reason)


class Siblings:
    """The calls of one reply, in order."""

    def __init__(self, policy: SiblingPolicy) -> None:
        self._policy = policy
        self._begun: list[PendingCall] = []
        # The first that failed, where that concerns the others.
        self._failed: PendingCall | None = None

    def add(self, pending: PendingCall) -> None:
        """This one is about to begin."""
        self._begun.append(pending)

    def note_result(self, pending: PendingCall) -> None:
        """This one has its result; where it failed, those that still run may have to stop.

        Never awaits: it is called while a lease is given back. Whoever waits for the calls waits
        for those that were stopped, too.
        """
        if self._policy != "cancel_siblings" or self._failed or not pending.has_failed:
            return
        self._failed = pending
        for sibling in reversed(self._begun):
            if sibling.result is None:
                sibling.stop(f"{self._which_failed} failed")

    def allowed(self, decision: Decision) -> Decision:
        """``decision``, or a refusal where a sibling failed before its turn came."""
        if self._failed is None or isinstance(decision, Refuse):
            return decision
        why = f"not run, because {self._which_failed} failed before it"
        return Refuse(decision.call, Blocked("cave_tool_call_skipped", why))

    @property
    def _which_failed(self) -> str:
        assert self._failed is not None, self
        call = self._failed.call
        return f"{call.name} ({call.id}) of the same reply"
