"""Virtual time on asyncio: a stand-in for a loop's clock and for the place where it waits."""

# This module is where the insides of asyncio's loop are known, and nowhere else; the type of them
# is written down below.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar, TypeVarTuple, cast, final

import anyio

from ._permuted import PermutedReady
from ._timeline import DeadlockError, Outside, Threads, Timeline, places

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Events = list[tuple[Any, int]]


class _Selector(Protocol):
    select: Callable[[float | None], Events]

    def get_map(self) -> Mapping[Any, Any]: ...


class _LoopParts(Protocol):
    """What lies inside ``asyncio.SelectorEventLoop``, the same from Python 3.11 to 3.13.

    None of the underscored names is promised; the tests notice a change.
    """

    time: Callable[[], float]
    run_in_executor: Callable[..., asyncio.Future[Any]]
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]  # a heap; its head is not cancelled during select()
    _selector: _Selector
    _internal_fds: int
    _clock_resolution: float


class _ResumedTime:
    """Real time again, going on from where virtual time stood."""

    def __init__(self, real: Callable[[], float], *, now: float) -> None:
        self.real = real
        self._ahead = now - real()

    def time(self) -> float:
        return self.real() + self._ahead


@final
class AsyncioTime:
    """Makes the time of one asyncio loop.

    Args:
        owner: Whose time it is; kept for whoever finds this on a loop.
        is_ours: The loop was made for virtual time, so that a deadlock may end it.

    Raises:
        RuntimeError: The loop is not of the kind that can be driven.
    """

    def __init__(
        self,
        timeline: Timeline,
        loop: asyncio.AbstractEventLoop,
        *,
        owner: object,
        is_ours: bool,
    ) -> None:
        if not isinstance(loop, asyncio.SelectorEventLoop):
            raise RuntimeError(
                f"virtual time needs asyncio's own SelectorEventLoop, not {type(loop).__name__}"
            )
        self.owner = owner
        self._timeline = timeline
        self._loop = loop
        self._is_ours = is_ours
        self._parts = cast("_LoopParts", loop)
        self._threads = Threads(loop)
        # Calls of run_in_executor whose end the loop has not seen.
        self._in_executor = 0
        self._real_select = self._parts._selector.select
        self._real_run_in_executor = self._parts.run_in_executor
        self._real_resolution = self._parts._clock_resolution
        # A loop that was virtual before wears a _ResumedTime; what that resumed is real time.
        worn: object = getattr(loop.time, "__self__", None)
        self._real_time = worn.real if isinstance(worn, _ResumedTime) else loop.time

    @staticmethod
    def of(loop: asyncio.AbstractEventLoop) -> AsyncioTime | None:
        """What makes this loop's time, if it is virtual."""
        worn: object = getattr(loop.time, "__self__", None)
        return worn if isinstance(worn, AsyncioTime) else None

    def take_over(self) -> None:
        """Drive a loop that has been running in real time."""
        self._timeline.take_up(self._loop.time())
        self.attach()

    def attach(self) -> None:
        self._parts.time = self.time
        self._parts.run_in_executor = self.run_in_executor
        self._parts._selector.select = self.select

    def detach(self) -> None:
        self._parts.time = _ResumedTime(self._real_time, now=self._timeline.now).time
        del vars(self._loop)["run_in_executor"]
        del vars(self._parts._selector)["select"]
        self._parts._clock_resolution = self._real_resolution

    def permute(self, seed: int) -> None:
        """Let tasks step in an order drawn from ``seed``. Only before the loop's first turn."""
        assert not self._parts._ready, "a callback would be lost"
        self._parts._ready = PermutedReady(seed)

    def watch_steps(self, before_step: Callable[[object], None]) -> None:
        """Call ``before_step`` with each task of the loop right before it makes a step."""
        ready = self._parts._ready
        if not isinstance(ready, PermutedReady):
            watched = PermutedReady(None)
            watched.extend(ready)
            self._parts._ready = ready = watched
        ready.before_step = before_step

    def time(self) -> float:
        return self._timeline.now

    def select(self, timeout: float | None) -> Events:
        """Stands in for the selector's ``select``: where the loop would wait, time moves."""
        if timeout is not None and timeout <= 0:
            events = self._real_select(timeout)  # something is ready: not the time to move
        else:
            events = self._wait()
        # The loop fires timers with `when < now + resolution`. With a resolution of one step of
        # the float that means `when <= now`: nothing fires early, and nothing due is missed.
        self._parts._clock_resolution = math.ulp(self._timeline.now)
        return events

    def _wait(self) -> Events:
        # Not from `timeout`, which asyncio caps at a day.
        timers = self._parts._scheduled
        timer = timers[0].when() if timers else math.inf
        # Asked before the poll: what a thread did before it ended is then seen by the poll.
        outside = self._outside(timer)
        events = self._real_select(self._timeline.pause(timer=timer, outside=outside))
        if not events:
            self._move(timer, outside)
        return events

    def _move(self, timer: float, outside: Outside) -> None:
        if timer < math.inf:
            self._timeline.now = timer
        elif outside is Outside.SILENT:
            # Raised out of the loop's own turn: run_until_complete passes it on, and
            # asyncio.Runner cancels and awaits all tasks, as after a KeyboardInterrupt.
            tasks = ((task.get_name(), task.get_coro()) for task in asyncio.all_tasks(self._loop))
            raise DeadlockError(self._timeline.now, places(tasks))

    def _outside(self, timer: float) -> Outside:
        if self._in_executor:
            return Outside.WORKING
        fds = len(self._parts._selector.get_map()) > self._parts._internal_fds
        # A loop that is not ours may wait for ever if it likes.
        may_wait = timer == math.inf and not self._is_ours
        at_least = Outside.LISTENING if fds or may_wait else Outside.SILENT
        return max(at_least, self._threads.outside())

    def run_in_executor(
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Stands in for the loop's ``run_in_executor``, to know how many calls are under way."""
        future: asyncio.Future[T] = self._real_run_in_executor(executor, func, *args)
        self._in_executor += 1
        future.add_done_callback(self._executor_is_done)
        return future

    def _executor_is_done(self, _: object) -> None:
        self._in_executor -= 1


def run_on_asyncio(
    timeline: Timeline,
    async_fn: Callable[[*Ts], Awaitable[T]],
    args: tuple[*Ts],
    *,
    owner: object,
    seed: int | None,
) -> T:
    """Run a program as ``asyncio.run`` does, in virtual time."""

    def new_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop()
        time = AsyncioTime(timeline, loop, owner=owner, is_ours=True)
        time.attach()
        if seed is not None:
            time.permute(seed)
        return loop

    # anyio runs it by asyncio.Runner, which cancels what is left over and closes generators.
    return anyio.run(async_fn, *args, backend_options={"loop_factory": new_loop})
