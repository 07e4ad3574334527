"""A ready queue for asyncio that lets tasks take their steps in an order drawn from a seed.

It can also tell of every step before it is taken.

Which orders are fair? asyncio promises that callbacks run in the order they were scheduled in,
and much is built on it: a transport schedules ``connection_made``, then the reading of its socket,
then the waking of whoever asked for it; a future's callbacks run in the order they were added; a
task group's own done-callback runs before the step of a task that waits for the child; anyio
schedules its next attempt to deliver a cancellation behind the steps it has just caused. Shuffling
all that tests programs that cannot happen. What a program may *not* rely on is the order in which
different tasks get to run, since that is decided by whichever message or timer came first, and the
order of timers that are due at the very same instant, which asyncio leaves undefined. So:

- neighbouring steps of different tasks are permuted; steps of one task keep their order;
- neighbouring timers that are due at the same instant are permuted;
- every other callback keeps its place, and nothing is moved across it.

Each order made this way is one that a real loop could have taken.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count, groupby
from weakref import WeakKeyDictionary


class PermutedReady(deque[asyncio.Handle]):
    """Takes the place of a loop's ready queue; equal seeds give equal orders, None asyncio's own.

    The loop runs one batch per iteration: it counts the queue, then pops that many. Nothing runs
    between the count and the first pop, so the first pop sees the whole batch and permutes it.
    """

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self._random = None if seed is None else random.Random(seed)
        # Called with each task right before it makes a step.
        self.before_step: Callable[[object], None] | None = None
        # How many handles of the present batch have not been popped.
        self._left = 0
        # In which order tasks were first seen ready, which is the order they were started in.
        self._birth: WeakKeyDictionary[asyncio.Task[object], int] = WeakKeyDictionary()
        self._births = count()

    def popleft(self) -> asyncio.Handle:
        if self._random is not None:
            self._permute_a_new_batch(self._random)
        handle = super().popleft()
        if self.before_step is not None and not handle.cancelled():
            task = _task_of(handle)
            if task is not None:
                self.before_step(task)
        return handle

    def _permute_a_new_batch(self, random: random.Random) -> None:
        if self._left <= 0:
            self._left = len(self)
            batch = list(self)
            self.clear()
            for _, peers in groupby(batch, key=_peers):
                self.extend(self._shuffled(list(peers), random))
        self._left -= 1

    def _shuffled(
        self, peers: list[asyncio.Handle], random: random.Random
    ) -> Iterable[asyncio.Handle]:
        steps: dict[asyncio.Task[object], list[asyncio.Handle]] = {}
        for handle in peers:
            task = _task_of(handle)
            if task is None:
                random.shuffle(peers)
                return peers
            self._birth.setdefault(task, next(self._births))
            steps.setdefault(task, []).append(handle)
        # anyio keeps the tasks of a scope in a set, so those cancelled together become ready in the
        # order of their addresses. Sorting first makes the result a function of the seed alone.
        tasks = sorted(steps, key=self._birth.__getitem__)
        random.shuffle(tasks)
        return [handle for task in tasks for handle in steps[task]]


def _peers(handle: asyncio.Handle) -> object:
    """What equals for neighbours that may change places."""
    if isinstance(handle, asyncio.TimerHandle):
        return handle.when()
    if _task_of(handle) is not None:
        return asyncio.Task
    return object()  # equals nothing: a callback that stays where it is


def _task_of(handle: asyncio.Handle) -> asyncio.Task[object] | None:
    """The task whose step this is; asyncio's own debug output finds it the same way."""
    callback: object = getattr(handle, "_callback", None)
    owner: object = getattr(callback, "__self__", None)
    return owner if isinstance(owner, asyncio.Task) else None  # pyright: ignore[reportUnknownVariableType]
