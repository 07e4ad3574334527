"""Public reports about budgets and limits that parallel work ran past, told to whole trees."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any, Literal

import anyio
import pytest

import treewarden as tw
from treewarden.actors import Brief, ModelSession
from treewarden.protocols import CallEnded, RunEvent
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from ..wire._streams import DONE, USAGE, chunk, sse, usage_only
from .kit import (
    Backend,
    Measured,
    Witness,
    both_backends,
    check_books,
    check_closed,
    check_nobody_was_refused,
    explore,
    free_model,
    hands_out,
    model_of_worst_case,
    slowly,
    tasks,
    uses_all,
)
from .loopback import Loopback, serve

# --- E01: every child reads the same spend before any has spent ----------------------------------


def fan_out(
    width: int, *, worker: ScriptedModel, planner: ScriptedModel
) -> tuple[tw.Agent, tw.Limits]:
    """A boss that starts ``width`` workers in one reply, and limits that are as wide."""
    child = tw.agent(id="worker", instructions="Work.", model=worker)
    work = tw.subagent(name="work", description="Does a part.", agent=child)
    boss = tw.agent(id="boss", instructions="Plan.", model=planner, tools=[work])
    return boss, tw.Limits(max_subagents=width, max_concurrent_subagents=width)


@pytest.mark.parametrize("on_contention", ["wait", "stop"])
@pytest.mark.parametrize(
    ("worst_case", "output_limit", "clamp", "calls", "spent"),
    [
        ("0.10", 1_000, False, 1, "10.00"),
        ("0.04", 1_000, False, 2, "9.98"),
        ("0.11", 1_100, False, 0, "9.90"),
        ("0.11", 1_100, True, 1, "10.00"),
    ],
)
def test_E01_five_children_share_a_tenth_of_a_dollar(
    worst_case: str,
    output_limit: int,
    clamp: bool,
    calls: int,
    spent: str,
    on_contention: Literal["wait", "stop"],
    record_property: Measured,
) -> None:
    budget = tw.Budget(max_usd="10.00", clamp=clamp, on_contention=on_contention)

    async def scenario() -> Witness:
        worker = model_of_worst_case(worst_case, uses_all, output_limit=output_limit)
        planner = model_of_worst_case("9.90", hands_out(*tasks("work", 5)))
        boss, limits = fan_out(5, worker=worker, planner=planner)
        witness = Witness(is_thorough=False)
        result = await tw.run(boss, "go", budget=budget, limits=limits, **witness.options)
        assert len(worker.requests) == calls
        assert result.cost_usd == Decimal(spent)
        check_stops(result, complete=calls, budget_exhausted=5 - calls)
        for child in result.receipt.subagents:
            assert child.own.calls == (child.stop_reason == "complete")
            assert child.reason.startswith("cave_budget_exhausted: ") or child.own.calls
        check_nobody_was_refused(witness)
        check_books(witness, result.receipt, worker, planner)
        return witness

    # Where at most one child does more than start and stop, there are 120 orders; more seeds see
    # more of them.
    seeds = 200 if calls == 2 or (on_contention == "wait" and calls) else 300
    what = f"E01 at ${worst_case}, clamp {clamp}, {on_contention}"
    explore(scenario, record_property, what, seeds=seeds)


@both_backends
def test_E01_a_clamped_call_says_what_it_was_clamped_from(backend: Backend) -> None:
    async def scenario() -> None:
        worker = model_of_worst_case("0.11", uses_all, output_limit=1_100)
        planner = model_of_worst_case("9.90", hands_out(*tasks("work", 1)))
        boss, limits = fan_out(1, worker=worker, planner=planner)
        witness = Witness()
        result = await tw.run(
            boss, "go", budget=tw.Budget(max_usd="10.00"), limits=limits, **witness.options
        )
        (line,) = result.receipt.subagents[0].lines
        assert (line.output_limit, line.clamped_from) == (1_000, 1_100)
        assert line.usd == Decimal("0.10")
        check_books(witness, result.receipt, worker, planner)

    VirtualClock().run(scenario, backend=backend)


def check_stops(result: tw.Result, **expected: int) -> None:
    """Assert how many children ended for which reason."""
    seen = [child.stop_reason for child in result.receipt.subagents]
    wanted = [reason for reason, count in expected.items() for _ in range(count)]
    assert sorted(seen) == sorted(wanted)


# --- E02, E03, E04: counted limits ---------------------------------------------------------------


def looker(model: ScriptedModel, ran: list[str], witness: Witness, **options: Any) -> tw.Agent:
    """An agent with one tool, which writes down who called it."""

    @tw.tool(effect="read", runs="host")
    async def look(ctx: tw.Context[None], number: int = 0) -> str:
        """Look.

        Args:
            number: What to look at.
        """
        ran.append(ctx.path)
        await anyio.sleep(0.5)
        witness.note("looking", ctx.path)
        await anyio.sleep(0.5)
        return f"seen {number}"

    return tw.agent(id="looker", instructions="Look.", model=model, tools=[look], **options)


@pytest.mark.parametrize(("limit", "width"), [(3, 2), (5, 4), (9, 8)])
def test_E02_parallel_delegations_share_one_limit_on_tool_calls(
    limit: int, width: int, record_property: Measured
) -> None:
    async def scenario() -> Witness:
        ran: list[str] = []
        worker = ScriptedModel(slowly(hands_out(("look", {}))), id="scripted/worker")
        planner = ScriptedModel(hands_out(*tasks("work", width)))
        witness = Witness(is_thorough=False)
        work = tw.subagent(name="work", description="Looks.", agent=looker(worker, ran, witness))
        boss = tw.agent(id="boss", instructions="Plan.", model=planner, tools=[work])
        limits = tw.Limits(max_tool_calls=limit, max_concurrent_subagents=width)
        result = await tw.run(boss, "go", limits=limits, **witness.options)
        # A delegation counts once, and so does each call that its child makes.
        assert len(ran) == limit - width
        assert witness.state.counters.tool_calls == limit
        refused = [r.code for c in result.receipt.subagents for r in c.refusals]
        assert refused == ["cave_tool_call_budget_exceeded"] * (2 * width - limit)
        assert result.complete
        check_stops(result, complete=width)
        check_books(witness, result.receipt, worker, planner)
        return witness

    explore(scenario, record_property, f"E02 with {width} delegations under {limit} tool calls")


def test_E02_eight_delegations_make_no_more_requests_than_five(record_property: Measured) -> None:
    async def scenario() -> Witness:
        ran: list[str] = []
        worker = ScriptedModel(hands_out(("look", {})), id="scripted/worker")
        planner = ScriptedModel(hands_out(*tasks("work", 8)))
        witness = Witness(is_thorough=False)
        work = tw.subagent(name="work", description="Looks.", agent=looker(worker, ran, witness))
        boss = tw.agent(id="boss", instructions="Plan.", model=planner, tools=[work])
        result = await tw.run(boss, "go", limits=tw.Limits(max_model_calls=5), **witness.options)
        assert (len(planner.requests), len(worker.requests)) == (1, 4)
        assert len(ran) == 4
        assert result.stop_reason == "call_budget_exhausted"
        check_stops(result, call_budget_exhausted=8)
        check_nobody_was_refused(witness)
        check_books(witness, result.receipt, worker, planner)
        return witness

    explore(scenario, record_property, "E02 with 8 delegations under 5 requests")


@pytest.mark.parametrize("whose", ["tree", "agent"])
@pytest.mark.parametrize("used", [0, 2])
def test_E03_of_eight_calls_in_one_reply_the_first_that_fit_are_run(
    used: int, whose: Literal["tree", "agent"], record_property: Measured
) -> None:
    """The rule: calls are admitted in their order; what is beyond the limit is refused."""

    def script(request: ScriptedRequest) -> Reply:
        if request.turn == 0 and used:
            return Reply(tool_calls=[("look", {"number": -n}) for n in range(1, used + 1)])
        if len(request.tool_results) == used:
            return Reply(tool_calls=[("look", {"number": n}) for n in range(8)])
        return Reply("done")

    async def scenario() -> Witness:
        ran: list[str] = []
        model = ScriptedModel(script)
        of_agent = {"max_tool_calls": 6} if whose == "agent" else {}
        limits = tw.Limits(max_tool_calls=6) if whose == "tree" else None
        witness = Witness(is_thorough=False)
        agent = looker(model, ran, witness, **of_agent)
        result = await tw.run(agent, "go", limits=limits, **witness.options)
        assert len(ran) == 6
        results = model.requests[-1].tool_results[used:]
        asked = model.requests[-1].messages[-2].tool_calls
        assert [r.call_id for r in results] == [call.id for call in asked]
        seen = [r.content for r in results if not r.is_error]
        assert seen == [f"seen {n}" for n in range(6 - used)]
        for refused in results[6 - used :]:
            assert refused.is_error
            assert refused.content.startswith("cave_tool_call_budget_exceeded: ")
        assert result.complete
        check_books(witness, result.receipt, model)
        return witness

    explore(scenario, record_property, f"E03 with {used} used of the {whose}'s 6 tool calls")


def loops(rounds: int) -> Callable[[ScriptedRequest], Reply]:
    """A script that asks for one more look until it has made ``rounds`` requests."""

    def script(request: ScriptedRequest) -> Reply:
        if request.turn < rounds - 1:
            return Reply(tool_calls=[("look", {"number": request.turn})])
        return Reply("done")

    return script


@both_backends
@pytest.mark.parametrize(
    ("allowed", "needed", "made", "stop_reason"),
    [
        (6, 60, 5, "call_budget_exhausted"),
        (80, 60, 60, "complete"),
        # More than the default of one invocation, which the tree's limit lifts.
        (80, 70, 70, "complete"),
    ],
)
def test_E04_a_child_has_what_the_tree_has_left_no_less_and_no_more(
    allowed: int, needed: int, made: int, stop_reason: str, backend: Backend
) -> None:
    async def scenario() -> None:
        worker = ScriptedModel(loops(needed), id="scripted/worker")
        planner = ScriptedModel(hands_out(*tasks("work", 1)))
        witness = Witness()
        work = tw.subagent(name="work", description="Looks.", agent=looker(worker, [], witness))
        boss = tw.agent(id="boss", instructions="Plan.", model=planner, tools=[work])
        limits = tw.Limits(max_model_calls=allowed)
        result = await tw.run(boss, "go", limits=limits, **witness.options)
        assert len(worker.requests) == made
        assert result.receipt.subagents[0].stop_reason == stop_reason
        assert len(planner.requests) + made <= allowed
        assert result.stop_reason == stop_reason
        check_books(witness, result.receipt, worker, planner)

    VirtualClock().run(scenario, backend=backend)


# --- E05, E06, E07: one budget, many who spend it ------------------------------------------------


def test_E05_a_tree_of_nine_makes_the_six_calls_it_can_pay_for(record_property: Measured) -> None:
    def script(request: ScriptedRequest) -> Reply:
        match request.agent_path.count("/"):
            case 1:
                return hands_out(*tasks("lead", 2))(request)
            case 2:
                return hands_out(*tasks("work", 3))(request)
            case _:
                return uses_all(request)

    async def scenario() -> Witness:
        model = model_of_worst_case("0.05", script)
        worker = tw.agent(id="worker", instructions="Work.", model=model, max_model_calls=1)
        work = tw.subagent(name="work", description="Works.", agent=worker)
        leader = tw.agent(
            id="leader", instructions="Lead.", model=model, tools=[work], max_model_calls=1
        )
        lead = tw.subagent(name="lead", description="Leads.", agent=leader)
        boss = tw.agent(
            id="boss", instructions="Plan.", model=model, tools=[lead], max_model_calls=1
        )
        witness = Witness(is_thorough=False)
        budget = tw.Budget(max_usd="0.30", clamp=False)
        result = await tw.run(boss, "go", budget=budget, **witness.options)
        receipt = result.receipt
        assert len(model.requests) == 6
        assert receipt.own.usd == Decimal("0.05")
        assert receipt.descendants.usd == Decimal("0.25")
        assert receipt.own.usd + receipt.descendants.usd == result.cost_usd == model.billed
        leads = receipt.subagents
        assert [lead.own.usd for lead in leads] == [Decimal("0.05")] * 2
        assert sum(lead.descendants.usd for lead in leads) == Decimal("0.15")
        check_nobody_was_refused(witness)
        check_books(witness, receipt, model)
        return witness

    explore(scenario, record_property, "E05")


def test_E06_forty_workers_make_sixteen_calls_of_six_cents_out_of_a_dollar(
    record_property: Measured,
) -> None:
    def six_of_ten_cents(request: ScriptedRequest) -> Reply:
        return Reply("done", usage=tw.Usage(output=600), delay=1.0)

    async def scenario() -> Witness:
        worker = model_of_worst_case("0.10", six_of_ten_cents)
        planner = free_model(hands_out(*tasks("work", 40)))
        boss, limits = fan_out(40, worker=worker, planner=planner)
        witness = Witness(is_thorough=False)
        budget = tw.Budget(max_usd="1.00", clamp=False)
        result = await tw.run(boss, "go", budget=budget, limits=limits, **witness.options)
        assert len(worker.requests) == 16
        assert result.cost_usd == Decimal("0.96")
        # The first wave is as wide as the budget, and none is wider.
        assert witness.most_held == Decimal("1.00")
        assert witness.state.counters.peak_calls == 10
        check_stops(result, complete=16, budget_exhausted=24)
        check_nobody_was_refused(witness)
        check_books(witness, result.receipt, worker, planner)
        return witness

    explore(scenario, record_property, "E06")


def records_late(request: ScriptedRequest) -> Reply:
    """A reply whose text is there at once, and whose usage comes 200 ms after it."""
    usage = tw.Usage(output=request.output_limit)
    return Reply(usage=usage, chunks=("the answer", "."), chunk_delay=0.2)


def test_E07_two_of_ten_requests_are_sent_although_spend_is_recorded_late(
    record_property: Measured,
) -> None:
    async def scenario() -> Witness:
        worker = model_of_worst_case("0.01", records_late)
        planner = free_model(hands_out(*tasks("work", 10)))
        boss, limits = fan_out(10, worker=worker, planner=planner)
        witness = Witness(is_thorough=False)
        budget = tw.Budget(max_usd="0.02", clamp=False)
        result = await tw.run(boss, "go", budget=budget, limits=limits, **witness.options)
        assert len(worker.requests) == 2
        assert result.cost_usd == Decimal("0.02")
        check_stops(result, complete=2, budget_exhausted=8)
        check_nobody_was_refused(witness)
        check_books(witness, result.receipt, worker, planner)
        return witness

    explore(scenario, record_property, "E07")


def test_E07_no_more_than_two_of_ten_requests_are_paid_for_when_whoever_records_them_crashes(
    record_property: Measured,
) -> None:
    async def scenario() -> Witness:
        worker = model_of_worst_case("0.01", records_late)
        planner = free_model(hands_out(*tasks("work", 10)))
        boss, limits = fan_out(10, worker=worker, planner=planner)
        witness = Witness(is_thorough=False)

        def record(event: RunEvent) -> None:
            witness.hear(event)
            if isinstance(event, CallEnded) and "work" in event.path:
                raise OSError("the database of usage is away")

        options: dict[str, Any] = {**witness.options, "on_event": record}
        budget = tw.Budget(max_usd="0.02", clamp=False)
        with pytest.raises(tw.RunError, match="the database of usage is away") as caught:
            await tw.run(boss, "go", budget=budget, limits=limits, **options)
        assert isinstance(caught.value.__cause__, OSError)
        assert len(worker.requests) == 2
        # The first was measured; the second had its text, but was cut off before its usage came.
        bases = [line.basis for r in caught.value.receipt.subagents for line in r.lines]
        assert sorted(bases) in (["estimated", "provider_reported"], ["provider_reported"] * 2)
        assert Decimal("0.01") < caught.value.receipt.total.usd <= Decimal("0.02")
        check_books(witness, caught.value.receipt, worker, planner)
        return witness

    explore(scenario, record_property, "E07 with a listener that crashes")


# --- E09, E11, E23 -------------------------------------------------------------------------------

FREE_INPUT = tw.Price(input="0", cache_read="0", cache_write="0", output="15")


@both_backends
@pytest.mark.parametrize(
    ("declared", "on_the_wire", "held"), [(10, 10, "0.00015"), (None, 8_192, "0.12288")]
)
def test_E09_what_is_held_is_what_the_provider_is_told(
    declared: int | None, on_the_wire: int, held: str, backend: Backend
) -> None:
    async def scenario() -> None:
        model = ScriptedModel(uses_all, price=FREE_INPUT)
        output = tw.output(max_tokens=declared)
        agent = tw.agent(id="brief", instructions="Be brief.", model=model, output=output)
        witness = Witness()
        result = await tw.run(agent, "hi", budget=tw.Budget(max_usd="1.00"), **witness.options)
        assert [request.output_limit for request in model.requests] == [on_the_wire]
        assert witness.holds() == [Decimal(held)]
        assert result.cost_usd == Decimal(held)
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
@pytest.mark.parametrize(
    ("options", "on_the_wire", "held"),
    [
        # Both names mean the output limit, so it is sent under the one this server reads.
        ({"settings": {"max_completion_tokens": 10}}, 10, "0.00015"),
        ({"settings": {"max_output_tokens": 10}}, 10, "0.00015"),
        # Nobody here knows that field, so it limits nothing.
        ({"extra_body": {"max_new_tokens": 10}}, 8_192, "0.12288"),
    ],
)
def test_E09_the_number_on_the_wire_is_the_one_that_is_held(
    options: dict[str, Any], on_the_wire: int, held: str, backend: Backend
) -> None:
    async def scenario(server: Loopback) -> None:
        model = tw.model("local/gpt", base_url=server.url, price=FREE_INPUT, **options)
        agent = tw.agent(id="brief", instructions="Be brief.", model=model)
        witness = Witness()
        result = await tw.run(agent, "hi", budget=tw.Budget(max_usd="1.00"), journal=witness.write)
        (body,) = server.requests
        assert body["max_tokens"] == on_the_wire
        assert "max_completion_tokens" not in body
        assert witness.holds() == [Decimal(held)]
        assert result.cost_usd == 7 * Decimal("0.000015")
        check_closed(witness)

    serve(backend, scenario, [sse(chunk("Hi"), chunk(finish="stop"), usage_only(USAGE), DONE)])


class BrokenBuilder(ScriptedModel):
    """A model whose requests cannot even be built."""

    def open(self, brief: Brief) -> Any:
        session: ModelSession = super().open(brief)

        async def call(*_: object) -> None:
            raise ValueError("this history has no encoding")

        session.call = call  # type: ignore[method-assign,assignment]
        return session


@pytest.mark.parametrize("fault", ["builder", "stream"])
def test_E11_a_turn_that_fails_gives_its_money_back_on_the_way_out(
    fault: Literal["builder", "stream"], record_property: Measured
) -> None:
    def breaks_off(request: ScriptedRequest) -> Reply:
        usage = tw.Usage(output=request.output_limit)
        return Reply(chunks=("a few", " words"), chunk_delay=0.5, break_after=1, usage=usage)

    async def scenario() -> Witness:
        price = model_of_worst_case("0.60", uses_all).card.price
        kind = BrokenBuilder if fault == "builder" else ScriptedModel
        broken = kind(breaks_off, price=price, max_output=1_000, id="scripted/broken")
        sound = model_of_worst_case("0.60", uses_all)
        witness = Witness(is_thorough=False)
        receipts: list[tw.Receipt] = []

        async def run(model: ScriptedModel) -> None:
            agent = tw.agent(id="one", instructions="Try.", model=model)
            try:
                result = await tree.run(agent, "go", on_event=witness.hear)
            except tw.RunError as error:
                receipts.append(error.receipt)
            else:
                receipts.append(result.receipt)

        budget = tw.Budget(max_usd="1.00", clamp=False)
        async with tw.open_tree(budget=budget, **witness.tree_options) as tree:
            async with anyio.create_task_group() as group:
                # Side by side: who comes second waits until the first one's money is back.
                for model in (broken, sound):
                    group.start_soon(run, model)
                for _ in range(3):
                    group.start_soon(run, broken)
            tree.check()
        tree.ledger.check_closed()
        ended = [receipt.stop_reason for receipt in receipts]
        assert ended.count("complete") == len(sound.requests) == 1
        # Who asked when the sound one had spent its $0.60 got nothing; all others tried and failed.
        assert {*ended[: ended.index("complete")]} <= {"failed"}
        assert {*ended[ended.index("complete") + 1 :]} <= {"failed", "budget_exhausted"}
        check_books(witness, receipts, broken, sound)
        return witness

    explore(scenario, record_property, f"E11 with a broken {fault}")


@both_backends
def test_E11_what_was_never_sent_costs_nothing(backend: Backend) -> None:
    async def scenario() -> None:
        model = BrokenBuilder([], price=FREE_INPUT)
        agent = tw.agent(id="one", instructions="Try.", model=model)
        witness = Witness()
        with pytest.raises(tw.RunError, match="this history has no encoding") as caught:
            await tw.run(agent, "go", budget=tw.Budget(max_usd="1.00"), **witness.options)
        (line,) = caught.value.receipt.lines
        assert (line.basis, line.usd) == ("not_dispatched", Decimal(0))
        assert caught.value.receipt.total.calls == 0
        check_books(witness, caught.value.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E23_a_boss_that_never_gives_up_is_stopped_by_the_limit_of_the_root(
    backend: Backend,
) -> None:
    def insists(request: ScriptedRequest) -> Reply:
        task = "read this: " + "word " * 12  # 60 tokens' worth at least, and the child has 50
        return Reply(tool_calls=[("work", {"task": task})], usage=tw.Usage(input=90, output=10))

    async def scenario() -> None:
        planner = ScriptedModel(insists, max_output=20)
        worker = ScriptedModel(uses_all, max_output=20, id="scripted/worker")
        child = tw.agent(id="worker", instructions="Work.", model=worker)
        work = tw.subagent(name="work", description="Works.", agent=child, max_tokens=50)
        boss = tw.agent(id="boss", instructions="Plan.", model=planner, tools=[work])
        witness = Witness()
        budget, limits = tw.Budget(max_tokens=1_000), tw.Limits(max_depth=1)
        with pytest.raises(tw.RunStopped) as caught:
            await tw.run(
                boss, "go", budget=budget, limits=limits, on_stop="raise", **witness.options
            )
        assert caught.value.code == "budget_exhausted"
        assert "root has" in str(caught.value)
        receipt = caught.value.receipt
        assert receipt.spent <= 1_000
        assert worker.requests == []
        assert len(receipt.subagents) >= 2
        for child_receipt in receipt.subagents:
            assert child_receipt.stop_reason == "budget_exhausted"
            assert f"{child_receipt.path} has 50 left" in child_receipt.reason
        check_books(witness, receipt, planner, worker)

    VirtualClock().run(scenario, backend=backend)
