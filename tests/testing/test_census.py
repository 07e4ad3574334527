"""Whatever is left behind is named, one by one, and what is not left is not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

import anyio
import anyio.lowlevel
import pytest

import treewarden as tw
from treewarden.testing import LeakError, Reply, ScriptedModel, VirtualClock, census

Backend = Literal["asyncio", "trio"]
both_backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])
on_linux = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks /proc")


def agent(**reply: float) -> tw.Agent:
    model = ScriptedModel([Reply("done", **reply)])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    return tw.agent(id="one", instructions="Answer.", model=model)


def kinds(error: LeakError) -> set[str]:
    return {leak.kind for leak in error.leaks}


@both_backends
def test_a_run_that_has_ended_leaves_nothing(backend: Backend) -> None:
    async def scenario() -> None:
        async with census() as inner:
            assert (await tw.run(agent(), "go")).complete
        assert len(inner.trees) == 1

    with census() as outer:
        VirtualClock().run(scenario, backend=backend)
    assert len(outer.trees) == 1


@both_backends
def test_an_open_tree_is_told_with_its_slots_holds_spans_and_tasks(backend: Backend) -> None:
    async def scenario() -> None:
        tree = tw.open_tree(budget=tw.Budget(max_usd="1.00"))
        stream = None
        with pytest.raises(LeakError) as caught:
            with census():
                await tree.__aenter__()
                stream = tree.stream(agent(delay=60), "go")
                await stream.__aenter__()
                await anyio.sleep(1)
        assert kinds(caught.value) == {"tree", "slot", "hold", "span", "task", "books"}
        assert "root/one#1 holds" in str(caught.value)
        assert "task: root/one#1: " in str(caught.value)
        assert stream is not None
        await stream.__aexit__(None, None, None)
        await tree.__aexit__(None, None, None)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_task_that_is_ending_may_take_its_last_steps(backend: Backend) -> None:
    async def ends_soon() -> None:
        for _ in range(3):
            await anyio.lowlevel.checkpoint()

    async def scenario() -> None:
        async with anyio.create_task_group() as group:
            async with census():
                group.start_soon(ends_soon)
            with pytest.raises(LeakError) as caught:
                async with census():
                    group.start_soon(anyio.sleep, 60, name="sleeper")
            assert kinds(caught.value) == {"task"}
            assert "sleeper" in str(caught.value)
            group.cancel_scope.cancel()

    VirtualClock().run(scenario, backend=backend)


@on_linux
def test_an_open_descriptor_is_told_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "open"
    opened: list[int] = []
    with pytest.raises(LeakError) as caught:
        with census():
            opened.append(os.open(file, os.O_CREAT | os.O_WRONLY))
    os.close(opened[0])
    (leak,) = caught.value.leaks
    assert (leak.kind, leak.what) == ("descriptor", f"{opened[0]}: {file}")


@on_linux
def test_a_child_process_is_told_until_it_has_been_waited_for() -> None:
    program = [sys.executable, "-c", "input()"]
    children: list[subprocess.Popen[bytes]] = []
    with pytest.raises(LeakError) as caught:
        with census(patience=0):
            children.append(subprocess.Popen(program, stdin=subprocess.PIPE))
    assert "process" in kinds(caught.value)
    assert str(children[0].pid) in str(caught.value)
    children[0].communicate(b"\n")
    with census():
        subprocess.run(program, input=b"\n", check=True)


@both_backends
def test_a_thread_that_a_tool_abandoned_is_told_with_its_place(backend: Backend) -> None:
    may_end = threading.Event()

    @tw.tool(effect="read", runs="host", timeout_seconds=1)
    def block() -> str:
        """Block."""
        may_end.wait()
        return "too late"

    async def scenario() -> None:
        calls = [Reply(tool_calls=[("block", {})]), Reply("done")]
        model = ScriptedModel(calls)
        blocked = tw.agent(id="one", instructions="Try.", model=model, tools=[block])
        with pytest.raises(LeakError) as caught:
            with census(patience=0.01):
                await tw.run(blocked, "go")
        assert kinds(caught.value) == {"thread"}
        assert "root/one#1/tool:block#1" in str(caught.value)

    try:
        VirtualClock(patience=0.01).run(scenario, backend=backend)
    finally:
        may_end.set()


def test_threads_that_a_pool_keeps_are_no_leak() -> None:
    async def scenario() -> None:
        async with census():
            await anyio.to_thread.run_sync(threading.get_ident)
            await asyncio.get_running_loop().run_in_executor(None, threading.get_ident)

    anyio.run(scenario)


def test_what_the_body_raises_comes_first() -> None:
    with pytest.raises(KeyError):
        with census():
            raise KeyError


# --- the fixture ----------------------------------------------------------------------------------

A_USERS_TESTS = """
import os

import anyio
import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel

pytest_plugins = ["treewarden.testing.pytest_plugin"]
pytestmark = pytest.mark.anyio


async def run():
    model = ScriptedModel([Reply("done")])
    await tw.run(tw.agent(id="one", instructions="Answer.", model=model), "go")


async def test_that_is_clean(leak_census):
    await run()
    assert len(leak_census.trees) == 1


async def test_that_leaves_a_tree(leak_census):
    await tw.open_tree().__aenter__()


def test_that_leaves_a_descriptor(leak_census):
    os.open(os.devnull, os.O_RDONLY)
"""


@pytest.mark.slow
@on_linux
def test_a_users_test_that_leaks_fails_with_the_fixture(tmp_path: Path) -> None:
    file = tmp_path / "test_users.py"
    file.write_text(A_USERS_TESTS)
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    told = done.stdout
    for backend in ("asyncio", "trio"):
        assert f"PASSED test_users.py::test_that_is_clean[{backend}]" in told, told
        assert f"ERROR test_users.py::test_that_is_clean[{backend}]" not in told, told
        assert f"FAILED test_users.py::test_that_leaves_a_tree[{backend}]" in told, told
    assert "tree: root is still open" in told
    assert "ERROR test_users.py::test_that_leaves_a_descriptor" in told
    assert "/dev/null" in told


@pytest.mark.slow
def test_the_part_loads_neither_pytest_nor_hypothesis_nor_trio() -> None:
    program = (
        "import sys, treewarden.testing as t; t.census, t.explore_cancellations; "
        "print({'pytest', 'hypothesis', 'trio'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n", done


@pytest.mark.slow
def test_without_hypothesis_the_ledger_machine_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import treewarden.testing\n"
        "try: treewarden.testing.LedgerMachine\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'treewarden[testing]'" in done.stdout, done
