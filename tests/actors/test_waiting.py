"""``Limits(admission="wait")``: subagents wait for a slot, and parents lend theirs meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import anyio
import attrs
import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from ..scenarios.kit import (
    Backend,
    Measured,
    Witness,
    both_backends,
    check_books,
    check_closed,
    check_nobody_was_refused,
    explore,
    hands_out,
    model_of_worst_case,
    tasks,
    uses_all,
)


def waits(cap: int, **options: Any) -> tw.Limits:
    return tw.Limits(max_concurrent_subagents=cap, max_subagents=None, admission="wait", **options)


def family(*, parents: int, children: int, price: str = "0.01") -> tuple[tw.Agent, ScriptedModel]:
    """A boss with parents that each start children and wait for them."""

    def script(request: ScriptedRequest) -> Reply:
        match request.agent_path.count("/"):
            case 1:
                return hands_out(*tasks("lead", parents))(request)
            case 2:
                asked = hands_out(*tasks("work", children))(request)
                return attrs.evolve(asked, delay=1.0)
            case _:
                return uses_all(request)

    model = model_of_worst_case(price, script)
    leaf = tw.agent(id="leaf", instructions="Work.", model=model)
    work = tw.subagent(name="work", description="Works.", agent=leaf)
    parent = tw.agent(id="parent", instructions="Split it.", model=model, tools=[work])
    lead = tw.subagent(name="lead", description="Leads.", agent=parent)
    return tw.agent(id="boss", instructions="Plan.", model=model, tools=[lead]), model


@attrs.define
class Census(Witness):
    """A witness who counts live parents, and when the first of them had its result."""

    most_parents: int = 0
    first_result_after: int | None = None

    def write(self, event: Any) -> None:
        super().write(event)
        nodes = self.state.nodes.values()
        parents = sum(node.path.rpartition("/")[2].startswith("lead#") for node in nodes)
        self.most_parents = max(self.most_parents, parents)
        if self.first_result_after is None and self._has_ended(event):
            self.first_result_after = self.state.counters.admitted

    def _has_ended(self, event: Any) -> bool:
        kind, path = self.order[-1]
        return kind == "Ended" and path.rpartition("/")[2].startswith("lead#")


async def live_parents(cap: int) -> Witness:
    boss, model = family(parents=10, children=2)
    witness = Census(is_thorough=False)
    result = await tw.run(boss, "go", limits=waits(cap), **witness.options)
    assert result.complete
    assert [r.stop_reason for r in result.receipt.walk()] == ["complete"] * 31
    assert witness.state.counters.peak == cap
    assert witness.most_parents <= cap
    assert witness.first_result_after is not None
    # The parents that fit, and children of theirs: none of those that came later.
    assert witness.first_result_after <= 3 * cap
    check_nobody_was_refused(witness)
    check_books(witness, result.receipt, model)
    return witness


@pytest.mark.parametrize("cap", [2, 4])
def test_live_parents_never_pass_the_cap_and_the_first_results_come_first(
    cap: int, record_property: Measured
) -> None:
    async def scenario() -> Witness:
        return await live_parents(cap)

    explore(scenario, record_property, f"parked parents under a cap of {cap}", seeds=110)


@both_backends
def test_under_a_cap_of_one_a_parent_is_done_before_the_next_begins(backend: Backend) -> None:
    async def scenario() -> Witness:
        return await live_parents(1)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_every_level_can_wait_under_a_cap_of_one(backend: Backend) -> None:
    async def scenario() -> None:
        def script(request: ScriptedRequest) -> Reply:
            if request.agent_path.count("/") < 6:
                return hands_out(*tasks("deeper", 2))(request)
            return uses_all(request)

        model = ScriptedModel(script)
        agent = tw.agent(id="leaf", instructions="Work.", model=model)
        for _ in range(5):
            deeper = tw.subagent(name="deeper", description="Goes deeper.", agent=agent)
            agent = tw.agent(id="level", instructions="Split.", model=model, tools=[deeper])
        witness = Witness()
        result = await tw.run(agent, "go", limits=waits(1, max_depth=5), **witness.options)
        assert len(list(result.receipt.walk())) == 1 + 2 + 4 + 8 + 16 + 32
        assert result.complete
        assert witness.state.counters.peak == 1
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


def nested(how: str, inner: tw.Agent) -> Any:
    """What a tool does to run an agent inside."""

    async def in_a_run() -> str:
        return (await tw.run(inner, "go")).text

    async def in_two_runs_at_once() -> str:
        async with anyio.create_task_group() as group:
            group.start_soon(in_a_run)
            group.start_soon(in_a_run)
        return "both done"

    async def in_a_stream() -> str:
        async with tw.stream(inner, "go") as run:
            return (await run.result()).text

    def in_a_thread() -> str:
        return tw.run_sync(inner, "go").text

    ways: dict[str, Callable[[], Any]] = {
        "run": in_a_run,
        "two runs": in_two_runs_at_once,
        "stream": in_a_stream,
        "thread": in_a_thread,
    }
    return ways[how]


@both_backends
@pytest.mark.parametrize("how", ["run", "two runs", "stream", "thread"])
def test_a_tool_that_runs_an_agent_gives_its_agents_slot_back_meanwhile(
    how: str, backend: Backend
) -> None:
    async def scenario() -> None:
        inner_model = ScriptedModel(lambda request: uses_all(request, "found"))
        inner = tw.agent(id="inner", instructions="Work.", model=inner_model)
        tool = tw.tool(nested(how, inner), name="dig", effect="read", runs="host", description="x")
        model = ScriptedModel(hands_out(("dig", {})))
        middle = tw.agent(id="middle", instructions="Dig.", model=model, tools=[tool])
        dig = tw.subagent(name="dig_deep", description="Digs.", agent=middle)
        top_model = ScriptedModel(hands_out(*tasks("dig_deep", 3)))
        top = tw.agent(id="top", instructions="Ask.", model=top_model, tools=[dig])
        witness = Witness()
        result = await tw.run(top, "go", limits=waits(1), **witness.options)
        assert result.complete
        assert witness.state.counters.peak == 1
        assert all(r.stop_reason == "complete" for r in result.receipt.walk())
        runs_inside = 6 if how == "two runs" else 3
        assert len(inner_model.requests) == runs_inside
        check_books(witness, result.receipt, model, top_model, inner_model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_an_approval_that_runs_an_agent_gives_the_slot_back_meanwhile(backend: Backend) -> None:
    async def scenario() -> None:
        judge_model = ScriptedModel(lambda request: uses_all(request, "yes"))
        judge = tw.agent(id="judge", instructions="Judge.", model=judge_model)

        async def approve(call: tw.ToolCall) -> bool:
            return call.name == "lead" or (await tw.run(judge, "may it?")).text == "yes"

        boss, model = family(parents=2, children=1)
        witness = Witness()
        options: dict[str, Any] = {**witness.options, "on_tool_call": approve}
        result = await tw.run(boss, "go", limits=waits(1), **options)
        assert result.complete
        assert len(judge_model.requests) == 2
        assert witness.state.counters.peak == 1
        check_books(witness, result.receipt, model, judge_model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_an_agent_with_a_tool_at_work_keeps_its_slot_until_the_tool_is_done(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        @tw.tool(effect="read", runs="host")
        async def look() -> str:
            """Look around."""
            await anyio.sleep(5)
            return "seen"

        def script(request: ScriptedRequest) -> Reply:
            if request.agent_path.count("/") == 1:
                return hands_out(*tasks("lead", 1))(request)
            if request.agent_path.count("/") == 2:
                return hands_out(("look", {}), *tasks("work", 1))(request)
            started_at.append(clock.monotonic())
            return uses_all(request)

        clock = VirtualClock.running()
        assert clock is not None
        started_at: list[float] = []
        model = ScriptedModel(script)
        leaf = tw.agent(id="leaf", instructions="Work.", model=model)
        work = tw.subagent(name="work", description="Works.", agent=leaf)
        parent = tw.agent(id="parent", instructions="Split.", model=model, tools=[look, work])
        lead = tw.subagent(name="lead", description="Leads.", agent=parent)
        boss = tw.agent(id="boss", instructions="Plan.", model=model, tools=[lead])
        began = clock.monotonic()
        witness = Witness()
        result = await tw.run(boss, "go", limits=waits(1), **witness.options)
        assert result.complete
        assert started_at == [began + 5]
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_whoever_stops_waiting_leaves_the_line_and_goes_on(backend: Backend) -> None:
    async def scenario() -> None:
        inner_model = ScriptedModel(lambda request: uses_all(request, delay=100))
        inner = tw.agent(id="inner", instructions="Work.", model=inner_model)
        waited: list[int] = []

        @tw.tool(effect="read", runs="host")
        async def impatient() -> str:
            """Do not wait for long."""
            with anyio.move_on_after(5):
                await tw.run(inner, "go")
            assert tree_counters().queued_entries == 0
            waited.append(1)
            return "gave up"

        def tree_counters() -> Any:
            return witness.state.counters

        model = ScriptedModel(hands_out(("impatient", {})))
        eager = tw.agent(id="eager", instructions="Try.", model=model, tools=[impatient])
        work = tw.subagent(name="work", description="Works.", agent=inner)
        hurry = tw.subagent(name="hurry", description="Hurries.", agent=eager)
        top_model = ScriptedModel(hands_out(*tasks("work", 1), *tasks("hurry", 1)))
        top = tw.agent(id="top", instructions="Ask.", model=top_model, tools=[work, hurry])
        witness = Witness()
        result = await tw.run(top, "go", limits=waits(2), **witness.options)
        assert result.complete
        assert waited == [1]
        check_books(witness, result.receipt, model, top_model, inner_model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_thread_that_waits_for_a_slot_is_told_when_its_call_is_over(backend: Backend) -> None:
    """It runs beside the loop, so nothing that cancels a task reaches it."""
    told: list[str] = []
    has_ended = threading.Event()

    async def scenario() -> None:
        slow_model = ScriptedModel(lambda request: uses_all(request, delay=100))
        inner = tw.agent(id="inner", instructions="Work.", model=slow_model)

        @tw.tool(effect="read", runs="host", timeout_seconds=5)
        def dig() -> str:
            """Dig."""
            try:
                return tw.run_sync(inner, "go").text
            except tw.UsageError as error:
                told.append(str(error))
                raise
            finally:
                has_ended.set()

        work = tw.subagent(name="work", description="Works.", agent=inner)
        model = ScriptedModel(hands_out(*tasks("work", 1), ("dig", {})))
        top = tw.agent(id="top", instructions="Ask.", model=model, tools=[work, dig])
        witness = Witness()
        result = await tw.run(top, "go", limits=waits(1), **witness.options)
        assert result.complete
        (_, dug) = model.requests[1].tool_results
        assert dug.content.startswith("cave_tool_timeout: ")
        check_books(witness, result.receipt, model, slow_model)

    VirtualClock(patience=0.05).run(scenario, backend=backend)
    assert has_ended.wait(5)
    (error,) = told
    assert "it waited for a slot, and root/top#1/tool:dig" in error
    assert "is closing" in error


@both_backends
def test_a_deadline_strikes_those_that_wait_as_well(backend: Backend) -> None:
    async def scenario() -> None:
        boss, model = family(parents=20, children=2)
        witness = Witness()
        result = await tw.run(boss, "go", limits=waits(2, deadline=6), **witness.options)
        assert result.stop_reason == "deadline"
        counters = witness.state.counters
        assert counters.admitted < 61
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_refusal_at_its_turn_is_an_error_result_and_the_rest_goes_on(backend: Backend) -> None:
    async def scenario() -> None:
        model = ScriptedModel(lambda request: uses_all(request))
        leaf = tw.agent(id="leaf", instructions="Work.", model=model)
        work = tw.subagent(name="work", description="Works.", agent=leaf)
        top_model = ScriptedModel(hands_out(*tasks("work", 4)))
        top = tw.agent(id="top", instructions="Ask.", model=top_model, tools=[work])
        limits = tw.Limits(max_concurrent_subagents=1, max_subagents=3, admission="wait")
        witness = Witness()
        result = await tw.run(top, "go", limits=limits, **witness.options)
        assert result.complete
        told = top_model.requests[1].tool_results
        assert [r.is_error for r in told] == [False, False, False, True]
        assert "cave_subagent_invocation_limit" in told[3].content
        assert [r.code for r in result.receipt.refusals] == ["cave_subagent_invocation_limit"]
        check_books(witness, result.receipt, model, top_model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_the_run_that_came_first_gets_the_slots_and_the_other_one_is_not_starved(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        model = ScriptedModel(lambda request: uses_all(request))
        leaf = tw.agent(id="leaf", instructions="Work.", model=model)
        work = tw.subagent(name="work", description="Works.", agent=leaf)
        first_model = ScriptedModel(hands_out(*tasks("work", 30)))
        second_model = ScriptedModel(hands_out(*tasks("work", 2)))
        first = tw.agent(id="first", instructions="Ask.", model=first_model, tools=[work])
        second = tw.agent(id="second", instructions="Ask.", model=second_model, tools=[work])
        witness = Witness()
        async with tw.open_tree(limits=waits(1), **witness.tree_options) as tree:
            async with anyio.create_task_group() as group:
                group.start_soon(tree.run, first, "go")
                await anyio.sleep(0.5)
                group.start_soon(tree.run, second, "go")
        begun = [path for kind, path in witness.order if kind == "Admitted" and "/work#" in path]
        places = [number for number, path in enumerate(begun) if "/second#" in path]
        # Every eighth grant goes to who waits longest; without that the second would be last.
        assert len(places) == 2
        assert places[0] < 16 and places[1] < 32, places
        assert begun[0].startswith("root/first#1")
        check_closed(witness)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_cancel_at_every_instant_leaves_nobody_in_line(backend: Backend) -> None:
    def run(at: int) -> int:
        witness = Witness(is_thorough=False)
        scopes: list[anyio.CancelScope] = []

        def listen(event: Any) -> None:
            witness.write(event)
            if len(witness.order) == at:
                scopes[0].cancel()

        async def scenario() -> None:
            boss, model = family(parents=3, children=2)
            options: dict[str, Any] = {**witness.options, "journal": listen}
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                await tw.run(boss, "go", limits=waits(2), **options)
            assert model.open_requests == 0

        VirtualClock().run(scenario, backend=backend)
        check_closed(witness)
        assert witness.state.counters.admitted <= 9
        return len(witness.order)

    instants = run(-1)
    assert instants > 100
    for at in range(1, instants + 1):
        run(at)


# --- beside the one that started it --------------------------------------------------------------


def in_the_background(
    script: Callable[[ScriptedRequest], Reply], policy: Any = "wait"
) -> tuple[tw.Agent, ScriptedModel]:
    """A boss, one parent that starts workers in the background, and those workers."""

    def answer(request: ScriptedRequest) -> Reply:
        match request.agent_path.count("/"):
            case 1:
                return hands_out(*tasks("lead", 1))(request)
            case 2:
                return script(request)
            case _:
                return uses_all(request, "worked")

    model = model_of_worst_case("0.01", answer)
    leaf = tw.agent(id="leaf", instructions="Work.", model=model)
    work = tw.subagent(name="work", description="Works.", agent=leaf, background=True)
    parent = tw.agent(
        id="parent", instructions="Split.", model=model, tools=[work], background=policy
    )
    lead = tw.subagent(name="lead", description="Leads.", agent=parent)
    return tw.agent(id="boss", instructions="Plan.", model=model, tools=[lead]), model


@both_backends
@pytest.mark.parametrize("how", ["by cave_wait", "at its end"])
def test_a_background_child_waits_for_the_slot_that_its_parent_lends_while_it_waits(
    how: str, backend: Backend
) -> None:
    def script(request: ScriptedRequest) -> Reply:
        if request.turn == 0:
            return Reply(tool_calls=tasks("work", 2))
        if request.turn == 1 and how == "by cave_wait":
            (first, second) = (json.loads(r.content) for r in request.tool_results)
            assert (first["status"], second["status"]) == ("queued", "queued")
            return Reply(tool_calls=[("cave_wait", {"ids": [first["id"], second["id"]]})])
        return Reply("all done")

    async def scenario() -> None:
        boss, model = in_the_background(script)
        witness = Witness()
        result = await tw.run(boss, "go", limits=waits(1), **witness.options)
        assert [r.stop_reason for r in result.receipt.walk()] == ["complete"] * 4
        assert witness.state.counters.peak == 1
        (parent,) = result.receipt.subagents
        assert [row.stop_reason for row in parent.background] == ["complete"] * 2
        assert all(row.was_read for row in parent.background)
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_background_child_that_is_cancelled_in_line_never_starts(backend: Backend) -> None:
    def script(request: ScriptedRequest) -> Reply:
        if request.turn == 0:
            return Reply(tool_calls=tasks("work", 2))
        if request.turn == 1:
            (first, _) = (json.loads(r.content) for r in request.tool_results)
            return Reply(tool_calls=[("cave_cancel", {"id": first["id"], "reason": "changed"})])
        return Reply("all done")

    async def scenario() -> None:
        boss, model = in_the_background(script)
        witness = Witness()
        result = await tw.run(boss, "go", limits=waits(1), **witness.options)
        (parent,) = result.receipt.subagents
        never, done = parent.background
        assert (never.stop_reason, never.reason) == ("cancelled", "changed")
        assert done.stop_reason == "complete"
        assert len(parent.subagents) == 1
        assert witness.state.counters.admitted == 2
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_background_child_that_is_refused_at_its_turn_is_told_as_one_that_ended(
    backend: Backend,
) -> None:
    def script(request: ScriptedRequest) -> Reply:
        return Reply("all done", tool_calls=tasks("work", 2) if request.turn == 0 else [])

    async def scenario() -> None:
        boss, model = in_the_background(script)
        witness = Witness()
        limits = tw.Limits(max_concurrent_subagents=1, max_subagents=2, admission="wait")
        result = await tw.run(boss, "go", limits=limits, **witness.options)
        assert result.complete
        (parent,) = result.receipt.subagents
        assert sorted(row.stop_reason for row in parent.background) == ["complete", "refused"]
        (refused,) = [row for row in parent.background if row.stop_reason == "refused"]
        assert "cave_subagent_invocation_limit" in refused.reason
        last = [r for r in model.requests if r.agent_path.count("/") == 2][-1]
        assert "cave_subagent_invocation_limit" in last.last_text
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_parent_that_ends_takes_those_in_line_with_it(backend: Backend) -> None:
    def script(request: ScriptedRequest) -> Reply:
        return Reply("enough", tool_calls=tasks("work", 2) if request.turn == 0 else [])

    async def scenario() -> None:
        boss, model = in_the_background(script, policy="cancel")
        witness = Witness()
        result = await tw.run(boss, "go", limits=waits(1), **witness.options)
        (parent,) = result.receipt.subagents
        assert parent.stop_reason == "background_dropped"
        assert [row.stop_reason for row in parent.background] == ["cancelled"] * 2
        assert witness.state.counters.admitted == 1
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)
