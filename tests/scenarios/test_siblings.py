"""Public reports about one failed call among several: work lost, orphaned, or not paid for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import anyio
import attrs
import pytest

import treewarden as tw
from treewarden.protocols import Message, Receipt, ToolResult
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from .kit import (
    FREE,
    Backend,
    Measured,
    Witness,
    both_backends,
    check_books,
    explore,
    price_for_worst_case,
    tasks,
)

Policy = Literal["collect", "cancel_siblings"]
PLAN = "root/boss#1"


def asks_once(*tool_calls: tuple[str, dict[str, Any]]) -> Callable[[ScriptedRequest], Reply]:
    """A plan of one reply with these calls, and an answer."""
    return lambda r: Reply(tool_calls=tool_calls) if r.turn == 0 else Reply("done")


def results_of(result: tw.Result) -> list[ToolResult]:
    messages: tuple[Message, ...] = result.messages
    return [p for m in messages for p in m.parts if isinstance(p, ToolResult)]


# --- E41: three children, one of which fails after a second ---------------------------------------


class Broken(Exception):
    """What the worker's tool raises."""


@attrs.define
class Three:
    boss: tw.Agent
    planner: ScriptedModel
    worker: ScriptedModel


def three_children(policy: Policy) -> Three:
    """The second child's model breaks at 1 s; the others write a piece each 0.25 s until 3 s."""

    def work(request: ScriptedRequest) -> Reply:
        if request.agent_path.endswith("#2"):
            return Reply(error="the model is broken", delay=1)
        usage = [tw.Usage(output=10 * n) for n in range(1, 13)]
        return Reply(chunks=("hm",) * 12, usage=usage, delay=0.25, chunk_delay=0.25)

    planner = ScriptedModel(asks_once(*tasks("work", 3)), price=FREE, id="scripted/planner")
    worker = ScriptedModel(work, price=price_for_worst_case("1.00"), max_output=1_000)
    agent = tw.agent(id="worker", instructions="Work.", model=worker)
    tool = tw.subagent(name="work", description="Works.", agent=agent)
    boss = tw.agent(
        id="boss", instructions="Plan.", model=planner, tools=[tool], on_sibling_failure=policy
    )
    return Three(boss, planner, worker)


def by_number(receipt: Receipt) -> list[Receipt]:
    return sorted(receipt.subagents, key=lambda child: child.path)


def test_E41_collect_gives_two_results_and_one_typed_failure(record_property: Measured) -> None:
    async def scenario() -> Witness:
        made, witness = three_children("collect"), Witness(is_thorough=False)
        result = await tw.run(made.boss, "go", **witness.options)
        assert VirtualClock.running().monotonic() == 3.0
        assert result.complete
        assert [one.is_error for one in results_of(result)] == [False, True, False]
        assert "the model is broken" in results_of(result)[1].content
        children = by_number(result.receipt)
        assert [c.stop_reason for c in children] == ["complete", "failed", "complete"]
        check_books(witness, result.receipt, made.planner, made.worker)
        return witness

    explore(scenario, record_property, "E41 collect")


def test_E41_cancel_siblings_gives_three_typed_outcomes_after_one_second_all_paid_for(
    record_property: Measured,
) -> None:
    async def scenario() -> Witness:
        made, witness = three_children("cancel_siblings"), Witness(is_thorough=False)
        result = await tw.run(made.boss, "go", **witness.options)
        assert VirtualClock.running().monotonic() == 1.0
        assert result.complete
        told = results_of(result)
        assert [one.call_id for one in told] == ["call-1-1", "call-1-2", "call-1-3"]
        assert [one.is_error for one in told] == [True] * 3
        why = "work (call-1-2) of the same reply failed"
        assert [told[0].content, told[2].content] == [f"cave_run_aborted: {why}"] * 2
        first, second, third = by_number(result.receipt)
        assert (second.stop_reason, second.error_code) == ("failed", "cave_provider_terminal_error")
        for child in (first, third):
            assert (child.stop_reason, child.reason) == ("cancelled", why)
            (line,) = child.lines
            # Three or four pieces were there by then; each reported ten tokens more.
            assert line.usd > 0
            assert line.output_tokens in (30, 40)
        check_books(witness, result.receipt, made.planner, made.worker)
        return witness

    explore(scenario, record_property, "E41 cancel_siblings")


@both_backends
def test_E41_a_child_that_needs_26_steps_takes_them_below_a_parent_that_may_take_300(
    backend: Backend,
) -> None:
    @tw.tool(effect="read", runs="host")
    async def look() -> str:
        """Look."""
        return "more"

    def work(request: ScriptedRequest) -> Reply:
        return Reply(tool_calls=[("look", {})]) if request.turn < 25 else Reply("found")

    async def scenario() -> None:
        planner, worker = ScriptedModel(asks_once(*tasks("work", 1))), ScriptedModel(work)
        agent = tw.agent(id="worker", instructions="Work.", model=worker, tools=[look])
        tool = tw.subagent(name="work", description="Works.", agent=agent)
        boss = tw.agent(
            id="boss", instructions="Plan.", model=planner, tools=[tool], max_model_calls=300
        )
        witness = Witness()
        result = await tw.run(boss, "go", **witness.options)
        assert result.complete
        (child,) = result.receipt.subagents
        assert (child.stop_reason, child.own.calls) == ("complete", 26)
        check_books(witness, result.receipt, planner, worker)

    VirtualClock().run(scenario, backend=backend)


# --- E42 and E43: a good result, a failure, and a slow sibling ------------------------------------


@attrs.define
class Bench:
    """Three tools, and a record of when each began and ended."""

    boss: tw.Agent
    model: ScriptedModel
    log: list[tuple[float, str]]


def bench(policy: Policy, error: Exception, *, effect: Literal["read", "write"] = "read") -> Bench:
    log: list[tuple[float, str]] = []

    def note(what: str) -> None:
        log.append((round(anyio.current_time(), 3), what))

    @tw.tool(effect=effect, runs="host")
    async def pay() -> str:
        """Pay; it cannot be undone."""
        await anyio.sleep(0.1)
        note("paid")
        return "paid"

    @tw.tool(effect=effect, runs="host")
    async def fail() -> str:
        """Fail."""
        await anyio.sleep(0.1)
        await anyio.sleep(0.1)
        note("failed")
        raise error

    @tw.tool(effect=effect, runs="host")
    async def crawl() -> str:
        """Be slow, and slow to clean up."""
        try:
            for _ in range(50):
                await anyio.sleep(0.1)
            return "crawled"
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.2)
            note("crawl is over")

    def script(request: ScriptedRequest) -> Reply:
        if request.turn == 0:
            return Reply(tool_calls=[("pay", {}), ("fail", {}), ("crawl", {})])
        note("the model is asked again")
        return Reply("done")

    model = ScriptedModel(script)
    boss = tw.agent(
        id="boss",
        instructions="Do.",
        model=model,
        tools=[pay, fail, crawl],
        on_sibling_failure=policy,
    )
    return Bench(boss, model, log)


ERRORS = [
    pytest.param(tw.ToolFailed("bench_broken", "it is broken"), id="E42"),
    pytest.param(ValueError("it is broken"), id="E43"),
]


@pytest.mark.parametrize("error", ERRORS)
@both_backends
def test_E42_E43_the_paid_result_stays_and_the_slow_sibling_is_cancelled_and_awaited(
    error: Exception, backend: Backend
) -> None:
    for seed in range(200):
        made, witness = bench("cancel_siblings", error), Witness(is_thorough=False)

        async def scenario(made: Bench = made, witness: Witness = witness) -> None:
            result = await tw.run(made.boss, "go", **witness.options)
            check_stopped_at_the_failure(made, result)
            assert [t.name for t in anyio.get_running_tasks() if "root/" in (t.name or "")] == []
            check_books(witness, result.receipt, made.model)

        VirtualClock().run(scenario, backend=backend, seed=seed)


def check_stopped_at_the_failure(made: Bench, result: tw.Result) -> None:
    assert result.complete
    paid, failed, slow = results_of(result)
    assert [r.call_id for r in (paid, failed, slow)] == ["call-1-1", "call-1-2", "call-1-3"]
    assert (paid.content, paid.is_error) == ("paid", False)
    assert "it is broken" in failed.content
    assert slow.content == "cave_run_aborted: fail (call-1-2) of the same reply failed"
    # Its clean-up took 0.2 s, and nobody went on before it was over.
    assert made.log == [
        (0.1, "paid"),
        (0.2, "failed"),
        (0.4, "crawl is over"),
        (0.4, "the model is asked again"),
    ]
    assert [(row.name, row.errors) for row in result.receipt.tools] == [
        ("pay", 0),
        ("fail", 1),
        ("crawl", 1),
    ]


@both_backends
def test_E42_collect_lets_the_slow_sibling_finish(backend: Backend) -> None:
    made, witness = bench("collect", ValueError("it is broken")), Witness()

    async def scenario() -> None:
        result = await tw.run(made.boss, "go", **witness.options)
        assert [one.content for one in results_of(result)] == [
            "paid",
            "ValueError: it is broken",
            "crawled",
        ]
        assert made.log[-1] == (5.2, "the model is asked again")
        check_books(witness, result.receipt, made.model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_in_order_calls_after_the_failed_one_are_not_run_and_say_so(backend: Backend) -> None:
    made = bench("cancel_siblings", ValueError("it is broken"), effect="write")
    witness = Witness()

    async def scenario() -> None:
        result = await tw.run(made.boss, "go", **witness.options)
        assert [one.content for one in results_of(result)] == [
            "paid",
            "ValueError: it is broken",
            "cave_tool_call_skipped: not run, because fail (call-1-2) of the same reply failed "
            "before it",
        ]
        assert [what for _, what in made.log] == ["paid", "failed", "the model is asked again"]
        assert [refusal.code for refusal in result.receipt.refusals] == ["cave_tool_call_skipped"]
        check_books(witness, result.receipt, made.model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
@pytest.mark.parametrize(
    "refused", [("nonesuch", {}), ("pay", {"too": "much"}), ("work", {"job": "x"}), ("work", {})]
)
def test_a_refused_call_is_no_failure_and_its_siblings_go_on(
    refused: tuple[str, dict[str, Any]], backend: Backend
) -> None:
    made = bench("cancel_siblings", ValueError("never"))

    async def scenario() -> None:
        model = ScriptedModel(asks_once(("crawl", {}), refused, ("pay", {})))
        helper = tw.agent(id="helper", instructions="Help.", model=model)
        work = tw.subagent(name="work", description="Works.", agent=helper)
        boss = attrs.evolve(made.boss, model=model, tools=(*made.boss.tools, work))
        witness = Witness()
        result = await tw.run(boss, "go", **witness.options)
        crawled, no, paid = results_of(result)
        assert (crawled.content, paid.content) == ("crawled", "paid")
        assert no.is_error
        assert no.content.startswith("cave_")
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_subagent_that_the_ledger_refuses_is_no_failure_either(backend: Backend) -> None:
    async def scenario() -> None:
        worker = ScriptedModel(lambda _: Reply("worked", delay=1))
        agent = tw.agent(id="worker", instructions="Work.", model=worker)
        work = tw.subagent(name="work", description="Works.", agent=agent)
        planner = ScriptedModel(asks_once(*tasks("work", 3)))
        boss = tw.agent(
            id="boss",
            instructions="Plan.",
            model=planner,
            tools=[work],
            on_sibling_failure="cancel_siblings",
        )
        witness = Witness()
        limits = tw.Limits(max_concurrent_subagents=2)
        result = await tw.run(boss, "go", limits=limits, **witness.options)
        assert [one.is_error for one in results_of(result)] == [False, False, True]
        check_books(witness, result.receipt, planner, worker)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_blocking_sibling_that_does_not_stop_is_abandoned_and_holds_nobody_up(
    backend: Backend,
) -> None:
    made, is_over = bench("cancel_siblings", ValueError("it is broken")), threading.Event()

    @tw.tool(effect="read", runs="host", timeout_seconds=None)
    def block() -> str:
        """Block."""
        is_over.wait()
        return "too late"

    async def scenario() -> None:
        model = ScriptedModel(asks_once(("block", {}), ("fail", {})))
        boss = attrs.evolve(made.boss, model=model, tools=(*made.boss.tools, block))
        witness = Witness()
        try:
            result = await tw.run(boss, "go", **witness.options)
        finally:
            is_over.set()
        blocked, _ = results_of(result)
        assert blocked.content == "cave_run_aborted: fail (call-1-2) of the same reply failed"
        (fault,) = result.receipt.faults
        assert "its thread did not stop and was abandoned" in fault
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_call_that_runs_out_of_its_time_has_failed(backend: Backend) -> None:
    made = bench("cancel_siblings", ValueError("never"))

    @tw.tool(effect="read", runs="host", timeout_seconds=1)
    async def stall() -> str:
        """Stall."""
        await anyio.sleep_forever()
        return ""

    async def scenario() -> None:
        model = ScriptedModel(asks_once(("crawl", {}), ("stall", {})))
        boss = attrs.evolve(made.boss, model=model, tools=(*made.boss.tools, stall))
        witness = Witness()
        result = await tw.run(boss, "go", **witness.options)
        crawled, stalled = results_of(result)
        assert crawled.content == "cave_run_aborted: stall (call-1-2) of the same reply failed"
        assert stalled.content == "cave_tool_timeout: its deadline has passed"
        assert made.log == [(1.2, "crawl is over")]
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)
