"""Journals on disk: real files, full disks, killed processes, and a journal that raises."""

from __future__ import annotations

import functools
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import anyio
import pytest

import treewarden as tw
from treewarden.actors import read_journal
from treewarden.ledgers import Dispatched, Ended, Event, Opened, Settled, TreeState, fold
from treewarden.protocols import JournalFailed
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

Backend: TypeAlias = Literal["asyncio", "trio"]
Journal: TypeAlias = tw.JsonLinesJournal | tw.SQLiteJournal
MakeJournal: TypeAlias = Callable[[str | Path], Journal]

both_backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])
both_kinds = pytest.mark.parametrize("make", [tw.JsonLinesJournal, tw.SQLiteJournal])

BUDGET = tw.Budget(max_usd="1.00")


def a_tree(*, parts: int = 2, delay: float = 1.0) -> tuple[tw.Agent, ScriptedModel]:
    """An agent with ``parts`` subagents that work side by side, and the model of all of them."""

    def script(request: ScriptedRequest) -> Reply:
        if "part" in request.agent_path:
            return Reply("found", delay=delay)
        if request.turn == 0:
            return Reply(tool_calls=[("part", {"task": f"{n}"}) for n in range(parts)])
        return Reply("done")

    model = ScriptedModel(script)
    worker = tw.agent(id="worker", instructions="Work.", model=model)
    part = tw.subagent(name="part", description="A part.", agent=worker, max_usd="0.30")
    return tw.agent(id="boss", instructions="Lead.", model=model, tools=[part]), model


async def run_in_a_tree(journal: Callable[[Event], None], *, runs: int = 1) -> tw.TreeLedger:
    """Run a tree with that journal; returns its ledger, closed."""
    boss, _ = a_tree()
    async with tw.open_tree(budget=BUDGET, journal=journal) as tree:
        for _ in range(runs):
            assert (await tree.run(boss, "go")).complete
        ledger = tree.ledger
    ledger.check_closed()
    return ledger


def trees_of(events: list[Event]) -> list[list[Event]]:
    trees: list[list[Event]] = []
    for event in events:
        if isinstance(event, Opened):
            trees.append([])
        trees[-1].append(event)
    return trees


# --- what is written is what happened -------------------------------------------------------------


@both_backends
@both_kinds
def test_a_journal_folds_to_the_identical_state(
    make: MakeJournal, backend: Backend, tmp_path: Path
) -> None:
    file, seen = tmp_path / "journal", list[Event]()
    with make(file) as journal:

        def write(event: Event) -> None:
            seen.append(event)
            journal(event)

        ledger = VirtualClock().run(
            functools.partial(run_in_a_tree, write, runs=3), backend=backend
        )
    read = list(read_journal(file))
    assert read == seen
    assert fold(read).plain() == ledger.state.plain()


@both_kinds
def test_trees_follow_each_other_in_one_file(make: MakeJournal, tmp_path: Path) -> None:
    file, ledgers = tmp_path / "journal", list[tw.TreeLedger]()
    with make(file) as journal:
        for _ in range(2):
            ledgers.append(VirtualClock().run(run_in_a_tree, journal))
    with make(file) as journal:  # and after it was closed
        ledgers.append(VirtualClock().run(run_in_a_tree, journal, backend="trio"))
    trees = trees_of(list(read_journal(file)))
    assert [fold(tree).plain() for tree in trees] == [lg.state.plain() for lg in ledgers]


@both_kinds
def test_a_journal_can_be_read_while_it_is_written(make: MakeJournal, tmp_path: Path) -> None:
    file = tmp_path / "journal"

    def script(request: ScriptedRequest) -> Reply:
        assert isinstance(list(read_journal(file))[-1], Dispatched)
        return Reply("read")

    agent = tw.agent(id="a", instructions="Read.", model=ScriptedModel(script))
    with make(file) as journal:
        result = tw.run_sync(agent, "go", clock=VirtualClock(), journal=journal)
    assert result.complete


@both_kinds
def test_two_trees_at_a_time_do_not_mix_in_one_journal(make: MakeJournal, tmp_path: Path) -> None:
    async def scenario() -> None:
        with make(tmp_path / "journal") as journal:
            async with tw.open_tree(journal=journal):
                with pytest.raises(tw.UsageError, match="being written by another tree"):
                    async with tw.open_tree(journal=journal):
                        raise AssertionError("it was opened")

    anyio.run(scenario)
    (opened, ended) = read_journal(tmp_path / "journal")
    assert isinstance(opened, Opened)
    assert isinstance(ended, Ended)


@both_kinds
def test_a_journal_that_was_closed_takes_nothing_more(make: MakeJournal, tmp_path: Path) -> None:
    journal = make(tmp_path / "journal")
    journal.close()
    journal.close()
    with pytest.raises(tw.UsageError, match="closed"):
        tw.run_sync(a_tree()[0], "go", journal=journal)


# --- SQLite ---------------------------------------------------------------------------------------


def test_a_database_is_in_wal_mode_and_has_one_thread(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    before = threading.active_count()
    with tw.SQLiteJournal(file) as journal:
        VirtualClock().run(run_in_a_tree, journal)
        assert threading.active_count() == before + 1
        with closing(sqlite3.connect(file)) as database:
            assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert threading.active_count() == before
    assert os.listdir(tmp_path) == ["journal.db"]


def test_events_are_committed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[str] = []

    class Counting(sqlite3.Connection):
        def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
            if sql == "COMMIT":
                commits.append(threading.current_thread().name)
            return super().execute(sql, *parameters)

    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Counting))
    with tw.SQLiteJournal(tmp_path / "journal") as journal:
        ledger = VirtualClock().run(run_in_a_tree, journal)
    events = list(read_journal(tmp_path / "journal"))
    dispatched = sum(isinstance(event, Dispatched) for event in events)
    assert len(events) == ledger.state.events
    # One for every call, one for the end of the tree, and what the thread found by itself.
    assert dispatched + 1 <= len(commits) < len(events)
    assert set(commits) == {"journal"}


@pytest.mark.parametrize("name", ["journal", "with ? and #.db"])
def test_a_database_that_nobody_writes_is_read_where_nothing_can_be_created(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    with tw.SQLiteJournal(file) as journal:
        VirtualClock().run(run_in_a_tree, journal)
    tmp_path.chmod(0o555)
    try:
        assert len(list(read_journal(file))) > 10
    finally:
        tmp_path.chmod(0o755)
    assert os.listdir(tmp_path) == [name]


def test_virtual_time_does_not_wait_for_the_writer(tmp_path: Path) -> None:
    boss, _ = a_tree(parts=5, delay=3600)
    begin = time.monotonic()
    with tw.SQLiteJournal(tmp_path / "journal") as journal:
        for backend in ("asyncio", "trio"):
            # Waiting for a thread only once would take this patience.
            clock = VirtualClock(patience=30)
            result = tw.run_sync(boss, "go", clock=clock, journal=journal, backend=backend)
            assert result.complete
    assert time.monotonic() - begin < 10


# --- a file that cannot be written ----------------------------------------------------------------


@contextmanager
def files_no_larger_than(size: int) -> Generator[None]:
    """What a full disk does: writes beyond it come to an error, the last one halfway."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@both_backends
@pytest.mark.parametrize(
    ("make", "size"), [(tw.JsonLinesJournal, 5_000), (tw.SQLiteJournal, 70_000)]
)
def test_a_full_disk_ends_the_tree_in_order(
    make: MakeJournal, size: int, backend: Backend, tmp_path: Path
) -> None:
    file = tmp_path / "journal"
    boss, model = a_tree()
    ledgers: list[tw.TreeLedger] = []

    async def scenario() -> None:
        with make(file) as journal, files_no_larger_than(size):
            async with tw.open_tree(budget=tw.Budget(max_usd="100"), journal=journal) as tree:
                ledgers.append(tree.ledger)
                for _ in range(100):
                    await tree.run(boss, "go")

    with pytest.raises(tw.RunError, match="the journal cannot be written") as caught:
        VirtualClock().run(scenario, backend=backend)
    assert caught.value.code == "cave_journal_failed"
    assert isinstance(caught.value.__cause__, OSError | sqlite3.Error)
    caught.value.receipt.check()
    ledgers[0].check_closed()
    assert model.open_requests == 0
    # What is in the file is what happened, up to somewhere; and every call that left is in it.
    read = list(read_journal(file))
    fold(read).check()
    dispatched = sum(isinstance(event, Dispatched) for event in read)
    assert 1 < len(model.requests) <= dispatched
    # Once there is room again, the next tree begins on a line of its own.
    with make(file) as journal:
        VirtualClock().run(run_in_a_tree, journal)
    assert len(trees_of(list(read_journal(file)))) == 2


@both_kinds
def test_a_journal_that_failed_stays_failed(make: MakeJournal, tmp_path: Path) -> None:
    journal = make(tmp_path / "journal")
    with files_no_larger_than(1_000), pytest.raises(JournalFailed):
        tw.run_sync(a_tree()[0], "go", clock=VirtualClock(), journal=failing_late(journal))
    with pytest.raises(JournalFailed):
        tw.run_sync(a_tree()[0], "go", clock=VirtualClock(), journal=journal)
    if isinstance(journal, tw.SQLiteJournal):
        with pytest.raises(sqlite3.Error):
            journal.close()
    else:
        journal.close()


def failing_late(journal: Journal) -> Callable[[Event], None]:
    """Write one thing so often that the disk is full, while the tree is being opened."""

    def write(event: Event) -> None:
        journal(event)
        for _ in range(50):
            journal(Settled(0.0, 1, 0, 0, "estimated"))
        if isinstance(journal, tw.SQLiteJournal):
            journal.flush()

    return write


@both_kinds
def test_a_place_where_no_file_can_be_is_an_error_at_once(
    make: MakeJournal, tmp_path: Path
) -> None:
    before = threading.active_count()
    with pytest.raises((OSError, sqlite3.Error)):
        make(tmp_path / "no" / "such" / "folder")
    with pytest.raises((OSError, sqlite3.Error)):
        make(tmp_path)
    assert threading.active_count() == before


@pytest.mark.parametrize("content", [b"dear diary\n", b"{}\n", b"\n", b'{"event":"Held"}\n'])
def test_a_file_of_another_kind_is_left_alone(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_bytes(content)
    with pytest.raises(tw.UsageError, match="is no journal"):
        tw.JsonLinesJournal(file)
    assert file.read_bytes() == content


def test_a_database_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "app.db"
    with closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE events (name TEXT)")
    with pytest.raises(sqlite3.Error, match="no such column"):
        tw.SQLiteJournal(file)
    with pytest.raises(tw.UsageError, match="is no journal"):
        list(read_journal(file))


def test_a_file_that_is_being_written_is_not_opened_by_a_second_writer(tmp_path: Path) -> None:
    with tw.JsonLinesJournal(tmp_path / "journal"):
        with pytest.raises(tw.UsageError, match="being written already"):
            tw.JsonLinesJournal(tmp_path / "journal")
    tw.JsonLinesJournal(tmp_path / "journal").close()


def test_two_writers_of_one_database_do_not_mix_their_trees(tmp_path: Path) -> None:
    file = tmp_path / "journal"

    async def scenario() -> list[tw.TreeLedger]:
        ledgers: list[tw.TreeLedger] = []

        async def one(journal: tw.SQLiteJournal) -> None:
            ledgers.append(await run_in_a_tree(journal, runs=2))

        with tw.SQLiteJournal(file) as first, tw.SQLiteJournal(file) as second:
            async with anyio.create_task_group() as group:
                group.start_soon(one, first)
                group.start_soon(one, second)
        return ledgers

    ledgers = VirtualClock().run(scenario)
    trees = trees_of(list(read_journal(file)))
    plain = sorted(str(fold(tree).plain()) for tree in trees)
    assert plain == sorted(str(ledger.state.plain()) for ledger in ledgers)


# --- a journal that raises ------------------------------------------------------------------------


class Broken:
    """A journal that takes ``good`` events and raises at the next."""

    def __init__(self, good: int) -> None:
        self.good = good
        self.state = TreeState()
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        assert len(self.events) <= self.good, "it was asked again after it had raised"
        self.events.append(event)
        if len(self.events) > self.good:
            raise ValueError(f"no room for {event}")
        self.state.apply(event)
        self.state.check()


def count_events() -> int:
    events: list[Event] = []
    tw.run_sync(a_tree()[0], "go", budget=BUDGET, clock=VirtualClock(), journal=events.append)
    return len(events)


@both_backends
def test_whichever_event_a_journal_raises_at_the_run_ends_in_order(backend: Backend) -> None:
    for good in range(1, count_events()):
        boss, model = a_tree()
        journal = Broken(good)
        with pytest.raises(tw.RunError, match="the journal cannot be written") as caught:
            tw.run_sync(
                boss,
                "go",
                budget=BUDGET,
                clock=VirtualClock(),
                journal=journal,
                backend=backend,
            )
        assert isinstance(caught.value.__cause__, ValueError)
        caught.value.receipt.check()
        assert caught.value.receipt.faults == ()
        total = caught.value.receipt.total  # of calls that were cut off, an estimate
        assert total.low_usd <= model.billed <= total.high_usd
        assert model.open_requests == 0
        # No request leaves for a call that could not be written down.
        written = sum(isinstance(event, Dispatched) for event in journal.events[:good])
        assert len(model.requests) <= written, good


@both_backends
def test_whichever_event_a_journal_raises_at_no_hold_is_left(backend: Backend) -> None:
    ledgers: list[tw.TreeLedger] = []

    async def scenario(good: int) -> None:
        boss, _ = a_tree()
        async with tw.open_tree(budget=BUDGET, journal=Broken(good)) as tree:
            ledgers.append(tree.ledger)
            with pytest.raises(tw.RunError, match="the journal cannot be written"):
                await tree.run(boss, "go")
                raise AssertionError(f"it went on after {good}")
            with pytest.raises(JournalFailed):
                await tree.run(boss, "go")

    for good in range(1, count_events() - 1):
        with pytest.raises(JournalFailed, match="the journal cannot be written"):
            VirtualClock().run(functools.partial(scenario, good), backend=backend)
        ledgers[-1].check_closed()


@both_backends
def test_a_journal_that_cannot_take_the_opening_starts_nothing(backend: Backend) -> None:
    boss, model = a_tree()
    with pytest.raises(JournalFailed) as caught:
        tw.run_sync(boss, "go", journal=Broken(0), backend=backend, clock=VirtualClock())
    assert isinstance(caught.value.__cause__, ValueError)
    assert model.requests == []


@both_backends
def test_a_stream_tells_that_its_journal_failed(backend: Backend) -> None:
    async def scenario() -> None:
        boss, _ = a_tree()
        async with tw.stream(boss, "go", journal=Broken(5)) as run:
            events = [event async for event in run]
            with pytest.raises(tw.RunError, match="the journal cannot be written"):
                await run.result()
        assert type(events[-1]).__name__ == "RunFailed"

    VirtualClock().run(scenario, backend=backend)


def test_the_last_event_is_missed_too() -> None:
    """The tree is closed after its last run, and that is written down as well."""
    journal = Broken(1)

    async def scenario() -> None:
        async with tw.open_tree(journal=journal):
            pass

    with pytest.raises(JournalFailed):
        anyio.run(scenario)


# --- a process that is killed ---------------------------------------------------------------------

KILLED = """
import sys
import treewarden as tw
from treewarden.testing import Reply, ScriptedModel

kind, backend, file = sys.argv[1:]

def script(request):
    print(request.agent_path, flush=True)
    if "part" not in request.agent_path:
        return Reply(tool_calls=[("part", {"task": str(n)}) for n in range(4)])
    if request.turn >= 20:
        return Reply("never", delay=3600)
    return Reply(tool_calls=[("think", {})])

@tw.tool(effect="read", runs="host")
async def think() -> str:
    "Think."
    return "thought"

model = ScriptedModel(script)
worker = tw.agent(id="worker", instructions="Work.", model=model, tools=[think])
part = tw.subagent(name="part", description="A part.", agent=worker)
boss = tw.agent(id="boss", instructions="Lead.", model=model, tools=[part])
budget = tw.Budget(max_usd="1000")
with getattr(tw, kind)(file) as journal:
    tw.run_sync(boss, "go", budget=budget, journal=journal, backend=backend)
"""


@both_backends
@both_kinds
@pytest.mark.parametrize("lines", [5, 85])
def test_after_a_kill_every_call_that_had_left_is_in_the_file(
    make: MakeJournal, backend: Backend, lines: int, tmp_path: Path
) -> None:
    file = tmp_path / "journal"
    arguments = [getattr(make, "__name__", ""), backend, str(file)]
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child, child.stdout as told:
        asked = [told.readline().strip() for _ in range(lines)]
        child.send_signal(signal.SIGKILL)
        asked += told.read().split()
    assert child.returncode == -signal.SIGKILL
    state, dispatched = TreeState(), list[str]()
    for event in read_journal(file):
        if isinstance(event, Dispatched):
            dispatched.append(state.holds[event.hold].node.path)
        state.apply(event)
        state.check()
    assert not set(asked) - set(dispatched)
    assert len(asked) <= len(dispatched)
    # Calls that had left and had no answer are open in it; nothing has closed them.
    open_ = sum(hold.is_dispatched for hold in state.holds.values())
    assert open_ == state.counters.calls_in_flight
    if lines == 85:
        assert open_ == 4
        assert sorted(asked) == sorted(dispatched)


def test_a_line_that_was_cut_off_anywhere_is_left_out(tmp_path: Path) -> None:
    whole, file = tmp_path / "whole", tmp_path / "cut"
    with tw.JsonLinesJournal(whole) as journal:
        VirtualClock().run(run_in_a_tree, journal)
    raw, events = whole.read_bytes(), list(read_journal(whole))
    begin = raw.rindex(b"\n", 0, len(raw) - 300)
    for size in range(begin, len(raw) + 1):
        file.write_bytes(raw[:size])
        assert list(read_journal(file)) == events[: raw.count(b"\n", 0, size)]


@pytest.mark.parametrize("cut", [1, 20, 5_000, 10**9])
def test_a_file_whose_last_line_was_cut_off_is_gone_on_with(cut: int, tmp_path: Path) -> None:
    file = tmp_path / "journal"
    with tw.JsonLinesJournal(file) as journal:
        VirtualClock().run(run_in_a_tree, journal)
    raw = file.read_bytes()
    # A half line that is longer than one block, too.
    half = raw[: len(raw) - cut] if cut < len(raw) else b'{"event":"Opened","at":' + b"1" * 9_999
    file.write_bytes(half)
    with tw.JsonLinesJournal(file) as journal:
        assert list(read_journal(file)) == list(read_journal(file))
        VirtualClock().run(run_in_a_tree, journal)
    trees = trees_of(list(read_journal(file)))
    assert len(trees) == (2 if b"\n" in half else 1)
    assert isinstance(trees[-1][-1], Ended)
