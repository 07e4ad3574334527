"""Whose turn it is among those that wait for an agent's slot.

The oldest top-level run comes first; within a run whoever wants its slot back, then the deeper,
then the earlier. So a tree finishes what it has begun before it begins more, and its first results
come early. Every eighth grant goes to the run that has waited longest since its last one, so nobody
starves: a run gets its turn after at most eight times as many grants as there are runs waiting.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

import attrs

FAIR_TURN = 8
"""Which grant goes by waiting time instead of age."""

# Left waiters are swept from a heap when there are this many more of them than of those in line.
_SWEEP_AT = 64


@attrs.define(eq=False)
class _Run:
    """Those of one top-level run that wait."""

    # (0 for a resume else 1, -depth, number), first come first; who left stays until it comes up.
    heap: list[tuple[int, int, int]] = attrs.field(factory=list[tuple[int, int, int]])
    count: int = 0


@attrs.define(eq=False)
class GrantOrder:
    """A line of numbers. Adding, leaving and granting cost O(log n) at most."""

    # The run of everybody in line.
    _run_of: dict[int, int] = attrs.field(factory=dict[int, int])
    # The runs with somebody in line, the one that waits longest since its last grant first.
    _turns: OrderedDict[int, _Run] = attrs.field(factory=OrderedDict[int, _Run])
    # The same runs by age, and some that are not in line any more.
    _ages: list[int] = attrs.field(factory=list[int])
    _aged: set[int] = attrs.field(factory=set[int])
    _grants: int = 0

    def __len__(self) -> int:
        return len(self._run_of)

    def __contains__(self, waiter: int) -> bool:
        return waiter in self._run_of

    def add(self, waiter: int, *, run: int, is_resume: bool, depth: int) -> None:
        """Put ``waiter`` in line. Its number tells when it came."""
        self._run_of[waiter] = run
        line = self._turns.get(run)
        if line is None:
            line = self._turns[run] = _Run()
            if run not in self._aged:
                self._aged.add(run)
                heapq.heappush(self._ages, run)
        line.count += 1
        heapq.heappush(line.heap, (0 if is_resume else 1, -depth, waiter))

    def drop(self, waiter: int) -> None:
        """Take ``waiter`` out of the line."""
        run = self._run_of.pop(waiter)
        line = self._turns[run]
        line.count -= 1
        if line.count == 0:
            del self._turns[run]
        elif len(line.heap) > 2 * line.count + _SWEEP_AT:
            line.heap = [row for row in line.heap if row[2] in self._run_of]
            heapq.heapify(line.heap)

    def head(self) -> int:
        """Whose turn it is. There has to be somebody in line."""
        if (self._grants + 1) % FAIR_TURN == 0:
            run = next(iter(self._turns))
        else:
            run = self._oldest()
        heap = self._turns[run].heap
        while heap[0][2] not in self._run_of:
            heapq.heappop(heap)
        return heap[0][2]

    def grant(self, waiter: int) -> None:
        """Take ``waiter`` out because it got what it waited for."""
        run = self._run_of[waiter]
        self._turns.move_to_end(run)
        self._grants += 1
        self.drop(waiter)

    def _oldest(self) -> int:
        ages = self._ages
        while ages[0] not in self._turns:
            self._aged.discard(heapq.heappop(ages))
        return ages[0]
