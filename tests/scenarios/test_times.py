"""Public reports about time: limits that were none, threads that stay, and silence."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

import treewarden as tw
from treewarden.protocols import CallIdle
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from .kit import Backend, Witness, both_backends, check_books, hands_out, tasks, uses_all


@both_backends
def test_E24_a_run_of_one_second_ends_at_one_second_though_its_tool_blocks_for_thirty(
    backend: Backend,
) -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    @tw.tool(effect="read", runs="host", timeout_seconds=None)
    def block() -> str:
        """Block a thread, whatever is said to it."""
        may_end.wait(30)
        has_ended.set()
        return "too late"

    async def scenario() -> None:
        model = ScriptedModel(hands_out(("block", {})))
        agent = tw.agent(id="one", instructions="Block.", model=model, tools=[block])
        witness = Witness()
        result = await tw.run(agent, "go", limits=tw.Limits(deadline=1), **witness.options)
        assert VirtualClock.running().monotonic() <= 1.2
        assert (result.stop_reason, result.complete) == ("deadline", False)
        (fault,) = result.receipt.faults
        assert "its thread did not stop and was abandoned; a late result is dropped" in fault
        assert not has_ended.is_set()
        check_books(witness, result.receipt, model)
        may_end.set()
        assert has_ended.wait(5)
        assert "too late" not in str(result.messages)

    try:
        # The clock does not wait long for a thread that is stuck.
        VirtualClock(patience=0.01).run(scenario, backend=backend)
    finally:
        may_end.set()


@both_backends
@pytest.mark.parametrize(("own", "effective"), [(None, 3_000), (1_800, 1_800), (7_200, 3_000)])
def test_E50_a_child_has_what_is_left_of_its_parents_time_or_its_own_if_that_is_less(
    own: int | None, effective: int, backend: Backend
) -> None:
    left: list[float] = []

    @tw.tool(effect="read", runs="host")
    async def look(ctx: tw.Context[None]) -> str:
        """Look at the time."""
        assert ctx.deadline is not None
        left.append(ctx.deadline - VirtualClock.running().monotonic())
        return "seen"

    @tw.tool(effect="read", runs="host", timeout_seconds=None)
    async def prepare() -> str:
        """Take ten minutes."""
        await anyio.sleep(600)
        return "ready"

    def lead(request: ScriptedRequest) -> Reply:
        plan: list[list[tuple[str, dict[str, Any]]]] = [[("prepare", {})], tasks("work", 1), []]
        return Reply("done", tool_calls=plan[request.turn])

    async def scenario() -> None:
        model = ScriptedModel(lead)
        worker_model = ScriptedModel(hands_out(("look", {})))
        worker = tw.agent(id="worker", instructions="Look.", model=worker_model, tools=[look])
        work = tw.subagent(name="work", description="Works.", agent=worker, timeout_seconds=own)
        agent = tw.agent(id="one", instructions="Ask.", model=model, tools=[prepare, work])
        witness = Witness()
        limits = tw.Limits(deadline=3_600)
        result = await tw.run(agent, "go", limits=limits, **witness.options)
        assert result.complete
        # A tool has a time of its own, which is less; its agent's is in the journal.
        (child,) = [e for e in witness.journal if getattr(e, "name", "") == "work"]
        assert child._asdict()["deadline"] - 600 == effective
        assert left == [min(effective, look.timeout_seconds or effective)]
        check_books(witness, result.receipt, model, worker_model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E50_a_child_whose_stream_falls_silent_ends_as_stalled_and_its_parent_goes_on(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        model = ScriptedModel(hands_out(*tasks("work", 2)))
        silent = ScriptedModel(
            lambda request: (
                Reply(chunks=("a", "b", "c"), chunk_delay=1, stall_after=2)
                if request.agent_path.endswith("#1")
                else uses_all(request)
            )
        )
        worker = tw.agent(id="worker", instructions="Work.", model=silent)
        work = tw.subagent(name="work", description="Works.", agent=worker)
        agent = tw.agent(id="one", instructions="Ask.", model=model, tools=[work])
        witness = Witness()
        limits = tw.Limits(idle_timeout=30)
        result = await tw.run(agent, "go", limits=limits, **witness.options)
        assert result.complete
        assert VirtualClock.running().monotonic() == 31
        stalled, done = sorted(result.receipt.subagents, key=lambda r: r.path)
        assert (stalled.stop_reason, done.stop_reason) == ("stalled", "complete")
        assert stalled.reason.startswith("the model call was silent for 30 s (idle_timeout 30 s)")
        (line,) = stalled.lines
        assert line.basis == "estimated"
        assert line.output_tokens == 2
        (cut,) = [r for r in silent.requests if r.agent_path == stalled.path]
        assert cut.ended == "cancelled"
        told = model.requests[1].tool_results[0]
        assert '"stop_reason":"stalled"' in told.content
        check_books(witness, result.receipt, model, silent)

    VirtualClock().run(scenario, backend=backend)


def steady(calls: int, *, every: float, last: float) -> ScriptedModel:
    """A model that asks for a tool ``calls`` times, and whose last reply takes ``last`` seconds."""

    def script(request: ScriptedRequest) -> Reply:
        if request.turn < calls:
            return Reply(tool_calls=[("look", {})], delay=every)
        return Reply("done", delay=last)

    return ScriptedModel(script)


@tw.tool(effect="read", runs="host")
async def look() -> str:
    """Look."""
    return "seen"


async def run_steadily(model: ScriptedModel) -> tuple[tw.Result, Witness]:
    options: dict[str, Any] = {"max_model_calls": 100, "max_tool_calls": 100}
    worker = tw.agent(id="worker", instructions="Work.", model=model, tools=[look], **options)
    lead_model = ScriptedModel(hands_out(*tasks("work", 1)))
    work = tw.subagent(name="work", description="Works.", agent=worker)
    lead = tw.agent(id="lead", instructions="Ask.", model=lead_model, tools=[work])
    witness = Witness()
    limits = tw.Limits(idle_timeout=120)
    result = await tw.run(lead, "go", limits=limits, **witness.options)
    check_books(witness, result.receipt, model, lead_model)
    return result, witness


@both_backends
def test_E51_a_child_that_makes_progress_for_half_an_hour_is_not_killed(backend: Backend) -> None:
    async def scenario() -> None:
        result, witness = await run_steadily(steady(90, every=20, last=20))
        assert VirtualClock.running().monotonic() == 1_820
        assert [r.stop_reason for r in result.receipt.walk()] == ["complete"] * 2
        assert not any(isinstance(event, CallIdle) for event in witness.events)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E51_a_call_that_hangs_for_121_seconds_is_warned_of_once_and_killed_at_120(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        result, witness = await run_steadily(steady(3, every=20, last=121))
        assert VirtualClock.running().monotonic() == 3 * 20 + 120
        (child,) = result.receipt.subagents
        assert child.stop_reason == "stalled"
        assert "silent for 120 s" in child.reason
        (warning,) = [event for event in witness.events if isinstance(event, CallIdle)]
        assert (warning.silent_seconds, warning.idle_timeout_seconds) == (96, 120)
        assert result.complete

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_each_silence_is_warned_of_anew_and_a_sign_of_life_starts_the_time_again(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        model = ScriptedModel([Reply(chunks=("a", "b", "c"), delay=9, chunk_delay=9)])
        agent = tw.agent(id="one", instructions="Write.", model=model)
        witness = Witness()
        result = await tw.run(agent, "go", limits=tw.Limits(idle_timeout=10), **witness.options)
        assert result.text == "abc"
        warnings = [event for event in witness.events if isinstance(event, CallIdle)]
        assert [warning.silent_seconds for warning in warnings] == [8, 8, 8]
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_run_that_joins_a_tree_keeps_the_trees_times_unless_it_has_its_own(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        model = ScriptedModel(lambda _: Reply("late", delay=60))
        agent = tw.agent(id="one", instructions="Wait.", model=model)
        witness = Witness()
        limits = tw.Limits(idle_timeout=10)
        async with tw.open_tree(limits=limits, **witness.tree_options) as tree:
            clock = VirtualClock.running()
            inherits = await tree.run(agent, "go", limits=tw.Limits(deadline=1_000))
            assert (inherits.stop_reason, clock.monotonic()) == ("stalled", 10)
            own = await tree.run(agent, "go", limits=tw.Limits(idle_timeout=20))
            assert (own.stop_reason, clock.monotonic()) == ("stalled", 30)
            late = await tree.run(agent, "go", limits=tw.Limits(deadline=0.5))
            assert (late.stop_reason, late.receipt.total.calls) == ("deadline", 0)
            assert late.stop_detail == (
                "0.5 s are left before the deadline, and no call is sent with less than 1 s "
                "(min_call_seconds)"
            )

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_second_that_a_run_asks_for_is_no_default_and_does_not_give_way_to_the_trees(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        model = ScriptedModel(lambda _: Reply("done"))
        agent = tw.agent(id="one", instructions="Write.", model=model)
        witness = Witness()
        async with tw.open_tree(limits=tw.Limits(min_call_seconds=5), **witness.tree_options) as t:
            silent = await t.run(agent, "go", limits=tw.Limits(deadline=3))
            assert (silent.stop_reason, silent.receipt.total.calls) == ("deadline", 0)
            assert "less than 5 s" in silent.stop_detail
            limits = tw.Limits(deadline=3, min_call_seconds=1)
            assert (await t.run(agent, "go", limits=limits)).text == "done"

    VirtualClock().run(scenario, backend=backend)
