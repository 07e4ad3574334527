"""A run from outside: read its events, wait for its result, cancel it.

The run never waits for whoever reads it. What was not read yet is kept in a buffer in which texts
of one actor are merged, so it is bounded by what the run writes, and a reader that sleeps holds
nothing up.
"""

from __future__ import annotations

import functools
import io
from collections import deque
from decimal import Decimal
from types import TracebackType
from typing import TYPE_CHECKING

import anyio

from treewarden.protocols import (
    ActorStopped,
    RunEnded,
    RunEvent,
    RunFailed,
    TextWritten,
    ThoughtWritten,
    TreewardenError,
    UsageError,
)

from ._actor import Actor, StopKind, to_the_end
from ._agent import Invocation
from ._lifecycle import State
from ._limits import Budget

if TYPE_CHECKING:
    from ._agent import Result
    from ._start import Start


class EventBuffer:
    """Events that were told and not read yet. Only appending and taking, never waiting."""

    def __init__(self) -> None:
        self._events: deque[RunEvent] = deque()
        # The first of the texts that are being merged; it comes after all of _events.
        self._begun: TextWritten | ThoughtWritten | None = None
        # What they say together. Joined only when it is read: a delta costs the same however much
        # was written before it.
        self._text = io.StringIO()
        # Set at the next news; None while nobody waits.
        self._news: anyio.Event | None = None
        self.is_over = False

    def tell(self, event: RunEvent) -> None:
        if isinstance(event, (TextWritten, ThoughtWritten)):
            begun = self._begun
            if begun is None or type(begun) is not type(event) or begun.path != event.path:
                self._close_text()
                self._begun = event
            self._text.write(event.text)
        else:
            self._close_text()
            self._events.append(event)
        self._wake()

    def finish(self) -> None:
        self.is_over = True
        self._wake()

    def take(self) -> RunEvent | None:
        if not self._events:
            self._close_text()
        return self._events.popleft() if self._events else None

    async def wait(self) -> None:
        self._news = anyio.Event()
        await self._news.wait()

    def _close_text(self) -> None:
        """Make one event of the texts that were merged."""
        if self._begun is not None:
            self._events.append(type(self._begun)(self._begun.path, self._text.getvalue()))
            self._begun, self._text = None, io.StringIO()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None


class RunStream:
    """A run whose events can be read: ``async with tw.stream(...) as run``.

    Leaving the block before the end cancels the run and waits until everything it held is back.
    The last event is ``RunEnded`` or ``RunFailed``.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._buffer = EventBuffer()
        self._actor: Actor | None = None
        self._invocation: Invocation | None = None
        self._is_told_end = False

    async def __aenter__(self) -> RunStream:
        if self._actor is not None:
            raise UsageError("this stream was entered before. Call tw.stream(...) again.")
        self._actor, self._invocation = await self._start.begin(
            self._buffer.tell, on_over=self._buffer.finish
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
        if exc is None:
            await self._start.let_caller_go_on()

    def __aiter__(self) -> RunStream:
        return self

    async def __anext__(self) -> RunEvent:
        self._required().root.require_owner()
        while (event := self._buffer.take()) is None:
            if self._is_told_end:
                raise StopAsyncIteration
            if self._buffer.is_over:
                self._is_told_end = True
                # Not before the tree is closed: a terminal event says that everything is back.
                await self._start.finish()
                return self._last_event()
            await self._buffer.wait()
        return event

    async def result(self) -> Result:
        """Wait for the end and return what came of it, whether the events were read or not.

        Raises:
            RunError: The run failed or was cancelled.
            SupervisorCancelled: A task of the tree was killed from outside before its first step.
        """
        actor = self._required()
        await actor.wait()
        await self._start.finish()
        return self._start.take()

    def cancel(self, reason: str, *, path: str | None = None) -> None:
        """Ask the run and everything below it to end, with a reason that reaches every receipt.

        Args:
            path: Ask only this subagent, and what is below it. No effect where it has ended.
        """
        actor = self._actor_at(path)
        if actor is not None:
            actor.stop(StopKind.CANCELLED, reason)

    def send(self, text: str, *, path: str | None = None) -> None:
        """Say something to the running agent; it reads it before its next model call.

        Args:
            path: Say it to this subagent instead.

        Raises:
            ActorStopped: It is over, ending, or on its last call; nothing will come of it.
            MailboxFull: It has 64 messages that it did not read yet.
        """
        actor = self._actor_at(path)
        if actor is None or actor.state in (State.STOPPING, State.ENDED):
            raise ActorStopped(path or self.path)
        assert isinstance(actor.body, Invocation), actor
        actor.body.send(text)

    def wrap_up(self, reason: str) -> None:
        """Ask the run and all below it for a final answer: their next model call is their last.

        Calls that are under way are not cut off. What the answer may cost is what is left.
        """
        self._live_invocation().wrap_up(reason)
        for actor in self._required().below():
            if isinstance(actor.body, Invocation):
                actor.body.wrap_up(reason)

    def set_budget(
        self, *, max_usd: str | int | Decimal | None = None, max_tokens: int | None = None
    ) -> None:
        """Raise or lower the ceiling of the run's own wallet while it runs.

        A lowered ceiling goes down as far as what is spent and held allows, and further as holds
        come back; it never breaches.

        Raises:
            ActorStopped: The run is over.
            UsageError: The run has no wallet of its own, or this is another denomination.
            LedgerError: A raise that the parent's wallet cannot pay for. Nothing changed.
        """
        self._required().root.require_owner()
        self._start.set_budget(Budget(max_usd=max_usd, max_tokens=max_tokens))

    async def aclose(self) -> None:
        """End the run if it is still going, and return when everything it held is back.

        Safe to call from any task of the loop, and more than once.
        """
        actor = self._required()
        actor.root.require_owner()
        actor.stop(StopKind.CANCELLED, "its stream was closed")
        await to_the_end(self._wait_until_settled)

    async def _wait_until_settled(self) -> None:
        await self._required().wait()
        await self._start.finish()

    def __del__(self) -> None:
        # Dropped without being closed: nobody will read it, so it need not go on.
        actor = self._actor
        if actor is not None and actor.state is not State.ENDED:
            actor.root.signal(
                functools.partial(actor.stop, StopKind.CANCELLED, "its stream was dropped")
            )

    @property
    def path(self) -> str:
        """The run's place in its tree."""
        return self._required().path

    def _actor_at(self, path: str | None) -> Actor | None:
        """The run, or the live subagent with that path below it."""
        actor = self._required()
        actor.root.require_owner()
        if path is None or path == actor.path:
            return actor
        below = (a for a in actor.below() if isinstance(a.body, Invocation))
        return next((a for a in below if a.path == path), None)

    def _live_invocation(self) -> Invocation:
        self._required().root.require_owner()
        assert self._invocation is not None, self
        return self._invocation

    def _required(self) -> Actor:
        if self._actor is None:
            raise UsageError("the stream is not open. Write `async with tw.stream(...) as run:`.")
        return self._actor

    def _last_event(self) -> RunEvent:
        assert self._invocation is not None, self
        try:
            result = self._start.take()
        except TreewardenError as error:
            receipt = self._invocation.receipt
            return RunFailed(self.path, error.code, str(error), receipt)
        return RunEnded(self.path, result.stop_reason, result.receipt)
