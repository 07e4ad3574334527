"""Public reports about supervisors, stops and restarts, told through an open tree."""

from __future__ import annotations

import gc
from decimal import Decimal

import anyio
import pytest

import treewarden as tw
from treewarden.ledgers import amount_of
from treewarden.testing import Reply, ScriptedModel, VirtualClock

from .kit import Backend, Witness, both_backends, check_books, model_of_worst_case, uses_all

BUDGET = tw.Budget(max_usd="1.00", clamp=False)
THREE_IN_TEN_SECONDS = tw.Intensity(restarts=3, period_seconds=10)


def worker_of(model: ScriptedModel) -> tw.Agent:
    return tw.agent(id="worker", instructions="Work.", model=model)


@both_backends
def test_E39_three_restarts_within_ten_seconds_and_the_fourth_failure_escalates(
    backend: Backend,
) -> None:
    model, witness = model_of_worst_case("0.10", uses_all), Witness()
    results: list[tw.Result] = []

    async def crash(_: tw.Actor) -> None:
        results.append(await tw.run(worker_of(model), "go"))
        raise OSError("no such device")

    async def main() -> None:
        supervisor = tw.Supervisor(
            [tw.ChildSpec(name="crasher", start=crash)], intensity=THREE_IN_TEN_SECONDS
        )
        tree = tw.open_tree(budget=BUDGET, **witness.tree_options)
        with pytest.raises(tw.ServiceFailed, match="no such device") as failed:
            async with tree:
                service = tree.supervise(supervisor, name="services")
                with pytest.raises(tw.ServiceFailed, match=service.path):
                    await service.wait()
                # Four runs of a second each: a restart takes no time and gives no money back.
                assert VirtualClock.running().monotonic() == 4.0
                assert tree.ledger.counters.restarts == 3
                assert amount_of("usd", witness.state.wallets[0].settled) == Decimal("0.40")
        assert isinstance(failed.value.__cause__, OSError)
        assert failed.value.service == "root/services#1"

    VirtualClock().run(main, backend=backend)
    assert [result.receipt.path for result in results] == [
        f"root/services#1/crasher#1/worker#{number}" for number in (1, 2, 3, 4)
    ]
    check_books(witness, [result.receipt for result in results], model)


@both_backends
def test_E39_one_crash_in_eleven_seconds_is_borne_until_the_money_is_gone(
    backend: Backend,
) -> None:
    model, witness = model_of_worst_case("0.10", uses_all), Witness(is_thorough=False)
    results: list[tw.Result] = []

    async def crash(_: tw.Actor) -> None:
        result = await tw.run(worker_of(model), "go")
        results.append(result)
        if result.stop_reason == "budget_exhausted":
            return
        await anyio.sleep(10)
        raise OSError("again")

    async def main() -> None:
        child = tw.ChildSpec(name="crasher", start=crash, restart="transient")
        supervisor = tw.Supervisor([child], intensity=THREE_IN_TEN_SECONDS)
        async with tw.open_tree(budget=BUDGET, **witness.tree_options) as tree:
            await tree.supervise(supervisor, name="services").wait()
            assert tree.ledger.counters.restarts == 10
            assert VirtualClock.running().monotonic() == 110.0

    VirtualClock().run(main, backend=backend)
    assert [result.stop_reason for result in results] == [*["complete"] * 10, "budget_exhausted"]
    assert sum(result.cost_usd for result in results) == Decimal("1.00")
    check_books(witness, [result.receipt for result in results], model)


@both_backends
def test_E40_an_asker_is_told_that_the_answerer_was_stopped_and_a_new_start_sees_no_old_reply(
    backend: Backend,
) -> None:
    told: list[tuple[float, object]] = []

    async def answer(actor: tw.Actor) -> None:
        while True:
            letter = await actor.receive()
            await anyio.sleep(5)
            letter.reply(f"reply to {letter.message}")

    async def main() -> None:
        now = VirtualClock.running().monotonic
        supervisor = tw.Supervisor([tw.ChildSpec(name="b", start=answer)])
        async with tw.open_tree(clock=VirtualClock.running()) as tree:
            first = tree.supervise(supervisor, name="services")
            await first.wait_started()

            async def ask(question: str) -> None:
                with pytest.raises(tw.ActorStopped, match=r"root/services#1/b#1"):
                    told.append((now(), await first.ask("b", question)))
                told.append((now(), "stopped"))

            async with anyio.create_task_group() as group:
                group.start_soon(ask, "read by b")
                group.start_soon(ask, "never read")
                await anyio.sleep(1)
                first.stop("an update")
                await first.wait()
                assert now() == 1.0
            with pytest.raises(tw.ActorStopped):
                first.send("b", "too late")

            second = tree.supervise(supervisor, name="services")
            await second.wait_started()
            assert await second.ask("b", "a new question") == "reply to a new question"
            assert now() == 6.0

    VirtualClock().run(main, backend=backend)
    gc.collect()  # an exception in a lost task would be told here, and warnings are errors
    assert told == [(1.0, "stopped"), (1.0, "stopped")]


@both_backends
def test_E40_a_run_that_waits_for_its_subagent_is_stopped_within_the_grace_time(
    backend: Backend,
) -> None:
    """The same between agents: A delegates to B, whose reply takes 5 s, and A is a service's."""
    raise_for: list[BaseException] = []
    model = ScriptedModel(
        lambda request: (
            Reply(tool_calls=[("b", {"task": "think"})])
            if request.agent_path.endswith("/a#1") and request.turn == 0
            else Reply(f"reply {len(model.requests)}", delay=5)
        )
    )
    b = tw.subagent(
        name="b",
        description="Thinks.",
        agent=tw.agent(id="b", instructions="Think.", model=model),
    )
    a = tw.agent(id="a", instructions="Ask b.", model=model, tools=[b])
    results: list[tw.Result] = []

    async def ask(_: tw.Actor) -> None:
        try:
            results.append(await tw.run(a, "go"))
        except BaseException as error:
            raise_for.append(error)
            raise

    async def main() -> None:
        supervisor = tw.Supervisor([tw.ChildSpec(name="asker", start=ask, restart="temporary")])
        async with tw.open_tree(clock=VirtualClock.running()) as tree:
            first = tree.supervise(supervisor, name="services")
            await anyio.sleep(1)
            first.stop("an update")
            await first.wait()
            assert VirtualClock.running().monotonic() == 1.0
            assert tree.ledger.counters.calls_in_flight == 0
            await tree.supervise(supervisor, name="services").wait()

    VirtualClock().run(main, backend=backend)
    assert len(raise_for) == 1
    (result,) = results
    # Of the first start there is nothing: not in what was asked, not in what was answered.
    assert [message.role for message in result.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert model.open_requests == 0
    gc.collect()
