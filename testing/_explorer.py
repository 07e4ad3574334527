"""Cancels a scenario at every instant it has, one run for each, and judges every end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ._exploration import BACKENDS, KINDS, Attempt, Backend, Exploration, Kind, Violation
from ._interruption import Instant, Interruption, Scenario


def explore_cancellations(
    scenario: Scenario,
    *,
    backends: Sequence[Backend] = BACKENDS,
    kinds: Sequence[Kind] = KINDS,
    times: Sequence[int] = (1, 2),
    instants: Iterable[int] | None = None,
    every: int = 1,
    seed: int | None = None,
    allowed: tuple[type[BaseException], ...] = (),
    patience: float = 0.25,
    max_violations: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Exploration:
    """Run ``scenario`` once undisturbed, and then once for each of its instants, cancelling there.

    The scenario runs in virtual time, in a loop of its own for each run, and uses ``tw.run``,
    ``tw.stream`` and ``tw.open_tree`` as a program does. It must not assert what a cancellation
    may change. An instant is the moment before a step of any of its tasks or of its trees' tasks.

    After each run must hold: the scenario has ended, with nothing raised but cancellations and
    ``TreewardenError``; every tree it opened is closed, with no lease, hold, waiter or span left
    and a journal that replays to the same state (W6, W8); no task, descriptor, thread or child
    process is left. A native cancel of an actor that has started ends it and what is below it, and
    no other actor; one before the first step ends the tree with ``SupervisorCancelled``.

    Args:
        kinds: "scope" cancels a scope around the scenario. "native", on asyncio only, calls
            ``task.cancel()``; it makes up to three runs at each instant: for the caller's task, for
            the task that is about to step, and for another live actor's, in turn.
        times: 1, and 2 for a second cancellation one to three steps after the first.
        instants: Only these, as a violation names them. None: all.
        every: Only each ``every``-th instant, where all would take too long.
        seed: Which order tasks run in (see ``VirtualClock.run``). None: asyncio's own, and on trio
            that of seed 0.
        allowed: What else the scenario may raise.
        patience: Real seconds that threads and processes which are about to end may take.
        max_violations: Stop when so many are found. None: go through all instants.
        on_progress: Called after each run with how many are done, and of how many.

    Raises:
        BaseException: What the scenario raised undisturbed, with a note saying where.
        ValueError: An argument cannot be.
    """
    _check_arguments(backends, kinds, times, every)
    chosen = None if instants is None else frozenset(instants)
    exploration = Exploration(getattr(scenario, "__name__", "scenario"))

    def judged(attempt: Attempt, limit: int | None) -> Interruption:
        run = Interruption(scenario, attempt, limit=limit, allowed=allowed, patience=patience)
        run.run(seed=seed)
        if run.broken:
            exploration.violations.append(_violation(run, exploration.scenario, seed))
        return run

    plan: list[tuple[Attempt, int]] = []
    for backend in backends:
        seen = judged(Attempt(backend, "scope", 1, 0), None)
        _raise_what_it_raised(seen)
        exploration.checkpoints[backend] = len(seen.instants)
        limit = 2_000 + 20 * len(seen.instants)
        attempts = _attempts(backend, kinds, times, seen.instants)
        plan.extend((a, limit) for a in attempts if _is_chosen(a.instant, chosen, every))
    for done, (attempt, limit) in enumerate(plan, start=1):
        if max_violations is not None and len(exploration.violations) >= max_violations:
            break
        if judged(attempt, limit).was_reached:
            exploration.count(attempt)
        if on_progress is not None:
            on_progress(done, len(plan))
    return exploration


def _is_chosen(instant: int, chosen: frozenset[int] | None, every: int) -> bool:
    return (instant - 1) % every == 0 if chosen is None else instant in chosen


def _attempts(
    backend: Backend, kinds: Sequence[Kind], times: Sequence[int], instants: Sequence[Instant]
) -> Iterator[Attempt]:
    """Every way to cancel at every instant of a scenario."""
    for kind in kinds:
        if kind == "native" and backend == "trio":
            continue  # trio has no such thing
        for often in times:
            for number, instant in enumerate(instants, start=1):
                for aim in instant.aims if kind == "native" else ("caller",):
                    yield Attempt(backend, kind, often, number, aim)


def _violation(run: Interruption, scenario: str, seed: int | None) -> Violation:
    return Violation(
        attempt=run.attempt,
        task=run.task,
        hit=run.hit_name,
        at=run.at,
        broken=tuple(run.broken),
        scenario=scenario,
        seed=seed,
    )


def _raise_what_it_raised(undisturbed: Interruption) -> None:
    if undisturbed.error is not None:
        undisturbed.error.add_note(
            f"on {undisturbed.attempt.backend}, undisturbed: an explored scenario has to end well"
        )
        raise undisturbed.error


def _check_arguments(
    backends: Sequence[Backend], kinds: Sequence[Kind], times: Sequence[int], every: int
) -> None:
    for given, known, name in ((backends, BACKENDS, "backends"), (kinds, KINDS, "kinds")):
        if isinstance(given, str) or not given or not set(given) <= set(known):
            raise ValueError(f"{name}={given!r}: give a sequence of {' and '.join(known)}")
    if not times or not set(times) <= {1, 2}:
        raise ValueError(f"times={times!r}: give a sequence of 1 and 2")
    if every < 1:
        raise ValueError(f"every={every}: give 1 for each instant, or more to leave some out")
