"""``treewarden stress``: a grid of trees, a row each, and what must hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from treewarden.ledgers import Outcome, TreeLedger

from .conftest import Command

on_each_backend = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def rows(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


# --- the grid -------------------------------------------------------------------------------------


def test_there_is_a_row_per_combination(treewarden: Command) -> None:
    said = treewarden("stress", "--fan-out", "2,3", "--depth", "1,2", "--json")
    found = [(r["fan_out"], r["depth"], r["backend"]) for r in rows(said.out)]
    backends = ("asyncio", "trio")
    assert found == [(f, d, b) for f in (2, 3) for d in (1, 2) for b in backends]
    assert said.code == 0


def test_every_subagent_of_the_tree_is_admitted(treewarden: Command) -> None:
    (row,) = rows(
        treewarden("stress", "--fan-out", "3", "--depth", "3", "--backend", "trio", "--json").out
    )
    assert row["admitted"] == 3 + 9 + 27
    # One call of each leaf, two of everybody above.
    assert row["calls"] == 27 + 2 * (1 + 3 + 9)


def test_without_json_it_is_one_table(treewarden: Command) -> None:
    said = treewarden("stress", "--fan-out", "4", "--backend", "asyncio,trio")
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[0][:7] == ["fan-out", "depth", "backend", "admitted", "peak", "refused", "calls"]
    assert [line[:7] for line in lines[1:]] == [
        ["4", "1", "asyncio", "4", "4", "0", "6"],
        ["4", "1", "trio", "4", "4", "0", "6"],
    ]
    assert (said.code, said.err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fan-out", "0"), "'0' is not a whole number from 1 to"),
        (("--fan-out", "-1"), "'-1' is not a whole number"),
        (("--fan-out", "2,,3"), "'' is not a whole number"),
        (("--fan-out", ""), "'' is not a whole number"),
        (("--fan-out", "many"), "'many' is not a whole number"),
        (("--fan-out", "1e3"), "'1e3' is not a whole number"),
        (("--fan-out", "٣"), "is not a whole number"),
        (("--fan-out", "9" * 5000), "is not a whole number"),
        (("--fan-out", "3,3"), "--fan-out 3,3 names a point twice."),
        (("--fan-out", "3,03"), "--fan-out 3,3 names a point twice."),
        (("--depth", "9"), "'9' is not a whole number from 1 to 8"),
        (("--fan-out", "100", "--depth", "3"), "is a tree of 1,010,100 subagents"),
        (("--backend", "curio"), "--backend is 'curio'."),
        (("--backend", "trio,trio"), "names a point twice"),
        (("--budget-tokens", "0"), "--budget-tokens is 0."),
        (("--max-concurrent-subagents", "0"), "--max-concurrent-subagents is 0."),
        (("--failure-rate", "1.5"), "--failure-rate is 1.5."),
        (("--failure-rate", "nan"), "--failure-rate is nan."),
        (("--call-seconds", "-1"), "--call-seconds is -1."),
        (("--cancel-after", "inf"), "--cancel-after is inf."),
        (("--seed", "x"), 'unable to convert "x" into int'),
        (("10",), "Unused Tokens"),
    ],
)
def test_a_bad_grid_exits_with_2_and_one_message(
    treewarden: Command, arguments: tuple[str, ...], message: str
) -> None:
    said = treewarden("stress", *arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("treewarden: ")
    assert message in said.err


# --- what must hold -------------------------------------------------------------------------------

HARD: dict[str, tuple[str, ...]] = {
    "a tight budget": ("--budget-tokens", "20000"),
    "a budget for nothing": ("--budget-tokens", "1"),
    "calls that fail": ("--failure-rate", "0.5"),
    "all calls failing": ("--failure-rate", "1"),
    "a cancel": ("--cancel-after", "1.3"),
    "a cancel at once": ("--cancel-after", "0"),
    "few at a time": ("--max-concurrent-subagents", "3"),
    "instant calls": ("--call-seconds", "0"),
    "all of it": (
        *("--budget-tokens", "20000", "--failure-rate", "0.3", "--cancel-after", "2"),
        *("--max-concurrent-subagents", "20"),
    ),
}


@on_each_backend
@pytest.mark.parametrize("hard", HARD)
def test_nothing_is_overshot_or_left_behind(treewarden: Command, backend: str, hard: str) -> None:
    said = treewarden(
        *("stress", "--fan-out", "7", "--depth", "2", "--backend", backend, "--json", *HARD[hard])
    )
    (row,) = rows(said.out)
    assert (said.code, said.err) == (0, "")
    assert row["ok"] is True
    assert row["overshoot"] in (0, None)
    assert set(row["leaks"].values()) == {0}
    assert row["violations"] == []


@on_each_backend
def test_a_budget_stops_the_tree_and_is_not_overshot(treewarden: Command, backend: str) -> None:
    options = ("--fan-out", "100", "--budget-tokens", "50000", "--backend", backend, "--json")
    (row,) = rows(treewarden("stress", *options).out)
    assert row["stop_reason"] == "budget_exhausted"
    assert row["overshoot"] == 0
    assert 0 < row["tokens"] <= 50_000


def test_a_wide_tree_asks_for_all_its_subagents_at_once(treewarden: Command) -> None:
    options = ("--fan-out", "500", "--max-concurrent-subagents", "50", "--backend", "asyncio")
    (row,) = rows(treewarden("stress", *options, "--json").out)
    assert (row["admitted"], row["peak"], row["rejections"]) == (50, 50, 450)


def test_a_cancel_comes_at_its_virtual_instant(treewarden: Command) -> None:
    for row in rows(treewarden("stress", "--cancel-after", "1.25", "--json").out):
        assert (row["stop_reason"], row["virtual_seconds"]) == ("cancelled", 1.25)


@on_each_backend
def test_a_seed_repeats_a_row(treewarden: Command, backend: str) -> None:
    options = ("--fan-out", "6", "--depth", "2", "--failure-rate", "0.2", "--backend", backend)

    def row(seed: str) -> dict[str, Any]:
        (found,) = rows(treewarden("stress", *options, "--seed", seed, "--json").out)
        return {
            name: value for name, value in found.items() if name not in ("wall_seconds", "seed")
        }

    assert row("1") == row("1")
    assert row("1") != row("2")


# --- what is found --------------------------------------------------------------------------------


def test_a_violated_invariant_exits_with_1_and_says_which(
    treewarden: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: TreeLedger) -> None:
        raise AssertionError("the books are off by one")

    monkeypatch.setattr(TreeLedger, "check_closed", never)
    said = treewarden("stress", "--fan-out", "2", "--backend", "trio", "--json")
    (row,) = rows(said.out)
    assert (said.code, row["ok"]) == (1, False)
    assert row["violations"] == ["the closed ledger: the books are off by one"]
    assert "fan-out 2, depth 1, trio: the closed ledger: the books are off by one" in said.err


def test_a_lease_that_is_not_given_back_is_a_leak(
    treewarden: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = TreeLedger.end

    def forget_the_root(self: TreeLedger, lease: Any, outcome: Outcome, at: float) -> None:
        if lease is not self.root:
            end(self, lease, outcome, at)

    monkeypatch.setattr(TreeLedger, "end", forget_the_root)
    said = treewarden("stress", "--fan-out", "2", "--backend", "asyncio", "--json")
    (row,) = rows(said.out)
    assert said.code == 1
    assert row["leaks"] == {"holds": 0, "slots": 0, "spans": 1, "tasks": 0}
