from __future__ import annotations

import pytest

from treewarden.actors import TRANSITIONS, Moment, State


def test_every_state_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(State)


def test_an_ended_actor_has_no_future() -> None:
    assert TRANSITIONS[State.ENDED] == {}


def test_every_state_but_the_first_is_reached() -> None:
    reached = {state for moments in TRANSITIONS.values() for state in moments.values()}
    assert reached >= set(State) - {State.ADMITTED}


@pytest.mark.parametrize("state", [s for s in State if s is not State.ENDED])
def test_a_stop_may_be_asked_for_at_any_time(state: State) -> None:
    assert Moment.STOP_ASKED in TRANSITIONS[state]


def test_only_a_task_without_a_first_step_can_be_lost() -> None:
    assert [s for s, moments in TRANSITIONS.items() if Moment.LOST in moments] == [State.ADMITTED]
