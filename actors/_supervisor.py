"""Running actors: the frame around each one, and what is restarted.

The frame is the outermost code of an actor's task. It is the supervisor's code running there, so
that giving back a lease never depends on the actor: whatever way the body ends (return, error,
cancellation by us, by the tree, or natively by somebody else), the frame turns it into an outcome,
waits until all below is gone, and ends the lease without an await.

What a frame cannot see is a task that was cancelled natively before its first step: then nothing of
it ever runs. The root notices that (see _root.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

import anyio
import anyio.lowlevel
import attrs

from treewarden.ledgers import Kind, Outcome
from treewarden.protocols import LedgerError, UsageError

from ._actor import Actor, StopAsked, StopKind, current_actor
from ._lifecycle import Moment, State, after
from ._supervision import Intensity, Restart, Strategy, plan_after_end

Body: TypeAlias = Callable[[Actor], Awaitable[Any]]


async def frame(actor: Actor, body: Body) -> None:
    """Run ``body`` and see the actor off. Never raises what the body or a cancellation raised."""
    if actor.state is not State.ENDED:
        actor.state = after(actor.state, Moment.FIRST_STEP)
    current_actor.set(actor)
    try:
        actor.value = await body(actor)
        actor.outcome = Outcome.OK
    except Exception as error:
        _note_error(actor, error)
    except BaseException as error:
        _note_cancellation(actor, error)
    if actor.children:
        await _outlive_children(actor)
    actor.root.see_off(actor)
    if actor.root.has_native_cancel:
        await _let_it_strike(actor)


def _note_error(actor: Actor, error: Exception) -> None:
    """An error is the outcome, except where the actor was to end anyway.

    Then the stop is why it ended, and the error is of its clean-up: a fault beside the outcome.
    """
    if actor.stop_asked is None:
        actor.outcome, actor.error = Outcome.FAILED, error
    else:
        actor.outcome = Outcome.CANCELLED
        if error is not actor.root.journal_failure:  # the stop itself, met on the way out
            actor.root.fault(actor, f"{actor.path}: its clean-up raised {error!r}")


def _note_cancellation(actor: Actor, error: BaseException) -> None:
    """Make an outcome of what is no plain error: mostly a cancellation, perhaps with company.

    Raises:
        BaseException: The error again, because the program is ending; the books are shut.
    """
    rest = _without_cancellation(error, actor.root.cancelled_type)
    if rest is None:
        actor.outcome = Outcome.CANCELLED
        _note_who_cancelled(actor)
    elif isinstance(rest, Exception):
        _note_error(actor, rest)
    else:
        # SystemExit and KeyboardInterrupt end the program, but not before the books are shut.
        actor.outcome, actor.error = Outcome.CANCELLED, error
        actor.root.fault(actor, f"ended by {error!r}")
        actor.root.see_off(actor, raised=error)
        raise error


def _without_cancellation(
    error: BaseException, cancelled: type[BaseException]
) -> BaseException | None:
    """What is left of an error when its cancellations are taken out of it."""
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).split(cancelled)[1]
    return None if isinstance(error, cancelled) else error


def _note_who_cancelled(actor: Actor) -> None:
    """A cancellation that nobody asked this actor for ends this actor only."""
    if actor.stop_asked is None:
        if actor.root.is_cancelled_from_outside:
            reason = StopAsked(StopKind.CLOSED, "the tree was cancelled")
        else:
            reason = StopAsked(StopKind.NATIVE, "its task was cancelled from outside")
        actor.stop_asked = reason
    actor.root.forget_native_cancel()


async def _let_it_strike(actor: Actor) -> None:
    """Take a native cancel that came during the task's last step, while there is still a frame.

    After it the task would end as cancelled, and anyio would take that for a reason to cancel the
    whole group. The actor has ended already, so here it harms nobody.
    """
    try:
        await anyio.lowlevel.checkpoint()
    except actor.root.cancelled_type:
        actor.root.forget_native_cancel()


async def _outlive_children(actor: Actor) -> None:
    """A parent's end is not the end before everything below it has ended."""
    asked = actor.stop_asked or StopAsked(StopKind.CLOSED, f"{actor.path} has ended")
    actor.lease.takes_no_more = True
    children = list((actor.children or {}).values())
    for child in reversed(children):
        child.stop(asked.kind, asked.reason)
    while actor.children:
        try:
            with anyio.CancelScope(shield=True):
                await actor.wait_for_children()
        except actor.root.cancelled_type:
            # A shield keeps out our own cancellations; a native one comes through once. The
            # children are still alive, so their parent must be too.
            actor.root.forget_native_cancel()


@attrs.frozen(kw_only=True)
class ChildSpec:
    """A child that a supervisor keeps alive.

    ``start`` is its body; it is called again for every restart, under the same lease.
    """

    name: str
    start: Body
    restart: Restart = Restart.PERMANENT


class Supervisor:
    """Keeps children alive, one for one, until restarts become too many.

    A restarted child keeps its lease, wallet and place in the tree. When the intensity is
    exceeded the supervisor stops all children and fails with the last child's error.
    """

    def __init__(
        self,
        children: tuple[ChildSpec, ...],
        *,
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        intensity: Intensity | None = None,
    ) -> None:
        if strategy is not Strategy.ONE_FOR_ONE:
            raise UsageError(
                f"strategy {strategy.value} is planned but not run yet. Use one_for_one.",
                code="cave_supervision_strategy_unavailable",
            )
        self._specs = children
        self._strategy = strategy
        self._intensity = intensity or Intensity()
        self._restarted_at: list[float] = []
        self._failure: BaseException | None = None

    async def __call__(self, actor: Actor) -> None:
        """The body of the supervising actor: start the children in order, then watch over them."""
        root = actor.root
        for spec in self._specs:
            root.start(actor, spec.name, self._keep_alive(spec), kind=Kind.SERVICE)
        await actor.wait_for_children()
        if self._failure is not None:
            raise self._failure

    def _keep_alive(self, spec: ChildSpec) -> Body:
        async def body(actor: Actor) -> Any:
            while True:
                value, error = None, None
                try:
                    value = await spec.start(actor)
                except LedgerError:
                    raise  # a bug of ours, not a failure of the child
                except Exception as raised:
                    error = raised
                if not self._starts_again(spec, actor, error):
                    return value

        return body

    def _starts_again(self, spec: ChildSpec, actor: Actor, error: Exception | None) -> bool:
        now = actor.root.clock.monotonic()
        plan = plan_after_end(
            self._strategy,
            tuple(s.name for s in self._specs),
            spec.name,
            restart=spec.restart,
            failed=error is not None,
            intensity=self._intensity,
            restarted_at=self._restarted_at,
            now=now,
        )
        if plan.escalate:
            self._escalate(actor, error)
        if spec.name not in plan.start:
            if error is not None:
                raise error
            return False
        self._restarted_at = [
            at for at in self._restarted_at if now - at < self._intensity.period_seconds
        ] + [now]
        actor.root.ledger.count_restart(actor.lease, now)
        return True

    def _escalate(self, actor: Actor, error: Exception | None) -> None:
        self._failure = error or RuntimeError(f"{actor.path} ends again and again")
        parent = actor.parent
        assert parent is not None, actor
        for sibling in reversed(list((parent.children or {}).values())):
            if sibling is not actor:
                sibling.stop(StopKind.CLOSED, f"{actor.path} failed too often")
        raise self._failure
