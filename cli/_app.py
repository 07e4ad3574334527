"""The command line: which sub-commands there are, and what becomes of what they raise.

A sub-command is a function that takes its options and returns an exit code. Its module is loaded
when it is called, so that ``treewarden --help`` loads nothing but the parser.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts import App

_HELP = "Run trees of LLM agents inside their limits."

_EPILOGUE = (
    "Exit codes: 0 ok, 1 failed, 2 usage, 3 stopped by a limit, 130 interrupted. "
    "Every command has --json (the answer as JSON on stdout) and --debug (tracebacks)."
)

# What `treewarden --help` says; the modules are not loaded for it.
_COMMANDS = {
    "run": "Run an agent from a Python file or module, inside a budget and limits.",
    "receipt": "Check a receipt's sums and show it as a table.",
    "replay": "Check a journal event by event and show the tree at any of them.",
    "stress": "Run trees of scripted agents in virtual time and check what must hold.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (without the program's name) asks for; returns the exit code.

    Errors go to stderr as one message; with ``--debug`` the traceback comes first.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(tokens)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone, `head` for example. There is nobody to tell.
        from ._errors import Exit, forget_stdout

        forget_stdout()
        return Exit.FAILED
    except (Exception, KeyboardInterrupt) as error:
        from ._errors import report

        return report(error, with_traceback="--debug" in tokens)
    return code


def _run(tokens: list[str]) -> int:
    if not tokens:
        return _show_help_for_nothing()
    app = _app(tokens)
    command, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    code = command(*bound.args, **bound.kwargs)
    return code if isinstance(code, int) else 0  # help and version return nothing


def _show_help_for_nothing() -> int:
    from rich.console import Console

    from ._errors import Exit

    _app([]).help_print([], console=Console(stderr=True))
    return Exit.USAGE


def _app(tokens: list[str]) -> App:
    from cyclopts import App

    app = App(
        name="treewarden",
        help=_HELP,
        help_epilogue=_EPILOGUE,
        help_format="markdown",
        version=_version,
    )
    for name, help_ in _COMMANDS.items():
        # A command that is called is loaded anyway; its own help is its docstring.
        line = None if name in tokens[:1] else help_
        app.command(f"treewarden.cli._{name}:{name}", name=name, help=line)
    return app


def _version() -> str:
    from importlib.metadata import version

    return f"treewarden {version('treewarden')}"
