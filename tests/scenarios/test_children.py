"""Public reports about children: what they may spend, how they end, what is counted as theirs."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import anyio
import pytest

import treewarden as tw
from treewarden.ledgers import Admitted, Ended
from treewarden.protocols import Message, RunEnded, RunEvent, TextWritten, ToolEnded, user
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from .kit import (
    Backend,
    Measured,
    P,
    Witness,
    both_backends,
    check_books,
    check_closed,
    explore,
    model_of_worst_case,
)

# --- E13: a child gets what is left, and being stuck is no success -------------------------------


@tw.tool(effect="read", runs="host")
async def look() -> str:
    """Look."""
    await anyio.sleep(1)
    return "seen"


def spender(request: ScriptedRequest) -> Reply:
    """Three calls of a dollar, a fourth that asks the child, and a last word."""
    calls: list[tuple[str, dict[str, Any]]] = []
    if request.turn < 3:
        calls = [("look", {})]
    elif request.turn == 3:
        calls = [("work", {"task": "all of it"})]
    return Reply("done", tool_calls=calls, usage=tw.Usage(output=request.output_limit))


def family(child: ScriptedModel, **options: Any) -> tuple[tw.Agent, ScriptedModel]:
    """A parent that has spent $4 when it asks a child, which declares a cap of $5."""
    worker = tw.agent(id="worker", instructions="Work.", model=child, tools=[look])
    work = tw.subagent(
        name="work",
        description="Works.",
        agent=worker,
        max_usd="5.00",
        min_usd="0.10",
        **options,
    )
    model = model_of_worst_case("1.00", spender)
    return tw.agent(id="parent", instructions="Plan.", model=model, tools=[look, work]), model


@both_backends
def test_E13_a_child_of_a_parent_that_has_one_dollar_left_gets_one_dollar(
    backend: Backend,
) -> None:
    def greedy(request: ScriptedRequest) -> Reply:
        """It would spend $3.00, half a dollar at a time."""
        calls: list[tuple[str, dict[str, Any]]] = [("look", {})] if request.turn < 5 else []
        usage = tw.Usage(output=request.output_limit)
        return Reply(f"part {request.turn + 1}", tool_calls=calls, usage=usage)

    async def scenario() -> None:
        child = model_of_worst_case("0.50", greedy)
        parent, model = family(child)
        witness = Witness()
        budget = tw.Budget(max_usd="5.00")
        result = await tw.run(parent, "go", budget=budget, **witness.options)
        (of_child,) = result.receipt.subagents
        assert of_child.max == Decimal("1.00")
        assert of_child.spent == Decimal("1.00")
        assert of_child.stop_reason == "budget_exhausted"
        told = answer_of_the_child(result.messages)
        assert told["stop_reason"] == "budget_exhausted"
        assert told["text"] == "part 2"
        # Nothing is left for a last word of the parent, which says so, too.
        assert result.stop_reason == "budget_exhausted"
        assert result.cost_usd == Decimal("5.00")
        check_books(witness, result.receipt, model, child)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E13_a_child_that_is_stuck_is_no_success_and_its_partial_text_is_seen(
    backend: Backend,
) -> None:
    def stuck(request: ScriptedRequest) -> Reply:
        if request.turn == 0:
            usage = tw.Usage(output=request.output_limit)
            return Reply("half of it", tool_calls=[("look", {})], usage=usage)
        return Reply(chunks=("and ", "so "), stall_after=1)

    async def scenario() -> None:
        child = model_of_worst_case("0.50", stuck)
        parent, model = family(child, timeout_seconds=30)
        witness = Witness()
        budget = tw.Budget(max_usd="5.00")
        result = await tw.run(parent, "go", budget=budget, **witness.options)
        (of_child,) = result.receipt.subagents
        assert of_child.max == Decimal("1.00")
        assert of_child.stop_reason == "deadline"
        told = json.loads(model.requests[-1].last_text)
        assert told["stop_reason"] == "deadline"
        assert told["text"] == "and "
        assert "stop_detail" in told
        assert result.complete
        check_books(witness, result.receipt, model, child)

    VirtualClock().run(scenario, backend=backend)


def answer_of_the_child(messages: tuple[Message, ...]) -> dict[str, Any]:
    (result,) = messages[-1].parts
    answer: dict[str, Any] = json.loads(getattr(result, "content", ""))
    return answer


# --- E14: the budget trips inside a child --------------------------------------------------------


def below(request: ScriptedRequest) -> Reply:
    """Every call costs $0.045; the boss asks a child, and the child looks before it answers."""
    name = "ask" if request.agent_path.count("/") == 1 else "look"
    arguments = {"task": "it"} if name == "ask" else {}
    calls: list[tuple[str, dict[str, Any]]] = [(name, arguments)] if request.turn == 0 else []
    usage = tw.Usage(output=request.output_limit)
    return Reply("partly", tool_calls=calls, usage=usage, delay=1)


def test_E14_a_budget_that_trips_in_a_child_ends_the_root_at_once(
    record_property: Measured,
) -> None:
    async def scenario() -> Witness:
        model = model_of_worst_case("0.045", below)
        worker = tw.agent(id="worker", instructions="Work.", model=model, tools=[look])
        ask = tw.subagent(name="ask", description="Ask.", agent=worker)
        boss = tw.agent(id="boss", instructions="Plan.", model=model, tools=[ask])
        witness = Witness()
        budget = tw.Budget(max_usd="0.10")
        events: list[RunEvent] = []
        results: list[tw.Result] = []
        async with tw.open_tree(budget=budget, **witness.tree_options) as tree:
            # Others in the tree, who cost nothing, so that there is something to be late for.
            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(rest_beside, tree)
                async with tree.stream(boss, "go") as run:
                    async for event in run:
                        events.append(event)
                        witness.hear(event)
                results.append(await run.result())
        (result,) = results
        # Root and child made a call each; the child's second one, at 3 s, is one too many.
        tripped = 1.0 + 1.0 + 1.0
        assert 0 <= end_of_the_boss(witness) - tripped < 1.0
        assert result.stop_reason == "budget_exhausted"
        assert not result.complete
        (of_child,) = result.receipt.subagents
        assert of_child.stop_reason == "budget_exhausted"
        # The call that awaited the child has its result, and the stream its last event.
        assert answer_of_the_child(result.messages)["stop_reason"] == "budget_exhausted"
        assert sum(isinstance(event, ToolEnded) for event in events) == 2
        assert isinstance(events[-1], RunEnded)
        assert result.cost_usd == Decimal("0.09")
        check_closed(witness)
        result.receipt.check()
        assert model.billed == Decimal("0.09")
        return witness

    explore(scenario, record_property, "E14")


def end_of_the_boss(witness: Witness) -> float:
    """When the root agent's lease ended."""
    (boss,) = [e.node for e in witness.journal if isinstance(e, Admitted) and e.name == "boss"]
    (at,) = [e.at for e in witness.journal if isinstance(e, Ended) and e.node == boss]
    return at


async def rest_beside(tree: tw.Tree) -> None:
    free = tw.Price(input="0", output="0", cache_read="0", cache_write="0")
    model = ScriptedModel(lambda _: Reply("rested", delay=1), price=free)
    await tree.run(tw.agent(id="idler", instructions="Rest.", model=model), "rest")


# --- E18: a child with imported history counts its own tokens ------------------------------------

OF_PARENT = 5_800_940_557
OF_CHILD = 2_161_386


@pytest.mark.parametrize("forks", [1, 3])
def test_E18_a_forked_child_counts_its_own_tokens_and_no_inherited_ones(
    forks: int, record_property: Measured
) -> None:
    def script(request: ScriptedRequest) -> Reply:
        if request.agent_path.count("/") == 1 and request.agent_path.startswith("root/parent"):
            calls: list[tuple[str, dict[str, Any]]] = []
            if request.turn < 2:
                calls = [("fork", {})] * forks if request.turn else [("look", {})]
            first = tw.Usage(input=OF_PARENT - 557, output=557)
            usage = tw.Usage() if request.turn else first
            return Reply("what I know", tool_calls=calls, usage=usage)
        # The child says what it used; that it sees all of the parent's history is no use of its.
        assert len(request.messages) > 3
        usage = tw.Usage(input=OF_CHILD - 386, output=386)
        return Reply(chunks=("a", "b", "c"), chunk_delay=0.5, usage=usage)

    async def scenario() -> Witness:
        model = ScriptedModel(script, context_window=None)
        child = tw.agent(id="child", instructions="Go on.", model=model)

        @tw.tool(effect="read", runs="host")
        async def fork() -> str:
            """Go on from here in a child."""
            history = model.requests[1].messages
            return (await tw.run(child, [*history, user("go on")])).text

        parent = tw.agent(id="parent", instructions="Plan.", model=model, tools=[look, fork])
        witness = Witness()
        async with tw.open_tree(**witness.tree_options) as tree:
            result = await tree.run(parent, "go", on_event=witness.hear)
            assert tree.snapshot()["nodes"]["root"]["tokens"] == OF_PARENT + forks * OF_CHILD
        of_children = result.receipt.subagents
        assert [r.total.tokens for r in of_children] == [OF_CHILD] * forks
        assert result.receipt.total.tokens == OF_PARENT + forks * OF_CHILD
        # And the tree grew by nothing else at any step.
        settled = [e._asdict()["tokens"] for e in witness.journal if type(e).__name__ == "Settled"]
        assert sorted(settled) == [0, 0, *[OF_CHILD] * forks, OF_PARENT]
        check_books(witness, result.receipt, model)
        return witness

    explore(scenario, record_property, f"E18 with {forks} forks", enough=1 if forks == 1 else 100)


@both_backends
def test_E18_a_saved_history_in_a_conversation_is_not_counted_again(backend: Backend) -> None:
    def script(request: ScriptedRequest) -> Reply:
        is_child = len(request.messages) > 1
        tokens = OF_CHILD if is_child else OF_PARENT
        return Reply("so", usage=tw.Usage(input=tokens - 100, output=100))

    async def scenario() -> None:
        model = ScriptedModel(script, context_window=None)
        agent = tw.agent(id="one", instructions="Go.", model=model)
        witness = Witness()
        async with tw.open_tree(**witness.tree_options) as tree:
            first = await tree.run(agent, "go")
            talk = tw.Conversation(first.messages)
            second = await tree.run(agent, "go on", conversation=talk)
        assert first.receipt.total.tokens == OF_PARENT
        assert second.receipt.total.tokens == OF_CHILD
        check_books(witness, [first.receipt, second.receipt], model)

    VirtualClock().run(scenario, backend=backend)


# --- E21: a cancelled run's tokens count ---------------------------------------------------------


def four_and_one(_: ScriptedRequest) -> Reply:
    """A token is four bytes: 4 and then 1 come, and the usage never does."""
    return Reply(chunks=("a" * 16, "b" * 4, "never"), chunk_delay=1, stall_after=2)


async def input_ceiling() -> int:
    """What the same request holds for its input."""
    witness = Witness()
    model = ScriptedModel([Reply("x")], max_output=5)
    agent = tw.agent(id="one", instructions="Write.", model=model)
    budget = tw.Budget(max_tokens=1_000_000)
    await tw.run(agent, "go", budget=budget, **witness.options)
    (held,) = witness.holds()
    return int(held) - 5


@both_backends
def test_E21_the_tokens_of_a_cancelled_stream_count_and_the_next_run_is_refused(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        limit = await input_ceiling() + 5
        model = ScriptedModel(four_and_one)
        agent = tw.agent(id="one", instructions="Write.", model=model)
        witness = Witness()
        budget = tw.Budget(max_tokens=limit, output_floor_tokens=1)
        async with tw.open_tree(budget=budget, **witness.tree_options) as tree:
            async with tree.stream(agent, "go") as run:
                written = ""
                async for event in run:
                    witness.hear(event)
                    if isinstance(event, TextWritten):
                        written += event.text
                        if written == "a" * 16 + "b" * 4:
                            run.cancel("enough")
            with pytest.raises(tw.RunCancelled) as cancelled:
                await run.result()
            receipt = cancelled.value.receipt
            (line,) = receipt.lines
            assert model.requests[0].output_limit == 5
            assert line.basis == "estimated"
            assert line.output_tokens == 5
            assert line.tokens == limit
            assert tree.snapshot()["wallets"]["root"]["free"] == 0
            second = await tree.run(agent, "go")
            assert second.stop_reason == "budget_exhausted"
            assert len(model.requests) == 1
        check_books(witness, [receipt, second.receipt], model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E21_in_money_the_prompt_counts_in_full_and_output_by_what_came(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        ceiling = await input_ceiling()
        model = ScriptedModel(four_and_one, price=P, caches=False)
        agent = tw.agent(id="one", instructions="Write.", model=model)
        witness = Witness()
        budget = tw.Budget(max_usd="1.00")
        async with tw.open_tree(budget=budget, **witness.tree_options) as tree:
            async with tree.stream(agent, "go") as run:
                await anyio.sleep(2)
                wallet = tree.snapshot()["wallets"]["root"]
                assert wallet["held"] > Decimal("0.1")
                run.cancel("enough")
            wallet = tree.snapshot()["wallets"]["root"]
            assert wallet["held"] == 0
        with pytest.raises(tw.RunCancelled) as cancelled:
            await run.result()
        (line,) = cancelled.value.receipt.lines
        assert (line.input_tokens, line.output_tokens) == (ceiling, 5)
        assert line.usd == (3 * ceiling + 15 * 5) * Decimal("0.000001")
        assert wallet["free"] == 1 - line.usd
        check_books(witness, cancelled.value.receipt, model)

    VirtualClock().run(scenario, backend=backend)
