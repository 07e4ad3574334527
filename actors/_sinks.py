"""Journals on disk. Pass one as ``journal=``; ``treewarden replay`` reads it.

What a journal is for decides what it promises: after the process is killed at any instant, every
call that may have cost money is in it. So an event is handed to the system in the order it
happened, and a call's ``Dispatched`` is there before its request leaves.
"""

from __future__ import annotations

import os
import queue
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from treewarden.ledgers import Dispatched, Event, event_from_json, event_to_json
from treewarden.protocols import UsageError

_SQLITE_MAGIC = b"SQLite format 3\x00"


class JsonLinesJournal:
    """One event a line, appended to a file.

    Each line is handed to the system as it happens, so a kill loses nothing; a power failure may
    lose the last ones. Use as a context manager, or call ``close``.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o644)

    def __call__(self, event: Event) -> None:
        line = (event_to_json(event) + "\n").encode()
        while line:  # a full disk may take a part and refuse the rest: that raises
            line = line[os.write(self._file, line) :]

    def close(self) -> None:
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


class SQLiteJournal:
    """Events in a SQLite database, written by one thread that commits what has gathered.

    Several trees may follow each other in one file; each begins with its ``Opened``. The loop
    waits for the disk only where a call is dispatched: what is not committed then is committed
    first. Use as a context manager, or call ``close``.

    Raises:
        sqlite3.Error: The database cannot be opened; from a later call: it could not be written.
    """

    def __init__(self, path: str | Path) -> None:
        self._events: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._failure: sqlite3.Error | None = None
        self._path = path
        opened = threading.Event()
        self._thread = _Writer(target=self._write, args=(opened,), name="journal", daemon=True)
        self._thread.start()
        opened.wait()
        self._raise_failure()

    def __call__(self, event: Event) -> None:
        self._raise_failure()
        self._events.put(event)
        if isinstance(event, Dispatched):
            self.flush()

    def flush(self) -> None:
        """Return when everything so far is committed."""
        written = threading.Event()
        self._events.put(written)
        written.wait()
        self._raise_failure()

    def close(self) -> None:
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
        self.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _write(self, opened: threading.Event) -> None:
        """The writer's thread. It alone has the connection, so it alone ever checkpoints."""
        waiting: list[threading.Event] = [opened]
        try:
            database = sqlite3.connect(self._path, isolation_level=None)
            try:
                database.execute("PRAGMA journal_mode=WAL")
                database.execute("PRAGMA synchronous=NORMAL")
                database.execute(
                    "CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, event TEXT)"
                )
                opened.set()
                while self._write_batch(database, waiting):
                    pass
            finally:
                database.close()
        except sqlite3.Error as error:
            self._failure = error
        finally:
            for somebody in waiting:
                somebody.set()

    def _write_batch(self, database: sqlite3.Connection, waiting: list[threading.Event]) -> bool:
        """Commit what has gathered; False when the journal was closed."""
        waiting.clear()
        lines: list[tuple[str]] = []
        self._thread.idle = True
        item = self._events.get()
        self._thread.idle = False
        is_open = True
        while True:
            match item:
                case None:
                    is_open = False
                case threading.Event():
                    waiting.append(item)
                case _:
                    lines.append((event_to_json(item),))
            if self._events.empty() or not is_open:
                break
            item = self._events.get()
        if lines:
            database.execute("BEGIN")
            database.executemany("INSERT INTO events (event) VALUES (?)", lines)
            database.execute("COMMIT")
        for somebody in waiting:
            somebody.set()
        return is_open


class _Writer(threading.Thread):
    # True while it has nothing to do. A virtual clock does not wait for an idle thread.
    idle = False


def read_journal(path: str | Path) -> Iterator[Event]:
    """The events of a journal file of either kind, in order.

    A last line that was cut off by a kill is left out.

    Raises:
        UsageError: It is no journal.
        OSError: The file cannot be read.
    """
    with open(path, "rb") as file:
        is_sqlite = file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    yield from _read_sqlite(path) if is_sqlite else _read_lines(path)


def _read_sqlite(path: str | Path) -> Iterator[Event]:
    address = f"{Path(path).resolve().as_uri()}?mode=ro"
    database = sqlite3.connect(address, uri=True)
    try:
        rows: Any = database.execute("SELECT event FROM events ORDER BY id")
        for (line,) in rows:
            yield event_from_json(line)
    except sqlite3.DatabaseError as error:
        raise UsageError(f"{path} is no journal: {error}", code="cave_journal_invalid") from None
    finally:
        database.close()


def _read_lines(path: str | Path) -> Iterator[Event]:
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield event_from_json(line)
