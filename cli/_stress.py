"""``treewarden stress``: trees of scripted agents, one trial per point of a grid."""

from __future__ import annotations

import json as json_
from collections.abc import Sequence
from itertools import product

import attrs

from ._errors import CommandError, Exit, tell
from ._options import AsJson, Backend, Flag
from ._tables import console, stress_table
from ._trial import Configuration, Trial, run_trial

_BACKENDS: tuple[Backend, ...] = ("asyncio", "trio")
_MAX_DEPTH = 8
# More takes minutes and gigabytes; the figures of a smaller tree say the same.
_MAX_SUBAGENTS = 100_000


def stress(
    *,
    fan_out: str = "10",
    depth: str = "1",
    budget_tokens: int | None = None,
    max_concurrent_subagents: int | None = None,
    backend: str = "both",
    seed: int = 0,
    call_seconds: float = 1.0,
    failure_rate: float = 0.0,
    cancel_after: float | None = None,
    json: AsJson = False,
    debug: Flag = False,
) -> int:
    """Run trees of scripted agents in virtual time and check what must hold.

    One row per combination of fan-out, depth and backend. Calls take no real time and cost nothing;
    admission, budgets, cancellation and receipts are the real ones. Exits with 1 where a budget was
    overshot, something was left behind, or an invariant did not hold.

    Args:
        fan_out: Subagents that every agent starts: one number, or several: 10,100.
        depth: Levels of subagents, 1 to 8: one number, or several.
        budget_tokens: The most tokens the tree may use; without it, it is only counted.
        max_concurrent_subagents: Refuse more than this many at a time; without it, none is refused.
        backend: asyncio, trio, or both.
        seed: Decides lengths, durations and the order in which tasks run.
        call_seconds: How long a model call takes on average, in virtual seconds.
        failure_rate: Which part of the subagents' calls fails, 0 to 1.
        cancel_after: Cancel the run after so many virtual seconds.
        json: Print one JSON object per row.
        debug: Show tracebacks.
    """
    base = _checked(
        Configuration(
            fan_out=1,
            depth=1,
            backend="asyncio",
            seed=seed,
            budget_tokens=budget_tokens,
            max_concurrent_subagents=max_concurrent_subagents,
            call_seconds=call_seconds,
            failure_rate=failure_rate,
            cancel_after=cancel_after,
        )
    )
    grid = _grid(
        base,
        _numbers(fan_out, "--fan-out", most=_MAX_SUBAGENTS),
        _numbers(depth, "--depth", most=_MAX_DEPTH),
        _backends(backend),
    )
    trials = _run_all(grid)
    _show(trials, as_json=json)
    return Exit.OK if all(trial.is_good for trial in trials) else Exit.FAILED


def _run_all(grid: list[Configuration]) -> list[Trial]:
    with console(is_stderr=True).status("") as status:
        trials: list[Trial] = []
        for configuration in grid:
            status.update(f"{len(trials) + 1} of {len(grid)}: {configuration}")
            trials.append(run_trial(configuration))
        return trials


def _show(trials: list[Trial], *, as_json: bool) -> None:
    if as_json:
        for trial in trials:
            print(json_.dumps(trial.to_json()))
    else:
        out = console()
        out.print(stress_table(trials, width=out.width))
    for trial in trials:
        for violation in trial.violations[:3]:
            tell(f"{trial.configuration}: {violation}")


# --- the grid -------------------------------------------------------------------------------------


def _checked(base: Configuration) -> Configuration:
    """``base``, if its values mean something."""
    for name in ("budget_tokens", "max_concurrent_subagents"):
        value = getattr(base, name)
        if value is not None and value < 1:
            raise CommandError(f"{_option(name)} is {value}. Give a whole number above 0.")
    if not 0 <= base.failure_rate <= 1:
        raise CommandError(f"--failure-rate is {base.failure_rate:g}. Give a part, from 0 to 1.")
    if not 0 <= base.call_seconds < 1e9:
        raise CommandError(f"--call-seconds is {base.call_seconds:g}. Give seconds, 0 or more.")
    if base.cancel_after is not None and not 0 <= base.cancel_after < 1e9:
        raise CommandError(f"--cancel-after is {base.cancel_after:g}. Give seconds, 0 or more.")
    return base


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _numbers(text: str, option: str, *, most: int) -> list[int]:
    """The different numbers of ``10,100``."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and 1 <= int(part[:9]) <= most):
            raise CommandError(
                f"{option} {text!r}: {part!r} is not a whole number from 1 to {most}. "
                f"Write {option} 2, or several as {option} 2,3."
            )
    numbers = [int(part) for part in parts]
    _refuse_doubles(numbers, option)
    return numbers


def _backends(text: str) -> list[Backend]:
    if text == "both":
        return list(_BACKENDS)
    parts = [part.strip() for part in text.split(",")]
    _refuse_doubles(parts, "--backend")
    chosen: list[Backend] = [backend for backend in _BACKENDS if backend in parts]
    if len(chosen) != len(parts):
        raise CommandError(f"--backend is {text!r}. Give asyncio, trio, or both.")
    return chosen


def _refuse_doubles(points: Sequence[object], option: str) -> None:
    if len(set(points)) < len(points):
        given = ",".join(map(str, points))
        raise CommandError(f"{option} {given} names a point twice. Each is tried once.")


def _grid(
    base: Configuration, fan_outs: list[int], depths: list[int], backends: list[Backend]
) -> list[Configuration]:
    grid = [
        attrs.evolve(base, fan_out=fan_out, depth=depth, backend=backend)
        for fan_out, depth, backend in product(fan_outs, depths, backends)
    ]
    for configuration in grid:
        if configuration.subagents > _MAX_SUBAGENTS:
            raise CommandError(
                f"fan-out {configuration.fan_out} with depth {configuration.depth} is a tree of "
                f"{configuration.subagents:,} subagents; the most is {_MAX_SUBAGENTS:,}. Lower one "
                "of the two."
            )
    return grid
