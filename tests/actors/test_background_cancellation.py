"""Whoever cancels while subagents are in the background, at whatever instant: nothing is left.

The scene has all there is to them: a start, a wait that runs out, a look, a cancellation, an answer
while one still runs, and an end of its own. A second scene has siblings that stop one another. Each
instant at which something happens is one at which somebody cancels, in a run of its own.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import anyio
import attrs
import pytest

import treewarden as tw
from treewarden.protocols import Receipt
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from ..scenarios.kit import (
    Backend,
    both_backends,
    check_books,
    check_closed,
    model_of_worst_case,
    tasks,
)
from .test_cancellation import Interrupter, tasks_left

BOSS = "root/boss#1"
FROM_OUTSIDE = "its task was cancelled from outside"
BUDGET = tw.Budget(max_usd="0.70", clamp=False)
LIMITS = tw.Limits(max_concurrent_calls=2)


@attrs.define
class Scene:
    """A boss to run, and the provider's account."""

    boss: tw.Agent
    model: ScriptedModel


Policy = Literal["wait", "cancel", "forbid"]
POLICIES: tuple[Policy, ...] = ("wait", "cancel", "forbid")


@tw.tool(effect="read", runs="host")
async def look() -> str:
    """Look."""
    await anyio.sleep(1)
    return "seen"


def background(policy: Policy) -> Scene:
    turns: list[list[tuple[str, dict[str, Any]]]] = [
        [*tasks("work", 3), ("cave_wait", {"timeout_seconds": 2})],
        [("cave_status", {}), ("cave_cancel", {"id": "work#2", "reason": "not needed"})],
        [],
        [("cave_wait", {})],
        [],
    ]

    def script(request: ScriptedRequest) -> Reply:
        usage = tw.Usage(output=10)
        if request.agent_path == BOSS:
            return Reply("hm", tool_calls=turns[request.turn], usage=usage)
        looks: list[tuple[str, dict[str, Any]]] = [("look", {})] if request.turn == 0 else []
        return Reply(chunks=("a", "b"), delay=1, chunk_delay=1, tool_calls=looks, usage=usage)

    model = model_of_worst_case("0.20", script)
    worker = tw.agent(id="worker", instructions="Work.", model=model, tools=[look])
    work = tw.subagent(name="work", description="Works.", agent=worker, background=True)
    boss = tw.agent(id="boss", instructions="Plan.", model=model, tools=[work], background=policy)
    return Scene(boss, model)


def siblings() -> Scene:
    """A subagent and two tools; one tool fails, and the others are stopped and clean up."""

    @tw.tool(effect="read", runs="host")
    async def fail() -> str:
        """Fail."""
        await anyio.sleep(1.5)
        raise ValueError("it is broken")

    @tw.tool(effect="read", runs="host")
    async def crawl() -> str:
        """Be slow, and slow to clean up."""
        try:
            await anyio.sleep(60)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.5)
        return "crawled"

    def script(request: ScriptedRequest) -> Reply:
        usage = tw.Usage(output=10)
        if request.agent_path == BOSS and request.turn == 0:
            (task,) = tasks("work", 1)
            return Reply(tool_calls=[task, ("fail", {}), ("crawl", {}), task], usage=usage)
        return Reply(chunks=("a", "b", "c"), delay=0.5, chunk_delay=0.5, usage=usage)

    model = model_of_worst_case("0.20", script)
    worker = tw.agent(id="worker", instructions="Work.", model=model)
    work = tw.subagent(name="work", description="Works.", agent=worker)
    boss = tw.agent(
        id="boss",
        instructions="Plan.",
        model=model,
        tools=[work, fail, crawl],
        on_sibling_failure="cancel_siblings",
    )
    return Scene(boss, model)


SCENES: dict[str, Callable[[], Scene]] = {
    **{f"background={policy}": partial(background, policy) for policy in POLICIES},
    "siblings": siblings,
}
every_scene = pytest.mark.parametrize("scene", SCENES)


@pytest.fixture(autouse=True)
def nothing_is_left_unawaited() -> Iterator[None]:
    """What is collected here and complains fails the test: warnings are errors."""
    yield
    gc.collect()


def undisturbed(scene: str, backend: Backend) -> Interrupter:
    witness = Interrupter()

    async def scenario() -> None:
        made = SCENES[scene]()
        result = await tw.run(made.boss, "go", budget=BUDGET, limits=LIMITS, **witness.options)
        is_dropped = scene == "background=cancel"
        assert result.stop_reason == ("background_dropped" if is_dropped else "complete")
        check_books(witness, result.receipt, made.model)
        check_report(result.receipt)

    VirtualClock().run(scenario, backend=backend)
    return witness


def check_report(receipt: Receipt) -> None:
    """Every background child has one row, which says what its own receipt says."""
    rows = {row.path: row for row in receipt.background}
    assert len(rows) == len(receipt.background)
    children = {child.path: child for child in receipt.subagents}
    for path, row in rows.items():
        assert (row.stop_reason, row.reason) == (children[path].stop_reason, children[path].reason)


def instants(scene: str, backend: Backend) -> range:
    """The number of every thing that happens in the undisturbed scene."""
    return range(1, len(undisturbed(scene, backend).order) + 1)


@both_backends
@every_scene
def test_cancelling_the_scope_of_the_caller_leaves_nothing_at_any_instant(
    scene: str, backend: Backend
) -> None:
    for at in instants(scene, backend):
        check_cancelled_caller(scene, at, backend)


def check_cancelled_caller(scene: str, at: int, backend: Backend) -> None:
    async def scenario() -> None:
        made = SCENES[scene]()
        scope = anyio.CancelScope()
        witness = Interrupter(is_thorough=False, at=at, act=scope.cancel)
        with scope:
            await tw.run(made.boss, "go", budget=BUDGET, limits=LIMITS, **witness.options)
        check_nothing_is_left(made, witness, backend)

    VirtualClock().run(scenario, backend=backend)


def check_nothing_is_left(made: Scene, witness: Interrupter, backend: Backend) -> None:
    check_closed(witness)
    assert made.model.open_requests == 0
    assert witness.charged_calls() == len(made.model.requests)
    if backend == "asyncio":
        assert tasks_left() == []


@both_backends
@pytest.mark.parametrize(
    ("scene", "path"),
    [
        *[(scene, None) for scene in SCENES],
        ("background=wait", f"{BOSS}/work#1"),
        ("background=forbid", f"{BOSS}/work#2"),
        ("siblings", f"{BOSS}/work#4"),
    ],
)
def test_cancelling_with_a_reason_leaves_nothing_and_the_reason_is_on_every_receipt(
    scene: str, path: str | None, backend: Backend
) -> None:
    """The run, or one subagent alone; then the others and the run go on to their end."""
    was_hit = 0
    for at in instants(scene, backend):
        receipt = cancelled_with_a_reason(scene, path, at, backend)
        cut = [r for r in receipt.walk() if r.reason == "not today"]
        was_hit += bool(cut)
        assert {r.path.startswith(path or BOSS) for r in cut} <= {True}
    assert was_hit > 5


def cancelled_with_a_reason(scene: str, path: str | None, at: int, backend: Backend) -> Receipt:
    receipts: list[Receipt] = []
    made = SCENES[scene]()

    async def scenario() -> None:
        # It may strike while the stream is being opened; then there is nobody to cancel yet.
        opened: list[tw.RunStream] = []

        def cancel() -> None:
            for run in opened:
                run.cancel("not today", path=path)

        witness = Interrupter(is_thorough=False, at=at, act=cancel)
        options = witness.tree_options
        async with tw.stream(made.boss, "go", budget=BUDGET, limits=LIMITS, **options) as run:
            opened.append(run)
            async for event in run:
                witness.hear(event)
            try:
                receipts.append((await run.result()).receipt)
            except tw.RunCancelled as error:
                receipts.append(error.receipt)
        check_books(witness, receipts[0], made.model)
        check_report(receipts[0])
        check_nothing_is_left(made, witness, backend)

    VirtualClock().run(scenario, backend=backend)
    return receipts[0]


@pytest.mark.parametrize("scene", ["background=wait", "siblings"])
@pytest.mark.parametrize("times", [1, 2])
def test_cancelling_the_task_of_the_caller_leaves_nothing_before_it_is_told(
    scene: str, times: int
) -> None:
    for at in instants(scene, "asyncio"):
        check_natively_cancelled_caller(scene, at, times)


def check_natively_cancelled_caller(scene: str, at: int, times: int) -> None:
    async def scenario() -> None:
        made = SCENES[scene]()
        loop = asyncio.get_running_loop()

        def cancel(left: int) -> None:
            caller.cancel()
            if left > 1:
                loop.call_soon(cancel, left - 1)

        async def wait() -> None:
            try:
                await tw.run(made.boss, "go", budget=BUDGET, limits=LIMITS, **witness.options)
            finally:
                check_closed(witness)
                assert tasks_left() == ["main"]

        witness = Interrupter(is_thorough=False, at=at, act=lambda: loop.call_soon(cancel, times))
        current = asyncio.current_task()
        assert current is not None
        current.set_name("main")
        caller = asyncio.create_task(wait())
        await asyncio.wait([caller])
        assert caller.cancelled() or caller.exception() is None
        check_nothing_is_left(made, witness, "asyncio")

    VirtualClock().run(scenario)


@pytest.mark.parametrize(
    ("scene", "path"),
    [
        ("background=wait", BOSS),
        ("background=wait", f"{BOSS}/work#1"),
        ("background=wait", f"{BOSS}/work#2"),
        ("background=wait", f"{BOSS}/tool:cave_wait#4"),
        ("background=wait", f"{BOSS}/tool:cave_cancel#6"),
        ("background=forbid", f"{BOSS}/work#3"),
        ("background=cancel", f"{BOSS}/work#3"),
        ("siblings", f"{BOSS}/tool:fail#2"),
        ("siblings", f"{BOSS}/tool:crawl#3"),
        ("siblings", f"{BOSS}/work#4"),
    ],
)
def test_a_native_cancel_of_any_task_of_the_scene_leaves_nothing_at_any_instant(
    scene: str, path: str
) -> None:
    """It ends that actor alone; before the first step it ends the tree loudly, and settled."""
    seen = [natively_cancelled(scene, path, at) for at in instants(scene, "asyncio")]
    assert any(seen)


def natively_cancelled(scene: str, path: str, at: int) -> bool:
    """Cancel the task ``path`` right after the ``at``-th instant; say if there was one."""
    hit: list[bool] = []

    async def scenario() -> None:
        made = SCENES[scene]()

        def cancel() -> None:
            hit.extend(t.cancel() for t in asyncio.all_tasks() if t.get_name() == path)

        loop = asyncio.get_running_loop()
        witness = Interrupter(is_thorough=False, at=at, act=lambda: loop.call_soon(cancel))
        try:
            result = await tw.run(made.boss, "go", budget=BUDGET, limits=LIMITS, **witness.options)
        except tw.SupervisorCancelled as error:
            assert error.never_started == (path,)
        except tw.RunCancelled as error:
            assert (path, error.reason) == (BOSS, FROM_OUTSIDE)
            check_books(witness, error.receipt, made.model)
            check_report(error.receipt)
        else:
            check_books(witness, result.receipt, made.model)
            check_report(result.receipt)
        check_nothing_is_left(made, witness, "asyncio")

    VirtualClock().run(scenario)
    return any(hit)
