"""Journals on disk. Pass one as ``journal=``; ``treewarden replay`` reads it.

What a journal is for decides what it promises: after the process is killed at any instant, every
call that may have cost money is in it. So an event is handed to the system in the order it
happened, a call's ``Dispatched`` is there before its request leaves, and a journal that cannot be
written ends its tree: what is not written down must not go on.
"""

from __future__ import annotations

import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import attrs

from treewarden.ledgers import Dispatched, Ended, Event, Opened, event_from_json, event_to_json
from treewarden.protocols import JournalFailed, UsageError

_SQLITE_MAGIC = b"SQLite format 3\x00"
# Everything that a journal of lines can begin with.
_FIRST_LINE = b'{"event":"Opened"'


# --- one tree at a time ---------------------------------------------------------------------------


@attrs.define
class _Turns:
    """Whose turn it is: the trees of a journal follow each other, they never mix."""

    # True between the opening of a tree and the end of its root.
    _is_tree_open: bool = False
    _is_closed: bool = False

    def require(self, event: Event) -> None:
        """Take note of ``event``, which is about to be written.

        Raises:
            UsageError: Another tree is being written, or the journal is closed.
        """
        if self._is_closed:
            raise UsageError(
                "the journal was closed while its tree was open. Close it after the run.",
                code="cave_journal_closed",
            )
        if type(event) is Opened:
            if self._is_tree_open:
                raise UsageError(
                    "this journal is being written by another tree. One journal takes one tree "
                    "after the other; give each that runs at the same time its own.",
                    code="cave_journal_in_use",
                )
            self._is_tree_open = True
        elif _ends_tree(event):
            self._is_tree_open = False

    def close(self) -> None:
        self._is_closed = True


def _ends_tree(event: Event) -> bool:
    return type(event) is Ended and event.node == 0


# --- lines in a file ------------------------------------------------------------------------------


class JsonLinesJournal:
    """One event a line, appended to a file.

    Each line is handed to the system as it happens, so a kill loses nothing; a power failure may
    lose the last ones. Trees may follow each other in one file; a line that a kill or a full disk
    had cut off is removed when the file is opened again. Use as a context manager, or call
    ``close``.

    Raises:
        OSError: The file cannot be opened.
        UsageError: It is something else than a journal, or a process is writing it.
    """

    def __init__(self, path: str | Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._turns = _Turns()
        # What went wrong first. A journal with a gap is worth nothing, so nothing comes after.
        self._failure: OSError | None = None
        self._file = os.open(path, flags, 0o644)
        try:
            _lock(self._file, path)
            _cut_off_half_line(self._file, path)
        except BaseException:
            os.close(self._file)
            raise

    def __call__(self, event: Event) -> None:
        if self._failure is not None:
            raise self._failure
        self._turns.require(event)
        line = (event_to_json(event) + "\n").encode()
        try:
            while line:  # a full disk may take a part and refuse the rest: that raises
                line = line[os.write(self._file, line) :]
        except OSError as error:
            self._failure = error
            raise

    def close(self) -> None:
        """Close the file. No effect when called again."""
        self._turns.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> JsonLinesJournal:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _lock(file: int, path: str | Path) -> None:
    """Keep other writers out as long as the file is open, also if this process is killed."""
    import fcntl  # not everywhere, and reading needs none of it

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{path} is being written already. Give each journal that is open a file of its own.",
            code="cave_journal_in_use",
        ) from None


def _cut_off_half_line(file: int, path: str | Path) -> None:
    size = os.fstat(file).st_size
    start = os.pread(file, len(_FIRST_LINE), 0)
    if not _FIRST_LINE.startswith(start):
        raise _no_journal(path, "it does not begin with the opening of a tree")
    end, block = size, 4096
    while end > 0:
        begin = max(0, end - block)
        found = os.pread(file, end - begin, begin).rfind(b"\n")
        if found >= 0:
            end = begin + found + 1
            break
        end = begin
    if end < size:
        os.ftruncate(file, end)


# --- rows in a database ---------------------------------------------------------------------------


class SQLiteJournal:
    """Events in a SQLite database, written by one thread that commits what has gathered.

    Trees may follow each other in one file, from one process or several; each has a number. The
    loop waits for the disk only where a call is dispatched and where the tree ends: what is not
    committed then is committed first. Use as a context manager, or call ``close``.

    Raises:
        sqlite3.Error: The database cannot be opened; from a later call: it could not be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._events: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._turns = _Turns()
        # What went wrong first; set by the writer, which writes nothing more after it.
        self._failure: Exception | None = None
        # True once somebody has been told of the failure.
        self._was_told = False
        self._path = path
        opened = threading.Event()
        self._thread = _Writer(target=self._work, args=(opened,), name="journal", daemon=True)
        self._thread.start()
        opened.wait()
        if self._failure is not None:
            self.close()

    def __call__(self, event: Event) -> None:
        self._raise_failure()
        self._turns.require(event)
        self._events.put(event)
        if type(event) is Dispatched or _ends_tree(event):
            self.flush()

    def flush(self) -> None:
        """Return when everything so far is committed."""
        if self._thread.is_alive():
            written = threading.Event()
            self._events.put(written)
            written.wait()
        self._raise_failure()

    def close(self) -> None:
        """Commit what is left and close the database.

        Raises:
            sqlite3.Error: Something could not be written, now or earlier.
        """
        self._turns.close()
        if self._thread.is_alive():
            self._events.put(None)
            self._thread.join()
        self._raise_failure()

    def __enter__(self) -> SQLiteJournal:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        was_told = self._was_told
        try:
            self.close()
        except Exception:
            # What is on its way out carries a receipt; it is not to be hidden by its own cause.
            if exc is None or not was_told:
                raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._was_told = True
            raise self._failure

    # --- the writer's thread: it alone has the connection, so it alone ever checkpoints ----------

    def _work(self, opened: threading.Event) -> None:
        try:
            database = _opened_database(self._path)
            try:
                opened.set()
                tree, is_open = 0, True
                while is_open:
                    tree, is_open = self._write_batch(database, tree)
            finally:
                database.close()
        except Exception as error:
            self._failure = error
            opened.set()
            self._let_go()

    def _write_batch(self, database: sqlite3.Connection, tree: int) -> tuple[int, bool]:
        """Commit what has gathered.

        Returns:
            The number of the tree that was written last, and False when the journal was closed.
        """
        events, waiting, is_open = self._gathered()
        try:
            if events:
                tree = _insert(database, tree, events)
        except Exception as error:
            self._failure = error  # before anybody looks
            raise
        finally:
            for somebody in waiting:
                somebody.set()
        return tree, is_open

    def _gathered(self) -> tuple[list[Event], list[threading.Event], bool]:
        """Wait for something, and take what there is."""
        events: list[Event] = []
        waiting: list[threading.Event] = []
        while True:
            match self._events.get():
                case None:
                    return events, waiting, False
                case threading.Event() as somebody:
                    waiting.append(somebody)
                case event:
                    events.append(event)
            if self._events.empty():
                return events, waiting, True

    def _let_go(self) -> None:
        """After a failure: keep nobody waiting until the journal is closed."""
        while (item := self._events.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()


class _Writer(threading.Thread):
    # It never wakes a task: who needs it, waits for it in place. So no virtual clock has to wait.
    idle = True


def _opened_database(path: str | Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute(
            "CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, tree INTEGER, event TEXT)"
        )
        # A database of somebody else may have a table of that name; better told now.
        database.execute("SELECT id, tree, event FROM events LIMIT 0")
    except BaseException:
        database.close()
        raise
    return database


def _insert(database: sqlite3.Connection, tree: int, events: Iterable[Event]) -> int:
    """Write events in one transaction; returns the number of the last one's tree."""
    rows: list[tuple[int, str]] = []
    # The number of a new tree is taken under the lock of the transaction.
    database.execute("BEGIN IMMEDIATE")
    try:
        (highest,) = database.execute("SELECT coalesce(max(tree), 0) FROM events").fetchone()
        for event in events:
            if type(event) is Opened:
                tree = highest = highest + 1
            rows.append((tree, event_to_json(event)))
        database.executemany("INSERT INTO events (tree, event) VALUES (?, ?)", rows)
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
    return tree


# --- a tree and its journal -----------------------------------------------------------------------


class Watched:
    """Between a ledger and its journal: what the journal raises never comes out of the ledger.

    A ledger's transaction is carried out when its event is told, so an error there would leave its
    caller with half of what it asked for. The tree is ended instead, in order.
    """

    def __init__(self, sink: Callable[[Event], None]) -> None:
        self._sink = sink
        # The first thing that it raised. After it the journal is not written any more: a gap would
        # make what follows unreadable.
        self.failure: BaseException | None = None
        # Ends the tree. None: it is not open yet, and whoever opens it gets the error.
        self.on_failure: Callable[[Exception], None] | None = None

    @contextmanager
    def opening(self) -> Generator[None]:
        """Where the tree is opened: what the journal raises there is the opener's to know.

        Raises:
            JournalFailed, UsageError: The opening cannot be written; nothing was started.
        """
        try:
            yield
        except Exception as error:
            if error is not self.failure or isinstance(error, UsageError):
                raise
            raise JournalFailed(error) from error

    def __call__(self, event: Event) -> None:
        if self.failure is not None:
            return
        try:
            self._sink(event)
        except Exception as error:
            self.failure = error
            if self.on_failure is None:
                raise
            self.on_failure(error)
        except BaseException as error:
            self.failure = error  # the program is ending
            raise


# --- reading --------------------------------------------------------------------------------------


def read_journal(path: str | Path) -> Iterator[Event]:
    """The events of a journal file of either kind, in order, one tree after the other.

    A last line that was cut off by a kill is left out. The file may be one that is being written.

    Raises:
        UsageError: It is no journal.
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        is_sqlite = file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    yield from _read_sqlite(path) if is_sqlite else _read_lines(path)


def _read_sqlite(path: str | Path) -> Iterator[Event]:
    found = Path(path).resolve()
    # Without a log beside it nobody is writing; then it can be read where nothing may be created.
    has_log = found.with_name(f"{found.name}-wal").exists()
    address = f"{found.as_uri()}?{'mode=ro' if has_log else 'immutable=1'}"
    database = sqlite3.connect(address, uri=True)
    try:
        rows = database.execute("SELECT event FROM events ORDER BY tree, id")
        for (line,) in rows:
            yield event_from_json(line)
    except sqlite3.DatabaseError as error:
        raise _no_journal(path, str(error)) from None
    finally:
        database.close()


def _read_lines(path: str | Path) -> Iterator[Event]:
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield event_from_json(line)


def _no_journal(path: str | Path, why: str) -> UsageError:
    return UsageError(f"{path} is no journal: {why}.", code="cave_journal_invalid")
