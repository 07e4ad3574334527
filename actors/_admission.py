"""A start that may have to wait: the way from being asked for to being an actor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import attrs

from treewarden.protocols import RefusedError

from ._actor import Actor, StopKind, to_the_end

if TYPE_CHECKING:
    from treewarden.ledgers import Entry

    from ._root import RootSupervisor


@attrs.define(eq=False)
class Admission:
    """What became of a start so far: an actor, or a place in line for one."""

    root: RootSupervisor
    actor: Actor | None = None
    entry: Entry | None = None
    # Why it left the line unanswered, if it did.
    why_left: str | None = None
    _news: anyio.Event | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it stands in line."""
        entry = self.entry
        return entry is not None and entry.outcome is None and self.why_left is None

    async def wait(self) -> Actor | None:
        """The actor, when it has started; None when it left the line.

        Raises:
            RefusedError: Its turn came and the tree had no room or money left for it.
        """
        while self.is_waiting:
            if self._news is None:
                self._news = anyio.Event()
            await self._news.wait()
        if self.entry is not None and isinstance(self.entry.outcome, RefusedError):
            raise self.entry.outcome
        return self.actor

    def tell(self) -> None:
        """Something has become of it: let who waits look."""
        if self._news is not None:
            self._news.set()

    def stop(self, reason: str) -> None:
        """Ask what has started to end, or leave the line."""
        if self.actor is not None:
            self.actor.stop(StopKind.CANCELLED, reason)
        elif self.is_waiting:
            assert self.entry is not None, self
            self.root.ledger.leave_line(self.entry, self.root.clock.monotonic())
            self.leave(reason)

    def leave(self, reason: str) -> None:
        """It is out of the line, and nothing will become of it."""
        self.why_left = reason
        self.tell()

    async def give_up(self, reason: str) -> None:
        """``stop``, and wait for the end of what has started."""
        self.stop(reason)
        if self.actor is not None:
            await to_the_end(self.actor.wait)
