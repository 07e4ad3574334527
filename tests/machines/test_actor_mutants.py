"""Which of our three kinds of proof sees which known mistake, in a table at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from treewarden.testing import (
    Census,
    Scenario,
    UsdMachine,
    VirtualClock,
    census,
    explore_cancellations,
    load_scenarios,
    run_seeded,
)

from .actor_mutants import ACTOR_MUTANTS
from .test_mutants import what_chance_catches, what_history_catches

ROOT = Path(__file__).parents[2]
SCENARIOS = [
    scenario
    for name, scenario in load_scenarios(ROOT / "examples" / "explored_trees.py").items()
    if name != "scenario_reader_breaks"
]
# What the explorer has to see by itself.
BY_THE_EXPLORER = {
    "release in the body",
    "lost granted ticket",
    "carve not ended on failed start",
}
# What goes wrong in the ledger, where the machine can see it too.
IN_THE_LEDGER = {
    "lost granted ticket",
    "lost granted slot",
    "carve not ended on failed start",
    "double refund",
    "queue not re-run on breach",
}
SEEDS = 5


def what_the_explorer_sees() -> str | None:
    for scenario in SCENARIOS:
        # Every other instant; all of them are for the code as it is.
        found = explore_cancellations(scenario, times=(1,), every=2, max_violations=1, patience=0)
        if not found.is_clean:
            attempt = found.violations[0].attempt
            return f"{attempt.backend}/{attempt.kind} at {attempt.instant}"
    return None


def what_schedules_see() -> str | None:
    """Undisturbed, in seeded orders, with the books looked at before every step."""
    for scenario in SCENARIOS:

        async def watched(scenario: Scenario = scenario) -> None:
            with census(patience=0) as seen:
                VirtualClock.watch_steps(lambda _: check_all(seen))
                await scenario()

        try:
            run_seeded(watched, seeds=SEEDS, order_of=lambda _: 0, backends=("asyncio",))
        except (AssertionError, RuntimeError) as error:
            return type(error).__name__
    return None


def check_all(seen: Census) -> None:
    for tree in seen.trees:
        tree.ledger.check()


def what_the_machine_sees() -> str | None:
    chance = what_chance_catches(UsdMachine)
    return chance or what_history_catches(UsdMachine)


def test_without_a_mutant_neither_the_explorer_nor_the_schedules_see_anything() -> None:
    assert what_the_explorer_sees() is None
    assert what_schedules_see() is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTOR_MUTANTS)
def test_a_mutant_of_the_actors_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    ACTOR_MUTANTS[name](monkeypatch)
    explorer, schedules = what_the_explorer_sees(), what_schedules_see()
    machine = what_the_machine_sees() if name in IN_THE_LEDGER else None
    monkeypatch.undo()
    assert explorer or schedules or machine, "it survived"
    assert explorer or name not in BY_THE_EXPLORER
    row = (name, explorer or "-", schedules or "-", machine or "-")
    record_property("actor mutant", "|".join(row))
