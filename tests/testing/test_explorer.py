"""The example trees stay clean at every instant, and what does not is told so that it helps."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import treewarden as tw
from treewarden.testing import (
    CancellationViolated,
    Exploration,
    Reply,
    Scenario,
    ScenarioNotFound,
    ScriptedModel,
    explore_cancellations,
    load_scenarios,
)

from ..soak.seconds import EXPLORER, soak_seconds

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "explored_trees.py"
SCENARIOS = load_scenarios(EXAMPLES)
Measured = Callable[[str, object], None]


def test_there_are_six_example_trees() -> None:
    assert len(SCENARIOS) == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_example_tree_may_be_cancelled_at_every_instant(
    name: str, record_property: Measured
) -> None:
    explored = explore_cancellations(SCENARIOS[name]).check()
    record_property("measured", f"explored {explored.summary}")
    assert min(explored.checkpoints.values()) >= 20
    # Every instant was one of the runs, in each way.
    for (backend, _), seen in explored.explored.items():
        assert seen == set(range(1, explored.checkpoints[backend] + 1))
    assert {(b, k) for b, k, _ in explored.runs} == {
        ("asyncio", "scope"),
        ("asyncio", "native"),
        ("trio", "scope"),
    }


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", SCENARIOS)
def test_an_example_tree_may_be_cancelled_at_every_instant_of_many_orders(
    name: str, record_property: Measured
) -> None:
    until = time.monotonic() + soak_seconds(EXPLORER) / len(SCENARIOS)
    seed, runs = 0, 0
    while time.monotonic() < until:
        explored = explore_cancellations(SCENARIOS[name], seed=seed).check()
        seed, runs = seed + 1, runs + explored.runs.total()
    record_property("measured", f"explored {name}: {seed} orders, {runs} runs, 0 violations")


# --- what it finds --------------------------------------------------------------------------------


async def sleeps_on_when_it_is_cancelled() -> None:
    """A scenario that leaves a task behind."""
    await one_run()
    asyncio.get_running_loop().create_task(asyncio.sleep(60), name="left over")
    await anyio.sleep(1)


async def one_run() -> None:
    model = ScriptedModel([Reply("done", delay=1)])
    await tw.run(tw.agent(id="one", instructions="Answer.", model=model), "go")


async def fails_in_its_clean_up() -> None:
    try:
        await one_run()
    except BaseException:
        raise KeyError("it cleans up badly") from None


async def never_ends_once_cancelled() -> None:
    try:
        await one_run()
    except BaseException:
        with anyio.CancelScope(shield=True):
            await anyio.Event().wait()
        raise


async def fails() -> None:
    await one_run()
    raise LookupError("nothing there")


def explore(scenario: Scenario, **options: Any) -> Exploration:
    given: dict[str, Any] = {"backends": ("asyncio",), "times": (1,), "patience": 0, **options}
    return explore_cancellations(scenario, **given)


def test_a_task_that_is_left_is_named_with_its_place() -> None:
    explored = explore(sleeps_on_when_it_is_cancelled, kinds=("scope",))
    assert not explored.is_clean
    assert explored.violations[0].attempt.instant == 0
    assert "task: left over: " in str(explored.violations[0])


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_a_cancelled_scenario_raises_is_a_violation_unless_it_is_allowed(
    backend: Any,
) -> None:
    explored = explore(fails_in_its_clean_up, backends=(backend,))
    assert explored.violations
    assert any("raised KeyError" in line for v in explored.violations for line in v.broken)
    assert explore(fails_in_its_clean_up, backends=(backend,), allowed=(KeyError,)).is_clean


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_scenario_that_does_not_end_is_told_with_who_waits_where(backend: Any) -> None:
    explored = explore(never_ends_once_cancelled, backends=(backend,), max_violations=1)
    (violation,) = explored.violations
    assert "it does not end: nothing can happen any more" in violation.broken[0]
    assert "in never_ends_once_cancelled" in violation.broken[0]


def test_a_violation_says_how_to_repeat_it() -> None:
    explored = explore(fails_in_its_clean_up, kinds=("native",))
    first = explored.violations[0]
    assert f"to repeat it: explore_cancellations({fails_in_its_clean_up.__name__}" in str(first)
    scope = {"explore_cancellations": explore_cancellations, **globals()}
    again: Exploration = eval(first.repeat, scope)
    assert [v.attempt for v in again.violations if v.attempt == first.attempt] == [first.attempt]
    assert again.violations[0].task == first.task


def test_check_raises_the_report() -> None:
    explored = explore(fails_in_its_clean_up)
    with pytest.raises(CancellationViolated) as caught:
        explored.check()
    assert caught.value.exploration is explored
    assert str(caught.value).startswith("fails_in_its_clean_up: asyncio/scope ")
    assert f"{len(explored.violations)} violations" in explored.summary


def test_a_scenario_that_fails_undisturbed_raises_what_it_raised() -> None:
    with pytest.raises(LookupError, match="nothing there") as caught:
        explore(fails)
    assert caught.value.__notes__ == [
        "on asyncio, undisturbed: an explored scenario has to end well"
    ]


def test_progress_is_told_after_each_run() -> None:
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))

    explored = explore(one_run, on_progress=tell)
    total = explored.runs.total()
    assert told == [(done, total) for done in range(1, total + 1)]


def test_the_same_scenario_is_explored_in_the_same_way_again() -> None:
    assert explore(one_run).to_json() == explore(one_run).to_json()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"backends": "trio"}, "backends='trio'"),
        ({"kinds": ("rude",)}, "give a sequence of scope and native"),
        ({"times": (3,)}, "give a sequence of 1 and 2"),
        ({"every": 0}, "every=0"),
    ],
)
def test_an_argument_that_cannot_be_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        explore(one_run, **options)


# --- the command ----------------------------------------------------------------------------------


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "treewarden.testing.explore", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_the_command_prints_a_table_and_ends_with_zero() -> None:
    done = command(f"{EXAMPLES}:scenario_reader_breaks", "--times", "1")
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = [line.split() for line in done.stdout.splitlines()]
    assert head == ["scenario", "backend", "kind", "checkpoints", "runs", "violations"]
    assert [row[:3] for row in rows] == [
        ["scenario_reader_breaks", backend, kind]
        for backend, kind in (("asyncio", "scope"), ("asyncio", "native"), ("trio", "scope"))
    ]
    assert {row[-1] for row in rows} == {"0"}


BAD = """
import asyncio

async def scenario_leaves_a_task():
    asyncio.create_task(asyncio.sleep(1), name="left over")

async def not_taken():
    raise OSError("it has no scenario's name")
"""


@pytest.mark.slow
def test_the_command_ends_with_one_and_tells_the_violations(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(BAD)
    done = command(file, "--backend", "asyncio", "--json")
    assert done.returncode == 1
    (explored,) = json.loads(done.stdout)
    assert explored["scenario"] == "scenario_leaves_a_task"
    assert any("left over" in line for line in explored["violations"][0]["broken"])
    failed = command(f"{file}:not_taken")
    assert failed.returncode == 1
    assert failed.stderr.startswith("explore: not_taken raised OSError: it has no scenario's name")


@pytest.mark.slow
def test_the_command_ends_with_two_where_it_cannot_be_used(tmp_path: Path) -> None:
    for arguments in ([], ["x.py", "--kind", "rude"], [tmp_path / "none.py"], ["x.py", "--at=0"]):
        done = command(*arguments)
        assert done.returncode == 2, done
        assert done.stdout == ""
    assert "exit codes: 0 nothing went wrong" in command("--help").stdout


def test_a_file_without_scenarios_says_what_to_write(tmp_path: Path) -> None:
    file = tmp_path / "empty.py"
    file.write_text("from explored_trees import *\nasync def scenario_with(a): ...\nthing = 3\n")
    for place, why in {
        f"{tmp_path / 'none.py'}": "does not exist",
        f"{tmp_path}": "is a folder",
        f"{EXAMPLES}:nonesuch": "Its scenarios: scenario_leaf_with_retries",
        f"{EXAMPLES}:is_top": "has to be an async function without parameters",
        f"{EXAMPLES}:a-b": "'a-b' is not a name",
        f"{file}": "Write one as `async def scenario_something()",
        f"{file}:thing": "thing in",
    }.items():
        with pytest.raises(ScenarioNotFound, match=re.escape(why)):
            load_scenarios(place)
    file.write_text("1 / 0")
    with pytest.raises(ScenarioNotFound, match="cannot be loaded: ZeroDivisionError"):
        load_scenarios(file)
