"""Virtual time for tests: delays cost nothing, deadlines are exact, and a seed repeats a run.

How time moves is told in ``_timeline.py``; how it is put into a loop, in one file per backend.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeVar, TypeVarTuple, final

import anyio.lowlevel

from ._asyncio_time import AsyncioTime, run_on_asyncio
from ._timeline import Timeline

if TYPE_CHECKING:
    # Where trio does not run it is not imported either: it costs more than all of this part.
    from ._trio_time import TrioTime

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@final
class VirtualClock:
    """A clock that jumps to the next timer when nothing is ready.

    It tells the time (``monotonic``, ``wall_ns``) to whoever is handed it, and makes the time of an
    event loop, so both always agree: ``clock.monotonic() == anyio.current_time()``.

        >>> clock = VirtualClock()
        >>> clock.run(anyio.sleep, 3600)
        >>> clock.monotonic()
        3600.0

    Args:
        start: The first reading of ``monotonic``.
        patience: Real seconds that a working thread may take before time moves on without it.
        io_patience: The same for what may come from a file descriptor or a child process.
    """

    def __init__(
        self, start: float = 0.0, *, patience: float = 0.25, io_patience: float = 0.0
    ) -> None:
        self._timeline = Timeline(start, patience=patience, io_patience=io_patience)
        # How many run() and installed() are under way.
        self._holders = 0
        # What to undo when the last installed() ends. None while run() owns the loop, or nothing.
        self._installed: AsyncioTime | TrioTime | None = None

    def __repr__(self) -> str:
        return f"<VirtualClock at {self._timeline.now}>"

    def monotonic(self) -> float:
        """Virtual seconds, on the time base of anyio's deadlines."""
        return self._timeline.now

    def wall_ns(self) -> int:
        """2020-01-01 plus virtual time, in nanoseconds: the same in every run."""
        return self._timeline.wall_ns()

    def advance(self, seconds: float) -> None:
        """Move time by hand; timers that are due then fire at the loop's next turn."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"time cannot move by {seconds} seconds")
        self._timeline.now += seconds

    @staticmethod
    def running() -> VirtualClock:
        """The clock that drives the running loop, for code that was not handed it.

        Raises:
            RuntimeError: The running loop is in real time.
        """
        if (clock := _clock_here()) is None:
            raise RuntimeError("the running loop is in real time: no VirtualClock drives it")
        return clock

    def run(
        self,
        async_fn: Callable[[*Ts], Awaitable[T]],
        *args: *Ts,
        backend: Literal["asyncio", "trio"] = "asyncio",
        seed: int | None = None,
    ) -> T:
        """Run a whole async program in virtual time, starting at this clock's reading.

        Args:
            seed: Which of the possible orders the tasks run in. The same seed repeats a run step by
                step, as long as it uses no threads. None leaves the order to the backend.

        Raises:
            DeadlockError: The program can go no further. Its clean-up has run.
            RuntimeError: A loop is running in this thread, or this clock drives one elsewhere.
        """
        if self._holders:
            raise RuntimeError("this clock drives a loop already; each loop needs its own clock")
        self._holders += 1
        try:
            if backend == "asyncio":
                return run_on_asyncio(self._timeline, async_fn, args, owner=self, seed=seed)
            from ._trio_time import run_on_trio

            return run_on_trio(self._timeline, async_fn, args, owner=self, seed=seed)
        finally:
            self._holders -= 1

    def installed(self) -> Installed:
        """A context manager that puts the running loop into virtual time for its body.

        The loop's time makes no jump on entry and on exit: timers set before keep the delay they
        have left, and so do those that outlive the body. So after the body the loop is in real
        time, but ahead of the system's monotonic clock. May be nested.

        Raises:
            RuntimeError: (on entry) The running loop cannot be taken over, or another clock drives
                it, or this clock drives another loop.
        """
        return Installed(self._install, self._uninstall)

    @staticmethod
    def watch_steps(before_step: Callable[[object], None]) -> None:
        """Call ``before_step`` with each task of the running loop right before it makes a step.

        Raises:
            RuntimeError: The running loop is in real time.
        """
        if (time := _time_here()) is None:
            raise RuntimeError("the running loop is in real time: its steps cannot be seen")
        time.watch_steps(before_step)

    def _install(self) -> VirtualClock:
        here = _clock_here()
        if here is not None and here is not self:
            raise RuntimeError("another VirtualClock drives this loop already; use that one")
        if here is None:
            if self._holders:
                raise RuntimeError("this clock drives another loop; each loop needs its own clock")
            time = self._time_for_running_loop()
            time.take_over()
            self._installed = time
        self._holders += 1
        return self

    def _uninstall(self) -> None:
        self._holders -= 1
        if not self._holders:
            assert self._installed is not None, "run() holds its clock to the end"
            self._installed.detach()
            self._installed = None

    def _time_for_running_loop(self) -> AsyncioTime | TrioTime:
        if (loop := _asyncio_loop_here()) is not None:
            return AsyncioTime(self._timeline, loop, owner=self, is_ours=False)
        from ._trio_time import TrioTime

        return TrioTime(self._timeline, owner=self, is_ours=False)


@final
class Installed:
    """The body in which a clock makes the running loop's time."""

    def __init__(self, install: Callable[[], VirtualClock], uninstall: Callable[[], None]) -> None:
        self._install, self._uninstall = install, uninstall

    def __enter__(self) -> VirtualClock:
        return self._install()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._uninstall()


def _asyncio_loop_here() -> asyncio.AbstractEventLoop | None:
    """The asyncio loop that runs the caller; None on trio."""
    token = anyio.lowlevel.current_token().native_token
    return token if isinstance(token, asyncio.AbstractEventLoop) else None


def _time_here() -> AsyncioTime | TrioTime | None:
    """What makes the running loop's time, if it is virtual."""
    if (loop := _asyncio_loop_here()) is not None:
        return AsyncioTime.of(loop)
    from ._trio_time import TrioTime

    return TrioTime.here()


def _clock_here() -> VirtualClock | None:
    """The clock that makes the running loop's time, if it is virtual."""
    time = _time_here()
    if time is None:
        return None
    assert isinstance(time.owner, VirtualClock)
    return time.owner
