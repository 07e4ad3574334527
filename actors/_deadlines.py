"""Deadlines of a whole tree, with one timer.

Nearly every tool call has a deadline and nearly none reaches it. A timer for each would cost more
than the rest of its bookkeeping; here setting one is a push onto a heap, and one task of the tree
sleeps until the earliest of them.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

import anyio

from ._actor import Actor, StopKind

if TYPE_CHECKING:
    from ._clock import Clock

# Entries of ended actors are swept when they are this many more than those of live ones.
_SWEEP_AT = 256


class Deadlines:
    """Stops actors at their instants."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Live actors with a deadline of their own, by lease id.
        self._actors: dict[int, Actor] = {}
        # (instant, lease id), earliest first; entries of ended actors stay until they come up.
        self._heap: list[tuple[float, int]] = []
        # Set to wake the watch: there is an earlier instant, or it is to end.
        self._news = anyio.Event()
        self._is_over = False

    def set(self, actor: Actor, instant: float) -> None:
        """Stop ``actor`` at ``instant`` unless it has ended by then."""
        lease_id = actor.lease.id
        self._actors[lease_id] = actor
        heap = self._heap
        heapq.heappush(heap, (instant, lease_id))
        if heap[0][1] == lease_id:
            self._news.set()
        elif len(heap) > 2 * len(self._actors) + _SWEEP_AT:
            self._heap = [entry for entry in heap if entry[1] in self._actors]
            heapq.heapify(self._heap)

    def drop(self, actor: Actor) -> None:
        """Forget an actor that has ended."""
        self._actors.pop(actor.lease.id, None)

    def end(self) -> None:
        """Let ``watch`` return."""
        self._is_over = True
        self._news.set()

    async def watch(self) -> None:
        """Stop whose instant has come, until ``end`` is called."""
        while not self._is_over:
            self._news = anyio.Event()
            with anyio.CancelScope(deadline=self._strike()):
                await self._news.wait()

    def _strike(self) -> float:
        """Stop everybody who is late; return the next instant that matters."""
        heap, now = self._heap, self._clock.monotonic()
        while heap:
            instant, lease_id = heap[0]
            actor = self._actors.get(lease_id)
            if actor is not None and instant > now:
                return instant
            heapq.heappop(heap)
            if actor is not None:
                actor.stop(StopKind.DEADLINE, "its deadline has passed")
        return math.inf
