"""Public reports about slots: deadlocks, leaks, and caps that did not hold, told to whole trees."""

from __future__ import annotations

from typing import Any, Literal

import anyio
import anyio.to_thread
import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from .kit import (
    Backend,
    Measured,
    Witness,
    both_backends,
    check_books,
    check_nobody_was_refused,
    explore,
    hands_out,
    tasks,
    uses_all,
)


def three_levels(model: ScriptedModel, *, parents: int, children: int) -> tw.Agent:
    """A boss with parents that each start children and wait for them."""
    leaf = tw.agent(id="leaf", instructions="Work.", model=model)
    work = tw.subagent(name="work", description="Works.", agent=leaf)
    parent = tw.agent(id="parent", instructions="Split it.", model=model, tools=[work])
    lead = tw.subagent(name="lead", description="Leads.", agent=parent)
    boss = tw.agent(id="boss", instructions="Plan.", model=model, tools=[lead])

    def script(request: ScriptedRequest) -> Reply:
        match request.agent_path.count("/"):
            case 1:
                return hands_out(*tasks("lead", parents))(request)
            case 2:
                return hands_out(*tasks("work", children))(request)
            case _:
                return uses_all(request)

    model.script = script
    return boss


@pytest.mark.parametrize("cap", [3, 1])
def test_E34_fifteen_nested_actors_finish_under_a_cap_on_calls_because_waiting_takes_no_slot(
    cap: int, record_property: Measured
) -> None:
    limits = tw.Limits(max_concurrent_calls=cap, max_concurrent_subagents=15)

    async def scenario() -> Witness:
        model = ScriptedModel([])
        boss = three_levels(model, parents=5, children=2)
        witness = Witness(is_thorough=False)
        result = await tw.run(boss, "go", limits=limits, **witness.options)
        assert result.complete
        below = [receipt for receipt in result.receipt.walk() if receipt is not result.receipt]
        assert [receipt.stop_reason for receipt in below] == ["complete"] * 15
        counters = witness.state.counters
        assert counters.peak_calls == cap
        assert counters.peak == 15
        # The boss and the parents ask twice: once to hand out the work, once to sum it up.
        assert len(model.requests) == 2 + 5 * 2 + 10
        check_nobody_was_refused(witness)
        check_books(witness, result.receipt, model)
        return witness

    explore(scenario, record_property, f"E34 under a cap of {cap}")


@pytest.mark.parametrize("ends_by", ["deadline", "itself"])
def test_E35_clean_up_that_raises_gives_the_only_slot_back_and_is_told_on_the_receipt(
    ends_by: Literal["deadline", "itself"], record_property: Measured
) -> None:
    """Two agents in sequence under a cap of one; their worktrees cannot be removed."""

    def one_by_one(request: ScriptedRequest) -> Reply:
        return Reply(tool_calls=tasks("work", 1)) if request.turn < 2 else Reply("done")

    async def scenario() -> Witness:
        witness = Witness(is_thorough=False)

        @tw.tool(effect="read", runs="host", timeout_seconds=None)
        async def edit(ctx: tw.Context[None]) -> str:
            """Edit in a worktree."""
            try:
                await anyio.sleep(1)
                witness.note("editing", ctx.path)
                await anyio.sleep(60 if ends_by == "deadline" else 1)
                return "edited"
            finally:
                witness.note("clean-up", ctx.path)
                raise OSError("the worktree is locked")

        edits: list[tuple[str, dict[str, Any]]] = [("edit", {})] * 4
        worker = ScriptedModel(hands_out(*edits), id="scripted/worker")
        agent = tw.agent(id="worker", instructions="Work.", model=worker, tools=[edit])
        work = tw.subagent(name="work", description="Works.", agent=agent, timeout_seconds=5)
        planner = ScriptedModel(one_by_one)
        boss = tw.agent(id="boss", instructions="Plan.", model=planner, tools=[work])
        limits = tw.Limits(max_concurrent_subagents=1)
        result = await tw.run(boss, "go", limits=limits, **witness.options)
        assert result.complete
        assert len(result.receipt.subagents) == 2
        for receipt in result.receipt.subagents:
            if ends_by == "deadline":
                # Why it ended is its deadline; what its clean-up raised stands beside that.
                assert receipt.stop_reason == "deadline"
                assert len(receipt.faults) == 4
                assert all("the worktree is locked" in fault for fault in receipt.faults)
            else:
                assert receipt.stop_reason == "complete"
                assert [(row.calls, row.errors) for row in receipt.tools] == [(4, 4)]
        check_nobody_was_refused(witness)
        check_books(witness, result.receipt, planner, worker)
        return witness

    explore(scenario, record_property, f"E35, ended by {ends_by}")


@both_backends
def test_E36_a_tree_used_from_another_loop_says_so_and_keeps_its_cap(backend: Backend) -> None:
    """Five tasks in the tree's loop, five from a foreign thread, five in a foreign loop."""
    errors: list[str] = []

    async def scenario() -> None:
        model = ScriptedModel(lambda _: Reply("done", delay=0.001))
        agent = tw.agent(id="one", instructions="Work.", model=model)
        witness = Witness()
        results: list[tw.Result] = []

        async def here() -> None:
            results.append(await tree.run(agent, "go"))

        def from_a_thread() -> None:
            results.extend(tree.run_from_thread(agent, "go") for _ in range(5))

        async def in_a_foreign_loop() -> None:
            for _ in range(5):
                with pytest.raises(tw.UsageError, match="one tree belongs to one event loop") as e:
                    await tree.run(agent, "go")
                errors.append(e.value.code)
                with pytest.raises(tw.UsageError, match="one tree belongs to one event loop"):
                    async with tree.stream(agent, "go"):
                        pass

        def foreign_loop() -> None:
            anyio.run(in_a_foreign_loop, backend=backend)

        limits = tw.Limits(max_concurrent_calls=1)
        async with tw.open_tree(limits=limits, journal=witness.write) as tree:
            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(here)
                group.start_soon(anyio.to_thread.run_sync, from_a_thread)
                group.start_soon(anyio.to_thread.run_sync, foreign_loop)
        tree.ledger.check_closed()
        assert [result.text for result in results] == ["done"] * 10
        assert witness.state.counters.peak_calls == 1
        assert len(model.requests) == 10
        check_books(witness, [result.receipt for result in results], model)

    anyio.run(scenario, backend=backend)
    assert errors == ["cave_tree_foreign_loop"] * 5


def test_E36_five_tasks_under_a_cap_of_one_make_one_call_at_a_time(
    record_property: Measured,
) -> None:
    async def scenario() -> Witness:
        model = ScriptedModel(lambda _: Reply("done", delay=1.0))
        agent = tw.agent(id="one", instructions="Work.", model=model)
        witness = Witness(is_thorough=False)
        receipts: list[tw.Receipt] = []

        async def run() -> None:
            result = await tree.run(agent, "go", on_event=witness.hear)
            receipts.append(result.receipt)

        limits = tw.Limits(max_concurrent_calls=1)
        async with tw.open_tree(limits=limits, **witness.tree_options) as tree:
            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(run)
        assert len(receipts) == 5
        assert VirtualClock.running().monotonic() == 5.0
        assert witness.state.counters.peak_calls == 1
        check_books(witness, receipts, model)
        return witness

    # Nothing runs side by side here: only in which order they come, of which there are 120.
    explore(scenario, record_property, "E36 in one loop", seeds=300)
