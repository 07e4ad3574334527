"""Virtual time on trio: a clock that sees the run's polls. Imported only where trio runs.

Trio's own MockClock is not enough: it jumps past the deadline around a working thread, it spins
where no timer is set, and it cannot tell a deadlock.
"""

# This module is where the insides of trio are known, and nowhere else; the type of them is written
# down below. The scheduling flag and the random source are what trio itself hands to Hypothesis.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sized
from contextlib import nullcontext
from importlib import import_module
from typing import Protocol, TypeVar, TypeVarTuple, cast, final

import anyio
import trio
import trio.testing

from ._timeline import DeadlockError, Outside, Threads, Timeline, places

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Runner(Protocol):
    clock: trio.abc.Clock
    runq: Sized
    waiting_for_idle: Sized
    tasks: set[_Task]


class _CancelStatus(Protocol):
    _scope: trio.CancelScope
    _parent: _CancelStatus | None


class _Task(Protocol):
    name: str
    coro: object
    _cancel_status: _CancelStatus | None


class _RunContext(Protocol):
    runner: _Runner


class _Inside(Protocol):
    """What lies inside ``trio._core._run``. None of it is promised; the tests notice a change."""

    GLOBAL_RUN_CONTEXT: _RunContext
    _ALLOW_DETERMINISTIC_SCHEDULING: bool
    _r: random.Random


_MOST_STANDSTILLS = 20
"""How often the clean-up after a deadlock may stand still before the run is broken off."""

_inside = cast("_Inside", import_module("trio._core._run"))


class _ResumedClock(trio.abc.Clock):
    """Real time again, going on from where virtual time stood."""

    def __init__(self, real: Callable[[], float], *, now: float) -> None:
        self.real = real
        self._ahead = now - real()

    def start_clock(self) -> None:
        raise AssertionError("a clock that resumes finds its run started")

    def current_time(self) -> float:
        return self.real() + self._ahead

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - self.current_time()


@final
class TrioTime(trio.abc.Clock, trio.abc.Instrument):
    """Makes the time of one trio run.

    Trio asks its clock how long to wait exactly when no task is runnable, then polls, then tells
    its instruments, then reads the clock and fires what is due. So the answer to the question is
    the real pause, and what the poll brought decides whether time moves.

    Args:
        owner: Whose time it is; kept for whoever finds this on a run.
        is_ours: The run was made for virtual time, so that a deadlock may end it.
    """

    # The run that is driven; known from the moment it starts.
    _runner: _Runner
    # What told the time before take_over(); no such thing in a run of our own.
    _real_time: Callable[[], float]

    def __init__(self, timeline: Timeline, *, owner: object, is_ours: bool) -> None:
        self.owner = owner
        self._timeline = timeline
        self._is_ours = is_ours
        self._threads = Threads()
        # The next deadline and the state of the outside when trio asked how long to wait; None
        # while that question is not open.
        self._asked: tuple[float, Outside] | None = None
        # Around all of the program, in watch(); only a deadlock cancels it.
        self._program = trio.CancelScope()
        # The deadlock that ended the program.
        self.deadlock: DeadlockError | None = None
        # How often it stood still since; and True once there is nothing left to cancel.
        self._standstills = 0
        self._gives_up = False

    @staticmethod
    def here() -> TrioTime | None:
        """What makes the running trio's time, if it is virtual."""
        clock = trio.lowlevel.current_clock()
        return clock if isinstance(clock, TrioTime) else None

    def take_over(self) -> None:
        """Drive the running trio, which has been in real time.

        Raises:
            RuntimeError: Trio's own MockClock drives it.
        """
        worn = trio.lowlevel.current_clock()
        if isinstance(worn, trio.testing.MockClock):
            raise RuntimeError("a MockClock drives this run already; leave the time to one of them")
        # A run that was virtual before wears a _ResumedClock; what that resumed is real time.
        self._real_time = worn.real if isinstance(worn, _ResumedClock) else worn.current_time
        self._timeline.take_up(worn.current_time())
        self.start_clock()
        self._runner.clock = self
        trio.lowlevel.add_instrument(self)

    def detach(self) -> None:
        self._runner.clock = _ResumedClock(self._real_time, now=self._timeline.now)
        trio.lowlevel.remove_instrument(self)

    def watch_steps(self, before_step: Callable[[object], None]) -> None:
        """Call ``before_step`` with each task of the run, beside trio's own, before its step."""
        trio.lowlevel.add_instrument(_StepWatch(before_step))

    def start_clock(self) -> None:
        self._runner = _inside.GLOBAL_RUN_CONTEXT.runner

    def current_time(self) -> float:
        return self._timeline.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        if self._gives_up:
            assert self.deadlock is not None
            raise self.deadlock  # breaks the run off, as an internal error of trio
        if deadline <= self._timeline.now:
            return 0.0
        if self._runner.waiting_for_idle:
            # wait_all_tasks_blocked() comes before time moves; trio cuts this to its cushion.
            return math.inf
        # Asked before the poll: what a thread did before it ended is then seen by the poll.
        outside = self._outside(deadline)
        self._asked = deadline, outside
        return self._timeline.pause(timer=deadline, outside=outside)

    def after_io_wait(self, timeout: float) -> None:
        asked, self._asked = self._asked, None
        if asked is not None and not self._runner.runq:
            self._move(*asked)

    def _move(self, deadline: float, outside: Outside) -> None:
        if deadline < math.inf:
            self._timeline.now = deadline
        elif outside is Outside.SILENT:
            self._end_deadlock()

    def _end_deadlock(self) -> None:
        # Trio would log what an instrument raises and go on, so the program is cancelled and
        # run_on_trio() raises the error in the end. If the clean-up stands still too, it is
        # because of a shield: asyncio.Runner's cancellation knows none, and so does this.
        if self.deadlock is None:
            self.deadlock = DeadlockError(self._timeline.now, places(self._tasks()))
            self._program.cancel()
            return
        shields = [scope for scope in self._scopes() if scope.shield]
        for scope in shields:
            scope.shield = False
        # Clean-up that is wanted to the end shields itself again each time.
        self._standstills += 1
        self._gives_up = not shields or self._standstills > _MOST_STANDSTILLS

    def _tasks(self) -> Iterator[tuple[str, object]]:
        for task in self._runner.tasks:
            if not task.name.startswith("<"):  # so trio calls its own, which wait for the others
                yield task.name, task.coro

    def _scopes(self) -> Iterator[trio.CancelScope]:
        """The scopes that each task is in."""
        for task in self._runner.tasks:
            status = task._cancel_status
            while status is not None:
                yield status._scope
                status = status._parent

    def _outside(self, deadline: float) -> Outside:
        if trio.testing.active_thread_count():
            return Outside.WORKING
        # A run that is not ours may wait for ever if it likes.
        may_wait = deadline == math.inf and not self._is_ours
        at_least = Outside.LISTENING if may_wait or _waits_for_io() else Outside.SILENT
        return max(at_least, self._threads.outside())

    async def watch(self, async_fn: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Run the program so that a deadlock can end it."""
        trio.lowlevel.current_task().name = getattr(async_fn, "__qualname__", repr(async_fn))
        with self._program:
            return await async_fn(*args)
        assert self.deadlock is not None, "only a deadlock cancels the program"
        raise self.deadlock


class _StepWatch(trio.abc.Instrument):
    """Tells of each step. What it raises, trio would log and forget, so it must not raise."""

    def __init__(self, before_step: Callable[[object], None]) -> None:
        self._before_step = before_step

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if not task.name.startswith("<"):
            self._before_step(task)


def _waits_for_io() -> bool:
    io = trio.lowlevel.current_statistics().io_statistics
    # Epoll and kqueue count under different names. One wait is trio's own, for other threads.
    names = ("tasks_waiting", "tasks_waiting_read", "tasks_waiting_write")
    return sum(int(getattr(io, name, 0)) for name in names) > 1


class _Seeded:
    """The body in which trio's scheduler draws its orders from a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._was = _inside._ALLOW_DETERMINISTIC_SCHEDULING, _inside._r.getstate()
        _inside._ALLOW_DETERMINISTIC_SCHEDULING = True
        _inside._r.seed(self._seed)

    def __exit__(self, *_: object) -> None:
        _inside._ALLOW_DETERMINISTIC_SCHEDULING, state = self._was
        _inside._r.setstate(state)


def run_on_trio(
    timeline: Timeline,
    async_fn: Callable[[*Ts], Awaitable[T]],
    args: tuple[*Ts],
    *,
    owner: object,
    seed: int | None,
) -> T:
    """Run a program as ``trio.run`` does, in virtual time."""
    time = TrioTime(timeline, owner=owner, is_ours=True)
    options = {"clock": time, "instruments": [time]}
    try:
        with nullcontext() if seed is None else _Seeded(seed):
            return anyio.run(time.watch, async_fn, *args, backend="trio", backend_options=options)
    finally:
        # Whatever the clean-up made of it, and however late it came.
        if time.deadlock is not None:
            raise time.deadlock
