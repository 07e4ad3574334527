"""What importing Treewarden costs, and what it leaves alone until it is used.

The times are CPU times of a fresh interpreter less those of one that does nothing, so a busy
machine moves them little; medians of several runs are compared and printed.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Loaded by who calls a provider, prints a table, runs on trio or speaks to a vendor's own library.
ONLY_WHEN_USED = {
    "anthropic",
    "cyclopts",
    "genai_prices",
    "google",
    "h11",
    "httpcore",
    "httpx",
    "mcp",
    "openai",
    "opentelemetry",
    "ray",
    "rich",  # structlog imports it at once, so structlog must wait as well
    "structlog",
    "trio",
}

DOOR = "import treewarden"
DEFINITIONS = "import treewarden as tw; tw.run, tw.agent, tw.Budget"
NOTHING = "pass"

RUNS = 7

Run = Callable[[str], str]


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Run a program in a fresh interpreter that finds its bytecode ready, as an installed one does.

    What the programs need is compiled once, into a folder of the test's own.
    """
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path)

    def run(program: str) -> str:
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, env=env, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    return run


def loaded_by(program: str, python: Run) -> set[str]:
    """The top-level modules that ``program`` loads beyond those of a bare interpreter."""
    listing = (
        "import json, sys; before = set(sys.modules)\n"
        f"{program}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    names: list[str] = json.loads(python(listing))
    return {name.split(".")[0] for name in names}


def cpu_of_children() -> float:
    """CPU seconds of all children so far, user and system."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds: float = used.ru_utime + used.ru_stime
    return seconds


def cpu_seconds(program: str, python: Run) -> float:
    before = cpu_of_children()
    python(program)
    return cpu_of_children() - before


def cost_of(program: str, python: Run) -> float:
    """Median CPU milliseconds of ``program`` above those of an interpreter that does nothing."""
    python(program)  # compiles
    # Taken in turns, so that what else the machine does falls on both alike.
    with_it: list[float] = []
    without: list[float] = []
    for _ in range(RUNS):
        with_it.append(cpu_seconds(program, python))
        without.append(cpu_seconds(NOTHING, python))
    return (statistics.median(with_it) - statistics.median(without)) * 1000


def test_the_front_door_loads_the_standard_library_and_itself_only(python: Run) -> None:
    assert loaded_by(DOOR, python) - sys.stdlib_module_names == {"treewarden"}


def test_defining_an_agent_loads_neither_http_nor_a_terminal_library_nor_trio(python: Run) -> None:
    assert loaded_by(DEFINITIONS, python) & ONLY_WHEN_USED == set()


@pytest.mark.slow
@pytest.mark.parametrize(("program", "limit"), [(DOOR, 40), (DEFINITIONS, 300)])
def test_an_import_costs_no_more_than_was_promised(
    program: str, limit: int, python: Run, record_property: Callable[[str, object], None]
) -> None:
    cost = cost_of(program, python)
    record_property("measured", f"{program}: {cost:.1f} ms CPU of {limit}")
    assert cost <= limit
