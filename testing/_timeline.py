"""How virtual time moves, apart from any event loop.

One rule, on both backends: *time moves only when nothing is ready, and then straight to the next
timer*. What is ready includes real file descriptors, which are polled before each move.

The world outside the loop has no virtual time, so three cases need a word:

- A thread with work (``to_thread``, an executor call, or a thread started since the clock took
  over) takes no virtual time while it is quick: before each move the loop waits for it, really, up
  to ``patience`` seconds. One that is slower or stuck is passed over for that one move, so a
  deadline around a stuck thread still comes, and time never runs ahead by more than a timer. A
  long-lived thread may have an attribute ``idle``; while it is True nobody waits for the thread.
- File descriptors and child processes are waited for ``io_patience`` seconds before each move. The
  default is none: mostly both ends are in one program, and the poll sees all there is to see.
- With no timer at all time cannot move, and the loop really waits. If nothing outside could ever
  wake it either, that is a deadlock.
"""

from __future__ import annotations

import enum
import math
import sys
import threading
from collections.abc import Container, Iterable
from typing import Protocol, cast

# The wall clock of virtual time starts here: 2020-01-01T00:00:00Z.
EPOCH_NS = 1_577_836_800 * 10**9

# Where only the outside can make something happen, we look again after this many real seconds:
# a thread may end without a word, and that makes a deadlock of a wait.
LOOK_AGAIN = 0.1


class DeadlockError(RuntimeError):
    """Every task waits for what cannot happen. The run has been cancelled, with its clean-up.

    Attributes:
        now: The virtual time at which the run stood still.
        waiting: One line for each task: its name and where it waits.
    """

    def __init__(self, now: float, waiting: tuple[str, ...]) -> None:
        tasks = "\n".join(f"  {line}" for line in waiting)
        super().__init__(
            f"nothing can happen any more at virtual time {now}: no timer is set, and no thread "
            f"or file descriptor can wake a task. Waiting:\n{tasks}\n"
            "Look for who should have woken them, or set a deadline around the wait."
        )
        self.now, self.waiting = now, waiting


class Outside(enum.IntEnum):
    """How likely it is that something comes from outside the loop."""

    SILENT = 0  # nothing outside can wake the loop
    LISTENING = 1  # something may come, or may never
    WORKING = 2  # a thread has work and will report


class Timeline:
    """Where virtual time stands, and how long the real world may hold it up."""

    def __init__(self, start: float, *, patience: float, io_patience: float) -> None:
        # Virtual seconds on the time base of the loop that is driven. Goes back only where
        # take_up() adopts the time base of another loop.
        self.now = start
        # The reading of `now` at which wall_ns() is EPOCH_NS.
        self._epoch = 0.0
        self._patience = {
            Outside.SILENT: 0.0,
            Outside.LISTENING: io_patience,
            Outside.WORKING: patience,
        }

    def wall_ns(self) -> int:
        return EPOCH_NS + round((self.now - self._epoch) * 1e9)

    def take_up(self, now: float) -> None:
        """Go on from the reading of a loop that has been running. The wall clock does not jump."""
        self._epoch += now - self.now
        self.now = now

    def pause(self, *, timer: float, outside: Outside) -> float:
        """How many real seconds to wait for news before time moves to ``timer``."""
        if timer < math.inf:
            return self._patience[outside]
        return 0.0 if outside is Outside.SILENT else LOOK_AGAIN


class _AnyioWorker(Protocol):
    """A thread of ``anyio.to_thread`` on asyncio (anyio._backends._asyncio.WorkerThread)."""

    loop: object
    # The workers of that loop that wait for work.
    idle_workers: Container[object]


# Threads that wait for work and are named so: trio's cache renames a thread while it has work, and
# Python calls a thread it did not start a dummy, long after that thread may have ended.
IDLE_NAMES = ("Trio thread ", "Dummy-")


class Threads:
    """The threads of this process, as far as they may wake one loop.

    Args:
        loop: The asyncio loop in question. None on trio, which counts its own threads.
    """

    def __init__(self, loop: object = None) -> None:
        self._loop = loop
        # Whoever ran before has nothing to do with this program, or shows it in another way.
        self._before = frozenset(threading.enumerate())

    def outside(self) -> Outside:
        return max(map(self._outside, threading.enumerate()))

    def working(self) -> list[threading.Thread]:
        """Those that came since and have work, or never say whether they do."""
        return [t for t in threading.enumerate() if self._outside(t) is Outside.WORKING]

    def _outside(self, thread: threading.Thread) -> Outside:
        if type(thread).__module__ == "anyio._backends._asyncio":
            worker = cast("_AnyioWorker", thread)
            works = worker.loop is self._loop and worker not in worker.idle_workers
            return Outside.WORKING if works else Outside.SILENT
        if thread in self._before or thread.name.startswith(IDLE_NAMES):
            return Outside.SILENT
        if getattr(thread, "idle", False) is True:
            return Outside.SILENT
        # An executor keeps its threads and does not say which have work (calls through the loop
        # are counted there); asyncio before 3.12 keeps a thread for each child process.
        if thread in _executor_threads() or thread.name.startswith("waitpid-"):
            return Outside.LISTENING
        return Outside.WORKING


def _executor_threads() -> Container[object]:
    module = sys.modules.get("concurrent.futures.thread")
    return cast("Container[object]", getattr(module, "_threads_queues", ()))


# What awaits on behalf of others; the line worth showing is the one that called it.
MACHINERY = ("anyio.", "asyncio.", "trio.", __name__.rpartition(".")[0] + ".")


def places(tasks: Iterable[tuple[str, object]]) -> tuple[str, ...]:
    """One line for each of these (name, coroutine): where it waits."""
    return tuple(sorted(f"{name}: {place(coroutine)}" for name, coroutine in tasks))


def place(awaitable: object) -> str:
    """The innermost line of a suspended coroutine that is not the machinery's, if there is one."""
    ours, innermost = None, "not started"
    while awaitable is not None:
        frame = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        if frame:
            code = frame.f_code
            innermost = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
            if not str(frame.f_globals.get("__name__")).startswith(MACHINERY):
                ours = innermost
        awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
    return ours or innermost
