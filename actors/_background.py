"""The background subagents of one invocation: what its model knows of them, and may do with them.

A background child is an ordinary actor below the invocation. What is special is only that the call
that started it has its result at once, so what the child comes to is read by other means: by the
framework tools (_oversight.py), or handed over when the invocation is about to give its answer.
A result is made once, when the child ends, so whoever reads it again reads the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from treewarden.ledgers import Kind, Outcome
from treewarden.protocols import BackgroundRow, JSONObject, Message, ToolResult

from ._actor import Actor, StopKind
from ._conversation import repair
from ._gates import Blocked, Oversee
from ._oversight import CancelChild, Order, ReadStatus, WaitFor, named_by
from ._schemas import plain_json
from ._tools import why_it_failed

if TYPE_CHECKING:
    from ._agent import Invocation
    from ._definitions import Subagent


@attrs.define(eq=False)
class BackgroundChild:
    """One of them. Its id is the last part of its path, ``research#2``."""

    subagent: Subagent
    invocation: Invocation
    actor: Actor
    # The parent's model has what it came to, or will have it with its next request.
    was_read: bool = False
    # What it came to, made when it ended.
    _told: JSONObject | None = None

    @property
    def id(self) -> str:
        return self.actor.path.rpartition("/")[2]

    @property
    def has_ended(self) -> bool:
        return self._told is not None

    def conclude(self) -> None:
        """It has ended, and its invocation has a receipt."""
        assert self._told is None, self
        self._told = self.invocation.told()

    def status(self) -> JSONObject:
        """How it is, without what it came to."""
        told = self._told
        if told is None:
            return {**self._who, "status": "running" if self.actor.stop_asked is None else "ending"}
        stop_reason, was_read = told["stop_reason"], self.was_read
        return {**self._who, "status": "ended", "stop_reason": stop_reason, "was_read": was_read}

    def result(self) -> JSONObject:
        """What it came to, or how it is while it runs."""
        return self.status() if self._told is None else {**self._ended, **self._told}

    def row(self) -> BackgroundRow:
        """Its row in the parent's stop report."""
        receipt = self.invocation.receipt
        return BackgroundRow(
            path=receipt.path,
            stop_reason=receipt.stop_reason,
            reason=receipt.reason,
            was_read=self.was_read,
        )

    @property
    def _who(self) -> dict[str, Any]:
        return {"id": self.id, "agent_id": self.invocation.agent.id}

    @property
    def _ended(self) -> dict[str, Any]:
        return {"id": self.id, "status": "ended"}


class Background:
    """All of one invocation, those that have ended included."""

    def __init__(self) -> None:
        # By id, in start order.
        self._children: dict[str, BackgroundChild] = {}
        # In the order in which they ended.
        self._ended: list[BackgroundChild] = []

    def add(self, child: BackgroundChild) -> None:
        self._children[child.id] = child

    def note_end(self, child: BackgroundChild) -> None:
        """It has given everything back. Called synchronously by its supervisor."""
        child.conclude()
        self._ended.append(child)

    @property
    def running(self) -> list[BackgroundChild]:
        return [child for child in self._children.values() if not child.has_ended]

    @property
    def unread(self) -> list[BackgroundChild]:
        """Those whose result nobody has read, whether there is one yet or not."""
        return [child for child in self._children.values() if not child.was_read]

    def chosen(self, ids: Iterable[str] | None) -> list[BackgroundChild]:
        """Those with these ids, each once; None: all."""
        if ids is None:
            return list(self._children.values())
        return [self._children[id_] for id_ in dict.fromkeys(ids)]

    def rows(self) -> tuple[BackgroundRow, ...]:
        """The stop report, in the order in which they ended."""
        return tuple(child.row() for child in self._ended)

    async def wait(self) -> None:
        """Return when none runs."""
        for child in self.running:
            await child.actor.wait()

    def stop(self, reason: str) -> list[BackgroundChild]:
        """Ask those that run to end, in reverse start order; say who they are, in start order."""
        stopped = self.running
        for child in reversed(stopped):
            child.actor.stop(StopKind.CANCELLED, reason)
        return stopped

    def hand_over(self) -> str | None:
        """What was not read of those that have ended, which by that is read. None: nothing."""
        unread = [child for child in self.unread if child.has_ended]
        for child in unread:
            child.was_read = True
        return _results_of(unread) if unread else None

    # --- what is refused -------------------------------------------------------------------------

    def refusal(self, order: Order) -> Blocked | None:
        """Why an order cannot be carried out, in words for the model, or None."""
        for id_ in named_by(order):
            if id_ not in self._children:
                return Blocked("cave_background_unknown", self._unknown(id_))
        if isinstance(order, CancelChild) and self._children[order.id].has_ended:
            return Blocked(
                "cave_background_ended",
                f"{order.id} has ended and does nothing any more; there is nothing to cancel. "
                "cave_wait gives its result.",
            )
        return None

    def why_not_resumed(self, id_: str, subagent: Subagent) -> Blocked | None:
        """Why ``id_`` cannot be gone on with, in words for the model, or None."""
        child = self._children.get(id_)
        if child is None or child.subagent is not subagent:
            own = [c.id for c in self._children.values() if c.subagent is subagent]
            known = ", ".join(own) or "none"
            return Blocked(
                "cave_background_unknown",
                f"{subagent.name} has not started {id_!r}; it has started: {known}",
            )
        if not child.has_ended:
            return Blocked("cave_background_running", f"{id_} still runs; wait for it first.")
        if child.invocation.result is None:
            return Blocked(
                "cave_background_not_resumable",
                f"{id_} failed or was cancelled; start a new one with what it needs to know.",
            )
        return None

    def history_of(self, id_: str) -> tuple[Message, ...]:
        """What was said in one that has ended, in a form that can be gone on with."""
        # One that a deadline ended in the middle of its tools has calls without results.
        messages, _ = repair(self._children[id_].invocation.messages)
        return messages

    def _unknown(self, id_: str) -> str:
        known = ", ".join(self._children) or "none"
        return f"there is no background subagent {id_!r}; known: {known}"


class OversightRun:
    """The body of a framework tool's actor, and what becomes of it."""

    def __init__(
        self, decision: Oversee, background: Background, answer: Callable[[ToolResult], None]
    ) -> None:
        self._call, self._order = decision.call, decision.order
        self._background = background
        # Called once, when the actor has ended.
        self._answer = answer
        # Whose result the text of this call tells.
        self._told: list[BackgroundChild] = []

    def start(self, parent: Actor) -> Actor:
        """Start the call's actor.

        Raises:
            RefusedError: The tree has no tool calls left; nothing was started.
        """
        return parent.root.start(
            parent, f"tool:{self._call.name}", self._run, kind=Kind.TOOL, on_end=self._conclude
        )

    async def _run(self, actor: Actor) -> str:
        match self._order:
            case WaitFor(ids=ids, timeout_seconds=seconds):
                waits_for = self._background.unread if ids is None else self._chosen(ids)
                with anyio.move_on_after(seconds):
                    await _wait_for_all(waits_for)
                return self._tell(waits_for)
            case ReadStatus(ids=ids):
                chosen = self._chosen(ids)
                return plain_json({"subagents": [child.status() for child in chosen]})
            case CancelChild(id=id_, reason=reason):
                (child,) = self._chosen((id_,))
                child.actor.stop(StopKind.CANCELLED, reason)
                await _wait_for_all([child])
                return self._tell([child])

    def _chosen(self, ids: Iterable[str] | None) -> list[BackgroundChild]:
        return self._background.chosen(ids)

    def _tell(self, children: list[BackgroundChild]) -> str:
        self._told = [child for child in children if child.has_ended]
        return _results_of(children)

    def _conclude(self, actor: Actor) -> None:
        call = self._call
        if actor.outcome is not Outcome.OK:
            self._answer(ToolResult(call.id, call.name, why_it_failed(actor), is_error=True))
            return
        for child in self._told:
            child.was_read = True
        self._answer(ToolResult(call.id, call.name, actor.value))


async def _wait_for_all(children: list[BackgroundChild]) -> None:
    """The one place where a framework tool waits for children."""
    for child in children:
        await child.actor.wait()


def _results_of(children: list[BackgroundChild]) -> str:
    return plain_json({"results": [child.result() for child in children]})
