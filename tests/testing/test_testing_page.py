"""What docs/testing.md shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

import treewarden as tw
from treewarden import testing
from treewarden.testing import (
    LedgerMachine,
    Reply,
    Scenario,
    ScriptedModel,
    UsdMachine,
    explore_cancellations,
)

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
BRIEFLY = settings(
    deadline=None,
    database=None,
    derandomize=True,
    max_examples=15,
    stateful_step_count=15,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def shown(what: str) -> dict[str, Any]:
    """The names that the one block of Python with ``what`` in it defines."""
    (code,) = [b for b in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if what in b]
    model = ScriptedModel(lambda _: Reply("done", delay=1))
    support = tw.agent(id="support", instructions="Help.", model=model)
    names: dict[str, Any] = {"__name__": "page", "tw": tw, "support": support}
    exec(compile(code, "docs/testing.md", "exec"), names)
    return names


def test_a_machine_of_a_users_own_runs_with_its_rule_and_its_invariant() -> None:
    machine: type[LedgerMachine] = shown("WithADashboard")["WithADashboard"]
    run_state_machine_as_test(machine, settings=BRIEFLY)


def test_a_users_invariant_that_does_not_hold_is_found() -> None:
    class Wrong(UsdMachine):
        @invariant()
        def nobody_holds_anything(self) -> None:
            assert not self.ledger.state.holds, "somebody holds"

    with pytest.raises(AssertionError, match="somebody holds"):
        run_state_machine_as_test(Wrong, settings=BRIEFLY)


@pytest.mark.slow
def test_the_scenario_is_clean_at_every_instant() -> None:
    names = shown("def test_it_may_be_cancelled")
    scenario: Scenario = names["scenario_two_readers"]
    assert explore_cancellations(scenario).is_clean
    names["test_it_may_be_cancelled_at_any_instant"]()


@pytest.mark.parametrize(
    "name",
    ["ReplayServer", "run_seeded", "Exploration", "LeakError", "LedgerMachine", "VirtualClock"],
)
def test_the_page_tells_of_what_there_is(name: str) -> None:
    assert hasattr(testing, name)
    assert f"`{name}" in PAGE
