"""Whoever cancels, and at whatever instant: all is settled and told, and nothing is left behind.

One small family is the scene of most tests: a boss with three workers, who compete for money and
for a call slot, call a tool, and answer in pieces. Every instant at which something happens in it
is one at which somebody cancels, in a run of its own.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, Literal

import anyio
import attrs
import pytest

import treewarden as tw
from treewarden.ledgers import Event
from treewarden.protocols import RunEvent, RunStarted
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from ..scenarios.kit import (
    Backend,
    Witness,
    both_backends,
    check_books,
    check_closed,
    hands_out,
    model_of_worst_case,
    tasks,
)

BOSS = "root/boss#1"
SECOND = f"{BOSS}/work#2"
ITS_TOOL = f"{SECOND}/tool:look#1"
FROM_OUTSIDE = "its task was cancelled from outside"

# Two calls are paid for at once, and one is sent at once.
BUDGET = tw.Budget(max_usd="0.70", clamp=False)
LIMITS = tw.Limits(max_concurrent_calls=1)


@attrs.define
class Interrupter(Witness):
    """A witness who does something at the ``at``-th thing that happens."""

    at: int = 0
    act: Callable[[], object] = attrs.field(default=lambda: None)

    def hear(self, event: RunEvent) -> None:
        super().hear(event)
        self._tick()

    def write(self, event: Event) -> None:
        super().write(event)
        self._tick()

    def _tick(self) -> None:
        if len(self.order) == self.at:
            self.act()

    def has_started(self, path: str) -> bool:
        return any(isinstance(event, RunStarted) and event.path == path for event in self.events)


@attrs.define
class Family:
    """A boss, three workers, and the provider's account of what they asked."""

    model: ScriptedModel
    boss: tw.Agent
    # The tool calls that began and those that ended in order.
    began: list[str] = attrs.field(factory=list[str])
    looked: list[str] = attrs.field(factory=list[str])


def family() -> Family:
    def script(request: ScriptedRequest) -> Reply:
        if request.agent_path.count("/") == 1:
            plan = hands_out(*tasks("work", 3))(request)
            return attrs.evolve(plan, usage=tw.Usage(output=10))
        calls: list[tuple[str, dict[str, Any]]] = [("look", {})] if request.turn == 0 else []
        usage = tw.Usage(output=10)
        return Reply(chunks=("a", "b"), delay=1, chunk_delay=1, tool_calls=calls, usage=usage)

    @tw.tool(effect="read", runs="host")
    async def look(ctx: tw.Context[None]) -> str:
        """Look."""
        made.began.append(ctx.path)
        await anyio.sleep(1)
        made.looked.append(ctx.path)
        return "seen"

    model = model_of_worst_case("0.30", script)
    worker = tw.agent(id="worker", instructions="Work.", model=model, tools=[look])
    work = tw.subagent(name="work", description="Works.", agent=worker)
    boss = tw.agent(id="boss", instructions="Plan.", model=model, tools=[work])
    made = Family(model, boss)
    return made


def test_undisturbed_the_family_finishes_and_waits_for_money_and_for_a_slot() -> None:
    witness = undisturbed("asyncio")
    kinds = [kind for kind, _ in witness.order]
    assert "Queued" in kinds
    assert "SlotQueued" in kinds
    assert kinds.count("Settled") == 2 + 3 * 2


def undisturbed(backend: Backend) -> Interrupter:
    witness = Interrupter()

    async def scenario() -> None:
        made = family()
        result = await tw.run(made.boss, "go", budget=BUDGET, limits=LIMITS, **witness.options)
        assert result.complete
        assert len(made.looked) == 3
        check_books(witness, result.receipt, made.model)

    VirtualClock().run(scenario, backend=backend)
    return witness


def instants(backend: Backend) -> range:
    """The number of every thing that happens in the undisturbed family."""
    return range(1, len(undisturbed(backend).order) + 1)


@pytest.fixture(autouse=True)
def nothing_is_left_unawaited() -> Iterator[None]:
    """What is collected here and complains fails the test: warnings are errors."""
    yield
    gc.collect()


def tasks_left() -> list[str]:
    """Names of the tasks of this loop beside the caller's."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    return [task.get_name() for task in others]


# --- a native cancel of one actor ----------------------------------------------------------------


@attrs.define
class Outcome:
    """What came of a run in which one task was cancelled natively."""

    result: tw.Result | None
    error: BaseException | None
    # Whether there was a task to be cancelled, and whether it had made its first step.
    was_hit: bool
    had_started: bool
    family: Family
    witness: Interrupter


def cancel_natively(path: str, at: int) -> Outcome:
    """Run the family on asyncio; cancel the task ``path`` right after the ``at``-th instant."""
    outcome: list[Outcome] = []

    async def scenario() -> None:
        made = family()
        hit: list[bool] = []

        def cancel() -> None:
            for task in asyncio.all_tasks():
                if task.get_name() == path:
                    had_started = witness.has_started(path) or path in made.began
                    if task.cancel():
                        hit.append(had_started)

        # In a turn of its own, as if it came from elsewhere in the program.
        loop = asyncio.get_running_loop()
        witness = Interrupter(is_thorough=False, at=at, act=lambda: loop.call_soon(cancel))
        result, error = None, None
        try:
            result = await tw.run(made.boss, "go", budget=BUDGET, limits=LIMITS, **witness.options)
        except tw.TreewardenError as raised:
            error = raised
        assert tasks_left() == []
        assert made.model.open_requests == 0
        check_closed(witness)
        outcome.append(Outcome(result, error, bool(hit), any(hit), made, witness))

    VirtualClock().run(scenario)
    return outcome[0]


def test_a_native_cancel_ends_a_started_actor_and_its_siblings_live_and_finish() -> None:
    """Cancelled at every instant of its life. Before its first step see the next test."""
    seen = [cancel_natively(SECOND, at) for at in instants("asyncio")]
    hit = [outcome for outcome in seen if outcome.was_hit and outcome.had_started]
    assert len(hit) > 20
    bases: set[str] = set()
    for outcome in hit:
        result = outcome.result
        assert result is not None, outcome.error
        assert result.complete
        first, second, third = sorted(result.receipt.subagents, key=lambda r: r.path)
        assert first.stop_reason == third.stop_reason == "complete"
        assert (second.stop_reason, second.reason) == ("cancelled", FROM_OUTSIDE)
        assert second.error_code == "cave_run_aborted"
        (told,) = [r for r in results_of(result) if r.is_error]
        assert FROM_OUTSIDE in told.content
        bases |= {line.basis for line in second.lines}
        check_books(outcome.witness, result.receipt, outcome.family.model)
    # Its open call was charged: as an estimate, or not at all where it had a slot and had not left.
    assert bases == {"provider_reported", "estimated", "not_dispatched"}
    missed = [outcome for outcome in seen if not outcome.was_hit]
    assert missed
    assert all(outcome.result and outcome.result.complete for outcome in missed)


def results_of(result: tw.Result) -> list[Any]:
    return [part for m in result.messages if m.role == "tool" for part in m.parts]


def test_a_native_cancel_of_a_tool_is_an_error_result_and_its_agent_goes_on() -> None:
    seen = [cancel_natively(ITS_TOOL, at) for at in instants("asyncio")]
    hit = [outcome for outcome in seen if outcome.was_hit and outcome.had_started]
    assert hit
    for outcome in hit:
        result = outcome.result
        assert result is not None, outcome.error
        assert [r.stop_reason for r in result.receipt.walk()] == ["complete"] * 4
        (second,) = [r for r in result.receipt.subagents if r.path == SECOND]
        assert [(row.calls, row.errors) for row in second.tools] == [(1, 1)]
        asked = [r for r in outcome.family.model.requests if r.agent_path == SECOND]
        assert asked[-1].last_text == f"cave_run_aborted: {FROM_OUTSIDE}"
        check_books(outcome.witness, result.receipt, outcome.family.model)


def test_a_native_cancel_of_the_run_itself_ends_it_and_all_below_with_that_reason() -> None:
    seen = [cancel_natively(BOSS, at) for at in instants("asyncio")]
    hit = [outcome for outcome in seen if outcome.was_hit and outcome.had_started]
    assert len(hit) > 50
    for outcome in hit:
        assert isinstance(outcome.error, tw.RunCancelled)
        assert outcome.error.reason == FROM_OUTSIDE
        cut = [r for r in outcome.error.receipt.walk() if r.stop_reason != "complete"]
        assert {r.reason for r in cut} == {FROM_OUTSIDE}
        check_books(outcome.witness, outcome.error.receipt, outcome.family.model)


@pytest.mark.parametrize("path", [BOSS, SECOND, ITS_TOOL])
def test_a_native_cancel_before_the_first_step_ends_the_supervisor_and_names_the_task(
    path: str,
) -> None:
    seen = [cancel_natively(path, at) for at in instants("asyncio")]
    early = [outcome for outcome in seen if outcome.was_hit and not outcome.had_started]
    assert early
    for outcome in early:
        assert isinstance(outcome.error, tw.SupervisorCancelled), outcome.error
        assert outcome.error.never_started == (path,)
        assert path in str(outcome.error)
        # Everything was cancelled and charged: one settlement for each request there was.
        assert outcome.witness.charged_calls() == len(outcome.family.model.requests)
        ended = {request.ended for request in outcome.family.model.requests}
        assert ended <= {"complete", "cancelled"}


def test_other_runs_of_an_open_tree_are_settled_when_a_task_never_makes_its_first_step() -> None:
    async def scenario() -> None:
        made, bystander = family(), ScriptedModel([Reply("never", delay=60)])
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            for task in asyncio.all_tasks():
                if task.get_name().endswith("/work#2"):
                    task.cancel()

        def watch(event: Event) -> None:
            witness.write(event)
            kind, path = witness.order[-1]
            if kind == "Admitted" and path.endswith("/work#2"):
                loop.call_soon(cancel)

        witness = Witness()
        options: dict[str, Any] = {**witness.tree_options, "journal": watch}
        other = tw.agent(id="other", instructions="Wait.", model=bystander)
        errors: list[BaseException] = []

        async def run(agent: tw.Agent) -> None:
            with pytest.raises(tw.TreewardenError) as caught:
                await tree.run(agent, "go")
            errors.append(caught.value)

        tree = tw.open_tree(**options)
        with pytest.raises(tw.SupervisorCancelled, match="work#2 was cancelled from outside"):
            async with tree:
                async with anyio.create_task_group() as group:
                    group.start_soon(run, made.boss)
                    group.start_soon(run, other)
        # The run with that task in it is told so; the other one was cancelled, with a receipt.
        by_type = {type(error): error for error in errors}
        assert set(by_type) == {tw.SupervisorCancelled, tw.RunCancelled}
        assert "the tree was cancelled" in str(by_type[tw.RunCancelled])
        assert tasks_left() == []
        assert bystander.requests[0].ended == "cancelled"
        check_closed(witness)
        tree.ledger.check_closed()

    VirtualClock().run(scenario)


def test_a_tool_that_cancels_its_own_task_with_its_last_step_harms_nobody_else() -> None:
    """After that step there is nothing left to be cancelled, and asyncio tells the group so."""

    @tw.tool(effect="read", runs="host")
    async def rude() -> str:
        """Be rude."""
        await anyio.sleep(1)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "done"

    async def scenario() -> None:
        model = ScriptedModel(hands_out(("rude", {}), ("rude", {})))
        agent = tw.agent(id="one", instructions="Try.", model=model, tools=[rude])
        witness = Witness()
        result = await tw.run(agent, "go", **witness.options)
        assert result.complete
        assert [r.content for r in model.requests[1].tool_results] == ["done"] * 2
        assert tasks_left() == []
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario)


def test_who_opens_a_tree_is_told_when_it_never_starts_beside_one_that_is_open() -> None:
    """The one who waits is an actor of the other tree, so the host cannot wait for that actor."""
    errors: list[BaseException] = []
    model = ScriptedModel(hands_out(("detach", {})))

    @tw.tool(effect="read", runs="host")
    async def detach() -> str:
        """Detach."""
        asyncio.get_running_loop().call_soon(cancel_the_tree)
        try:
            return (await tw.run(agent, "go", detached=True)).text
        except BaseException as error:
            errors.append(error)
            raise

    agent = tw.agent(id="one", instructions="Try.", model=model, tools=[detach])

    def cancel_the_tree() -> None:
        for task in asyncio.all_tasks():
            has_begun = inspect.getcoroutinestate(task.get_coro()) != inspect.CORO_CREATED  # type: ignore[arg-type]
            if task.get_name() == "treewarden tree" and not has_begun:
                task.cancel()

    async def scenario() -> None:
        with pytest.raises(tw.RunCancelled, match="the tree was cancelled"):
            await tw.run(agent, "go")
        assert tasks_left() == []

    VirtualClock().run(scenario)
    assert [type(error) for error in errors] == [tw.SupervisorCancelled]


def test_a_loop_that_is_shut_down_at_any_instant_settles_the_run_first() -> None:
    """As at the end of ``asyncio.run``: every task is cancelled at once, started or not."""
    for at in instants("asyncio"):
        shut_down_at(at)


def shut_down_at(at: int) -> None:
    made, witnesses = family(), list[Interrupter]()

    async def main() -> None:
        is_over = asyncio.Event()
        witness = Interrupter(is_thorough=False, at=at, act=is_over.set)
        witnesses.append(witness)
        options = witness.options
        running = asyncio.create_task(
            tw.run(made.boss, "go", budget=BUDGET, limits=LIMITS, **options)
        )
        await is_over.wait()
        assert not running.done()

    VirtualClock().run(main)
    check_closed(witnesses[0])
    assert made.model.open_requests == 0
    assert witnesses[0].charged_calls() == len(made.model.requests)


# --- whoever waits is cancelled ------------------------------------------------------------------


@both_backends
@pytest.mark.parametrize("waits", ["run", "result", "reader"])
def test_cancelling_the_scope_of_a_caller_settles_everything_at_every_instant(
    waits: Literal["run", "result", "reader"], backend: Backend
) -> None:
    for at in instants(backend):
        check_cancelled_caller(at, waits, backend)


def check_cancelled_caller(
    at: int, waits: Literal["run", "result", "reader"], backend: Backend
) -> None:
    async def scenario() -> None:
        made = family()
        scope = anyio.CancelScope()
        witness = Interrupter(is_thorough=False, at=at, act=scope.cancel)
        with scope:
            await call(waits, made, witness)
        check_closed(witness)
        assert made.model.open_requests == 0
        if backend == "asyncio":
            assert tasks_left() == []

    VirtualClock().run(scenario, backend=backend)


async def call(
    waits: Literal["run", "result", "reader"], made: Family, witness: Interrupter
) -> None:
    """Run the family and wait for it in one of three ways."""
    if waits == "run":
        await tw.run(made.boss, "go", budget=BUDGET, limits=LIMITS, **witness.options)
        return
    options = witness.tree_options
    async with tw.stream(made.boss, "go", budget=BUDGET, limits=LIMITS, **options) as run:
        if waits == "result":
            await run.result()
            return
        async for event in run:
            witness.hear(event)


@pytest.mark.parametrize("waits", ["run", "result", "reader"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_cancelling_the_task_of_a_caller_settles_everything_before_it_is_told(
    waits: Literal["run", "result", "reader"], times: int
) -> None:
    """Natively, on asyncio; the second and third time while it waits for all to be settled."""
    for at in instants("asyncio"):
        check_natively_cancelled_caller(at, waits, times)


def check_natively_cancelled_caller(
    at: int, waits: Literal["run", "result", "reader"], times: int
) -> None:
    async def scenario() -> None:
        made = family()
        loop = asyncio.get_running_loop()

        def cancel(left: int) -> None:
            caller.cancel()
            if left > 1:
                loop.call_soon(cancel, left - 1)

        async def wait() -> None:
            try:
                await call(waits, made, witness)
            except asyncio.CancelledError:
                # It is told only when nothing is left of its run.
                check_closed(witness)
                assert made.model.open_requests == 0
                assert tasks_left() == ["main"]
                raise

        witness = Interrupter(is_thorough=False, at=at, act=lambda: loop.call_soon(cancel, times))
        current = asyncio.current_task()
        assert current is not None
        current.set_name("main")
        caller = asyncio.create_task(wait())
        await asyncio.wait([caller])
        assert caller.cancelled() or caller.exception() is None
        check_closed(witness)
        assert tasks_left() == []

    VirtualClock().run(scenario)


@both_backends
def test_a_caller_in_an_open_tree_is_cancelled_and_the_other_runs_go_on(backend: Backend) -> None:
    async def scenario() -> None:
        made = family()
        quick = ScriptedModel([Reply("done", delay=3)])
        other = tw.agent(id="other", instructions="Answer.", model=quick)
        witness = Witness()
        results: list[tw.Result] = []

        async def run_other() -> None:
            results.append(await tree.run(other, "go"))

        async with tw.open_tree(**witness.tree_options) as tree:
            async with anyio.create_task_group() as group:
                group.start_soon(run_other)
                with anyio.move_on_after(2):
                    await tree.run(made.boss, "go")
                # It is over for good, while the other one is not.
                assert made.model.open_requests == 0
                assert quick.open_requests == 1
                tree.check()
        assert [result.text for result in results] == ["done"]
        check_closed(witness)

    VirtualClock().run(scenario, backend=backend)


# --- deadlines -----------------------------------------------------------------------------------


@both_backends
def test_a_deadline_ends_the_run_at_its_instant_with_open_calls_charged(backend: Backend) -> None:
    cleaned: list[float] = []

    def script(request: ScriptedRequest) -> Reply:
        if request.agent_path == BOSS and request.turn == 0:
            return Reply(tool_calls=[*tasks("work", 2), ("dig", {})], delay=1)
        return Reply("never told in full", chunks=4, chunk_delay=3)

    @tw.tool(effect="read", runs="host", timeout_seconds=None)
    async def dig() -> str:
        """Dig."""
        try:
            await anyio.sleep(3_600)
        finally:
            cleaned.append(anyio.current_time())
        return "a hole"

    async def scenario() -> None:
        model = ScriptedModel(script)
        worker = tw.agent(id="worker", instructions="Work.", model=model)
        work = tw.subagent(name="work", description="Works.", agent=worker)
        boss = tw.agent(id="boss", instructions="Plan.", model=model, tools=[work, dig])
        witness = Witness()
        limits = tw.Limits(deadline=7.5)
        budget = tw.Budget(max_usd="2.00")
        result = await tw.run(boss, "go", budget=budget, limits=limits, **witness.options)
        assert VirtualClock.running().monotonic() == 7.5
        assert cleaned == [7.5]
        assert result.stop_reason == "deadline"
        assert str(result).startswith("[stopped: deadline: its deadline has passed]")
        assert [r.stop_reason for r in result.receipt.walk()] == ["deadline"] * 3
        for child in result.receipt.subagents:
            (line,) = child.lines
            assert line.basis == "estimated"
            assert line.output_tokens > 0
        assert [request.ended for request in model.requests[1:]] == ["cancelled"] * 2
        assert result.receipt.ended_ns - result.receipt.started_ns == 7_500_000_000
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_whoever_waits_for_money_or_a_slot_stops_when_it_is_too_late_to_send_a_call(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        model = model_of_worst_case("0.40", lambda _: Reply("never", delay=60))
        agent = tw.agent(id="one", instructions="Work.", model=model)
        witness = Witness()
        results: list[tw.Result] = []

        async def run() -> None:
            results.append(await tree.run(agent, "go"))

        limits = tw.Limits(max_concurrent_calls=1, deadline=5)
        budget = tw.Budget(max_usd="1.00")
        async with tw.open_tree(budget=budget, limits=limits, **witness.tree_options) as tree:
            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(run)
            assert VirtualClock.running().monotonic() == 5
            tree.check()
        assert [result.stop_reason for result in results] == ["deadline"] * 4
        # One was sent. One had its money and no slot; two had neither, a second before the end.
        assert len(model.requests) == 1
        assert sorted(result.receipt.total.calls for result in results) == [0, 0, 0, 1]
        told = sorted(result.stop_detail.rpartition("; ")[2] for result in results)
        assert told[0] == "it waited for a call slot"
        assert set(told[1:3]) <= {told[0], "it waited for money on root"}
        assert told[3] == "its deadline has passed"
        assert "1 s are left before the deadline" in min(result.stop_detail for result in results)
        check_books(witness, [result.receipt for result in results], model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_tool_that_takes_too_long_is_an_error_result_and_the_run_goes_on(
    backend: Backend,
) -> None:
    @tw.tool(effect="read", runs="host", timeout_seconds=2)
    async def dig() -> str:
        """Dig."""
        await anyio.sleep(3_600)
        return "a hole"

    async def scenario() -> None:
        model = ScriptedModel(hands_out(("dig", {})))
        agent = tw.agent(id="one", instructions="Dig.", model=model, tools=[dig])
        witness = Witness()
        result = await tw.run(agent, "go", **witness.options)
        assert result.complete
        assert VirtualClock.running().monotonic() == 2
        (told,) = model.requests[1].tool_results
        assert told.is_error
        assert told.content.startswith("cave_tool_timeout: ")
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_tool_in_a_thread_that_ignores_its_time_is_abandoned_and_named(
    backend: Backend,
) -> None:
    may_end, ended = threading.Event(), threading.Event()

    @tw.tool(effect="read", runs="host", timeout_seconds=2)
    def block() -> str:
        """Block."""
        may_end.wait()
        ended.set()
        return "too late"

    async def scenario() -> None:
        model = ScriptedModel(hands_out(("block", {})))
        agent = tw.agent(id="one", instructions="Block.", model=model, tools=[block])
        witness = Witness()
        result = await tw.run(agent, "go", **witness.options)
        assert result.complete
        assert not ended.is_set()
        (told,) = model.requests[1].tool_results
        assert told.content.startswith("cave_tool_timeout: ")
        (fault,) = result.receipt.faults
        assert fault.startswith("root/one#1/tool:block#1: its thread did not stop")
        assert "too late" not in str(result.messages)
        check_books(witness, result.receipt, model)

    try:
        # The clock does not wait long for a thread that is stuck.
        VirtualClock(patience=0.01).run(scenario, backend=backend)
    finally:
        may_end.set()
    assert ended.wait(5)


@both_backends
def test_a_run_whose_deadline_passes_while_a_thread_blocks_is_over_at_once(
    backend: Backend,
) -> None:
    may_end = threading.Event()

    @tw.tool(effect="read", runs="host", timeout_seconds=None)
    def block() -> str:
        """Block."""
        may_end.wait()
        return "too late"

    async def scenario() -> None:
        model = ScriptedModel(hands_out(("block", {})))
        agent = tw.agent(id="one", instructions="Block.", model=model, tools=[block])
        witness = Witness()
        limits = tw.Limits(deadline=1)
        result = await tw.run(agent, "go", limits=limits, **witness.options)
        assert VirtualClock.running().monotonic() == 1
        assert result.stop_reason == "deadline"
        assert ["abandoned" in fault for fault in result.receipt.faults] == [True]
        check_books(witness, result.receipt, model)

    try:
        VirtualClock(patience=0.01).run(scenario, backend=backend)
    finally:
        may_end.set()


def test_a_thread_that_ends_while_its_loop_stands_still_does_not_wait_for_it() -> None:
    """A loop that was stopped may never run again. On trio a loop cannot be stopped so."""
    may_end, threads = threading.Event(), list[threading.Thread]()

    @tw.tool(effect="read", runs="host")
    def block() -> str:
        """Block."""
        threads.append(threading.current_thread())
        loop.call_soon_threadsafe(loop.stop)
        may_end.wait()
        return "seen"

    model = ScriptedModel(hands_out(("block", {})))
    agent = tw.agent(id="one", instructions="Block.", model=model, tools=[block])
    loop = asyncio.new_event_loop()
    try:
        run = loop.create_task(tw.run(agent, "go"))
        loop.run_forever()
        may_end.set()
        (thread,) = threads
        thread.join(5)
        assert not thread.is_alive()
        # And one that goes on finds the result that was left for it.
        assert loop.run_until_complete(run).complete
        assert [result.content for result in model.requests[1].tool_results] == ["seen"]
    finally:
        may_end.set()
        loop.close()


# --- a reader that sleeps ------------------------------------------------------------------------


@both_backends
def test_a_reader_that_sleeps_keeps_neither_the_last_slot_nor_the_last_money(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        told = Reply("a long story", chunks=6, chunk_delay=1, usage=tw.Usage(output=400))
        model = model_of_worst_case("1.00", lambda _: told)
        agent = tw.agent(id="one", instructions="Tell.", model=model, output=None)
        witness = Witness()
        receipts: list[tw.Receipt] = []
        # Each call needs all there is, and the only slot.
        budget, limits = tw.Budget(max_usd="1.40"), tw.Limits(max_concurrent_calls=1)
        async with tw.open_tree(budget=budget, limits=limits, **witness.tree_options) as tree:
            async with tree.stream(agent, "go") as slow:
                async for _ in slow:
                    break  # and the reader falls asleep
                quick = await tree.run(agent, "go")
                assert quick.complete
                assert VirtualClock.running().monotonic() == 10
                receipts.append(quick.receipt)
                await anyio.sleep(60)
                result = await slow.result()
                assert result.text == "a long story"
                receipts.append(result.receipt)
            tree.check()
        assert sum(receipt.total.usd for receipt in receipts) == Decimal("0.80")
        check_books(witness, receipts, model)

    VirtualClock().run(scenario, backend=backend)


# --- what raises ---------------------------------------------------------------------------------


@both_backends
def test_a_child_that_raises_is_an_error_result_and_its_siblings_finish(backend: Backend) -> None:
    def script(request: ScriptedRequest) -> Reply:
        if request.agent_path == BOSS:
            return hands_out(*tasks("work", 3))(request)
        error = OSError("the disk is full") if request.agent_path == SECOND else None
        return Reply("done", delay=1, error=error)

    async def scenario() -> None:
        model = ScriptedModel(script)
        worker = tw.agent(id="worker", instructions="Work.", model=model)
        work = tw.subagent(name="work", description="Works.", agent=worker)
        boss = tw.agent(id="boss", instructions="Plan.", model=model, tools=[work])
        witness = Witness()
        result = await tw.run(boss, "go", **witness.options)
        assert result.complete
        reasons = {r.path[-1]: r.stop_reason for r in result.receipt.subagents}
        assert reasons == {"1": "complete", "2": "failed", "3": "complete"}
        (told,) = [r for r in model.requests[-1].tool_results if r.is_error]
        assert "OSError: the disk is full" in told.content
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_tool_that_raises_is_an_error_result(is_blocking: bool, backend: Backend) -> None:
    async def fails() -> str:
        """Fail."""
        raise ValueError("no such region")

    def fails_in_a_thread() -> str:
        """Fail."""
        raise ValueError("no such region")

    function: Callable[[], Any] = fails_in_a_thread if is_blocking else fails
    broken = tw.tool(function, name="broken", effect="read", runs="host")

    async def scenario() -> None:
        model = ScriptedModel(hands_out(("broken", {}), ("broken", {})))
        agent = tw.agent(id="one", instructions="Try.", model=model, tools=[broken])
        witness = Witness()
        result = await tw.run(agent, "go", **witness.options)
        assert result.complete
        told = [r.content for r in model.requests[1].tool_results if r.is_error]
        assert told == ["ValueError: no such region"] * 2
        assert [(row.calls, row.errors) for row in result.receipt.tools] == [(2, 2)]
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_call_that_the_caller_refuses_is_not_run_and_says_why(backend: Backend) -> None:
    asked: list[str] = []

    async def approve(call: tw.ToolCall) -> bool | str:
        asked.append(call.name)
        await anyio.sleep(1)
        return "not on a Friday" if call.name == "work" else call.arguments == {}

    async def scenario() -> None:
        made = family()
        ran: list[str] = []

        @tw.tool(effect="write", runs="host")
        async def note(text: str = "") -> str:
            """Note.

            Args:
                text: What.
            """
            ran.append(text)
            return "noted"

        calls: list[tuple[str, dict[str, Any]]] = [
            ("note", {}),
            *tasks("work", 1),
            ("note", {"text": "x"}),
        ]
        model = ScriptedModel(hands_out(*calls))
        work = tw.subagent(name="work", description="Works.", agent=made.boss)
        agent = tw.agent(id="one", instructions="Try.", model=model, tools=[note, work])
        witness = Witness()
        result = await tw.run(agent, "go", on_tool_call=approve, **witness.options)
        assert result.complete
        assert (asked, ran) == (["note", "work", "note"], [""])
        first, second, third = model.requests[1].tool_results
        assert first.content == "noted"
        assert second.content == "cave_tool_call_denied: not on a Friday"
        assert third.content == "cave_tool_call_denied: the caller did not approve this call"
        assert [r.code for r in result.receipt.refusals] == ["cave_tool_call_denied"] * 2
        assert made.model.requests == []
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
@pytest.mark.parametrize("ending", [KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("is_blocking", [False, True])
def test_what_ends_the_program_ends_it_with_the_books_shut(
    is_blocking: bool, ending: BaseException, backend: Backend
) -> None:
    async def stop() -> str:
        """Stop."""
        await anyio.sleep(1)
        raise ending

    def stop_in_a_thread() -> str:
        """Stop."""
        raise ending

    function: Callable[[], Any] = stop_in_a_thread if is_blocking else stop
    last = tw.tool(function, name="last", effect="read", runs="host")
    witness = Witness()
    model = ScriptedModel([])

    def script(request: ScriptedRequest) -> Reply:
        if request.turn == 0 and request.agent_path == BOSS:
            return Reply(tool_calls=[*tasks("work", 1), ("last", {}), *tasks("work", 1)])
        return Reply("never told", chunks=2, chunk_delay=60)

    model.script = script
    worker = tw.agent(id="worker", instructions="Work.", model=model)
    work = tw.subagent(name="work", description="Works.", agent=worker)
    boss = tw.agent(id="boss", instructions="Plan.", model=model, tools=[work, last])

    async def scenario() -> None:
        await tw.run(boss, "go", **witness.options)

    with pytest.raises(type(ending)) as caught:
        VirtualClock().run(scenario, backend=backend)
    assert caught.value is ending
    check_closed(witness)
    assert [request.ended for request in model.requests] == ["complete", "cancelled", "cancelled"]
    assert witness.charged_calls() == 3


@both_backends
def test_a_listener_that_raises_ends_its_own_run_and_no_other(backend: Backend) -> None:
    """At every event, those among them that are told while a lease is given back."""
    kinds = {type(event) for event in undisturbed(backend).events}
    for kind in kinds:
        VirtualClock().run(_listener_raises_at, kind, backend=backend)


async def _listener_raises_at(kind: type[RunEvent]) -> None:
    made = family()
    quick = ScriptedModel([Reply("done", delay=30)])
    other = tw.agent(id="other", instructions="Answer.", model=quick)
    witness = Witness()
    results: list[tw.Result] = []
    receipts: list[tw.Receipt] = []

    def listen(event: RunEvent) -> None:
        witness.hear(event)
        if isinstance(event, kind):
            raise OSError("nobody listens")

    async def run_other() -> None:
        results.append(await tree.run(other, "go"))

    async def run_boss() -> None:
        with pytest.raises(tw.RunError, match="on_event raised OSError: nobody listens") as caught:
            await tree.run(made.boss, "go", on_event=listen)
        assert isinstance(caught.value.__cause__, OSError)
        receipts.append(caught.value.receipt)

    async with tw.open_tree(**witness.tree_options) as tree:
        async with anyio.create_task_group() as group:
            group.start_soon(run_other)
            group.start_soon(run_boss)
        tree.check()
    assert [result.text for result in results] == ["done"]
    check_books(witness, [*receipts, results[0].receipt], made.model, quick)
