"""Supervisors: keeping children alive, and ending them in order."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum
from typing import Any, TypeVar, final

import anyio
import anyio.lowlevel
import attrs

from treewarden.ledgers import Kind
from treewarden.protocols import ServiceFailed, UsageError

from ._actor import (
    Actor,
    Body,
    StopKind,
    to_the_end,
)
from ._child import Child
from ._lifecycle import State
from ._supervision import Intensity, Restart, Strategy, plan_after_end

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")

_PATIENCE_SECONDS = 5.0


_E = TypeVar("_E", bound=Enum)


def _member(kind: type[_E], given: Any, what: str) -> _E:
    try:
        return kind(given)
    except ValueError:
        known = ", ".join(f'"{member.value}"' for member in kind)
        raise UsageError(
            f"{what} is {given!r}. Use one of {known}.", code="cave_option_invalid"
        ) from None


def _restart_of(given: Restart | str) -> Restart:
    return _member(Restart, given, "restart")


def _require_spec(given: Any) -> ChildSpec:
    if not isinstance(given, ChildSpec):
        raise UsageError(
            f"{given!r} is no child. Give tw.ChildSpec(name=..., start=...).",
            code="cave_option_invalid",
        )
    return given


def _require_intensity(given: Any) -> Intensity:
    if not isinstance(given, Intensity):
        raise UsageError(
            f"intensity is {given!r}. Give tw.Intensity(restarts=..., period_seconds=...).",
            code="cave_option_invalid",
        )
    return given


def _is_span(given: Any) -> bool:
    return type(given) in (int, float) and 0 <= given < math.inf


def _usual_patience(spec: ChildSpec) -> float | None:
    return None if isinstance(spec.start, Supervisor) else _PATIENCE_SECONDS


@final
@attrs.frozen(kw_only=True)
class ChildSpec:
    """A child that a supervisor keeps alive.

    Args:
        name: Its place below the supervisor.
        start: Its body, called with its actor; called again for every restart, under the same
            lease. A ``Supervisor`` is such a body, too.
        restart: "permanent": it is always started again. "transient": only when it failed or was
            killed. "temporary": never.
        shutdown_seconds: How long its end is waited for before the next one is stopped. None: as
            long as it takes. 5, but None for a supervisor, which has children of its own to wait
            for.

    Raises:
        UsageError: One of them cannot be.
    """

    name: str
    start: Body
    restart: Restart = attrs.field(default=Restart.PERMANENT, converter=_restart_of)
    shutdown_seconds: float | None = attrs.field(
        default=attrs.Factory(_usual_patience, takes_self=True)
    )

    def __attrs_post_init__(self) -> None:
        require_name(self.name)
        if not callable(self.start):
            raise UsageError(f"start of {self.name} is {self.start!r}. Give an async function.")
        seconds = self.shutdown_seconds
        if seconds is not None and not _is_span(seconds):
            raise UsageError(
                f"shutdown_seconds of {self.name} is {seconds!r}. Give a number from 0, or None.",
                code="cave_option_invalid",
            )


@final
class Supervisor:
    """Keeps children alive until restarts become too many.

    Children start in order and are stopped in reverse order, each waited for at most its
    ``shutdown_seconds``. When one ends that is to be started again, the strategy says who is
    started again with it: "one_for_one" nobody, "one_for_all" all the others, "rest_for_one" those
    after it. A child that is started again keeps its lease, its wallet and its path. One restart
    more than the intensity bears stops all children and fails the supervisor with the last child's
    error. It ends by itself when none of its children runs or will.

    It says what is to be and has no state of its own: one may serve in several places.

    Raises:
        UsageError: An argument cannot be.
    """

    def __init__(
        self,
        children: Iterable[ChildSpec],
        *,
        strategy: Strategy | str = Strategy.ONE_FOR_ONE,
        intensity: Intensity | None = None,
    ) -> None:
        self.children = tuple(map(_require_spec, children))
        self.strategy = _member(Strategy, strategy, "strategy")
        self.intensity = _require_intensity(Intensity() if intensity is None else intensity)
        names = [spec.name for spec in self.children]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise UsageError(
                f"the children of a supervisor need different names, and {', '.join(twice)} is "
                "there more than once.",
                code="cave_option_invalid",
            )

    async def __call__(self, actor: Actor) -> None:
        """The body of the supervising actor: start the children in order, then watch over them."""
        await self.supervise(actor, lambda: None)

    async def supervise(self, actor: Actor, on_started: Callable[[], None]) -> None:
        """The same, and ``on_started`` is called when every child has made its first step."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        supervision = _Supervision(self, actor)
        actor.stops_in_order = True
        try:
            await supervision.start()
            on_started()
            await supervision.watch()
        finally:
            try:
                await to_the_end(supervision.shut_down)
            finally:
                actor.stops_in_order = False


class _Supervision:
    """A supervisor at work, from its start to its end."""

    def __init__(self, supervisor: Supervisor, actor: Actor) -> None:
        self._supervisor, self._actor = supervisor, actor
        # In start order. Those that have started; all of them, but for an end that comes early.
        self._children: dict[str, Child] = {}
        # Whose end was not looked at yet, in the order they ended.
        self._ended: deque[Child] = deque()
        self._news = anyio.Event()
        self._restarted_at: list[float] = []
        self._why_shut_down: str | None = None
        # What a child's actor ended with that was not asked to: a bug of ours.
        self._bug: BaseException | None = None

    async def start(self) -> None:
        """Start the children in order."""
        for spec in self._supervisor.children:
            await self._start(spec)

    async def watch(self) -> None:
        """Look after the children and return when none of them runs or will.

        Raises:
            Exception: Too many restarts: the last child's error.
        """
        while True:
            if self._bug is not None:
                raise self._bug
            while self._ended:
                await self._look_after(self._ended.popleft())
            if not any(child.is_up for child in self._children.values()):
                break
            self._news = anyio.Event()
            await self._news.wait()
        for child in self._children.values():
            child.let_end()
        for child in self._children.values():
            await child.actor.wait()

    async def shut_down(self) -> None:
        """Stop the children one after the other, last first, and return when all have ended.

        Whoever takes too long is reported, and waited for when the others have ended. Good to be
        called again when it was interrupted.
        """
        asked = self._actor.stop_asked
        kind = StopKind.CLOSED if asked is None else asked.kind
        why = self._why_shut_down or f"{self._actor.path} has ended"
        why = why if asked is None else asked.reason
        children = [c for c in self._children.values() if c.actor.state is not State.ENDED]
        for child in reversed(children):
            if not child.is_over:  # else it is on its way, with an end of its own
                child.stop(kind, why, self._now)
            await self._wait_patiently(child, child.actor.wait)
        for child in children:
            await child.actor.wait()

    # --- starting and stopping -----------------------------------------------------------------

    async def _start(self, spec: ChildSpec) -> None:
        child = Child(spec.name, spec.start, spec.restart, spec.shutdown_seconds, self._note_end)
        child.actor = self._actor.root.start(
            self._actor,
            spec.name,
            child,
            kind=Kind.SERVICE,
            on_end=lambda actor: self._note_gone(child, actor),
        )
        self._children[spec.name] = child
        await child.wait_begun()

    async def _restart(self, names: tuple[str, ...]) -> None:
        for name in names:
            child, root = self._children[name], self._actor.root
            if child.is_over:
                continue
            root.ledger.count_restart(child.actor.lease, self._now)
            child.start_again()
            await child.wait_begun()

    async def _stop_for_restart(self, names: tuple[str, ...], why: str) -> None:
        stopped: list[Child] = []
        for child in (self._children[name] for name in names):
            if not child.is_up:
                continue
            stopped.append(child)
            if child.restart is Restart.TEMPORARY:
                child.stop(StopKind.CLOSED, why, self._now)
            else:
                child.stop_incarnation(why, self._now)
            await self._wait_patiently(child, child.wait_down)
        for child in stopped:
            await child.wait_down()

    async def _wait_patiently(self, child: Child, wait: Callable[[], Awaitable[None]]) -> None:
        left = child.patience_left(self._now)
        with anyio.move_on_after(left) as patience:
            await wait()
        if not patience.cancelled_caught:
            return
        late = (
            f"{child.actor.path} did not end within {child.patience_seconds:g} s of being asked to"
        )
        if late not in self._actor.lease.recorder.faults:  # once is enough to know it
            self._actor.root.fault(self._actor, late)

    # --- what an end comes to --------------------------------------------------------------------

    async def _look_after(self, child: Child) -> None:
        ending = child.ending
        if child.is_over or ending is None:
            return  # it was stopped, or started again, for another one's sake
        now, supervisor = self._now, self._supervisor
        plan = plan_after_end(
            supervisor.strategy,
            tuple(self._children),
            child.name,
            restart=child.restart,
            failed=ending.error is not None,
            intensity=supervisor.intensity,
            restarted_at=self._restarted_at,
            now=now,
            temporary=frozenset(
                c.name for c in self._children.values() if c.restart is Restart.TEMPORARY
            ),
        )
        if plan.escalate:
            self._escalate(child, ending.error)
        if plan.start:
            self._restarted_at = [
                at for at in self._restarted_at if now - at < supervisor.intensity.period_seconds
            ] + [now]
            await self._stop_for_restart(plan.stop, f"{child.actor.path} is started again")
            await self._restart(plan.start)
        elif child.restart is Restart.TEMPORARY or supervisor.strategy is Strategy.ONE_FOR_ONE:
            child.let_end()

    def _escalate(self, child: Child, error: Exception | None) -> None:
        child.let_end()
        self._why_shut_down = f"{child.actor.path} failed too often"
        raise error or ServiceFailed(
            child.actor.path,
            f"it ended more than {self._supervisor.intensity.restarts} times within "
            f"{self._supervisor.intensity.period_seconds:g} s",
        )

    def _note_end(self, child: Child) -> None:
        self._ended.append(child)
        self._news.set()

    def _note_gone(self, child: Child, actor: Actor) -> None:
        """The child's actor has ended, and whoever waits for it has to know."""
        if actor.lease.has_record:
            self._actor.lease.recorder.faults.extend(actor.lease.recorder.faults)
        if not child.is_over and actor.stop_asked is None:
            self._bug = actor.error
        child.is_over = True
        child.note_gone()
        self._news.set()

    @property
    def _now(self) -> float:
        return self._actor.root.clock.monotonic()


def require_name(name: Any) -> None:
    """See to it that a name can be part of a path.

    Raises:
        UsageError: It cannot.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"a service's name is {name!r}. Use letters, digits, '.', '_' and '-', at most 96, "
            "and a letter or digit first.",
            code="cave_option_invalid",
        )
