"""What a program leaves behind: counted before and after, and the difference named one by one.

One rule: only what is certainly left is reported. Threads that a pool keeps for later, and the
asynchronous machinery's own tasks and descriptors, are no leak.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Token
from types import TracebackType
from typing import Any, Protocol, cast, final

import anyio.lowlevel
import attrs

from treewarden.actors import RootSupervisor, running_backend, tree_observer
from treewarden.ledgers import fold

from ._timeline import Threads, place

_FDS = "/proc/self/fd"
_TURNS = 10
"""How many turns of the loop a task may take to end, where there is a loop to wait in."""


@attrs.frozen
class Leak:
    """One thing that is left.

    Attributes:
        kind: "task", "tree", "slot", "hold", "span", "descriptor", "thread", "process", or "books"
            where a ledger contradicts itself.
        what: Which one, and where it hangs where that is known.
    """

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


class LeakError(AssertionError):
    """Something is left behind. An assertion, so that a test which leaks has failed.

    Attributes:
        leaks: All of it.
    """

    def __init__(self, leaks: tuple[Leak, ...]) -> None:
        listed = "\n".join(f"  {leak}" for leak in leaks)
        super().__init__(f"{len(leaks)} left behind:\n{listed}")
        self.leaks = leaks


def census(*, patience: float = 0.25) -> Census:
    """A context manager that compares what there is before its body and after.

    Counted are the tasks of the running loop, every tree that is opened inside (its slots, holds,
    spans and books), open file descriptors, threads that have work (an abandoned tool is one), and
    child processes. Use it with ``with`` around a whole program or inside async code, or with
    ``async with``, which lets tasks that are ending take their last steps.

    What the body raises comes first: then nothing is compared.

    Args:
        patience: Real seconds that threads and processes which are about to end may take.

    Raises:
        LeakError: (on leaving) Something is left; it says what. It is still there.
    """
    return Census(patience)


@final
class Census:
    """What ``census`` gives. ``trees`` are the root supervisors of the trees opened inside."""

    def __init__(self, patience: float = 0.25) -> None:
        self.trees: list[RootSupervisor] = []
        self._patience = patience
        self._token: Token[Any] | None = None

    def __enter__(self) -> Census:
        outer = tree_observer.get()

        def observe(tree: RootSupervisor) -> None:
            self.trees.append(tree)
            if outer is not None:
                outer(tree)

        self._token = tree_observer.set(observe)
        self._threads = Threads(_asyncio_loop())
        self._tasks = frozenset(_tasks_here())
        self._processes = frozenset(child_processes())
        # Last: whatever the others opened to look around is closed again.
        self._descriptors = open_descriptors()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_observing()
        if exc is None:
            self.check()

    async def __aenter__(self) -> Census:
        return self.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_observing()
        if exc is None:
            for _ in range(_TURNS):
                if not any(leak.kind in ("task", "tree") for leak in self._left_in_loop()):
                    break
                await anyio.lowlevel.checkpoint()
            self.check()

    @contextmanager
    def observing(self) -> Generator[None]:
        """Count before the body, and see the trees that it opens; compare when you like."""
        self.__enter__()
        try:
            yield
        finally:
            self._stop_observing()

    def _stop_observing(self) -> None:
        if self._token is not None:
            tree_observer.reset(self._token)
            self._token = None

    def check(self) -> None:
        """Compare with what there was on entry.

        Raises:
            LeakError: Something is left.
        """
        leaks = tuple(self.leaks())
        if leaks:
            raise LeakError(leaks)

    def leaks(self) -> list[Leak]:
        """What is left just now."""
        self._be_patient()
        return [*self._left_in_loop(), *self._left_outside()]

    def _left_in_loop(self) -> Iterator[Leak]:
        for tree in self.trees:
            yield from leaks_of_tree(tree)
        for task in _tasks_here():
            if task not in self._tasks:
                yield Leak("task", f"{name_of(task)}: {place(coroutine_of(task))}")

    def _left_outside(self) -> Iterator[Leak]:
        for thread in self._threads.working():
            yield Leak("thread", _thread_text(thread))
        for process in child_processes():
            if process not in self._processes:
                yield Leak("process", _process_text(process))
        for number, target in open_descriptors().items():
            if self._descriptors.get(number) != target:
                yield Leak("descriptor", f"{number}: {target}")

    def _be_patient(self) -> None:
        """Let end what is about to end anyway: a thread's last lines run after its work is told."""
        until = time.monotonic() + self._patience
        while time.monotonic() < until:
            threads = self._threads.working()
            for thread in threads:
                thread.join(min(0.01, self._patience))
            if not threads and not (set(child_processes()) - self._processes):
                return
            time.sleep(0.001)


def leaks_of_tree(tree: RootSupervisor) -> Iterator[Leak]:
    """What is left of a tree that should have ended, down to its books."""
    ledger, state = tree.ledger, tree.ledger.state
    if not tree.is_closed:
        yield Leak("tree", f"{ledger.root.node.path} is still open")
    for actor in tree.top.below():
        yield Leak("slot", f"{actor.path} is {actor.state.value}")
    living = {actor.path for actor in tree.top.below()}
    for node in state.nodes.values():
        if node.id and node.path not in living:
            yield Leak("slot", f"the lease of {node.path} has not ended")
    for hold in state.holds.values():
        how = "dispatched" if hold.is_dispatched else "granted and not sent"
        yield Leak("hold", f"{hold.node.path} holds {hold.amount} {ledger.unit} units ({how})")
    for waiting in state.waiting.values():
        yield Leak("hold", f"{waiting.node.path} still waits for money")
    if state.counters.open_spans:
        yield Leak("span", f"{state.counters.open_spans} spans are open")
    yield from _faults_in_books(tree)


def _faults_in_books(tree: RootSupervisor) -> Iterator[Leak]:
    try:
        tree.ledger.check_closed()
    except AssertionError as error:
        yield Leak("books", f"W6 does not hold: {_one_line(error)}")
    journal = tree.ledger.journal
    try:
        folded = fold(journal.tail, onto=journal.base).plain()
    except (AssertionError, KeyError) as error:
        yield Leak("books", f"W8 does not hold: the journal cannot be replayed: {_one_line(error)}")
        return
    if folded != tree.ledger.state.plain():
        yield Leak("books", "W8 does not hold: the journal replays to another state")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- tasks -------------------------------------------------------------------------------------


class _TrioTask(Protocol):
    name: str
    coro: object
    child_nurseries: Iterable[_TrioNursery]


class _TrioNursery(Protocol):
    child_tasks: Iterable[_TrioTask]


def running_tasks() -> Iterator[object]:
    """The tasks of the running loop beside trio's own."""
    if running_backend() == "asyncio":
        yield from asyncio.all_tasks()
        return
    trio: Any = sys.modules["trio"]
    left: list[_TrioTask] = [trio.lowlevel.current_root_task()]
    while left:
        task = left.pop()
        if not task.name.startswith("<"):
            yield task
        left.extend(child for nursery in task.child_nurseries for child in nursery.child_tasks)


def _tasks_here() -> Iterator[object]:
    """The same; none where no loop runs."""
    if _loop_runs():
        yield from running_tasks()


def _loop_runs() -> bool:
    try:
        running_backend()
    except anyio.NoEventLoopError:
        return False
    return True


def _asyncio_loop() -> object:
    return asyncio.get_running_loop() if _loop_runs() and running_backend() == "asyncio" else None


def name_of(task: object) -> str:
    """A task's name, on either backend."""
    if isinstance(task, asyncio.Task):
        return cast("asyncio.Task[object]", task).get_name()
    return cast("_TrioTask", task).name


def coroutine_of(task: object) -> object:
    """What a task runs, on either backend."""
    if isinstance(task, asyncio.Task):
        return cast("asyncio.Task[object]", task).get_coro()
    return cast("_TrioTask", task).coro


# --- the process -------------------------------------------------------------------------------


def open_descriptors() -> Mapping[int, str]:
    """What is open in this process, by number; empty where the system does not tell."""
    try:
        numbers = os.listdir(_FDS)
    except OSError:
        return {}
    found: dict[int, str] = {}
    for number in numbers:
        try:
            found[int(number)] = os.readlink(f"{_FDS}/{number}")
        except OSError:
            continue  # it was that of the listing itself
    return found


def child_processes() -> list[int]:
    """The processes started here and not yet waited for; none where the system does not tell."""
    found: list[int] = []
    for thread in threading.enumerate():
        try:
            with open(f"/proc/self/task/{thread.native_id}/children", encoding="ascii") as file:
                found.extend(map(int, file.read().split()))
        except OSError:
            continue  # it has ended, or this is no Linux
    return found


def _process_text(process: int) -> str:
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
    except OSError:
        return f"{process}"
    ended = ", ended and not waited for" if rest.split()[:1] == ["Z"] else ""
    return f"{process} ({name}{ended})"


def _thread_text(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or -1)  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return thread.name
    where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return f"{thread.name}: {where}"
