"""Public reports about budgets that parallel work ran past, told to whole trees."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest

from .kit import (
    Witness,
    check_books,
    check_nobody_was_refused,
    explore,
    free_model,
    hands_out,
    model_of_worst_case,
    tasks,
    uses_all,
)

Measured = Callable[[str, object], None]


@pytest.mark.parametrize(
    ("worst_case", "output_limit", "clamp", "calls", "spent"),
    [
        ("0.10", 1_000, False, 1, "10.00"),
        ("0.04", 1_000, False, 2, "9.98"),
        ("0.11", 1_100, False, 0, "9.90"),
        ("0.11", 1_100, True, 1, "10.00"),
    ],
)
def test_E01_five_children_share_a_tenth_of_a_dollar(
    worst_case: str,
    output_limit: int,
    clamp: bool,
    calls: int,
    spent: str,
    record_property: Measured,
) -> None:
    async def scenario() -> Witness:
        worker = model_of_worst_case(worst_case, uses_all, output_limit=output_limit)
        planner = model_of_worst_case("9.90", hands_out(*tasks("work", 5)))
        child = tw.agent(id="worker", instructions="Work.", model=worker)
        work = tw.subagent(name="work", description="Work.", agent=child)
        boss = tw.agent(id="boss", instructions="Plan.", model=planner, tools=[work])
        witness = Witness(is_thorough=False)
        result = await tw.run(
            boss, "go", budget=tw.Budget(max_usd="10.00", clamp=clamp), **witness.options
        )
        assert len(worker.requests) == calls
        assert result.cost_usd == Decimal(spent)
        ended = [child.stop_reason for child in result.receipt.subagents]
        assert sorted(ended) == ["budget_exhausted"] * (5 - calls) + ["complete"] * calls
        check_nobody_was_refused(witness)
        check_books(witness, result.receipt, worker, planner)
        return witness

    explore(scenario, record_property, f"E01 at ${worst_case}, clamp {clamp}")
