"""Exit codes, and how what was raised becomes an exit code and one message on stderr."""

from __future__ import annotations

import os
import sys
import traceback
from enum import IntEnum

from treewarden.protocols import (
    CredentialsError,
    RefusedError,
    TreewardenError,
    UsageError,
)


class Exit(IntEnum):
    """What the command returns to the shell."""

    OK = 0
    # A run that failed, a receipt that is wrong, an invariant that does not hold.
    FAILED = 1
    # The command, its input or the agent's definition cannot be used; nothing was started.
    USAGE = 2
    # A budget or a limit ended the run before it was complete.
    LIMIT = 3
    INTERRUPTED = 130


class CommandError(Exception):
    """A command cannot do what was asked. Its text is the whole message."""

    def __init__(self, message: str, *, code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.code = code


def report(error: BaseException, *, with_traceback: bool) -> int:
    """Say on stderr what went wrong, and return the exit code."""
    if with_traceback:
        traceback.print_exception(error, file=sys.stderr)
    error = _only_one(error)
    tell(_message(error))
    return _code(error)


def tell(message: str) -> None:
    """Write one message to stderr."""
    print(f"treewarden: {plain(message)}", file=sys.stderr)


def forget_stdout() -> None:
    """Stop writing to a stdout that nobody reads any more."""
    # The interpreter flushes it at its end and would complain once more.
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # no file behind it


def plain(text: str) -> str:
    """``text`` without the control characters that could steer a terminal; lines stay lines.

    What is shown may have been written by a model, or come out of a file of unknown origin.
    """
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)


def _only_one(error: BaseException) -> BaseException:
    """The error inside a group of one."""
    inner: list[BaseException] = list(getattr(error, "exceptions", ()))
    return _only_one(inner[0]) if len(inner) == 1 else error


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, (CommandError, TreewardenError)):
        return str(error)
    if _is_from_the_parser(error):
        return f"{error}\nTry `{_command_of(error)} --help`."
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"unexpected {what}\nRun the command again with --debug to see where it comes from."


def _code(error: BaseException) -> int:
    match error:
        case KeyboardInterrupt():
            return Exit.INTERRUPTED
        case CommandError():
            return error.code
        case UsageError():
            return Exit.USAGE
        case CredentialsError() if not error.was_sent:
            return Exit.USAGE
        case RefusedError():
            return Exit.LIMIT
        case _:
            return Exit.USAGE if _is_from_the_parser(error) else Exit.FAILED


def _is_from_the_parser(error: BaseException) -> bool:
    # Not imported for this: where it raised something, it is loaded.
    cyclopts = sys.modules.get("cyclopts")
    return cyclopts is not None and isinstance(error, cyclopts.CycloptsError)


def _command_of(error: BaseException) -> str:
    return " ".join(("treewarden", *(getattr(error, "command_chain", None) or ())))
