"""Alarms of a whole tree, with one timer.

Nearly every tool call has a deadline and nearly none reaches it. A timer for each would cost more
than the rest of its bookkeeping; here setting one is a push onto a heap, and one task of the tree
sleeps until the earliest of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import anyio

if TYPE_CHECKING:
    from ._clock import Clock

Ring: TypeAlias = Callable[[float], float | None]
"""What happens when an alarm goes off: told the instant, it returns the next one, or None."""

# Entries of alarms that are off are swept when they are this many more than those that are set.
_SWEEP_AT = 256


class Deadlines:
    """Rings at set instants."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Alarms that are set, by the id of the lease or hold they belong to.
        self._rings: dict[int, Ring] = {}
        # (instant, id), earliest first; entries of what was dropped stay until they come up.
        self._heap: list[tuple[float, int]] = []
        # Set to wake the watch: there is an earlier instant, or it is to end.
        self._news = anyio.Event()
        self._is_over = False

    def set(self, id_: int, instant: float, ring: Ring) -> None:
        """Call ``ring`` at ``instant`` unless it is dropped by then."""
        self._rings[id_] = ring
        heap = self._heap
        heapq.heappush(heap, (instant, id_))
        if heap[0][1] == id_:
            self._news.set()
        elif len(heap) > 2 * len(self._rings) + _SWEEP_AT:
            self._heap = [entry for entry in heap if entry[1] in self._rings]
            heapq.heapify(self._heap)

    def drop(self, id_: int) -> None:
        """Forget an alarm, if it is set."""
        self._rings.pop(id_, None)

    def end(self) -> None:
        """Let ``watch`` return."""
        self._is_over = True
        self._news.set()

    async def watch(self) -> None:
        """Ring whatever is due, until ``end`` is called."""
        while not self._is_over:
            self._news = anyio.Event()
            with anyio.CancelScope(deadline=self._strike()):
                await self._news.wait()

    def _strike(self) -> float:
        """Ring everything that is due; return the next instant that matters."""
        now = self._clock.monotonic()
        while self._heap:
            instant, id_ = self._heap[0]
            ring = self._rings.get(id_)
            if ring is not None and instant > now:
                return instant
            heapq.heappop(self._heap)
            again = None if ring is None else ring(now)
            if again is not None and id_ in self._rings:
                heapq.heappush(self._heap, (again, id_))
            elif ring is not None:
                self._rings.pop(id_, None)
        return math.inf
