"""Breakers: whether a model goes round in circles, judged by what came of its calls.

A repeat is the same tool with the same arguments *and the same result*. So polling is no loop as
long as what it sees changes, and a failure that comes back word for word is one. A judge looks at
one turn when its results are there, and says what is to be done at the next gate: first the model
is told, then the run is stopped.

Pure: told what happened, it keeps no clock and changes nothing but its own memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs

from treewarden.protocols import BreakerRow, JSONObject, UsageError, digest

_MOST = 2**53 - 1
# How long a tool that says it is unavailable is left alone: the first time, and at most.
_FIRST_SECONDS, _MOST_SECONDS = 1, 30
# So many doublings of the first are above the most.
_DOUBLINGS = 5


def _threshold(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and (type(value) is not int or not 1 <= value <= _MOST):
        raise UsageError(
            f"{field.name} is {value!r}. Give a positive whole number, or None to switch this "
            "breaker off.",
            code="cave_breaker_threshold_invalid",
        )


def _yes_or_no(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if type(value) is not bool:
        raise UsageError(
            f"{field.name} is {value!r}. Use True or False.", code="cave_option_invalid"
        )


@attrs.frozen(kw_only=True)
class Breakers:
    """When an agent is told that it goes round in circles, and when it is stopped.

    Every agent of the run is judged by itself. None in a field switches that breaker off.

    Args:
        repeated_tool_calls: So many equal calls with equal results in the window are a loop.
        repeated_tool_call_window_turns: How many turns are looked at. None: all of the run.
        no_progress_turns: So many turns with the same text and results, one after the other, and
            no successful write or subagent among them, are a standstill.
        max_tool_calls_per_turn: Of a reply with more calls the surplus is not run.
        steer: Tell the model first, and stop the run when it goes on all the same. False: stop
            the run at once.

    Raises:
        UsageError: A number cannot be used; nothing was started.
    """

    repeated_tool_calls: int | None = attrs.field(default=3, validator=_threshold)
    repeated_tool_call_window_turns: int | None = attrs.field(default=8, validator=_threshold)
    no_progress_turns: int | None = attrs.field(default=3, validator=_threshold)
    max_tool_calls_per_turn: int | None = attrs.field(default=8, validator=_threshold)
    steer: bool = attrs.field(default=True, validator=_yes_or_no)


@attrs.frozen(kw_only=True)
class Seen:
    """One tool call and what came of it."""

    tool: str
    # As text where they could not be read.
    arguments: JSONObject | str
    result: str
    is_error: bool = False
    # Where it succeeds, something is not as it was before.
    changes_state: bool = False
    # Calling it again and again is what it is for.
    may_repeat: bool = False
    # It is no sign of anything: what it needs was not there, or it waited for others.
    is_neutral: bool = False


class Verdict(NamedTuple):
    """What a judge found."""

    # For the receipt.
    row: BreakerRow
    # For the model, or for whoever asks why the run stopped.
    text: str

    @property
    def stops(self) -> bool:
        return self.row.action == "stopped"


class _Call(NamedTuple):
    turn: int
    signature: str
    tool: str


@attrs.define
class _Told:
    """What the model was told of a repeat."""

    turn: int
    # How often it may still come before the round it belongs to is whole.
    left: int


class Judge:
    """Judges the turns of one agent, in order."""

    def __init__(self, breakers: Breakers) -> None:
        self._breakers = breakers
        self._turn = 0
        # The calls of the window, oldest first, and how often each of them is in it.
        self._calls: deque[_Call] = deque()
        self._counts: Counter[str] = Counter()
        # Everything that ever changed something: doing it once more changes nothing.
        self._changes: set[str] = set()
        # Of which repeats the model was told.
        self._told: dict[str, _Told] = {}
        # The last turn, how often it came in a row, and whether the model was told so.
        self._last_turn: str | None = None
        self._same_turns = 0
        self._told_of_standstill = False
        # Tools that were not there when they were called last: how often, and until when to wait.
        self._away: dict[str, tuple[int, float]] = {}

    # --- fan-out ---------------------------------------------------------------------------------

    def surplus(self, tool: str, position: int) -> Verdict | None:
        """Say whether the call at this place of a reply, from 1, is one too many."""
        most = self._breakers.max_tool_calls_per_turn
        if most is None or position <= most:
            return None
        why = (
            f"this is call {position} of one reply, and {most} of a reply are run "
            "(max_tool_calls_per_turn). It was not run. Ask for it again in your next reply if it "
            "is still needed"
        )
        row = BreakerRow(
            kind="fan_out_blocked", tool=tool, count=position, action="blocked", reason=why
        )
        return Verdict(row, why)

    # --- repeats and standstill ------------------------------------------------------------------

    def pass_turn(self) -> None:
        """A turn that says nothing about progress: it only moves the window."""
        self._turn += 1
        self._forget()

    def judge(self, text: str, calls: Sequence[Seen]) -> Verdict | None:
        """Judge a turn: what the model wrote, and the calls that were not blocked as surplus."""
        self.pass_turn()
        verdict: Verdict | None = None
        for seen in calls:
            found = self._judge_call(seen)
            # The first that stops the run wins, else the first.
            if found is not None and (verdict is None or (found.stops and not verdict.stops)):
                verdict = found
        return self._judge_turn(text, calls, is_told=verdict is not None) or verdict

    def _judge_call(self, seen: Seen) -> Verdict | None:
        threshold = self._breakers.repeated_tool_calls
        if threshold is None or seen.may_repeat or seen.is_neutral:
            return None
        signature = signature_of(seen)
        if seen.changes_state and not seen.is_error and signature not in self._changes:
            # After a change that was not made before, the same call may well be asked again.
            self._changes.add(signature)
            self._clear_calls()
        self._calls.append(_Call(self._turn, signature, seen.tool))
        self._counts[signature] += 1
        count = self._counts[signature]
        told = self._told.get(signature)
        if told is not None:
            if told.left:
                told.left -= 1
                return None
            if told.turn == self._turn:
                return None  # asked for before the model could know
            return self._loop(signature, [seen.tool], count, is_told=True)
        if count < threshold:
            return None
        return self._tell_of_loop(signature, count, threshold)

    def _tell_of_loop(self, signature: str, count: int, threshold: int) -> Verdict:
        repeated = self._round(signature, threshold)
        if self._breakers.steer:
            for each in repeated:
                left = max(0, threshold - self._counts[each])
                self._told.setdefault(each, _Told(self._turn, left))
        return self._loop(signature, list(repeated.values()), count, is_told=False)

    def _round(self, signature: str, threshold: int) -> dict[str, str]:
        """This call, and those since it came last that repeat as well, with their tools."""
        of_round: dict[str, str] = {}
        calls = reversed(self._calls)
        last = next(calls)
        for call in calls:
            if call.signature == signature:
                break
            if self._counts[call.signature] >= max(2, threshold - 1):
                of_round[call.signature] = call.tool
        in_order = dict(reversed(of_round.items()))
        return {last.signature: last.tool, **in_order}

    def _loop(self, signature: str, tools: list[str], count: int, *, is_told: bool) -> Verdict:
        window = self._breakers.repeated_tool_call_window_turns
        within = "in this run" if window is None else f"within {window} turns"
        what = (
            f"{tools[0]} was called {count} times {within} with the same arguments and gave the "
            "same result"
            if len(tools) == 1
            else f"{', '.join(tools)} go round in a circle: the same calls with the same results "
            f"{count} times {within}"
        )
        return self._verdict(
            "loop_detected", "cave_tool_call_loop_detected", what, tools[0], count, signature,
            is_told=is_told,
        )  # fmt: skip

    def _judge_turn(self, text: str, calls: Sequence[Seen], *, is_told: bool) -> Verdict | None:
        threshold = self._breakers.no_progress_turns
        if threshold is None:
            return None
        if any(seen.changes_state and not seen.is_error for seen in calls):
            self._last_turn, self._same_turns, self._told_of_standstill = None, 0, False
            return None
        if any(seen.is_neutral for seen in calls):
            return None
        signature = _digest([text, [[seen.tool, seen.is_error, seen.result] for seen in calls]])
        if signature == self._last_turn:
            self._same_turns += 1
        else:
            self._last_turn, self._same_turns, self._told_of_standstill = signature, 1, False
        if is_told or self._same_turns < threshold:
            return None
        was_told, self._told_of_standstill = self._told_of_standstill, True
        what = f"the last {self._same_turns} turns had the same text and the same results"
        return self._verdict(
            "no_progress", "cave_no_progress", what, None, self._same_turns, signature,
            is_told=was_told,
        )  # fmt: skip

    def _verdict(
        self,
        kind: str,
        code: str,
        what: str,
        tool: str | None,
        count: int,
        signature: str,
        *,
        is_told: bool,
    ) -> Verdict:
        stops = is_told or not self._breakers.steer
        row = BreakerRow(
            kind=kind,
            tool=tool,
            count=count,
            signature=signature,
            action="stopped" if stops else "steered",
            reason=what,
        )
        if stops:
            return Verdict(row, f"{what}, and the model had been told so" if is_told else what)
        advice = (
            "Nothing changes by doing it again. Do something else: other arguments, another tool, "
            "or your final answer from what you have, with what is missing. If the same comes "
            "again, this run is stopped."
        )
        return Verdict(row, f"{code}: {what}. {advice}")

    # --- what the window holds -------------------------------------------------------------------

    def _forget(self) -> None:
        window = self._breakers.repeated_tool_call_window_turns
        if window is None:
            return
        first = self._turn - window + 1
        while self._calls and self._calls[0].turn < first:
            gone = self._calls.popleft().signature
            self._counts[gone] -= 1
            if not self._counts[gone]:
                del self._counts[gone]
                self._told.pop(gone, None)

    def _clear_calls(self) -> None:
        self._calls.clear()
        self._counts.clear()
        self._told.clear()

    # --- tools that are not there ----------------------------------------------------------------

    def note_answer(self, tool: str) -> None:
        """The tool answered, whatever it said."""
        self._away.pop(tool, None)

    def note_unavailable(self, tool: str, at: float, retry_after: float | None) -> float:
        """What the tool needs was not there.

        Returns:
            How many seconds it is to be left alone: what it asked for, else twice as long each
            time.
        """
        times = self._away.get(tool, (0, at))[0]
        wait = retry_after
        if wait is None:
            wait = min(_MOST_SECONDS, _FIRST_SECONDS * 2 ** min(times, _DOUBLINGS))
        self._away[tool] = (times + 1, at + wait)
        return wait

    def wait_seconds(self, tool: str, at: float) -> float:
        """How long the next call of this tool is to wait from now."""
        away = self._away.get(tool)
        return 0 if away is None else max(0, away[1] - at)

    def check(self) -> None:
        """Assert that what is counted is what the window holds."""
        window = self._breakers.repeated_tool_call_window_turns
        counted = Counter(call.signature for call in self._calls)
        assert counted == self._counts, (counted, self._counts)
        assert self._told.keys() <= counted.keys(), self._told
        turns = [call.turn for call in self._calls]
        assert turns == sorted(turns), turns
        assert not turns or turns[-1] <= self._turn, (turns, self._turn)
        assert window is None or not turns or turns[0] > self._turn - window, (turns, self._turn)
        assert all(told.left >= 0 and told.turn <= self._turn for told in self._told.values())
        assert (self._last_turn is None) == (self._same_turns == 0), self._same_turns


def signature_of(seen: Seen) -> str:
    """What makes two calls the same, as 64 hex digits."""
    return _digest([seen.tool, seen.arguments, seen.is_error, seen.result])


def _digest(value: Any) -> str:
    try:
        return digest(value)
    except UsageError:
        # A number or a text that JSON cannot say is still the same as itself.
        return hashlib.sha256(repr(value).encode(errors="backslashreplace")).hexdigest()
