"""``treewarden replay``: every prefix is checked, and what is shown adds up."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import treewarden as tw
from treewarden.actors import read_journal
from treewarden.ledgers import Event, Held, Settled, event_to_json, fold
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from .conftest import Command

BUDGET = tw.Budget(max_usd="1.00")


def a_tree() -> tw.Agent:
    def script(request: ScriptedRequest) -> Reply:
        if "research" in request.agent_path:
            return Reply("found", usage=tw.Usage(output=100), delay=1.0)
        if request.turn == 0:
            return Reply(tool_calls=[("research", {"task": task}) for task in "ab"])
        return Reply("done")

    model = ScriptedModel(script, max_output=1_000)
    worker = tw.agent(id="researcher", instructions="Research.", model=model)
    research = tw.subagent(name="research", description="Research.", agent=worker, max_usd="0.3")
    return tw.agent(id="support", instructions="Answer.", model=model, tools=[research])


def events_of_a_run(budget: tw.Budget | None = BUDGET) -> list[Event]:
    events: list[Event] = []
    tw.run_sync(a_tree(), "go", budget=budget, clock=VirtualClock(), journal=events.append)
    return events


def write(file: Path, *trees: list[Event]) -> str:
    lines = [event_to_json(event) + "\n" for events in trees for event in events]
    file.write_text("".join(lines))
    return str(file)


@pytest.fixture
def journal(folder: Path) -> str:
    return write(folder / "journal", events_of_a_run())


# --- a good one -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [tw.JsonLinesJournal, tw.SQLiteJournal])
def test_a_journal_of_either_kind_is_shown_as_a_tree(
    treewarden: Command, folder: Path, kind: type[tw.JsonLinesJournal] | type[tw.SQLiteJournal]
) -> None:
    with kind(folder / "journal") as sink:
        result = tw.run_sync(a_tree(), "go", budget=BUDGET, clock=VirtualClock(), journal=sink)
    said = treewarden("replay", "journal")
    assert said.code == 0
    heading, _, *rows = said.out.splitlines()
    assert heading.endswith("(Ended): it is over")
    cells = [row.lstrip("├└─│ ").split() for row in rows[:5]]
    assert [cell[0] for cell in cells] == [
        "root", "support#1", "research#1", "research#2", "total"
    ]  # fmt: skip
    assert [cell[1] for cell in cells] == ["0", "2", "1", "1", "4"]
    spent = [Decimal(cell[2]) for cell in cells]
    assert sum(spent[:-1]) == spent[-1] == result.cost_usd
    assert rows[5:] == [f"certainly spent: {result.cost_usd:f} USD", "limit: 1 USD"]


def test_every_event_can_be_looked_at_and_its_sums_are_those_of_the_state(
    treewarden: Command, journal: str
) -> None:
    events = list(read_journal(journal))
    for at in range(1, len(events) + 1):
        said = treewarden("replay", journal, "--at", str(at), "--json")
        assert said.code == 0
        shown, state = json.loads(said.out), fold(events[:at])
        assert (shown["event"], shown["events"]) == (at, len(events))
        assert shown["last_event"] == type(events[at - 1]).__name__
        assert amount(shown["spent"]) == state.wallets[0].settled
        assert amount(shown["held"]) == sum(
            h.amount for h in state.holds.values() if not h.is_dispatched
        )
        assert amount(shown["uncertain"]) == sum(
            h.amount for h in state.holds.values() if h.is_dispatched
        )
        live = {node["path"] for node in shown["nodes"] if node["outcome"] is None}
        assert live == {node.path for node in state.nodes.values()}
        for column in ("held", "uncertain"):
            assert sum(amount(n[column]) for n in shown["nodes"]) == amount(shown[column])
        assert sum(n["calls"] for n in shown["nodes"]) == state.counters.model_calls


def amount(text: str) -> int:
    scaled = Decimal(text) * 10**12
    assert scaled == int(scaled)
    return int(scaled)


def test_without_a_budget_there_is_no_limit_to_show(treewarden: Command, folder: Path) -> None:
    said = treewarden("replay", write(folder / "journal", events_of_a_run(None)))
    assert said.code == 0
    assert "limit" not in said.out


def test_a_token_tree_is_shown_in_tokens(treewarden: Command, folder: Path) -> None:
    events: list[Event] = []
    budget = tw.Budget(max_tokens=100_000)
    model = ScriptedModel([Reply("done", usage=tw.Usage(output=100))])
    agent = tw.agent(id="a", instructions="A.", model=model)
    tw.run_sync(agent, "go", budget=budget, clock=VirtualClock(), journal=events.append)
    said = treewarden("replay", write(folder / "journal", events))
    assert "spent tokens" in said.out
    assert "certainly spent: 100 tokens" in said.out
    assert "limit: 100000 tokens" in said.out


def test_of_several_trees_the_last_is_shown_unless_another_is_asked_for(
    treewarden: Command, folder: Path
) -> None:
    file = write(folder / "journal", events_of_a_run(), events_of_a_run(None))
    assert treewarden("replay", file).out.startswith("tree 2 of 2, event ")
    first = json.loads(treewarden("replay", file, "--tree", "1", "--json").out)
    assert (first["tree"], first["trees"], first["max"]) == (1, 2, "1")


def test_what_was_carried_is_told_beside_what_was_spent(
    treewarden: Command, folder: Path, journal: str
) -> None:
    events: list[Event] = []
    tw.run_sync(
        a_tree(),
        "go",
        budget=BUDGET,
        clock=VirtualClock(),
        resume_from=journal,
        journal=events.append,
    )
    before = json.loads(treewarden("replay", journal, "--json").out)["spent"]
    file = write(folder / "second", events)
    shown = json.loads(treewarden("replay", file, "--json").out)
    assert (shown["carried"], shown["spent"]) == (before, before)
    assert f"spent before under the same limit: {before} USD" in treewarden("replay", file).out


# --- after a kill ---------------------------------------------------------------------------------


def test_after_a_kill_it_says_what_is_certain_uncertain_and_held(
    treewarden: Command, folder: Path
) -> None:
    events = events_of_a_run()
    # Killed when the first of two subagents had sent its request and the second had not.
    third = [number for number, event in enumerate(events) if isinstance(event, Held)][2]
    events = events[: third + 1]
    file = write(folder / "journal", events)
    shown = json.loads(treewarden("replay", file, "--json").out)
    assert not shown["is_over"]
    by_name = {node["path"].rpartition("/")[2]: node for node in shown["nodes"]}
    assert Decimal(by_name["support#1"]["usd"]) == Decimal(shown["spent"]) > 0
    assert Decimal(by_name["research#1"]["uncertain"]) == Decimal(shown["uncertain"]) > 0
    assert Decimal(by_name["research#2"]["held"]) == Decimal(shown["held"]) > 0
    said = treewarden("replay", file)
    assert said.code == 0
    assert "the journal ends here and the tree was open" in said.out
    assert f"certainly spent: {shown['spent']} USD" in said.out
    assert f"uncertain: between 0 and {shown['uncertain']} USD" in said.out
    assert f"held: {shown['held']} USD, for calls that had not left" in said.out


KILLED = """
import os, signal, sys
import treewarden as tw
from treewarden.testing import Reply, ScriptedModel

def script(request):
    if request.turn == 0:
        return Reply(tool_calls=[("nothing", {})], usage=tw.Usage(output=1000))
    os.kill(os.getpid(), signal.SIGKILL)

model = ScriptedModel(script, price=tw.Price(input="0", output="100"), max_output=1000)
agent = tw.agent(id="a", instructions="A.", model=model)
with getattr(tw, sys.argv[1])("journal") as journal:
    tw.run_sync(agent, "go", budget=tw.Budget(max_usd="1"), journal=journal)
"""


@pytest.mark.parametrize("kind", ["JsonLinesJournal", "SQLiteJournal"])
def test_a_process_that_was_killed_in_a_call_leaves_an_uncertain_one(
    treewarden: Command, folder: Path, kind: str
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, kind], cwd=folder, check=False)
    assert killed.returncode == -9
    shown = json.loads(treewarden("replay", "journal", "--json").out)
    assert (shown["spent"], shown["uncertain"], shown["held"]) == ("0.1", "0.1", "0")
    assert shown["last_event"] == "Dispatched"


# --- what is wrong with it ------------------------------------------------------------------------


def lie(index: int, events: list[Event], **changes: Any) -> list[Event]:
    return [*events[:index], events[index]._replace(**changes), *events[index + 1 :]]


def first(kind: type, events: list[Event]) -> int:
    return next(n for n, event in enumerate(events) if isinstance(event, kind))


def overspends(events: list[Event]) -> tuple[list[Event], int, str]:
    """More was held than there was."""
    at = first(Held, events)
    return lie(at, events, amount=2 * 10**12), at, "AssertionError"


def charges_nobody(events: list[Event]) -> tuple[list[Event], int, str]:
    at = first(Settled, events)
    return lie(at, events, hold=99), at, "KeyError"


def pays_back(events: list[Event]) -> tuple[list[Event], int, str]:
    at = len(events) - 1 - first(Settled, events[::-1])
    return lie(at, events, usd=-5), at, "AssertionError"


def forgets_one(events: list[Event]) -> tuple[list[Event], int, str]:
    at = first(Held, events)
    return [*events[:at], *events[at + 1 :]], at, "KeyError"


@pytest.mark.parametrize("change", [overspends, charges_nobody, pays_back, forgets_one])
def test_the_first_event_at_which_something_is_wrong_is_named(
    treewarden: Command,
    folder: Path,
    change: Callable[[list[Event]], tuple[list[Event], int, str]],
) -> None:
    good = events_of_a_run()
    events, at, error = change(good)
    said = treewarden("replay", write(folder / "journal", good, events, good))
    assert said.code == 1
    kind = type(events[at]).__name__
    assert f"journal: tree 2, event {at + 1} ({kind}): {error}" in said.err
    assert said.err.count("event ") == 1
    as_json = treewarden("replay", "journal", "--tree", "2", "--json")
    assert as_json.code == 1
    assert f"event {at + 1} " in json.loads(as_json.out)["problem"]


def test_a_line_in_the_middle_that_is_no_event_is_named(
    treewarden: Command, folder: Path, journal: str
) -> None:
    lines = Path(journal).read_text().splitlines(keepends=True)
    Path(journal).write_text("".join([*lines[:7], "{}\n", *lines[8:]]))
    said = treewarden("replay", journal)
    assert said.code == 1
    assert "tree 1, event 8 (unreadable): " in said.err


def test_a_last_line_that_was_cut_off_is_no_problem(
    treewarden: Command, folder: Path, journal: str
) -> None:
    Path(journal).write_text(Path(journal).read_text()[:-9])
    assert treewarden("replay", journal).code == 0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "holds no events"),
        (b"dear diary\n", "this is no journal event"),
        (b"{}\n", "this is no journal event"),
        (b'{"event":"Left","at":0.0,"ticket":1}\n', "does not begin with a tree"),
        (b"SQLite format 3\x00 but not really", "is no journal"),
        (b"\xff\xfe\n", "this is no journal event"),
    ],
    ids=["empty", "text", "object", "middle", "not SQLite", "not UTF-8"],
)
def test_a_file_that_is_no_journal_is_a_usage_error(
    treewarden: Command, folder: Path, content: bytes, why: str
) -> None:
    (folder / "file").write_bytes(content)
    said = treewarden("replay", "file")
    assert said.code == 2
    assert why in said.err
    assert said.out == ""


def test_a_database_without_events_is_a_usage_error(treewarden: Command, folder: Path) -> None:
    with closing(sqlite3.connect(folder / "app.db")) as database:
        database.execute("CREATE TABLE users (name TEXT)")
    said = treewarden("replay", "app.db")
    assert said.code == 2
    assert "is no journal" in said.err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere"], "cannot be read"),
        (["."], "cannot be read"),
        (["journal", "--at", "0"], "counted from 1"),
        (["journal", "--at", "999"], "--at is 999, and tree 1 has "),
        (["journal", "--tree", "2"], "--tree is 2, and journal holds 1."),
        (["journal", "--tree", "-1"], "counted from 1"),
        ([], "requires an argument"),
    ],
    ids=str,
)
def test_what_cannot_be_shown_is_a_usage_error(
    treewarden: Command, journal: str, arguments: list[str], why: str
) -> None:
    said = treewarden("replay", *arguments)
    assert said.code == 2
    assert why in said.err
    assert said.out == ""


def test_names_in_a_file_cannot_steer_the_terminal(
    treewarden: Command, folder: Path, journal: str
) -> None:
    raw = Path(journal).read_text().replace('"name":"support"', '"name":"\\u001b[31m[red]"')
    Path(journal).write_text(raw)
    said = treewarden("replay", journal)
    assert said.code == 0
    assert "\x1b" not in said.out
    assert "[red]#1" in said.out
