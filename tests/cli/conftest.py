"""The command in this process, in a folder of its own, with a file of agents in it."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import attrs
import pytest

from treewarden.cli import main

AGENTS = '''
import treewarden as tw
from treewarden.testing import Reply, ScriptedModel


@tw.tool(effect="read", runs="host")
async def look(what: str) -> str:
    """Look something up."""
    print("looking for", what)
    return f"{what} was found"


def answer(request):
    if request.turn:
        return Reply("Both have been found.")
    asked = [("research", {"task": task}) for task in ("oaks", "elms")]
    return Reply("I divide it.", tool_calls=[("look", {"what": "trees"}), *asked])


researcher = tw.agent(
    id="researcher",
    instructions="Research.",
    model=ScriptedModel(lambda request: Reply(f"About {request.last_text}.")),
)
support = tw.agent(
    id="support",
    instructions="Answer.",
    model=ScriptedModel(answer),
    tools=[
        look,
        tw.subagent(name="research", description="Research.", agent=researcher, max_usd="0.20"),
    ],
)
echo = tw.agent(
    id="echo",
    instructions="Echo.",
    model=ScriptedModel(lambda request: Reply(request.last_text)),
)
failing = tw.agent(
    id="failing",
    instructions="Fail.",
    model=ScriptedModel([Reply("a start", chunks=2, error=500, break_after=1)]),
)
slow = tw.agent(id="slow", instructions="Wait.", model=ScriptedModel([Reply("late", delay=3600)]))
silent = tw.agent(
    id="silent", instructions="Say no usage.", model=ScriptedModel([Reply("well", usage=None)])
)
unpriced = tw.agent(
    id="unpriced", instructions="Cost?", model=ScriptedModel([Reply("well")], price=None)
)


def delegating(policy, turns):
    """A boss that starts two in the background and answers before they have ended."""
    worker = tw.agent(
        id="worker", instructions="Work.", model=ScriptedModel(lambda _: Reply("found", delay=0.05))
    )
    work = tw.subagent(name="work", description="Work.", agent=worker, background=True)
    start = Reply(tool_calls=[("work", {"task": task}) for task in ("oaks", "elms")])
    return tw.agent(
        id=policy,
        instructions="Delegate.",
        model=ScriptedModel([start, *turns]),
        tools=[work],
        background=policy,
    )


patient = delegating("wait", [Reply("wait"), Reply("All was found.")])
hasty = delegating("cancel", [Reply("Never mind.")])
strict = delegating(
    "forbid", [Reply("Now?"), Reply(tool_calls=[("cave_wait", {})]), Reply("All was found.")]
)
is_open = tw.agent(id="is-open", instructions="Any model.")
'''


@attrs.frozen
class Said:
    """What a command came to."""

    code: int
    out: str
    err: str


class Command(Protocol):
    def __call__(self, *arguments: str, stdin: bytes | None = None) -> Said: ...


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory; afterwards nothing that was loaded from it stays loaded."""
    (tmp_path / "agents.py").write_text(AGENTS)
    monkeypatch.chdir(tmp_path)
    # A place for everything that is put on the path is a copy of it.
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Tests say themselves how wide a line is and which model there is.
    for variable in ("COLUMNS", "CAVE_MODEL", "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.fixture
def treewarden(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Run the command with these arguments, in this process."""

    def command(*arguments: str, stdin: bytes | None = None) -> Said:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        capsys.readouterr()
        code = main(arguments)
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return command


# Started in the background by a shell, this process ignores SIGINT, and so would every child.
signal.signal(signal.SIGINT, signal.default_int_handler)
