"""What a caller may ask for: a budget and limits, checked when they are made."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any, Literal

import attrs

from treewarden.ledgers import Caps, Unit, usd
from treewarden.protocols import UsageError

from ._definitions import seconds

_MAX_COUNT = 1_000_000
_MAX_DEPTH = 8


@attrs.frozen(kw_only=True)
class Funding:
    """How calls are funded near the end of a budget. The options of ``Budget`` without the sum."""

    clamp: bool = True
    output_floor_tokens: int = 256
    waits: bool = True
    max_wait_seconds: float | None = None


@attrs.frozen(init=False)
class Budget:
    """A ceiling in USD or in tokens, and what happens near it.

    ``Budget(max_usd="1.00")`` or ``Budget(max_tokens=250_000)``. Money is text, int or Decimal;
    floats are refused.

    Args:
        initial_usd, initial_tokens: What is released at the start; None: all of it.
        clamp: Shrink a call's output to what is left instead of stopping, down to the floor.
        output_floor_tokens: The smallest output worth a call.
        on_contention: "wait": a call that does not fit queues while other calls' holds may still
            come back. "stop": it takes what is there, or stops.
        max_wait: How long a call queues at most; None: as long as it takes.

    Raises:
        UsageError: With the contract's code; nothing was started.
    """

    unit: Unit
    # In 10^-12 USD or tokens.
    max: int
    initial: int
    funding: Funding

    def __init__(
        self,
        *,
        max_usd: str | int | Decimal | None = None,
        max_tokens: int | None = None,
        initial_usd: str | int | Decimal | None = None,
        initial_tokens: int | None = None,
        clamp: bool = True,
        output_floor_tokens: int = 256,
        on_contention: Literal["wait", "stop"] = "wait",
        max_wait: float | timedelta | None = None,
    ) -> None:
        if (max_usd is None) == (max_tokens is None):
            given = "neither" if max_usd is None else "both"
            raise UsageError(
                f"a budget has exactly one of max_usd and max_tokens, not {given}.",
                code="cave_budget_denomination_ambiguous",
            )
        unit: Unit = "tokens" if max_usd is None else "usd"
        most = (
            _tokens(max_tokens, "max_tokens") if max_usd is None else usd(max_usd, what="max_usd")
        )
        if most <= 0:
            raise UsageError("a budget is above 0.", code="cave_budget_max_invalid")
        initial = _initial(unit, most, initial_usd, initial_tokens)
        if type(output_floor_tokens) is not int or not 0 < output_floor_tokens < 2**53:
            raise UsageError(
                f"output_floor_tokens is {output_floor_tokens!r}, not a positive whole number.",
                code="cave_budget_output_floor_invalid",
            )
        if on_contention not in ("wait", "stop"):
            raise UsageError(
                f'on_contention is {on_contention!r}. Use "wait" or "stop".',
                code="cave_option_invalid",
            )
        self.__attrs_init__(  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            unit,
            most,
            initial,
            Funding(
                clamp=clamp,
                output_floor_tokens=output_floor_tokens,
                waits=on_contention == "wait",
                max_wait_seconds=seconds(max_wait, "max_wait", code="cave_option_invalid"),
            ),
        )


class _Unsaid(float):
    """A default: it gives way to what a tree says. The same number that was given does not."""


_MIN_CALL_SECONDS = _Unsaid(1.0)


@attrs.frozen(kw_only=True)
class CallTimes:
    """How long a call may be silent, and how much time has to be left to send one."""

    idle_timeout_seconds: float | None = None
    min_call_seconds: float = _MIN_CALL_SECONDS

    def over(self, inherited: CallTimes) -> CallTimes:
        """These where they were given, else the inherited ones."""
        idle, least = self.idle_timeout_seconds, self.min_call_seconds
        return CallTimes(
            idle_timeout_seconds=inherited.idle_timeout_seconds if idle is None else idle,
            min_call_seconds=inherited.min_call_seconds if isinstance(least, _Unsaid) else least,
        )


@attrs.frozen(init=False)
class Limits:
    """What a tree may do besides spending. None: no limit.

    Args:
        max_runs: Top-level runs that an open tree starts in its life.
        max_depth: Levels of subagents below a top-level run, 1 to 8.
        max_subagents: Subagents that are started in the tree's life.
        max_concurrent_subagents: Subagents alive at the same time.
        max_concurrent_calls: Provider calls in flight at the same time.
        max_model_calls, max_tool_calls: Over the whole tree, taken when a call is dispatched.
        max_descendants: Subagents that are started below one top-level run in its life.
        max_spawns_per_minute: Subagents that are started in the whole tree within any minute.
        deadline: How long the run may take, in seconds or as a timedelta. An instant for all below.
        idle_timeout: How long an open model call may be silent, in seconds or as a timedelta. Then
            it is ended and charged, and its run stops as ``stalled``.
        min_call_seconds: A call is not sent with less time than this left before the deadline.
        admission: What a subagent does that finds every slot taken: "reject" refuses it, "wait" has
            it wait for its turn, and then a parent gives its own slot to others while all that it
            waits for are children. Totals and depth refuse in both.

    Raises:
        UsageError: With the contract's code; nothing was started.
    """

    caps: Caps
    deadline_seconds: float | None
    times: CallTimes

    def __init__(
        self,
        *,
        max_runs: int | None = None,
        max_depth: int = 2,
        max_subagents: int | None = 50,
        max_concurrent_subagents: int | None = 8,
        max_concurrent_calls: int | None = None,
        max_model_calls: int | None = None,
        max_tool_calls: int | None = None,
        max_descendants: int | None = None,
        max_spawns_per_minute: int | None = None,
        deadline: float | timedelta | None = None,
        idle_timeout: float | timedelta | None = None,
        min_call_seconds: float | timedelta = _MIN_CALL_SECONDS,
        admission: Literal["reject", "wait"] = "reject",
    ) -> None:
        if admission not in ("reject", "wait"):
            raise UsageError(
                f'admission is {admission!r}. Use "reject" or "wait".', code="cave_option_invalid"
            )
        caps = Caps(
            max_runs=_count(max_runs, "max_runs", "cave_run_limit_invalid"),
            max_depth=_depth(max_depth),
            max_subagents=_count(
                max_subagents, "max_subagents", "cave_subagent_invocation_limit_invalid"
            ),
            max_concurrent_subagents=_count(
                max_concurrent_subagents,
                "max_concurrent_subagents",
                "cave_subagent_concurrency_limit_invalid",
            ),
            max_concurrent_calls=_count(
                max_concurrent_calls, "max_concurrent_calls", "cave_call_concurrency_limit_invalid"
            ),
            max_model_calls=_count(
                max_model_calls, "max_model_calls", "cave_max_model_calls_invalid"
            ),
            max_tool_calls=_count(max_tool_calls, "max_tool_calls", "cave_max_tool_calls_invalid"),
            max_descendants=_count(
                max_descendants, "max_descendants", "cave_subagent_breadth_limit_invalid"
            ),
            max_spawns_per_minute=_count(
                max_spawns_per_minute,
                "max_spawns_per_minute",
                "cave_subagent_spawn_rate_limit_invalid",
            ),
            admission=admission,
        )
        self.__attrs_init__(  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            caps,
            seconds(deadline, "deadline"),
            CallTimes(
                idle_timeout_seconds=seconds(idle_timeout, "idle_timeout"),
                min_call_seconds=_least_seconds(min_call_seconds),
            ),
        )


def _tokens(value: Any, name: str, code: str = "cave_budget_max_invalid") -> int:
    if type(value) is not int or not 0 < value < 2**53:
        raise UsageError(f"{name} is {value!r}, not a positive whole number of tokens.", code=code)
    return value


def _initial(unit: Unit, most: int, initial_usd: Any, initial_tokens: Any) -> int:
    own, other = (initial_usd, initial_tokens) if unit == "usd" else (initial_tokens, initial_usd)
    if other is not None:
        raise UsageError(
            f"the budget is in {unit}, so is its initial_{unit}.",
            code="cave_budget_denomination_ambiguous",
        )
    if own is None:
        return most
    code = "cave_budget_initial_invalid"
    amount = (
        usd(own, what="initial_usd", code=code)
        if unit == "usd"
        else _tokens(own, "initial_tokens", code)
    )
    if not 0 < amount <= most:
        raise UsageError(
            f"initial_{unit} is {own!r}: it is above 0 and at most the max.", code=code
        )
    return amount


def _count(value: Any, name: str, code: str) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= _MAX_COUNT:
        raise UsageError(
            f"{name} is {value!r}. Give a whole number from 1 to {_MAX_COUNT}, or None.", code=code
        )
    return value


def _depth(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_DEPTH:
        raise UsageError(
            f"max_depth is {value!r}. Give a whole number from 1 to {_MAX_DEPTH}.",
            code="cave_subagent_depth_limit_invalid",
        )
    return value


def _least_seconds(value: Any) -> float:
    if isinstance(value, _Unsaid):
        return value
    if type(value) in (int, float) and value == 0:
        return 0.0
    given = seconds(value, "min_call_seconds")
    if given is None:
        raise UsageError(
            "min_call_seconds is None. Give a number of seconds; 0 for no such limit.",
            code="cave_run_deadline_invalid",
        )
    return given
