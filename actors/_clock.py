"""Where the living tree gets its time from.

Rule 7: the clock is handed in. Nothing else in this part asks a loop or the system for the time, so
a virtual clock in a test is the whole of time for the tree that got it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Literal, Protocol, cast

import anyio.lowlevel


class Clock(Protocol):
    """What tells the time: one reading for deadlines, one for the record."""

    def monotonic(self) -> float:
        """Seconds on the time base of anyio's deadlines (``anyio.current_time()``)."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since 1970, for spans and receipts; never for a decision."""
        ...


def running_backend() -> Literal["asyncio", "trio"]:
    """The name of the event loop that runs the caller.

    Raises:
        anyio.NoEventLoopError: No event loop runs in this thread.
    """
    # anyio's own detection is private and the sniffio it rests on is optional since 4.12. Its
    # loop token is public and names the backend class, so both answer alike by construction.
    backend = anyio.lowlevel.current_token().backend_class
    return "trio" if backend.__module__.endswith("trio") else "asyncio"


def loop_teller() -> Callable[[], object]:
    """What says which loop runs its caller, as long as that is of the kind which runs now.

    ``current_token()`` says the same of every kind, at ten times the cost; an actor's start asks.
    Called where no such loop runs, the function raises RuntimeError.
    """
    if running_backend() == "trio":
        return cast("Callable[[], object]", sys.modules["trio"].lowlevel.current_trio_token)
    return cast("Callable[[], object]", sys.modules["asyncio"].get_running_loop)


class LoopClock:
    """The clock of the running event loop, found once, so that a reading is one short call.

    It is read in the thread of its loop; other threads send the tree's owner a message instead.

    Raises:
        anyio.NoEventLoopError: No event loop runs in this thread.
    """

    __slots__ = ("_read",)

    # Tells the time of the loop this clock was made in, virtual while a virtual clock drives it.
    _read: Callable[[], float]

    def __init__(self) -> None:
        self._read = _trio_time() if running_backend() == "trio" else _asyncio_time()

    def monotonic(self) -> float:
        """Seconds on the time base of anyio's deadlines."""
        return self._read()

    def wall_ns(self) -> int:
        """Nanoseconds since 1970 by the system's clock."""
        return time.time_ns()


def _asyncio_time() -> Callable[[], float]:
    import asyncio  # loaded long ago where its loop runs; not by the trees that live on trio

    loop = asyncio.get_running_loop()
    # Not `loop.time` itself: VirtualClock.installed() puts another `time` on the loop, and a
    # method bound before that would go on telling real time.
    return lambda: loop.time()


def _trio_time() -> Callable[[], float]:
    # It runs us, so it is loaded; an import statement would make it a dependency of this module.
    return cast("Callable[[], float]", sys.modules["trio"].current_time)
