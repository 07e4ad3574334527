"""What a tree must not leave behind outside its ledger: tasks, threads, descriptors, complaints."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

import anyio.lowlevel


def living_tasks() -> int:
    """Tasks of the running loop."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        from trio.lowlevel import current_statistics

        return current_statistics().tasks_living


class _Complaints(logging.Handler):
    """Keeps what a loop or a collector logs, such as an exception that nobody fetched."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def nothing_is_left() -> Generator[None]:
    """Around one loop from its start to its end: no descriptor, thread or complaint is left."""
    complaints = _Complaints()
    logging.getLogger().addHandler(complaints)
    files, threads = _descriptors(), set(threading.enumerate())
    try:
        yield
    finally:
        logging.getLogger().removeHandler(complaints)
    # Threads were told to end; what the system has still to do for that is not ours.
    late = [t for t in threading.enumerate() if t not in threads]
    for thread in late:
        thread.join(5)
    assert not any(thread.is_alive() for thread in late), late
    assert _descriptors() == files
    assert complaints.said == []


@contextmanager
def no_task_is_left() -> Generator[None]:
    """Around a scenario inside its loop. Check with ``settled`` first."""
    tasks = living_tasks()
    yield
    assert living_tasks() == tasks


async def settled() -> None:
    """Return when a task that has done its last step is gone, and what was dropped collected."""
    gc.collect(0)
    for _ in range(3):
        await anyio.lowlevel.checkpoint()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
