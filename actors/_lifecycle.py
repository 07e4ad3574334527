"""The life of an actor, as a table.

Two rules: every lawful change of an actor's state is in this table and nowhere else, and what is
missing is a bug in the caller, not a case to be ignored.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where an actor is in its life."""

    # Enum hashes a member's name, in Python; a member is the only one of its kind anyway, and the
    # table below is looked up three times in every actor's life.
    __hash__ = object.__hash__

    ADMITTED = "admitted"  # it has a lease and a task that has not made its first step
    RUNNING = "running"
    STOPPING = "stopping"  # its body is over or asked to end; children may still be alive
    ENDED = "ended"  # its lease is given back


class Moment(Enum):
    """What can happen to an actor."""

    __hash__ = object.__hash__

    FIRST_STEP = "first_step"
    STOP_ASKED = "stop_asked"
    BODY_OVER = "body_over"
    CHILDREN_GONE = "children_gone"
    # Its task is gone without ever having made a step.
    LOST = "lost"


TRANSITIONS: dict[State, dict[Moment, State]] = {
    State.ADMITTED: {
        Moment.FIRST_STEP: State.RUNNING,
        # A stop may come before the first step: the step is then made into a cancelled scope.
        Moment.STOP_ASKED: State.ADMITTED,
        Moment.LOST: State.ENDED,
    },
    State.RUNNING: {
        Moment.STOP_ASKED: State.STOPPING,
        Moment.BODY_OVER: State.STOPPING,
    },
    State.STOPPING: {
        Moment.STOP_ASKED: State.STOPPING,
        Moment.BODY_OVER: State.STOPPING,
        Moment.CHILDREN_GONE: State.ENDED,
    },
    State.ENDED: {},
}


def after(state: State, moment: Moment) -> State:
    """The state after ``moment``.

    Raises:
        AssertionError: That cannot happen in this state.
    """
    follows = TRANSITIONS[state].get(moment)
    assert follows is not None, f"{moment.value} cannot happen to an actor that is {state.value}"
    return follows
