"""Public reports about subagents in the background: dropped, run on, lost or counted twice."""

from __future__ import annotations

import json
from decimal import Decimal

import anyio
import attrs
import pytest

import treewarden as tw
from treewarden.actors import Subagent
from treewarden.protocols import ActorStopped, Receipt, TextWritten
from treewarden.testing import Reply, ScriptedRequest, VirtualClock

from .kit import Backend, Measured, Witness, both_backends, explore, price_for_worst_case, tasks
from .office import (
    BOSS,
    Office,
    Policy,
    calls,
    handed_over,
    office,
    read,
    results_of,
    steps,
    stop_reasons,
    worked,
)

# --- E48: nothing is dropped with success ---------------------------------------------------------


def three_in_the_background(policy: Policy, *later: Reply) -> Office:
    """The boss starts three, ten seconds each, and gives its answer after one second."""
    answer = Reply("my answer", delay=1)
    plan = steps(calls(*tasks("work", 3)), answer, *later)
    return office(plan, worked, policy=policy)


def test_E48_wait_is_complete_after_ten_seconds_with_three_results_handed_over(
    record_property: Measured,
) -> None:
    async def scenario() -> Witness:
        made, witness = three_in_the_background("wait", Reply("all in all")), Witness()
        result = await tw.run(made.boss, "go", **witness.options)
        assert VirtualClock.running().monotonic() == 10.0
        assert (result.complete, result.text) == (True, "all in all")
        told = handed_over(result.messages)
        assert [(one["id"], one["text"]) for one in told] == [
            ("work#1", "it worked."),
            ("work#2", "it worked."),
            ("work#3", "it worked."),
        ]
        assert stop_reasons(result.receipt) == ["complete"] * 3
        assert [row.was_read for row in result.receipt.background] == [True] * 3
        made.check(witness, result.receipt)
        return witness

    explore(scenario, record_property, "E48 wait")


def test_E48_cancel_is_not_complete_and_has_three_typed_cancellations_after_one_second(
    record_property: Measured,
) -> None:
    async def scenario() -> Witness:
        made, witness = three_in_the_background("cancel"), Witness()
        result = await tw.run(made.boss, "go", **witness.options)
        assert VirtualClock.running().monotonic() == 1.0
        assert (result.stop_reason, result.text) == ("background_dropped", "my answer")
        assert "work#1, work#2, work#3 cancelled" in result.stop_detail
        assert stop_reasons(result.receipt) == ["cancelled"] * 3
        assert {child.reason for child in result.receipt.subagents} == {
            f"{BOSS} gave its final answer"
        }
        assert {child.error_code for child in result.receipt.subagents} == {"cave_run_aborted"}
        # What they had written by then is charged, as an estimate.
        assert [r.ended for r in made.worker.requests] == ["cancelled"] * 3
        made.check(witness, result.receipt)
        return witness

    explore(scenario, record_property, "E48 cancel")


def test_E48_forbid_takes_no_answer_before_the_model_has_waited(
    record_property: Measured,
) -> None:
    async def scenario() -> Witness:
        wait = calls(("cave_wait", {}))
        made, witness = three_in_the_background("forbid", wait, Reply("now then")), Witness()
        result = await tw.run(made.boss, "go", **witness.options)
        assert VirtualClock.running().monotonic() == 10.0
        assert (result.complete, result.text) == (True, "now then")
        told = made.planner.requests[2].last_text
        assert told.startswith("Your answer is not accepted yet: work#1, work#2, work#3 still run")
        last = read(results_of(result.messages)[-1])
        assert [one["stop_reason"] for one in last] == ["complete"] * 3
        made.check(witness, result.receipt)
        return witness

    explore(scenario, record_property, "E48 forbid")


@both_backends
def test_E48_under_forbid_a_model_that_will_not_wait_is_stopped_by_its_own_call_limit(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        made, witness = three_in_the_background("forbid"), Witness()
        boss = attrs.evolve(made.boss, max_model_calls=5)
        result = await tw.run(boss, "go", **witness.options)
        assert VirtualClock.running().monotonic() == 4.0
        assert result.stop_reason == "call_budget_exhausted"
        assert len(made.planner.requests) == 5
        assert [(c.stop_reason, c.reason) for c in result.receipt.subagents] == [
            ("cancelled", f"{BOSS} stopped: call_budget_exhausted")
        ] * 3
        made.check(witness, result.receipt)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E48_without_a_call_left_to_read_them_results_are_waited_for_and_it_is_no_success(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        made, witness = three_in_the_background("wait"), Witness()
        boss = attrs.evolve(made.boss, max_model_calls=2)
        result = await tw.run(boss, "go", **witness.options)
        assert VirtualClock.running().monotonic() == 10.0
        assert (result.stop_reason, result.text) == ("call_budget_exhausted", "my answer")
        assert stop_reasons(result.receipt) == ["complete"] * 3
        made.check(witness, result.receipt)

    VirtualClock().run(scenario, backend=backend)


@both_backends
@pytest.mark.parametrize("policy", ["wait", "cancel", "forbid"])
def test_E48_a_result_that_nobody_read_is_no_success_either(
    policy: Policy, backend: Backend
) -> None:
    """The workers have ended before the boss answers, and it has not looked."""

    async def scenario() -> None:
        plan = steps(calls(*tasks("work", 2)), Reply("mine", delay=20), Reply("ours"))
        made, witness = office(plan, worked, policy=policy), Witness()
        result = await tw.run(made.boss, "go", **witness.options)
        assert VirtualClock.running().monotonic() == 20.0
        assert stop_reasons(result.receipt) == ["complete"] * 2
        if policy == "cancel":
            assert (result.stop_reason, result.text) == ("background_dropped", "mine")
            assert "none cancelled, work#1, work#2 finished" in result.stop_detail
        else:
            assert (result.complete, result.text) == (True, "ours")
            assert [one["id"] for one in handed_over(result.messages)] == ["work#1", "work#2"]
        was_read = policy != "cancel"
        assert [row.was_read for row in result.receipt.background] == [was_read] * 2
        made.check(witness, result.receipt)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E48_an_answer_after_everything_was_read_is_the_answer(backend: Backend) -> None:
    async def scenario() -> None:
        for policy in ("wait", "cancel", "forbid"):
            plan = steps(calls(*tasks("work", 2)), calls(("cave_wait", {})), Reply("done"))
            made, witness = office(plan, worked, policy=policy), Witness()
            result = await tw.run(made.boss, "go", **witness.options)
            assert (result.complete, result.text) == (True, "done")
            assert len(made.planner.requests) == 3
            made.check(witness, result.receipt)

    VirtualClock().run(scenario, backend=backend)


# --- E49: the end of a turn, and the end of the actor ---------------------------------------------


@both_backends
def test_E49_the_end_of_a_turn_cancels_nothing_in_the_background(backend: Backend) -> None:
    @tw.tool(effect="write", runs="host")
    async def file() -> str:
        """File something."""
        await anyio.sleep(1)
        return "filed"

    async def scenario() -> None:
        turns = [calls(*tasks("work", 2)), *[calls(("file", {}))] * 4, Reply("done"), Reply("so")]
        made, witness = office(steps(*turns), worked), Witness()
        boss = attrs.evolve(made.boss, tools=(*made.boss.tools, file))
        result = await tw.run(boss, "go", **witness.options)
        assert result.complete
        assert VirtualClock.running().monotonic() == 10.0
        assert stop_reasons(result.receipt) == ["complete"] * 2
        made.check(witness, result.receipt)

    VirtualClock().run(scenario, backend=backend)


def test_E49_closing_the_actor_cancels_and_the_stop_report_gives_each_exactly_one_outcome(
    record_property: Measured,
) -> None:
    """Closed at the very instant at which both workers finish: who was first is the seed's."""
    outcomes: set[tuple[str, ...]] = set()

    async def scenario() -> Witness:
        made, witness = (
            office(steps(calls(*tasks("work", 3)), Reply("", delay=60)), worked),
            Witness(),
        )
        receipt = await closed_after(10, made, witness)
        report = receipt.background
        assert sorted(row.path for row in report) == [f"{BOSS}/work#{n}" for n in (1, 2, 3)]
        by_path = {child.path: child for child in receipt.subagents}
        for row in report:
            child = by_path[row.path]
            assert (row.stop_reason, row.reason) == (child.stop_reason, child.reason)
            assert row.stop_reason in ("complete", "cancelled")
            if row.stop_reason == "cancelled":
                assert row.reason == "the office is closed"
        # The report is in the order of the ends: who had finished stands before who was cancelled.
        reasons = [row.stop_reason for row in report]
        assert reasons == sorted(reasons, key=["complete", "cancelled"].index)
        outcomes.add(tuple(sorted(reasons)))
        made.check(witness, receipt)
        return witness

    explore(scenario, record_property, "E49 close and finish at once")
    assert len(outcomes) > 1, outcomes


async def closed_after(seconds: float, made: Office, witness: Witness) -> Receipt:
    """Run it, cancel it after so long, and give the receipt."""
    async with tw.stream(made.boss, "go", **witness.tree_options) as run:
        async with anyio.create_task_group() as group:

            async def close() -> None:
                await anyio.sleep(seconds)
                run.cancel("the office is closed")

            group.start_soon(close)
            async for event in run:
                witness.hear(event)
    with pytest.raises(tw.RunCancelled, match="the office is closed") as caught:
        await run.result()
    return caught.value.receipt


@both_backends
def test_E49_a_deadline_closes_the_actor_and_everything_in_its_background(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        made, witness = (
            office(steps(calls(*tasks("work", 2)), Reply("", delay=60)), worked),
            Witness(),
        )
        limits = tw.Limits(deadline=4)
        result = await tw.run(made.boss, "go", limits=limits, **witness.options)
        assert VirtualClock.running().monotonic() == 4.0
        assert [r.stop_reason for r in result.receipt.walk()] == ["deadline"] * 3
        assert [row.stop_reason for row in result.receipt.background] == ["deadline"] * 2
        made.check(witness, result.receipt)

    VirtualClock().run(scenario, backend=backend)


# --- E47: what has ended stays ended --------------------------------------------------------------


@both_backends
def test_E47_an_ended_child_takes_no_message_and_makes_no_call_until_it_is_started_again(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        plan = steps(
            calls(*tasks("work", 1)),
            calls(("cave_wait", {})),
            calls(("cave_cancel", {"id": "work#1", "reason": "retired"})),
            Reply(chunks=("do", "ne"), delay=60, chunk_delay=10),
        )
        made, witness = office(plan, worked), Witness()
        async with tw.stream(made.boss, "go", **witness.tree_options) as run:
            async for event in run:
                witness.hear(event)
                if isinstance(event, TextWritten) and event.path == BOSS:
                    break
            # It ended at 10; this is a minute later.
            assert VirtualClock.running().monotonic() == 70.0
            with pytest.raises(ActorStopped, match="work#1 has ended"):
                run.send("go on!", path=f"{BOSS}/work#1")
            run.cancel("retired", path=f"{BOSS}/work#1")
            result = await run.result()
        assert result.complete
        assert len(made.worker.requests) == 1
        assert witness.state.counters.admitted == 1
        retired = results_of(result.messages)[-1]
        assert retired.startswith("cave_background_ended: work#1 has ended")
        assert [r.code for r in result.receipt.refusals] == ["cave_background_ended"]
        made.check(witness, result.receipt)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E47_a_child_that_still_runs_is_told_and_one_subtree_is_cancelled_alone(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        def work(request: ScriptedRequest) -> Reply:
            if "also" in request.last_text:
                return Reply("that, too")
            return Reply("this", delay=10)

        plan = steps(calls(*tasks("work", 2)), Reply("mine", delay=5), Reply("done"))
        made, witness = office(plan, work), Witness()
        async with tw.stream(made.boss, "go", **witness.tree_options) as run:
            async for event in run:
                witness.hear(event)
                if isinstance(event, TextWritten) and event.path == BOSS:
                    break
            run.send("and also that", path=f"{BOSS}/work#1")
            run.cancel("not needed", path=f"{BOSS}/work#2")
            result = await run.result()
        assert result.complete
        told = handed_over(result.messages)
        assert [(one["id"], one["text"], one["stop_reason"]) for one in told] == [
            ("work#1", "that, too", "complete"),
            ("work#2", "", "cancelled"),
        ]
        assert told[1]["error"] == "cave_run_aborted: not needed"
        made.check(witness, result.receipt)

    VirtualClock().run(scenario, backend=backend)


# --- E16: everything is counted, and once ---------------------------------------------------------


def test_E16_reading_twice_adds_nothing_and_resuming_adds_only_the_new_part(
    record_property: Measured,
) -> None:
    """Two children at $0.033; the first is read twice, the second is resumed for $0.010."""

    def work(request: ScriptedRequest) -> Reply:
        output = 33 if request.turn == 0 else 10
        text = "first" if request.turn == 0 else f"after {request.messages[1].text}"
        return Reply(chunks=tuple(text), usage=tw.Usage(output=output), delay=1, chunk_delay=0.1)

    plan = steps(
        calls(*tasks("work", 2)),
        calls(("cave_wait", {"ids": ["work#1"]}), ("cave_wait", {"ids": ["work#1"]})),
        calls(("cave_wait", {"ids": ["work#1", "work#2"]})),
        calls(("work", {"task": "a little more", "resume": "work#2"})),
        calls(("cave_wait", {})),
        calls(("cave_wait", {"ids": ["work#1"]})),
        Reply("done"),
    )

    async def scenario() -> Witness:
        witness = Witness(is_thorough=False)
        made = office(plan, work, price=price_for_worst_case("1.00"))
        result = await tw.run(made.boss, "go", **witness.options)
        assert result.complete
        (_, _, once, again, both, _, resumed, last) = results_of(result.messages)
        assert once == again == last
        assert json.loads(both)["results"][0] == json.loads(once)["results"][0]
        (told,) = read(resumed)
        assert (told["id"], told["text"]) == ("work#6", "after first")
        assert len(result.receipt.subagents) == 3
        assert {child.path: child.cost_usd for child in result.receipt.subagents} == {
            f"{BOSS}/work#1": Decimal("0.033"),
            f"{BOSS}/work#2": Decimal("0.033"),
            f"{BOSS}/work#6": Decimal("0.010"),
        }
        assert result.cost_usd == Decimal("0.076")
        made.check(witness, result.receipt)
        return witness

    explore(scenario, record_property, "E16")


# --- E15: a limit in a definition holds in the background, too ------------------------------------


def in_the_foreground(boss: tw.Agent) -> tw.Agent:
    """The same boss, who waits for whomever it starts."""
    foreground = (attrs.evolve(t, background=False) for t in boss.tools if isinstance(t, Subagent))
    return attrs.evolve(boss, tools=tuple(foreground))


async def ten_calls(*, in_background: bool) -> Witness:
    """Two workers that always ask for another tool, with a definition that says ten calls."""

    @tw.tool(effect="read", runs="host")
    async def look() -> str:
        """Look."""
        return "more"

    def work(request: ScriptedRequest) -> Reply:
        usage = tw.Usage(output=10)
        return Reply(chunks=("and ", "on"), tool_calls=[("look", {})], usage=usage, chunk_delay=1)

    plan = steps(calls(*tasks("work", 2)), Reply("one moment"), Reply("done"))
    witness = Witness(is_thorough=False)
    made = office(plan, work, tools=[look], max_model_calls=10)
    boss = made.boss if in_background else in_the_foreground(made.boss)
    result = await tw.run(boss, "go", **witness.options)
    assert result.complete
    assert [(c.own.calls, c.stop_reason) for c in result.receipt.subagents] == [
        (10, "call_budget_exhausted")
    ] * 2
    assert len(made.worker.requests) == 20
    if in_background:
        told = handed_over(result.messages)
    else:
        told = [json.loads(text) for text in results_of(result.messages)]
    assert [one["stop_reason"] for one in told] == ["call_budget_exhausted"] * 2
    assert "all of its 10 model calls" in told[0]["stop_detail"]
    made.check(witness, result.receipt)
    return witness


def test_E15_ten_model_calls_in_a_definition_are_ten_in_the_background(
    record_property: Measured,
) -> None:
    async def scenario() -> Witness:
        return await ten_calls(in_background=True)

    explore(scenario, record_property, "E15 in the background")


@both_backends
def test_E15_ten_model_calls_in_a_definition_are_ten_in_the_foreground(backend: Backend) -> None:
    async def scenario() -> None:
        await ten_calls(in_background=False)

    VirtualClock().run(scenario, backend=backend)
