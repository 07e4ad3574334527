"""The journal that ``treewarden run --journal FILE`` writes; the file's name says of which kind."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from treewarden.actors import JsonLinesJournal, SQLiteJournal

from ._errors import CommandError, Exit

if TYPE_CHECKING:
    from treewarden.ledgers import Event

_KINDS: dict[str, type[JsonLinesJournal] | type[SQLiteJournal]] = {
    ".jsonl": JsonLinesJournal,
    ".sqlite": SQLiteJournal,
    ".db": SQLiteJournal,
}


@contextmanager
def journal_to(file: Path | None) -> Generator[Callable[[Event], None] | None]:
    """The journal of a run, open while it goes on; None where none was asked for.

    Raises:
        CommandError: It cannot be opened; nothing was started.
        UsageError: It is something else than a journal, or somebody is writing it.
    """
    if file is None:
        yield None
        return
    kind = _KINDS.get(file.suffix.lower())
    if kind is None:
        raise CommandError(
            f"--journal {file}: the name does not say which kind. Give FILE.jsonl, or FILE.sqlite "
            "or FILE.db for a database."
        )
    try:
        journal = kind(file)
    except (OSError, sqlite3.Error) as error:
        raise CommandError(f"the journal cannot be written to {file}: {error}") from None
    # What could not be written ended the run, which says so. It is not to be hidden by its cause.
    was_told = False

    def write(event: Event) -> None:
        nonlocal was_told
        try:
            journal(event)
        except Exception:
            was_told = True
            raise

    try:
        yield write
    finally:
        try:
            journal.close()
        except sqlite3.Error as error:
            if not was_told:
                raise CommandError(
                    f"the journal was not written to its end: {error}", code=Exit.FAILED
                ) from None
