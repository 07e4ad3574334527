"""The command as a real process: start-up, signals, pipes and terminals."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import resource
import select
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from treewarden.cli import main

MODULE = (sys.executable, "-m", "treewarden.cli")
SCRIPT = str(Path(sys.executable).parent / "treewarden")

on_each_backend = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# --- start-up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [MODULE, (SCRIPT,)])
def test_the_version_is_said_by_the_script_and_by_the_module(command: tuple[str, ...]) -> None:
    done = run(*command, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, "treewarden 0.1.0\n", "")


@pytest.mark.slow
def test_help_takes_less_than_four_tenths_of_a_second() -> None:
    def cpu_seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run(*MODULE, "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    cpu_seconds()  # compiles
    # Twice the promise: a test machine is busy with other tests.
    assert statistics.median(cpu_seconds() for _ in range(5)) < 0.8


def test_help_lists_the_commands_without_loading_the_runtime() -> None:
    program = (
        "import sys\nfrom treewarden.cli import main\nmain(['--help'])\n"
        "print([m for m in ('anyio', 'httpx', 'trio', 'treewarden.actors') if m in sys.modules])"
    )
    done = run(sys.executable, "-c", program)
    assert done.stdout.splitlines()[-1] == "[]"
    for command in ("run", "receipt", "stress"):
        assert f"│ {command} " in done.stdout


@pytest.mark.parametrize("command", ["run", "receipt", "stress"])
def test_every_command_has_help_and_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"Usage: treewarden {command}" in out
    assert "--json" in out
    assert "Exit codes: 0 ok, 1 failed, 2 usage, 3 stopped by a limit" in out


def test_no_command_is_a_usage_error_with_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Usage: treewarden COMMAND" in said.err


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rum"]) == 2
    assert 'Unknown command "rum". Did you mean "run"?' in capsys.readouterr().err


# --- signals --------------------------------------------------------------------------------------


@contextmanager
def running(folder: Path, *arguments: str) -> Generator[subprocess.Popen[str]]:
    """The command at work in ``folder``; it has said that its run started."""
    with subprocess.Popen(
        (*MODULE, "run", *arguments),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().endswith(": started\n")
        try:
            yield process
        finally:
            process.kill()


@on_each_backend
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_cancels_the_run_and_prints_its_receipt(
    folder: Path, backend: str, number: signal.Signals, code: int
) -> None:
    with running(folder, "agents.py:slow", "x", "--backend", backend) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "")
    lines = err.splitlines()
    assert lines[-1] == f"treewarden: cancelled (cave_run_aborted): interrupted by {number.name}"
    assert "slow#1" in lines[-3]
    assert "cancelled" in lines[-3]
    assert "Traceback" not in err


def test_ctrl_c_leaves_json_whole(folder: Path) -> None:
    with running(folder, "agents.py:slow", "x", "--json", "--receipt", "r.json") as process:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    value = json.loads(out)
    assert process.returncode == 130
    assert value["stop_detail"] == "interrupted by SIGINT"
    assert value["receipt"]["subagents"] == []
    assert json.loads((folder / "r.json").read_text()) == value["receipt"]


BLOCKING = """
import sys, time
import treewarden as tw
from treewarden.testing import Reply, ScriptedModel

@tw.tool(effect="read", runs="host")
async def block() -> None:
    "Block the event loop, as no tool should."
    print("blocking", flush=True)
    time.sleep(3600)

only = tw.agent(id="only", instructions="", tools=[block],
                model=ScriptedModel([Reply(tool_calls=[("block", {})])]))
"""


@on_each_backend
def test_a_second_ctrl_c_ends_a_run_that_blocks_the_loop(folder: Path, backend: str) -> None:
    (folder / "blocking.py").write_text(BLOCKING)
    with running(folder, "blocking.py", "x", "--backend", backend) as process:
        assert process.stderr is not None
        while process.stderr.readline() != "blocking\n":
            pass
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT


def test_ctrl_c_before_the_run_exits_with_130(folder: Path) -> None:
    (folder / "loading.py").write_text(
        "import time\nprint('loads', flush=True)\ntime.sleep(3600)\n"
    )
    with subprocess.Popen(
        (*MODULE, "run", "loading.py", "x"), cwd=folder, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "loads\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == "treewarden: interrupted\n"


# --- pipes and terminals --------------------------------------------------------------------------


def test_a_reader_that_leaves_is_no_failure_of_the_run(folder: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(
            (*MODULE, "run", "agents.py:echo", "x"),
            cwd=folder,
            stdout=writes,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writes)
    assert done.returncode == 0
    assert "echo#1" in done.stderr
    assert "Error" not in done.stderr


WIDE = """
import treewarden as tw
from treewarden.testing import Reply, ScriptedModel

leaves = ScriptedModel(lambda r: Reply("leaves", delay=0.5))
leaf = tw.agent(id="leaf", instructions="", model=leaves)
tasks = [("leaf", {"task": "x"})] * 40


def answer(request):
    calls = [] if request.turn else tasks
    return Reply("all\\x1b]0;evil\\x07 of them", tool_calls=calls)


only = tw.agent(
    id="only",
    instructions="",
    model=ScriptedModel(answer),
    tools=[tw.subagent(name="leaf", description="d", agent=leaf)],
)
"""


def on_a_terminal(folder: Path, *arguments: str, rows: int, columns: int) -> tuple[int, str]:
    """Run the command on a terminal of that size; its exit code and all that it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        (*MODULE, *arguments), cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    written, end = b"", time.monotonic() + 60
    try:
        while time.monotonic() < end:
            select.select([ours], [], [], 1)
            try:
                piece = os.read(ours, 65_536)
            except OSError:  # the other end was closed
                break
            if not piece:
                break
            written += piece
        return process.wait(10), written.decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_terminal_shows_the_tree_while_it_runs_then_answer_and_receipt(folder: Path) -> None:
    (folder / "wide.py").write_text(WIDE)
    options = ("--max-concurrent-subagents", "none", "--budget-usd", "9.50")
    code, written = on_a_terminal(folder, "run", "wide.py:only", "x", *options, rows=16, columns=90)
    assert code == 0
    live, _, after = written.rpartition("all�]0;evil� of them")
    assert "└─ " in live
    assert "leaf#1 " in live
    assert "asks scripted/model" in live
    assert "left of $9.50" in live
    assert "40 running" in live or "41 running" in live
    # There is no room for forty rows, and that is said.
    assert "running, 0 ended" in live
    assert "only#1" in after
    assert "total" in after
    assert "\x1b]0;evil" not in written


def test_a_terminal_marks_subagents_in_the_background(folder: Path) -> None:
    agents = folder / "agents.py"
    agents.write_text(agents.read_text().replace("delay=0.05", "delay=0.5"))
    code, written = on_a_terminal(folder, "run", "agents.py:strict", "x", rows=16, columns=90)
    assert code == 0
    assert "work#1 &" in re.sub(r"\x1b\[[\d;]*m", "", written)
    assert "waits" in written


def test_a_prompt_is_not_awaited_on_a_terminal(folder: Path) -> None:
    code, written = on_a_terminal(folder, "run", "agents.py:echo", rows=24, columns=80)
    assert code == 2
    assert "there is no prompt" in written
