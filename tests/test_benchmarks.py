"""The benchmarks run and print one JSON line each. Their figures are for quiet machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
# The semantics kit is downloaded; its test can be skipped.
NAMES = sorted({file.stem for file in BENCHMARKS.glob("[a-z]*.py")} - {"semantics_kit"})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_prints_one_line_of_json_that_says_if_its_targets_are_met(name: str) -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", "--quick"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    (line,) = done.stdout.splitlines()
    said = json.loads(line)
    assert said["benchmark"] == name
    assert said["ok"] is all(row["ok"] for row in said["rows"])
    assert done.returncode == (0 if said["ok"] else 1)
    assert said["rows"]


def test_the_ceiling_holds_under_parallel_children() -> None:
    """Not a matter of a quiet machine: the overshoot benchmark has to be ok anywhere."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "overshoot.py", "--quick"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert json.loads(done.stdout)["ok"], done.stderr
