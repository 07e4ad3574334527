"""A start that may have to wait: the way from being asked for to being an actor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import attrs

from treewarden.ledgers import Lease
from treewarden.protocols import RefusedError, UsageError

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
    _news: anyio.Event | None = None

    async def wait(self) -> Actor:
        """The actor, when it has started.

        Raises:
            RefusedError: Its turn came and the tree had no room or money left for it.
            UsageError: Its parent is ending; nothing starts below it any more.
        """
        while self.actor is None:
            outcome = None if self.entry is None else self.entry.outcome
            if isinstance(outcome, RefusedError):
                raise outcome
            if self.entry is None or isinstance(outcome, Lease):
                raise UsageError(
                    "its parent is closing; nothing can start below it.", code="cave_tree_closed"
                )
            self._news = anyio.Event()
            await self._news.wait()
        return self.actor

    def tell(self) -> None:
        """Something has become of it: let who waits look."""
        if self._news is not None:
            self._news.set()

    async def give_up(self, reason: str) -> None:
        """Leave the line, or stop what has started and wait for its end."""
        if self.entry is not None:
            self.root.ledger.leave_line(self.entry, self.root.clock.monotonic())
        actor = self.actor
        if actor is not None:
            actor.stop(StopKind.CANCELLED, reason)
            await to_the_end(actor.wait)
