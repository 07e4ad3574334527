"""One child of a supervisor: an actor that lives several times.

What runs between a start and an end is an *incarnation*. The lease, the wallet and the path stay
over all of them, so the actor's body is a loop, and each round of it has a cancel scope of its own:
ending an incarnation is not ending the actor. What belongs to one incarnation, the runs that it
started and the messages that it did not read, ends with it.

The child decides nothing. It says how an incarnation ended and waits to be told what comes now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import attrs

from treewarden.protocols import LedgerError, ServiceFailed

from ._actor import Actor, Body, StopKind, without_cancellation
from ._lifecycle import State
from ._mailbox import Mailbox
from ._supervision import Restart


@attrs.frozen
class Ending:
    """How an incarnation ended: with a value, with an error, or stopped by its supervisor."""

    value: Any = None
    error: Exception | None = None


class Child:
    """The body of a supervised actor, and what its supervisor knows of it."""

    def __init__(
        self,
        name: str,
        start: Body,
        restart: Restart,
        patience_seconds: float | None,
        tell: Callable[[Child], None],
    ) -> None:
        self.name, self.restart = name, restart
        self.patience_seconds = patience_seconds
        # How its last incarnation ended; None while one lives.
        self.ending: Ending | None = None
        # Nothing is started again.
        self.is_over = False
        self._start, self._tell = start, tell
        # Why the living incarnation is to end, or None, and since when.
        self._why_down: str | None = None
        self._asked_at: float | None = None
        self._scope = anyio.CancelScope()
        self._begun = anyio.Event()
        self._down = anyio.Event()
        self._verdict = anyio.Event()

    # Set by its supervisor, right after the start.
    actor: Actor

    # --- what its supervisor asks of it ----------------------------------------------------------

    @property
    def is_up(self) -> bool:
        return self.ending is None and self.actor.state is not State.ENDED

    async def wait_begun(self) -> None:
        """Return when the code of its incarnation has made its first step."""
        await self._begun.wait()

    async def wait_down(self) -> None:
        """Return when its incarnation and all below it have ended."""
        await self._down.wait()

    def stop_incarnation(self, why: str, now: float) -> None:
        """Ask what runs to end, and keep the place. No effect where nothing runs."""
        if not self.is_up or self._why_down is not None:
            return
        self._why_down, self._asked_at = why, now
        self._close_mailbox(self.actor)
        if not self.actor.stops_in_order:
            self.actor.stop_below(StopKind.CLOSED, why)
        self._scope.cancel()

    def stop(self, kind: StopKind, why: str, now: float) -> None:
        """Ask what runs to end, and the actor with it."""
        self._asked_at = now if self._asked_at is None else self._asked_at
        self.actor.stop(kind, why)

    def patience_left(self, now: float) -> float | None:
        """For how many more seconds it is waited for before the next is stopped; None: no end."""
        if self.patience_seconds is None or self._asked_at is None:
            return None
        return max(0.0, self._asked_at + self.patience_seconds - now)

    def start_again(self) -> None:
        """Begin another incarnation in the same place."""
        assert self.ending is not None, self.actor
        self.ending = self.actor.mailbox = None
        self._why_down = self._asked_at = None
        self._begun, self._down = anyio.Event(), anyio.Event()
        self._verdict.set()

    def note_gone(self) -> None:
        """Its actor has ended, in whatever way."""
        self._begun.set()
        self._down.set()

    def let_end(self) -> None:
        """Start nothing again: the actor ends as its last incarnation did."""
        self.is_over = True
        self._verdict.set()

    # --- the actor's body ----------------------------------------------------------------------

    async def __call__(self, actor: Actor) -> Any:
        while True:
            ending = await self._live(actor)
            ending = await self._end_below(actor, ending)
            if actor.stop_asked is not None:
                return _last_word(ending)
            self._note(ending)
            await self._wait_for_verdict(actor)
            if self.is_over:
                # Dormant for a while, it may have been killed since.
                return _last_word(self.ending or ending)

    async def _live(self, actor: Actor) -> Ending:
        """One incarnation."""
        self._scope = anyio.CancelScope()
        try:
            with self._scope:
                return await self._incarnation(actor)
        except BaseException as error:
            rest = without_cancellation(error, actor.root.cancelled_type)
            if actor.root.is_cancelled_from_outside or not isinstance(
                rest, (Exception, type(None))
            ):
                raise
            if rest is not None:
                return self._failed(actor, rest)
            # Nobody's scope: its task was cancelled natively. That is OTP's `killed`.
            return self._killed(actor)
        return Ending()  # its own scope: it was stopped for another one's sake

    async def _incarnation(self, actor: Actor) -> Ending:
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._begun.set()
        try:
            return Ending(value=await self._start(actor))
        except LedgerError:
            raise  # a bug of ours, not a failure of the child
        except Exception as error:
            return self._failed(actor, error)

    def _failed(self, actor: Actor, error: Exception) -> Ending:
        if self._why_down is None:
            return Ending(error=error)
        actor.root.fault(actor, f"{actor.path}: its clean-up raised {error!r}")
        return Ending()

    async def _end_below(self, actor: Actor, ending: Ending) -> Ending:
        """End the runs that the incarnation started and left."""
        self._close_mailbox(actor)
        why = self._why_down or f"{actor.path} has ended"
        while actor.children:
            actor.stop_below(StopKind.CLOSED, why)
            try:
                with anyio.CancelScope(shield=True):
                    await actor.wait_for_children()
            except actor.root.cancelled_type:
                # As in the frame: a native cancel comes through a shield, once for each call.
                ending = self._killed(actor)
        return ending

    async def _wait_for_verdict(self, actor: Actor) -> None:
        while True:
            try:
                await self._verdict.wait()
                break
            except actor.root.cancelled_type:
                if actor.root.is_cancelled_from_outside:
                    raise
                ending = self._killed(actor)
                if self.is_over:
                    self.ending = ending
                    break
                # Nothing runs that could be killed, but whoever did it wanted it gone. If it was
                # just told to start again, that is the incarnation that is killed.
                self._verdict = anyio.Event()
                self._note(ending)
        self._verdict = anyio.Event()

    def _killed(self, actor: Actor) -> Ending:
        actor.root.forget_native_cancel()
        return Ending(error=ServiceFailed(actor.path, "its task was cancelled from outside"))

    def _note(self, ending: Ending) -> None:
        self.ending = ending
        self._begun.set()
        self._down.set()
        self._tell(self)

    def _close_mailbox(self, actor: Actor) -> None:
        """Take no messages until there is an incarnation again, which reads none of these."""
        if actor.mailbox is None:
            actor.mailbox = Mailbox(actor.path)
        actor.mailbox.close()


def _last_word(ending: Ending) -> Any:
    if ending.error is not None:
        raise ending.error
    return ending.value
