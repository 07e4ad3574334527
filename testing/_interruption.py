"""One run of a scenario in which somebody is cancelled at one instant, and what came of it.

An *instant* is the moment right before a task makes a step: any task of the scenario or of its
trees, counted over all of them. Between two instants exactly one piece of code runs, without an
await in it, so every state that another task or a caller can find is the state at some instant.
Among them are the moments between a grant (of money, of a call slot, of an admission) and the
resume of whoever waited for it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from inspect import CORO_CREATED, getcoroutinestate
from types import CoroutineType
from typing import Any, cast, final

import anyio
import attrs

from treewarden.actors import Actor, State, StopKind, running_backend
from treewarden.protocols import SupervisorCancelled, TreewardenError

from ._census import Census, coroutine_of, leaks_of_tree, name_of, running_tasks
from ._exploration import Aim, Attempt
from ._timeline import DeadlockError, place
from ._virtual import VirtualClock

Scenario = Callable[[], Awaitable[object]]

_CALLER = "scenario"
"""The name of the task that the scenario runs in."""


class Runaway(RuntimeError):
    """A scenario takes steps without end."""

    def __init__(self, steps: int) -> None:
        super().__init__(f"after {steps} steps it still goes on: something spins")


@attrs.frozen
class Instant:
    """An instant of the undisturbed run: who may be cancelled natively there."""

    aims: tuple[Aim, ...]


@attrs.define
class Hit:
    """A native cancel that has struck."""

    task: asyncio.Task[object]
    # The actor it runs, and its state then; None for what is no actor's task.
    actor: Actor | None
    had_started: bool
    # The other live actors of that tree, and which of them are below the one that was hit.
    others: list[Actor]
    below: set[int]


@final
class Interruption:
    """Runs a scenario once. Not used again.

    Args:
        attempt: Where it is cancelled; instant 0 leaves it undisturbed.
        limit: After so many steps it is taken to spin.
        allowed: What the scenario may raise, beside cancellations and errors of Treewarden.
        patience: See ``census``.
    """

    def __init__(
        self,
        scenario: Scenario,
        attempt: Attempt,
        *,
        limit: int | None = None,
        allowed: tuple[type[BaseException], ...] = (),
        patience: float = 0.25,
        thread_patience: float = 0.25,
    ) -> None:
        self.attempt = attempt
        # One for each step, in an undisturbed run.
        self.instants: list[Instant] = []
        # What did not hold.
        self.broken: list[str] = []
        # What the scenario raised, cancellations included.
        self.error: BaseException | None = None
        # The instant in words, once it has come.
        self.task, self.hit_name, self.at = "(it never came)", "nobody", 0.0
        self._scenario, self._limit, self._allowed = scenario, limit, allowed
        self._thread_patience = thread_patience
        self._census = Census(patience)
        self._steps = 0
        self._is_over = False
        self._driver: object = None
        self._caller: asyncio.Task[object] | None = None
        # Around the scenario, from outside in: cancelling a scope twice does nothing, so there are
        # two. Made in the loop.
        self._scopes: list[anyio.CancelScope] = []
        self._hit: Hit | None = None
        # What a task would have run that was cancelled before its first step.
        self._never_ran: Coroutine[Any, Any, object] | None = None
        # The second time comes a few steps after the first: not the same number each time.
        again = attempt.instant + 1 + attempt.instant % 3
        self._strikes = [attempt.instant, again][: attempt.times] if attempt.instant else []

    @property
    def was_reached(self) -> bool:
        """False if the run was over before the instant came."""
        return self._steps >= self.attempt.instant

    def run(self, *, seed: int | None) -> None:
        """Run it to its end and judge. Raises only what a scenario's author has to see."""
        backend = self.attempt.backend
        if backend == "trio" and seed is None:
            seed = 0  # without one, trio draws its orders anew in each run
        clock = VirtualClock(patience=self._thread_patience)
        try:
            clock.run(self._program, backend=backend, seed=seed)
        except (DeadlockError, Runaway) as stuck:
            self.broken.append(f"it does not end: {stuck}")
            for tree in self._census.trees:
                self.broken.extend(map(str, leaks_of_tree(tree)))
        finally:
            if self._never_ran is not None:
                self._never_ran.close()
        self.broken.extend(self._wrong_endings())
        self.broken.extend(self._collateral_damage())

    # --- running -------------------------------------------------------------------------------

    async def _program(self) -> None:
        is_on_asyncio = running_backend() == "asyncio"
        (self._driver,) = running_tasks()
        if is_on_asyncio:
            asyncio.get_running_loop().set_exception_handler(self._note_unhandled)
        self._scopes = [anyio.CancelScope(), anyio.CancelScope()]
        with self._census.observing():
            VirtualClock.watch_steps(self._before_step)
            try:
                await (self._on_asyncio() if is_on_asyncio else self._on_trio())
            finally:
                self._is_over = True
        self.broken.extend(str(leak) for leak in self._census.leaks())

    async def _on_asyncio(self) -> None:
        # Not in a task group: a native cancel of its child would cancel this task too.
        self._caller = asyncio.get_running_loop().create_task(self._call(), name=_CALLER)
        await asyncio.wait([self._caller])

    async def _on_trio(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._call, name=_CALLER)

    async def _call(self) -> None:
        outer, inner = self._scopes
        with outer, inner:
            try:
                await self._scenario()
            except BaseException as error:
                self.error = error
                if not _leaves(error, _cancellations()) or not isinstance(error, Exception):
                    raise

    def _note_unhandled(self, loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.broken.append(f"unhandled in the loop: {context.get('message')}: {error!r}")

    def _before_step(self, task: object) -> None:
        if task is self._driver or self._is_over:
            return
        self._steps += 1
        if not self.attempt.instant:
            self._check_books()
            self.instants.append(Instant(tuple(self._aims(task))))
        elif self._steps in self._strikes:
            self._check_books()
            self._strike(task)
        if self._limit is not None and self._steps > self._limit:
            for scope in self._scopes:
                scope.cancel()
            if running_backend() == "asyncio":
                raise Runaway(self._steps)

    def _check_books(self) -> None:
        """Every ledger's invariants hold between two steps. The first that does not is told."""
        for tree in self._census.trees:
            try:
                tree.ledger.check()
            except AssertionError as error:
                if not self.broken:
                    self.broken.append(f"before step {self._steps} the books are wrong: {error}")

    # --- striking ------------------------------------------------------------------------------

    def _aims(self, stepping: object) -> Iterator[Aim]:
        """Who may be cancelled natively before this step, each task once."""
        yield "caller"
        if self._caller is None:
            return
        if stepping is not self._caller:
            yield "stepping"
        if self._other(name_of(stepping), len(self.instants) + 1) is not None:
            yield "other"

    def _strike(self, stepping: object) -> None:
        is_first = self._steps == self.attempt.instant
        if is_first:
            self.task = f"{name_of(stepping)}: {place(coroutine_of(stepping))}"
            self.at = VirtualClock.running().monotonic()
        if self.attempt.kind == "scope":
            self.hit_name = "the scope around the scenario"
            self._scopes[1 if is_first else 0].cancel()
            return
        if is_first:
            self._hit = self._aim(stepping)
        if self._hit is not None:
            self._hit.task.cancel()

    def _aim(self, stepping: object) -> Hit | None:
        """The task to be cancelled natively."""
        victim: object = self._caller
        if self.attempt.aim == "stepping":
            victim = stepping
        elif self.attempt.aim == "other":
            path = self._other(name_of(stepping), self._steps)
            victim = next((t for t in asyncio.all_tasks() if t.get_name() == path), None)
        if victim is None:
            return None
        task = cast("asyncio.Task[object]", victim)
        self.hit_name = f"{task.get_name()}, which was at {place(task.get_coro())}"
        self._never_ran = _unstarted(task)
        actor = self._actor_of(task.get_name())
        if actor is None:
            return Hit(task, None, had_started=True, others=[], below=set())
        return Hit(
            task,
            actor,
            had_started=actor.state is not State.ADMITTED,
            others=[other for other in actor.root.top.below() if other is not actor],
            below={id(below) for below in actor.below()},
        )

    def _other(self, stepping: str, number: int) -> str | None:
        """The path of a live actor beside the one that steps; another one at each instant."""
        living = [a.path for tree in self._census.trees for a in tree.top.below()]
        others = [path for path in living if path != stepping]
        return others[number % len(others)] if others else None

    def _actor_of(self, name: str) -> Actor | None:
        """The actor whose task is called so; None where that is not certain."""
        found = [a for tree in self._census.trees for a in tree.top.below() if a.path == name]
        return found[0] if len(found) == 1 else None

    # --- judging -------------------------------------------------------------------------------

    def _wrong_endings(self) -> Iterator[str]:
        if self.error is None:
            return
        good: tuple[type[BaseException], ...] = (TreewardenError, *self._allowed, *_cancellations())
        for error in _leaves(self.error, good):
            yield f"the scenario raised {type(error).__name__}: {error}"

    def _collateral_damage(self) -> Iterator[str]:
        """What a native cancel of one actor has done to others."""
        hit = self._hit
        if hit is None or hit.actor is None:
            return
        root = hit.actor.root
        if not hit.had_started:
            # Nothing of it ever ran, so nothing but the owner can tell.
            if not isinstance(root.failure, SupervisorCancelled):
                yield (
                    f"{hit.actor.path} was cancelled before its first step, and its tree ended "
                    f"with {root.failure!r} instead of SupervisorCancelled"
                )
            return
        if root.failure is not None:
            yield f"a native cancel of {hit.actor.path} ended its tree: {root.failure!r}"
        for other in hit.others:
            if id(other) not in hit.below and _was_drawn_in(other):
                yield f"a native cancel of {hit.actor.path} cancelled {other.path} too"


def _was_drawn_in(actor: Actor) -> bool:
    """True if a cancellation reached it that neither its tree nor its parent asked for."""
    asked = actor.stop_asked
    if asked is None:
        return False
    return asked.kind is StopKind.NATIVE or asked.reason == "the tree was cancelled"


def _unstarted(task: asyncio.Task[object]) -> Coroutine[Any, Any, object] | None:
    """What a task of an anyio group will run with its first step; None if it has begun.

    Python warns of a coroutine that never ran. anyio leaves it at that for its own tasks, and here
    it is what was asked for.
    """
    wrapper = task.get_coro()
    if not isinstance(wrapper, CoroutineType) or getcoroutinestate(wrapper) != CORO_CREATED:
        return None
    frame = wrapper.cr_frame
    assert frame is not None, "it has not begun, so it is not over"
    handle: object = frame.f_locals.get("self")
    return cast("Coroutine[Any, Any, object] | None", getattr(handle, "coro", None))


def _cancellations() -> tuple[type[BaseException], ...]:
    trio: Any = sys.modules.get("trio")
    types: list[type[BaseException]] = [asyncio.CancelledError]
    if trio is not None:
        types.append(trio.Cancelled)
    return tuple(types)


def _leaves(error: BaseException, without: tuple[type[BaseException], ...]) -> list[BaseException]:
    """The errors in ``error``, itself or a group, that are of none of these types."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return [leaf for inner in group.exceptions for leaf in _leaves(inner, without)]
    return [] if isinstance(error, without) else [error]
