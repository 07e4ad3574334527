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
from treewarden.protocols import BackgroundRow, JSONObject, Message, RefusedError, ToolResult

from ._actor import Actor
from ._conversation import repair
from ._gates import Blocked, Oversee
from ._oversight import CancelChild, Order, ReadStatus, WaitFor, named_by
from ._schemas import plain_json
from ._tools import why_it_failed

if TYPE_CHECKING:
    from ._admission import Admission
    from ._agent import Invocation
    from ._definitions import Subagent
    from ._slot import Slot


@attrs.define(eq=False)
class BackgroundChild:
    """One of them, from the call that started it on. It may still wait for its slot."""

    subagent: Subagent
    invocation: Invocation
    # Set right after it was made.
    admission: Admission = attrs.field(init=False)
    # The last part of its path, ``research#2``; while it waited for a slot it had no path yet, and
    # then it is ``research#w1``.
    id: str = ""
    # The parent's model has what it came to, or will have it with its next request.
    was_read: bool = False
    # What it came to, made when it ended.
    _told: JSONObject | None = None
    # Why it never started, if it did not: its stop reason, and that in words.
    _never_started: tuple[str, str] | None = None

    @property
    def has_ended(self) -> bool:
        return self._told is not None

    def conclude(self) -> None:
        """It has ended, and its invocation has a receipt."""
        assert self._told is None, self
        self._told = self.invocation.told()

    def conclude_unstarted(self, stop_reason: str, why: str) -> None:
        """It has left the line, and will not start any more."""
        assert self._told is None, self
        self._never_started = stop_reason, why
        agent_id = self.invocation.agent.id
        self._told = {"agent_id": agent_id, "stop_reason": stop_reason, "error": why}

    def status(self) -> JSONObject:
        """How it is, without what it came to."""
        told = self._told
        if told is None:
            return {**self._who, "status": self._live_status}
        stop_reason, was_read = told["stop_reason"], self.was_read
        return {**self._who, "status": "ended", "stop_reason": stop_reason, "was_read": was_read}

    def result(self) -> JSONObject:
        """What it came to, or how it is while it runs."""
        return self.status() if self._told is None else {**self._ended, **self._told}

    def row(self, parent: str) -> BackgroundRow:
        """Its row in the stop report of ``parent``."""
        if self._never_started is not None:
            stop_reason, why = self._never_started
            path = f"{parent}/{self.subagent.name}"
            return BackgroundRow(
                path=path, stop_reason=stop_reason, reason=why, was_read=self.was_read
            )
        receipt = self.invocation.receipt
        return BackgroundRow(
            path=receipt.path,
            stop_reason=receipt.stop_reason,
            reason=receipt.reason,
            was_read=self.was_read,
        )

    async def wait(self) -> None:
        """Return when it has ended, or will not start any more."""
        try:
            actor = await self.admission.wait()
        except RefusedError:
            return  # it is told what became of it, as of one that ran
        if actor is not None:
            await actor.wait()

    @property
    def _live_status(self) -> str:
        actor = self.admission.actor
        if actor is None:
            return "queued"
        return "running" if actor.stop_asked is None else "ending"

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
        # How many could not start at once.
        self._waited = 0

    def add(self, child: BackgroundChild) -> None:
        actor = child.admission.actor
        if actor is not None:
            child.id = actor.path.rpartition("/")[2]
        else:
            self._waited += 1
            child.id = f"{child.subagent.name}#w{self._waited}"
        self._children[child.id] = child

    def note_end(self, child: BackgroundChild) -> None:
        """It has given everything back. Called synchronously by its supervisor."""
        child.conclude()
        self._ended.append(child)

    def note_refusal(self, child: BackgroundChild, refused: RefusedError) -> None:
        """Its turn came, and it was refused. Called in the middle of a ledger's transaction."""
        child.conclude_unstarted("refused", str(refused))
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

    def rows(self, parent: str) -> tuple[BackgroundRow, ...]:
        """The stop report of ``parent``, in the order in which they ended."""
        never = [child for child in self._children.values() if not child.has_ended]
        for child in never:  # it stood in line to the end
            child.conclude_unstarted("cancelled", f"{parent} has ended")
        return tuple(child.row(parent) for child in (*self._ended, *never))

    async def wait(self) -> None:
        """Return when none runs."""
        for child in self.running:
            await child.wait()

    def stop(self, reason: str) -> list[BackgroundChild]:
        """Ask those that run to end, in reverse start order; say who they are, in start order."""
        stopped = self.running
        for child in reversed(stopped):
            self.stop_one(child, reason)
        return stopped

    def stop_one(self, child: BackgroundChild, reason: str) -> None:
        """Ask one to end; one that waits in line leaves it, and that is its end."""
        is_waiting = child.admission.is_waiting
        child.admission.stop(reason)
        if is_waiting:
            child.conclude_unstarted("cancelled", reason)
            self._ended.append(child)

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
        if child.invocation.result is None:  # one that never started has none either
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
        self,
        decision: Oversee,
        background: Background,
        slot: Slot | None,
        answer: Callable[[ToolResult], None],
    ) -> None:
        self._call, self._order = decision.call, decision.order
        # The slot of the agent whose call it is, if it has one to give back.
        self._slot = slot
        self._background = background
        # Called once, when the actor has ended.
        self._answer = answer
        # Whose result the text of this call tells.
        self._told: list[BackgroundChild] = []

    # Set at the first step.
    _actor: Actor

    def start(self, parent: Actor) -> Actor:
        """Start the call's actor.

        Raises:
            RefusedError: The tree has no tool calls left; nothing was started.
        """
        return parent.root.start(
            parent, f"tool:{self._call.name}", self._run, kind=Kind.TOOL, on_end=self._conclude
        )

    async def _run(self, actor: Actor) -> str:
        self._actor = actor
        match self._order:
            case WaitFor(ids=ids, timeout_seconds=seconds):
                waits_for = self._background.unread if ids is None else self._chosen(ids)
                with anyio.move_on_after(seconds):
                    await self._wait_for_all(waits_for)
                return self._tell(waits_for)
            case ReadStatus(ids=ids):
                chosen = self._chosen(ids)
                return plain_json({"subagents": [child.status() for child in chosen]})
            case CancelChild(id=id_, reason=reason):
                (child,) = self._chosen((id_,))
                self._background.stop_one(child, reason)
                await self._wait_for_all([child])
                return self._tell([child])

    async def _wait_for_all(self, children: list[BackgroundChild]) -> None:
        """Wait for these; meanwhile this call does nothing that needs its agent's slot."""
        if self._slot is None or all(child.has_ended for child in children):
            return await _wait_for_each(children)
        self._slot.rest(self._actor)
        try:
            await _wait_for_each(children)
        finally:
            self._slot.wake(self._actor)
        await self._slot.wait()

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


async def _wait_for_each(children: list[BackgroundChild]) -> None:
    for child in children:
        await child.wait()


def _results_of(children: list[BackgroundChild]) -> str:
    return plain_json({"results": [child.result() for child in children]})
