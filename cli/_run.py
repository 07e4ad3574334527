"""``treewarden run``: one run of an agent from a file or module.

Whatever the agent's own code prints goes to stderr, so that stdout is the answer and nothing else.
"""

from __future__ import annotations

import contextlib
import json as json_
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import attrs
from cyclopts import Group, Parameter
from rich.console import Console

import treewarden as tw
from treewarden.actors import Agent, Budget, Limits, Result
from treewarden.ledgers import Event
from treewarden.protocols import Receipt, RunError

from ._errors import CommandError, Exit, forget_stdout, plain, tell
from ._interrupts import Interrupts
from ._journals import journal_to
from ._live import Progress, progress_on
from ._load import load_agent
from ._options import AsJson, Backend, Flag
from ._override import with_model
from ._tables import console, show_receipt

_LIMITS = Group("Budget and limits", sort_key=1)
_MODEL = Group("Model", sort_key=2)
_OUTPUT = Group("Output", sort_key=3)
_JOURNAL = Group("Journal", sort_key=4)

# About what fits on a screen; the receipt itself always has everything.
_MOST_ROWS = 40


@Parameter(name="*", group=_LIMITS)
@attrs.frozen(kw_only=True)
class LimitOptions:
    """What the tree may do besides spending; "none" lifts a limit that has a default."""

    max_depth: int = 2
    """Levels of subagents, 1 to 8."""
    max_subagents: int | None = 50
    """Subagents started in all; "none" for no limit."""
    max_concurrent_subagents: int | None = 8
    """Subagents alive at the same time; "none" for no limit."""
    max_concurrent_calls: int | None = None
    """Model calls in flight at the same time."""
    max_model_calls: int | None = None
    """Model calls in all."""
    max_tool_calls: int | None = None
    """Tool calls in all, subagents included."""
    max_descendants: int | None = None
    """Subagents started below one top-level run."""
    max_spawns_per_minute: int | None = None
    """Subagents started within any minute."""
    deadline: float | None = None
    """Seconds the run may take."""
    idle_timeout: float | None = None
    """Seconds a model call may be silent; then the run stops as stalled."""
    min_call_seconds: float = 1.0
    """No call is sent with less time than this left before the deadline."""
    admission: Literal["reject", "wait"] = "reject"
    """What a subagent does that finds every slot taken."""

    def limits(self) -> Limits:
        return Limits(**attrs.asdict(self))


_NO_LIMIT_OPTIONS = LimitOptions()


def run(
    target: str,
    prompt: str | None = None,
    /,
    *,
    budget_usd: Annotated[str | None, Parameter(group=_LIMITS)] = None,
    budget_tokens: Annotated[int | None, Parameter(group=_LIMITS)] = None,
    limits: LimitOptions = _NO_LIMIT_OPTIONS,
    model: Annotated[str | None, Parameter(group=_MODEL)] = None,
    base_url: Annotated[str | None, Parameter(group=_MODEL)] = None,
    backend: Annotated[Backend, Parameter(group=_MODEL)] = "asyncio",
    json: Annotated[AsJson, Parameter(group=_OUTPUT)] = False,
    receipt: Annotated[Path | None, Parameter(group=_OUTPUT)] = None,
    quiet: Annotated[Flag, Parameter(name=("--quiet", "-q"), group=_OUTPUT)] = False,
    debug: Annotated[Flag, Parameter(group=_OUTPUT)] = False,
    journal: Annotated[Path | None, Parameter(group=_JOURNAL)] = None,
    resume_from: Annotated[Path | None, Parameter(group=_JOURNAL)] = None,
) -> int:
    """Run an agent from a Python file or module, inside a budget and limits.

    The answer goes to stdout; progress and the receipt go to stderr. Ctrl-C cancels the run, prints
    the receipt of what it cost until then, and exits with 130; a second Ctrl-C ends at once.

    Args:
        target: FILE:AGENT or MODULE:AGENT, for example agents.py:support. Without :AGENT where
            there is exactly one.
        prompt: What to ask; without it, what comes on stdin. Put -- before one that starts with -.
        budget_usd: The most it may cost in USD, for example 0.50.
        budget_tokens: The most tokens it may use.
        model: Put the agent, and all below it that name no model, on this one: provider/name.
        base_url: Where that model is.
        backend: The event loop.
        json: Print text, stop reason and receipt as one JSON object.
        receipt: Write the receipt to this file.
        quiet: Show no progress and no receipt.
        debug: Show tracebacks.
        journal: Append every ledger event to this file: .jsonl (a line each), or .sqlite or .db (a
            database). treewarden replay reads it.
        resume_from: Go on under the same limit: what the last tree in this journal spent counts
            against the budget from the start, what is uncertain in full.
    """
    budget = _budget(budget_usd, budget_tokens)
    caps = limits.limits()
    if receipt is not None:
        _check_can_be_written(receipt)
    screen = console(is_stderr=True)
    with contextlib.redirect_stdout(sys.stderr):
        agent = with_model(load_agent(target), model, base_url)
        question = _prompt(prompt)
        progress = progress_on(screen, quiet=quiet)
        with journal_to(journal) as write:
            watched = Watched(progress, write, resume_from)
            ending = anyio.run(_attend, agent, question, budget, caps, watched, backend=backend)
    if debug and ending.error is not None:
        traceback.print_exception(ending.error)
    ending.show(screen, as_json=json, quiet=quiet)
    if receipt is not None:
        _write(receipt, ending.receipt)
    return ending.code


def _budget(max_usd: str | None, max_tokens: int | None) -> Budget | None:
    if max_usd is None and max_tokens is None:
        return None
    return Budget(max_usd=max_usd, max_tokens=max_tokens)


def _prompt(given: str | None) -> str:
    if given is None:
        given = _from_stdin().rstrip("\n")
    if not given.strip():
        raise CommandError("the prompt is empty. Say what to ask, as an argument or on stdin.")
    return given


def _from_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise CommandError(
            'there is no prompt. Give one after the agent, treewarden run agents.py:support "…", '
            "or pipe it in."
        )
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise CommandError(f"what came on stdin is not text: {error}") from None


def _check_can_be_written(file: Path) -> None:
    """Now, not after the money is spent."""
    folder = file.parent
    if (
        file.is_dir()
        or not folder.is_dir()
        or not os.access(file if file.exists() else folder, os.W_OK)
    ):
        raise CommandError(
            f"the receipt cannot be written to {file}. Give a file in a folder that exists."
        )


def _write(file: Path, receipt: Receipt) -> None:
    try:
        file.write_text(json_.dumps(receipt.to_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"the receipt was not written: {error}", code=Exit.FAILED) from None


# --- the run --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Ending:
    """What a run came to, whichever way it ended."""

    text: str
    stop_reason: str
    detail: str
    receipt: Receipt
    # What a run raised that failed or was cancelled.
    error: RunError | None = None
    # The number of the signal that cancelled it.
    signal: int | None = None

    @classmethod
    def of(cls, result: Result) -> Ending:
        return cls(
            text=result.text,
            stop_reason=result.stop_reason,
            detail=result.stop_detail,
            receipt=result.receipt,
        )

    @classmethod
    def of_error(cls, error: RunError, signal: int | None) -> Ending:
        return cls(
            text=error.text,
            stop_reason=error.receipt.stop_reason,
            detail=error.message,
            receipt=error.receipt,
            error=error,
            signal=signal,
        )

    @property
    def code(self) -> int:
        if self.signal is not None:
            return 128 + self.signal
        if self.stop_reason == "complete":
            return Exit.OK
        # A refusal is the model's; no limit of ours stood in the way.
        is_failed = self.error is not None or self.stop_reason == "refusal"
        return Exit.FAILED if is_failed else Exit.LIMIT

    def show(self, screen: Console, *, as_json: bool, quiet: bool) -> None:
        """The answer on stdout, all else on stderr."""
        try:
            self._answer(as_json=as_json)
        except BrokenPipeError:
            # Ctrl-C ends a whole pipeline. The receipt is told all the same.
            forget_stdout()
        if not quiet and not as_json:
            screen.print()
            show_receipt(screen, self.receipt, most_rows=_MOST_ROWS, with_root=False)
        if self.code != Exit.OK:
            tell(f"{self._verdict}: {self.detail}")

    def _answer(self, *, as_json: bool) -> None:
        if as_json:
            _print(json_.dumps(self.to_json(), indent=2))
        elif self.text:
            _print(plain(self.text) if sys.stdout.isatty() else self.text)

    @property
    def _verdict(self) -> str:
        if self.error is None:
            return f"stopped by {self.stop_reason}"
        return f"{self.stop_reason} ({self.error.code})"

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "stop_reason": self.stop_reason,
            "stop_detail": self.detail,
            "error_code": None if self.error is None else self.error.code,
            "receipt": self.receipt.to_json(),
        }


@attrs.frozen
class Watched:
    """Who follows a run: what is shown of it, and the journal that it is written to."""

    progress: Progress
    write: Callable[[Event], None] | None = None
    # The journal whose spend counts from the start.
    resume_from: Path | None = None

    def note(self, event: Event) -> None:
        # Written before it is shown: what a person saw is in the file.
        if self.write is not None:
            self.write(event)
        self.progress.note(event)


async def _attend(
    agent: Agent, prompt: str, budget: Budget | None, limits: Limits, watched: Watched
) -> Ending:
    """Run the agent, show how it goes on, and cancel it where a signal says so."""
    progress = watched.progress
    stream = tw.stream(
        agent,
        prompt,
        budget=budget,
        limits=limits,
        journal=watched.note,
        resume_from=watched.resume_from,
    )
    with progress:
        async with stream as run:
            with Interrupts(run.cancel) as interrupts:
                async with anyio.create_task_group() as group:
                    group.start_soon(progress.keep_drawing)
                    async for event in run:
                        progress.hear(event)
                    group.cancel_scope.cancel()
                try:
                    return Ending.of(await run.result())
                except RunError as error:
                    return Ending.of_error(error, interrupts.caught)


def _print(text: str) -> None:
    text = text if text.endswith("\n") else f"{text}\n"
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()
