"""The frame around each actor: the outermost code of its task.

It is the supervisor's code running there, so that giving back a lease never depends on the actor:
whatever way the body ends (return, error, cancellation by us, by the tree, or natively by somebody
else), the frame turns it into an outcome, waits until all below is gone, and ends the lease without
an await.

What a frame cannot see is a task that was cancelled natively before its first step: then nothing of
it ever runs. The root notices that (see _root.py).
"""

from __future__ import annotations

import anyio
import anyio.lowlevel

from treewarden.ledgers import Outcome

from ._actor import Actor, Body, StopAsked, StopKind, current_actor, without_cancellation
from ._lifecycle import Moment, State, after


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
    rest = without_cancellation(error, actor.root.cancelled_type)
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
