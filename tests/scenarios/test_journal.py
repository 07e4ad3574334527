"""Going on after an end, under the same limit: what was spent before counts once.

The numbers of E12: $6 of $10 are spent, the file's limit is edited to $1,000, the run is resumed.
The limit is the host's, $10; $6 are kept; $4 are left.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import treewarden as tw
from treewarden.actors import read_journal
from treewarden.ledgers import Dispatched, Event, event_to_json
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from .kit import Backend, Witness, both_backends, check_closed, model_of_worst_case, uses_all

Journal: TypeAlias = type[tw.JsonLinesJournal] | type[tw.SQLiteJournal]
both_kinds = pytest.mark.parametrize("kind", [tw.JsonLinesJournal, tw.SQLiteJournal])

TEN = tw.Budget(max_usd="10.00")


def looper(calls: int) -> tuple[tw.Agent, ScriptedModel]:
    """An agent that makes ``calls`` calls of $1.00 each."""

    @tw.tool(effect="read", runs="host")
    async def look() -> str:
        """Look."""
        return "seen"

    def script(request: ScriptedRequest) -> Reply:
        reply = uses_all(request)
        if request.turn < calls - 1:
            return Reply(tool_calls=[("look", {})], usage=reply.usage)
        return reply

    model = model_of_worst_case("1.00", script)
    return tw.agent(id="looper", instructions="Look.", model=model, tools=[look]), model


def edit_lines(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Do to a journal what somebody does who wants a larger limit."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for fields in lines:
        change(fields)
    file.write_text("".join(json.dumps(fields) + "\n" for fields in lines))


def edit_rows(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    with closing(sqlite3.connect(file)) as database, database:
        for number, event in database.execute("SELECT id, event FROM events").fetchall():
            fields = json.loads(event)
            change(fields)
            database.execute(
                "UPDATE events SET event = ? WHERE id = ?", (json.dumps(fields), number)
            )


def raise_limit(fields: dict[str, Any]) -> None:
    if fields["event"] == "Opened":
        fields["max"] = fields["released"] = 1_000 * 10**12


def spend(file: Path, kind: Journal, calls: int, **options: Any) -> tw.Result:
    agent, _ = looper(calls)
    with kind(file) as journal:
        return tw.run_sync(
            agent, "go", budget=TEN, clock=VirtualClock(), journal=journal, **options
        )


@both_backends
@both_kinds
def test_E12_a_resumed_run_has_what_the_hosts_limit_leaves(
    kind: Journal, backend: Backend, tmp_path: Path
) -> None:
    file = tmp_path / "journal"
    first = spend(file, kind, 6, backend=backend)
    assert first.cost_usd == Decimal(6)
    (edit_lines if kind is tw.JsonLinesJournal else edit_rows)(file, raise_limit)

    async def scenario() -> None:
        agent, model = looper(20)
        witness = Witness()
        result = await tw.run(agent, "go", budget=TEN, resume_from=file, **witness.options)
        assert result.stop_reason == "budget_exhausted"
        assert len(model.requests) == 4
        assert result.cost_usd == model.billed == Decimal(4)
        receipt = result.receipt
        receipt.check()
        assert receipt.max == 10
        assert receipt.carried == 6
        assert receipt.spent == 4
        assert receipt.overspent == 0
        assert tw.Receipt.from_json(json.loads(json.dumps(receipt.to_json()))) == receipt
        check_closed(witness)
        assert witness.state.wallets[0].settled == 10 * 10**12

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E12_runs_of_an_open_tree_share_what_is_left(backend: Backend, tmp_path: Path) -> None:
    file = tmp_path / "journal"
    spend(file, tw.JsonLinesJournal, 6)

    async def scenario() -> None:
        witness = Witness()
        async with tw.open_tree(budget=TEN, resume_from=file, **witness.tree_options) as tree:
            tree.check()
            assert tree.snapshot()["wallets"]["root"]["free"] == 4
            results = [await tree.run(looper(3)[0], "go") for _ in range(2)]
            tree.check()
        assert [result.cost_usd for result in results] == [3, 1]
        assert [result.complete for result in results] == [True, False]
        for result in results:
            result.receipt.check()
        check_closed(witness)

    VirtualClock().run(scenario, backend=backend)


@both_kinds
def test_E12_spend_is_counted_once_however_often_a_run_is_resumed(
    kind: Journal, tmp_path: Path
) -> None:
    file = tmp_path / "journal"
    spend(file, kind, 3)
    results = [spend(file, kind, 3, resume_from=file) for _ in range(3)]
    assert [result.receipt.carried for result in results] == [3, 6, 9]
    assert [result.cost_usd for result in results] == [3, 3, 1]
    assert results[-1].stop_reason == "budget_exhausted"
    nothing = spend(file, kind, 3, resume_from=file)
    assert nothing.receipt.carried == 10
    assert nothing.cost_usd == 0
    assert nothing.stop_reason == "budget_exhausted"


@both_backends
def test_E12_what_is_uncertain_after_a_kill_counts_in_full(
    backend: Backend, tmp_path: Path
) -> None:
    """Killed in the sixth call: $5 are certain, and $1 may have been spent or not."""
    file = tmp_path / "journal"
    spend(file, tw.JsonLinesJournal, 6)
    events = list(read_journal(file))
    (at,) = [n for n, event in enumerate(events) if isinstance(event, Dispatched)][5:]
    write_events(file, events[: at + 1])
    result = spend(file, tw.JsonLinesJournal, 20, resume_from=file, backend=backend)
    assert result.receipt.carried == 6
    assert result.cost_usd == 4
    # One event earlier the money was only held, so nothing was spent on that call.
    write_events(file, events[:at])
    result = spend(file, tw.JsonLinesJournal, 20, resume_from=file, backend=backend)
    assert result.receipt.carried == 5
    assert result.cost_usd == 5


def write_events(file: Path, events: list[Event]) -> None:
    file.write_text("".join(event_to_json(event) + "\n" for event in events))


def test_E12_a_limit_below_what_was_spent_funds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    spend(file, tw.JsonLinesJournal, 6)
    agent, model = looper(1)
    result = tw.run_sync(agent, "go", budget=tw.Budget(max_usd="5.00"), resume_from=file)
    assert result.stop_reason == "budget_exhausted"
    assert model.requests == []
    result.receipt.check()
    assert result.receipt.carried == 6
    assert result.receipt.spent == 0
    assert result.receipt.overspent == 1


def test_E12_tokens_are_carried_like_money(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    budget = tw.Budget(max_tokens=100_000)
    with tw.SQLiteJournal(file) as journal:
        first = tw.run_sync(
            looper(2)[0], "go", budget=budget, clock=VirtualClock(), journal=journal
        )
    second = tw.run_sync(looper(1)[0], "go", budget=budget, clock=VirtualClock(), resume_from=file)
    assert second.receipt.carried == first.receipt.spent == first.receipt.total.tokens > 0
    second.receipt.check()


# --- a budget that was set but is not in force fails the start ------------------------------------


def test_E12_a_start_that_cannot_count_what_was_spent_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    spend(file, tw.JsonLinesJournal, 6)
    (tmp_path / "empty").touch()
    (tmp_path / "notes").write_text("dear diary\n")
    (tmp_path / "torn").write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[1:]))
    no_budget: dict[str, Any] = {"resume_from": file}
    wrong: list[tuple[dict[str, Any], str]] = [
        (no_budget, "Give budget="),
        ({"resume_from": file, "budget": tw.Budget(max_tokens=9)}, "Give a budget in usd"),
        ({"resume_from": tmp_path / "nowhere", "budget": TEN}, "cannot be read"),
        ({"resume_from": tmp_path, "budget": TEN}, "cannot be read"),
        ({"resume_from": tmp_path / "empty", "budget": TEN}, "holds no tree"),
        ({"resume_from": tmp_path / "notes", "budget": TEN}, "no journal event"),
        ({"resume_from": tmp_path / "torn", "budget": TEN}, "event 1 does not follow"),
    ]
    for options, why in wrong:
        agent, model = looper(1)
        with pytest.raises(tw.UsageError, match=why):
            tw.run_sync(agent, "go", **options)
        assert model.requests == []


def pay_back(fields: dict[str, Any]) -> None:
    fields["usd"] = -(10**12)


def charge_another(fields: dict[str, Any]) -> None:
    fields["hold"] += 1000


@pytest.mark.parametrize("change", [pay_back, charge_another])
def test_E12_a_file_whose_charges_were_edited_is_refused(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    file = tmp_path / "journal"
    spend(file, tw.JsonLinesJournal, 2)
    edit_lines(file, lambda fields: change(fields) if fields["event"] == "Settled" else None)
    with pytest.raises(tw.UsageError, match="cannot be gone on with"):
        tw.run_sync(looper(1)[0], "go", budget=TEN, resume_from=file)


def test_E12_a_run_that_joins_a_tree_brings_no_spend_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    spend(file, tw.JsonLinesJournal, 2)
    errors: list[tw.UsageError] = []
    inner, _ = looper(1)

    @tw.tool(effect="read", runs="host")
    async def nested() -> str:
        """Run another agent."""
        try:
            await tw.run(inner, "go", budget=TEN, resume_from=file)
        except tw.UsageError as error:
            errors.append(error)
        return "tried"

    model = ScriptedModel([Reply(tool_calls=[("nested", {})]), Reply("ok")])
    outer = tw.agent(id="outer", instructions="Nest.", model=model, tools=[nested])
    assert tw.run_sync(outer, "go").complete
    assert "resume_from= belong to a tree" in str(errors[0])
