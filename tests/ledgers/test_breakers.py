"""What a judge of breakers makes of turns: what is a loop, what is none, and what follows."""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treewarden.ledgers import Breakers, Judge, Seen, Verdict
from treewarden.protocols import UsageError

LOOPS_ONLY = Breakers(no_progress_turns=None)
quick = settings(max_examples=60, deadline=None)


def call(tool: str = "look", result: str = "same", **more: Any) -> Seen:
    return Seen(tool=tool, arguments=more.pop("arguments", {}), result=result, **more)


def write(what: str, result: str = "ok", **more: Any) -> Seen:
    return call("write", result, arguments={"what": what}, changes_state=True, **more)


def judged(*turns: list[Seen], by: Breakers = LOOPS_ONLY, text: str = "hm") -> list[str]:
    """What was done after each turn: nothing, or the kind and the action."""
    judge = Judge(by)
    done: list[str] = []
    for turn in turns:
        verdict = judge.judge(text, turn)
        judge.check()
        done.append("" if verdict is None else f"{verdict.row.kind} {verdict.row.action}")
        if verdict is not None and verdict.stops:
            break
    return done


def first(done: list[str], what: str) -> int | None:
    """The number of the first turn after which that was done, from 1."""
    return done.index(what) + 1 if what in done else None


TOLD, STOPPED = "loop_detected steered", "loop_detected stopped"


# --- what can be asked for -----------------------------------------------------------------------


@pytest.mark.parametrize("field", [name for name in attrs.fields_dict(Breakers) if name != "steer"])
@pytest.mark.parametrize("nonsense", [0, -1, 1.5, True, "3", 2**53])
def test_a_threshold_is_a_positive_whole_number(field: str, nonsense: Any) -> None:
    with pytest.raises(UsageError) as raised:
        Breakers(**{field: nonsense})
    assert raised.value.code == "cave_breaker_threshold_invalid"
    assert field in str(raised.value)


def test_steer_is_yes_or_no() -> None:
    with pytest.raises(UsageError):
        Breakers(steer=1)  # type: ignore[arg-type]


# --- repeats -------------------------------------------------------------------------------------


def test_a_call_is_a_loop_at_three_and_the_run_ends_at_four() -> None:
    assert judged(*[[call()]] * 4) == ["", "", TOLD, STOPPED]


def test_two_equal_calls_are_no_loop() -> None:
    assert judged([call()], [call()], [call("edit")]) == ["", "", ""]


def test_without_steering_the_run_ends_at_three() -> None:
    at_once = attrs.evolve(LOOPS_ONLY, steer=False)
    assert judged(*[[call()]] * 4, by=at_once) == ["", "", STOPPED]


@pytest.mark.parametrize(
    "other",
    [
        call(result="another"),
        call("edit"),
        call(arguments={"line": 1}),
        call(is_error=True),
    ],
)
def test_another_tool_argument_or_result_is_another_call(other: Seen) -> None:
    assert judged([call()], [call()], [other]) == ["", "", ""]


def test_the_order_of_arguments_makes_no_other_call() -> None:
    one, other = call(arguments={"a": 1, "b": 2}), call(arguments={"b": 2, "a": 1})
    assert judged([one], [other], [one]) == ["", "", TOLD]


def test_arguments_that_json_cannot_say_are_the_same_as_themselves() -> None:
    odd = call(arguments={"a": float("nan")}, result="\ud800")
    assert judged([odd], [odd], [odd]) == ["", "", TOLD]


def test_a_failure_that_comes_back_is_a_loop() -> None:
    assert first(judged(*[[call(is_error=True)]] * 4), TOLD) == 3


def test_a_call_that_failed_once_is_told_from_its_successes() -> None:
    """22.3 (14) as it is here: the result counts, so the failure is another call."""
    two = attrs.evolve(LOOPS_ONLY, repeated_tool_calls=2)
    assert judged([call(is_error=True)], [call()], [call()], by=two) == ["", "", TOLD]


@pytest.mark.parametrize(("last", "fires"), [(8, True), (9, False)])
def test_the_window_has_edges(last: int, fires: bool) -> None:
    """23.5.24, the window: turns 1, 5 and 8 are within eight turns, 1, 5 and 9 are not."""
    turns = [[call()] if n in (1, 5, last) else [call("other", str(n))] for n in range(1, last + 1)]
    assert (judged(*turns)[-1] == TOLD) is fires


def test_without_a_window_the_whole_run_is_looked_at() -> None:
    endless = attrs.evolve(LOOPS_ONLY, repeated_tool_call_window_turns=None)
    turns = [[call()] if n % 40 == 0 else [call("other", str(n))] for n in range(121)]
    assert first(judged(*turns, by=endless), TOLD) == 81


def test_a_window_as_short_as_the_threshold_still_ends_the_run() -> None:
    short = attrs.evolve(LOOPS_ONLY, repeated_tool_call_window_turns=3)
    assert judged(*[[call()]] * 4, by=short) == ["", "", TOLD, STOPPED]


def test_turns_without_calls_move_the_window() -> None:
    short = attrs.evolve(LOOPS_ONLY, repeated_tool_call_window_turns=3)
    assert judged([call()], [call()], [], [call()], by=short) == [""] * 4


def test_three_equal_calls_of_one_reply_are_told_and_no_more_before_the_model_knows() -> None:
    assert judged([call()] * 5, [call()]) == [TOLD, STOPPED]


def test_what_was_said_of_a_loop_names_it() -> None:
    judge = Judge(LOOPS_ONLY)
    verdict: Verdict | None = None
    for _ in range(3):
        verdict = judge.judge("", [call()])
    assert verdict is not None
    assert (verdict.row.tool, verdict.row.count) == ("look", 3)
    assert re.fullmatch("[0-9a-f]{64}", verdict.row.signature or "")
    assert verdict.text.startswith("cave_tool_call_loop_detected: look was called 3 times")


def test_who_was_told_and_does_something_else_is_not_stopped() -> None:
    turns = [[call()]] * 3 + [[call("other", str(n))] for n in range(20)]
    assert judged(*turns) == ["", "", TOLD] + [""] * 20


def test_after_the_window_a_loop_is_told_anew() -> None:
    others = [[call("other", str(n))] for n in range(8)]
    done = judged(*[[call()]] * 3, *others, *[[call()]] * 3)
    assert done == ["", "", TOLD, *[""] * 8, "", "", TOLD]


def test_a_tool_that_may_repeat_is_no_loop() -> None:
    assert judged(*[[call(may_repeat=True)]] * 9) == [""] * 9


def test_a_tool_that_was_not_there_is_no_loop() -> None:
    assert judged(*[[call(is_error=True, is_neutral=True)]] * 9) == [""] * 9


# --- circles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_circle_is_told_in_its_third_round_and_ended_in_its_fourth(period: int) -> None:
    turns = [[call(f"tool{n % period}")] for n in range(4 * period)]
    done = judged(*turns)
    assert first(done, TOLD) == 2 * period + 1
    assert first(done, STOPPED) == 3 * period + 1
    assert done.count(TOLD) == 1


def test_a_circle_is_named_in_its_order() -> None:
    judge = Judge(LOOPS_ONLY)
    said = [judge.judge("", [call(name)]) for name in ("read", "edit", "test") * 3]
    texts = [verdict.text for verdict in said if verdict is not None]
    assert len(texts) == 1
    assert "read, edit, test go round in a circle" in texts[0]


def test_two_loops_that_alternate_irregularly_are_seen() -> None:
    done = judged(*[[call(name)] for name in "aabbaba"])
    assert first(done, TOLD) == 5


def test_a_loop_among_calls_that_change_is_seen() -> None:
    done = judged(*[[call(), call("other", str(n))] for n in range(4)])
    assert done == ["", "", TOLD, STOPPED]


@pytest.mark.parametrize("period", [1, 2, 3])
def test_writing_the_same_again_and_again_is_a_loop(period: int) -> None:
    done = judged(*[[write(str(n % period))] for n in range(4 * period)])
    told = first(done, TOLD)
    assert told is not None
    assert 2 * period < told <= 3 * period


def test_something_new_that_was_written_starts_the_count_again() -> None:
    """The same test may fail as often as something is really tried in between."""
    turns: list[list[Seen]] = []
    for n in range(10):
        turns += [[write(f"try {n}")], [call("test", "it fails", is_error=True)]]
    assert judged(*turns) == [""] * 20


def test_an_edit_that_fails_changes_nothing() -> None:
    turns: list[list[Seen]] = []
    for n in range(4):
        turns += [[write(f"try {n}", "no such file", is_error=True)], [call("test", "it fails")]]
    assert judged(*turns) == ["", "", "", "", "", TOLD, "", STOPPED]


# --- standstill ----------------------------------------------------------------------------------

STANDSTILL = Breakers(repeated_tool_calls=None)
SLOW, STUCK = "no_progress steered", "no_progress stopped"


def searches(count: int) -> list[list[Seen]]:
    """Always something else, always the same answer."""
    return [[call("search", "nothing", arguments={"page": n})] for n in range(count)]


def test_the_same_answer_to_different_questions_is_a_standstill() -> None:
    assert judged(*searches(4), by=Breakers()) == ["", "", SLOW, STUCK]
    at_once = attrs.evolve(STANDSTILL, steer=False)
    assert judged(*searches(4), by=at_once) == ["", "", STUCK]


def test_two_turns_are_no_standstill() -> None:
    assert judged(*searches(2), [call("search", "found")], by=STANDSTILL) == ["", "", ""]


def test_another_text_is_another_turn() -> None:
    judge = Judge(STANDSTILL)
    assert [judge.judge(str(n), searches(1)[0]) for n in range(5)] == [None] * 5


def test_a_write_is_progress_and_a_failed_one_is_none() -> None:
    two = attrs.evolve(STANDSTILL, no_progress_turns=2)
    assert judged([write("a")], [write("a")], [write("a")], by=two) == [""] * 3
    failed = write("a", is_error=True)
    assert judged([failed], [failed], by=two) == ["", SLOW]


def test_after_progress_the_turns_are_counted_anew() -> None:
    turns = [*searches(2), [write("a")], *searches(2)]
    assert judged(*turns, by=STANDSTILL) == [""] * 5


def test_waiting_for_what_is_not_there_is_no_standstill() -> None:
    away = [call("fetch", "503", is_error=True, is_neutral=True)]
    assert judged(*[away] * 9, by=Breakers()) == [""] * 9
    assert judged(*searches(2), away, *searches(1), by=STANDSTILL) == ["", "", "", SLOW]


def test_a_tool_that_may_repeat_can_stand_still() -> None:
    turn = [call(may_repeat=True)]
    assert judged(*[turn] * 4, by=Breakers()) == ["", "", SLOW, STUCK]


def test_the_loop_is_told_before_the_standstill() -> None:
    assert judged(*[[call()]] * 4, by=Breakers()) == ["", "", TOLD, STOPPED]


# --- fan-out and tools that are away -------------------------------------------------------------


def test_the_surplus_of_a_reply_is_named_by_its_place() -> None:
    judge = Judge(Breakers(max_tool_calls_per_turn=2))
    found = [judge.surplus("look", position) for position in (1, 2, 3, 4)]
    rows = [None if verdict is None else verdict.row for verdict in found]
    assert rows[:2] == [None, None]
    assert [(row.kind, row.count, row.action) for row in rows[2:] if row] == [
        ("fan_out_blocked", 3, "blocked"),
        ("fan_out_blocked", 4, "blocked"),
    ]


def test_a_breaker_that_is_off_says_nothing() -> None:
    off = Breakers(repeated_tool_calls=None, no_progress_turns=None, max_tool_calls_per_turn=None)
    assert judged(*[[call()]] * 20, by=off) == [""] * 20
    assert Judge(off).surplus("look", 1_000) is None


def test_a_tool_that_is_away_is_left_alone_longer_each_time() -> None:
    judge = Judge(Breakers())
    assert judge.wait_seconds("fetch", 0.0) == 0
    waits = [judge.note_unavailable("fetch", 100.0, None) for _ in range(8)]
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert judge.wait_seconds("fetch", 110.0) == 20
    assert judge.wait_seconds("fetch", 131.0) == 0
    assert judge.wait_seconds("look", 110.0) == 0
    judge.note_answer("fetch")
    assert judge.wait_seconds("fetch", 110.0) == 0
    assert judge.note_unavailable("fetch", 200.0, None) == 1


def test_a_tool_says_itself_how_long_it_is_away() -> None:
    judge = Judge(Breakers())
    assert judge.note_unavailable("fetch", 0.0, 12.5) == 12.5
    assert judge.wait_seconds("fetch", 2.5) == 10.0


# --- whatever comes ------------------------------------------------------------------------------

seens = st.builds(
    Seen,
    tool=st.sampled_from("ab"),
    arguments=st.sampled_from([{}, {"n": 1}]),
    result=st.sampled_from("xy"),
    is_error=st.booleans(),
    changes_state=st.sampled_from([False, False, True]),
    may_repeat=st.sampled_from([False, False, False, True]),
    is_neutral=st.sampled_from([False, False, False, True]),
)
turns = st.lists(st.lists(seens, max_size=4), max_size=30)
thresholds = st.none() | st.integers(1, 4)
breakers = st.builds(
    Breakers,
    repeated_tool_calls=thresholds,
    repeated_tool_call_window_turns=st.none() | st.integers(1, 6),
    no_progress_turns=thresholds,
    steer=st.booleans(),
)


@quick
@given(breakers, turns)
def test_a_judge_agrees_with_its_window_and_never_stops_before_it_told(
    by: Breakers, history: list[list[Seen]]
) -> None:
    done = judged(*history, by=by)
    actions = [each.split() for each in done if each]
    if not by.steer:
        assert all(action == "stopped" for _, action in actions)
        return
    for place, (kind, action) in enumerate(actions):
        if action == "stopped":
            assert [kind, "steered"] in actions[:place]


@quick
@given(breakers, st.integers(1, 30), st.integers(1, 4))
def test_results_that_are_all_different_are_never_a_loop(
    by: Breakers, count: int, width: int
) -> None:
    by = attrs.evolve(by, repeated_tool_calls=max(2, by.repeated_tool_calls or 2))
    by = attrs.evolve(by, no_progress_turns=max(2, by.no_progress_turns or 2))
    history = [[call(result=f"{n} {k}") for k in range(width)] for n in range(count)]
    assert judged(*history, by=by) == [""] * count


@quick
@given(st.integers(1, 5), st.integers(2, 5), st.data())
def test_every_circle_that_the_window_holds_is_told_and_ended_within_a_round(
    period: int, threshold: int, data: st.DataObject
) -> None:
    window = data.draw(st.none() | st.integers((threshold - 1) * period + 1, 40))
    by = Breakers(
        repeated_tool_calls=threshold,
        repeated_tool_call_window_turns=window,
        no_progress_turns=None,
    )
    rounds = threshold + 1
    done = judged(*[[call(f"tool{n % period}")] for n in range(rounds * period)], by=by)
    told, ended = first(done, TOLD), first(done, STOPPED)
    assert told == (threshold - 1) * period + 1
    assert ended is not None
    assert threshold * period < ended <= rounds * period


@quick
@given(st.integers(1, 6), st.integers(2, 6), st.data())
def test_one_repeat_less_than_the_threshold_is_never_a_loop(
    different: int, threshold: int, data: st.DataObject
) -> None:
    calls = [f"tool{n}" for n in range(different)] * (threshold - 1)
    order = data.draw(st.permutations(calls))
    by = Breakers(
        repeated_tool_calls=threshold,
        repeated_tool_call_window_turns=None,
        no_progress_turns=None,
    )
    assert judged(*[[call(name)] for name in order], by=by) == [""] * len(order)
