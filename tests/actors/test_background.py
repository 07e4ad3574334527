"""What a model is offered for its background subagents, and what each tool answers."""

from __future__ import annotations

import json
from typing import Any

import anyio
import attrs
import pytest

import treewarden as tw
from treewarden.protocols import Receipt, RunStarted, SubagentEnded, TextWritten
from treewarden.testing import Reply, ScriptedModel, VirtualClock

from ..scenarios.kit import Backend, Witness, both_backends, price_for_worst_case, tasks
from ..scenarios.office import (
    BOSS,
    Office,
    calls,
    handed_over,
    office,
    read,
    results_of,
    steps,
    stop_reasons,
    worked,
)

WAIT = ("cave_wait", dict[str, Any]())
FRAMEWORK_TOOLS = {"cave_wait", "cave_status", "cave_cancel"}


def carry_out(made: Office, backend: Backend, **options: Any) -> tw.Result:
    """Run the boss in virtual time and check the books."""
    results: list[tw.Result] = []

    async def scenario() -> None:
        witness = Witness()
        results.append(await tw.run(made.boss, "go", **options, **witness.options))
        made.check(witness, results[0].receipt)

    VirtualClock().run(scenario, backend=backend)
    return results[0]


def plan(*replies: Reply, **options: Any) -> Office:
    return office(steps(*replies), worked, **options)


# --- what is offered ----------------------------------------------------------------------------


@both_backends
def test_the_framework_tools_are_offered_only_where_there_is_a_background_subagent(
    backend: Backend,
) -> None:
    made = plan(calls(*tasks("work", 1)), Reply("done"))
    carry_out(made, backend)
    assert {s.name for s in made.planner.requests[0].tools} == {"work", *FRAMEWORK_TOOLS}
    assert made.worker.requests[0].tools == ()


@both_backends
def test_without_a_background_subagent_a_framework_tool_is_unknown(backend: Backend) -> None:
    async def scenario() -> None:
        model = ScriptedModel(steps(calls(WAIT), Reply("done")))
        agent = tw.agent(id="one", instructions="Work.", model=model)
        result = await tw.run(agent, "go")
        (told,) = results_of(result.messages)
        assert told == "cave_unknown_tool: there is no tool 'cave_wait'; known: none"

    VirtualClock().run(scenario, backend=backend)


@pytest.mark.parametrize("name", ["background", "on_sibling_failure"])
def test_a_policy_that_does_not_exist_is_refused_with_those_that_do(name: str) -> None:
    options: dict[str, Any] = {name: "shrug"}
    with pytest.raises(tw.UsageError, match=f"{name} is 'shrug'. Use one of \"") as caught:
        tw.agent(id="a", instructions="Work.", **options)
    assert "agent 'a'" in str(caught.value)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_a_subagent_is_in_the_background_or_not(value: Any) -> None:
    agent = tw.agent(id="a", instructions="Work.")
    with pytest.raises(tw.UsageError, match="Use True or False"):
        tw.subagent(name="work", description="Works.", agent=agent, background=value)


# --- starting -----------------------------------------------------------------------------------


@both_backends
def test_starting_returns_at_once_with_an_id_and_a_status(backend: Backend) -> None:
    made = plan(calls(*tasks("work", 2)), calls(WAIT), Reply("done"))
    result = carry_out(made, backend)
    first, second, _ = results_of(result.messages)
    assert json.loads(first) == {"id": "work#1", "agent_id": "worker", "status": "running"}
    assert json.loads(second)["id"] == "work#2"
    # On its caller's receipt each is once.
    assert sorted(child.path for child in result.receipt.subagents) == [
        f"{BOSS}/work#1",
        f"{BOSS}/work#2",
    ]


@both_backends
def test_a_start_that_the_ledger_refuses_is_an_error_result_and_leaves_nothing(
    backend: Backend,
) -> None:
    made = plan(calls(*tasks("work", 3)), calls(WAIT), Reply("done"))
    limits = tw.Limits(max_concurrent_subagents=2)
    result = carry_out(made, backend, limits=limits)
    *_, refused, waited = results_of(result.messages)
    assert refused.startswith("cave_subagent_concurrency_limit")
    assert [one["id"] for one in read(waited)] == ["work#1", "work#2"]
    assert result.complete


@both_backends
def test_caps_attempts_and_deadline_hold_as_for_any_subagent(backend: Backend) -> None:
    price = price_for_worst_case("0.10")
    made = plan(
        calls(*tasks("work", 3)),
        calls(WAIT),
        Reply("done"),
        price=price,
        max_usd="0.20",
        max_calls=2,
        timeout_seconds=5,
    )
    result = carry_out(made, backend, budget=tw.Budget(max_usd="0.50"))
    assert [str(child.max) for child in result.receipt.subagents] == ["0.2", "0.2"]
    assert stop_reasons(result.receipt) == ["deadline"] * 2
    assert results_of(result.messages)[2].startswith("cave_subagent_call_budget")


@both_backends
def test_events_tell_of_background_children_as_of_others_and_say_that_they_are(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        made, witness = plan(calls(*tasks("work", 1)), Reply("a"), Reply("b")), Witness()
        await tw.run(made.boss, "go", **witness.options)
        started = {e.path: e for e in witness.events if isinstance(e, RunStarted)}
        assert not started[BOSS].is_in_background
        assert started[f"{BOSS}/work#1"].is_in_background
        (ended,) = [e for e in witness.events if isinstance(e, SubagentEnded)]
        assert (ended.path, ended.stop_reason) == (f"{BOSS}/work#1", "complete")
        written = [e for e in witness.events if isinstance(e, TextWritten)]
        assert "".join(e.text for e in written if e.path == ended.path) == "it worked."

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_background_children_have_background_children_of_their_own(backend: Backend) -> None:
    async def scenario() -> None:
        leaf = ScriptedModel(lambda _: Reply("leaf", delay=5))
        lead = ScriptedModel(steps(calls(*tasks("work", 2)), Reply("so far"), Reply("led")))
        top = ScriptedModel(steps(calls(*tasks("lead", 2)), Reply("mine"), Reply("ours")))
        options: dict[str, Any] = {"description": "Does.", "background": True}
        worker = tw.agent(id="worker", instructions="Work.", model=leaf)
        work = tw.subagent(name="work", agent=worker, **options)
        leader = tw.agent(id="leader", instructions="Lead.", model=lead, tools=[work])
        leads = tw.subagent(name="lead", agent=leader, **options)
        boss = tw.agent(id="boss", instructions="Plan.", model=top, tools=[leads])
        witness = Witness()
        result = await tw.run(boss, "go", **witness.options)
        assert (result.complete, result.text) == (True, "ours")
        assert [one["text"] for one in handed_over(result.messages)] == ["led", "led"]
        assert [r.stop_reason for r in result.receipt.walk()] == ["complete"] * 7
        result.receipt.check()

    VirtualClock().run(scenario, backend=backend)


# --- waiting ------------------------------------------------------------------------------------


@both_backends
def test_waiting_reads_a_result_in_the_form_of_a_subagents_result(backend: Backend) -> None:
    made = plan(calls(*tasks("work", 1)), calls(WAIT), Reply("done"))
    result = carry_out(made, backend)
    (told,) = read(results_of(result.messages)[-1])
    assert told == {
        "id": "work#1",
        "status": "ended",
        "text": "it worked.",
        "agent_id": "worker",
        "usage_basis": "provider_reported",
        "input_tokens": 0,
        "output_tokens": 1000,
        "cost_usd": "0",
        "stop_reason": "complete",
        "claim_basis": "inferred",
    }


@both_backends
@pytest.mark.parametrize("seconds", [0, 4.5])
def test_a_wait_with_a_timeout_returns_what_is_so_by_then_and_ends_nobody(
    seconds: float, backend: Backend
) -> None:
    made = plan(
        calls(*tasks("work", 1)),
        calls(("cave_wait", {"timeout_seconds": seconds})),
        calls(WAIT),
        Reply("done"),
    )
    result = carry_out(made, backend)
    _, early, late = results_of(result.messages)
    assert read(early) == [{"id": "work#1", "agent_id": "worker", "status": "running"}]
    assert read(late)[0]["text"] == "it worked."
    assert (result.receipt.ended_ns - result.receipt.started_ns) == 10_000_000_000


@both_backends
def test_a_wait_without_ids_is_for_what_was_not_read_and_then_for_nothing(
    backend: Backend,
) -> None:
    made = plan(
        calls(*tasks("work", 1)),
        calls(WAIT),
        calls(*tasks("work", 1)),
        calls(WAIT),
        calls(WAIT),
        Reply("done"),
    )
    waits = [t for t in results_of(carry_out(made, backend).messages) if "results" in t]
    assert [[one["id"] for one in read(text)] for text in waits] == [["work#1"], ["work#3"], []]


@both_backends
def test_a_start_and_a_wait_in_one_reply_wait_for_what_was_started(backend: Backend) -> None:
    made = plan(calls(*tasks("work", 2), WAIT), Reply("done"))
    result = carry_out(made, backend)
    assert [one["text"] for one in read(results_of(result.messages)[-1])] == ["it worked."] * 2


@both_backends
def test_an_id_named_twice_is_told_once(backend: Backend) -> None:
    made = plan(
        calls(*tasks("work", 1)),
        calls(("cave_wait", {"ids": ["work#1", "work#1"]})),
        Reply("done"),
    )
    assert len(read(results_of(carry_out(made, backend).messages)[-1])) == 1


@both_backends
def test_a_failed_child_is_a_typed_outcome_and_not_an_error_of_the_wait(backend: Backend) -> None:
    made = office(
        steps(calls(*tasks("work", 1)), calls(WAIT), Reply("done")),
        lambda _: Reply(error="out of order", delay=1),
    )
    result = carry_out(made, backend)
    (told,) = read(results_of(result.messages)[-1])
    assert (told["status"], told["stop_reason"]) == ("ended", "failed")
    assert "out of order" in told["error"]
    assert [(r.name, r.errors) for r in result.receipt.tools] == [("work", 0), ("cave_wait", 0)]
    assert result.complete


# --- looking and cancelling -----------------------------------------------------------------------


@both_backends
def test_a_status_says_who_runs_who_has_ended_and_what_was_read_without_the_texts(
    backend: Backend,
) -> None:
    status = ("cave_status", dict[str, Any]())
    made = plan(
        calls(*tasks("work", 1)),
        calls(*tasks("work", 1), delay=5),
        calls(status),
        calls(("cave_wait", {"ids": ["work#1"]})),
        calls(status),
        calls(("cave_status", {"ids": ["work#2"]})),
        calls(WAIT),
        Reply("done"),
    )
    told = [t for t in results_of(carry_out(made, backend).messages) if "subagents" in t]
    first, second, one = [json.loads(text)["subagents"] for text in told]
    running = {"id": "work#2", "agent_id": "worker", "status": "running"}
    ended = {"id": "work#1", "agent_id": "worker", "status": "ended", "stop_reason": "complete"}
    assert first == [{**running, "id": "work#1"}, running]
    assert second == [{**ended, "was_read": True}, running]
    assert one == [running]


@both_backends
def test_cancelling_ends_one_with_the_reason_awaits_it_and_tells_what_it_came_to(
    backend: Backend,
) -> None:
    cancel = ("cave_cancel", {"id": "work#2", "reason": "found elsewhere"})
    made = plan(calls(*tasks("work", 2)), calls(cancel, delay=3), calls(WAIT), Reply("done"))
    result = carry_out(made, backend)
    _, _, cancelled, waited = results_of(result.messages)
    (told,) = read(cancelled)
    assert (told["stop_reason"], told["error"]) == (
        "cancelled",
        "cave_run_aborted: found elsewhere",
    )
    assert [one["id"] for one in read(waited)] == ["work#1"]
    second, first = result.receipt.subagents
    assert (second.stop_reason, second.reason) == ("cancelled", "found elsewhere")
    assert first.stop_reason == "complete"
    assert [row.path for row in result.receipt.background] == [second.path, first.path]
    # It was read: it is no reason to doubt the answer.
    assert result.complete


@both_backends
@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("cave_wait", {"ids": ["work#9"]}, "cave_background_unknown: there is no background"),
        ("cave_status", {"ids": ["x"]}, "cave_background_unknown: there is no background"),
        ("cave_cancel", {"id": "x", "reason": "y"}, "cave_background_unknown: there is no"),
        ("cave_cancel", {"id": "work#1"}, "cave_tool_input_schema_mismatch:cave_cancel"),
        ("cave_wait", {"ids": "work#1"}, "cave_tool_input_schema_mismatch:cave_wait"),
        ("cave_wait", {"timeout_seconds": -1}, "cave_tool_input_schema_mismatch:cave_wait"),
        ("cave_wait", {"id": "work#1"}, "cave_tool_input_schema_mismatch:cave_wait"),
        ("work", {"task": "t", "resume": "work#1"}, "cave_background_running: work#1 still runs"),
        ("work", {"task": "t", "resume": "work#7"}, "cave_background_unknown: work has not"),
        ("work", {"task": "t", "resume": 1}, "cave_subagent_arguments_invalid: work takes"),
    ],
)
def test_what_cannot_be_is_refused_in_words_and_starts_nothing(
    name: str, arguments: dict[str, Any], why: str, backend: Backend
) -> None:
    made = plan(calls(*tasks("work", 1)), calls((name, arguments)), calls(WAIT), Reply("done"))
    result = carry_out(made, backend)
    assert results_of(result.messages)[1].startswith(why)
    assert len(result.receipt.refusals) == 1
    assert len(result.receipt.subagents) == 1


@both_backends
def test_a_cancelled_child_cannot_be_resumed(backend: Backend) -> None:
    made = plan(
        calls(*tasks("work", 1)),
        calls(("cave_cancel", {"id": "work#1", "reason": "no"}), delay=1),
        calls(("work", {"task": "go on", "resume": "work#1"})),
        Reply("done"),
    )
    result = carry_out(made, backend)
    assert results_of(result.messages)[-1].startswith("cave_background_not_resumable: work#1")


# --- what they count as ---------------------------------------------------------------------------


@both_backends
def test_framework_tools_count_as_tool_calls_of_the_agent_and_of_the_tree_and_as_no_subagents(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        status = ("cave_status", dict[str, Any]())
        turns = [calls(*tasks("work", 1)), calls(status), calls(status), calls(status)]
        made, witness = plan(*turns, Reply("a"), Reply("b")), Witness()
        limits = tw.Limits(max_tool_calls=3)
        result = await tw.run(made.boss, "go", limits=limits, **witness.options)
        told = results_of(result.messages)
        assert "running" in told[2]
        assert told[3].startswith("cave_tool_call_budget_exceeded")
        counters = witness.state.counters
        assert (counters.tool_calls, counters.admitted) == (3, 1)
        assert [(row.name, row.calls) for row in result.receipt.tools] == [
            ("work", 1),
            ("cave_status", 3),
        ]
        made.check(witness, result.receipt)

        mine = attrs.evolve(made.boss, max_tool_calls=2)
        result = await tw.run(mine, "go")
        assert results_of(result.messages)[2].startswith("cave_tool_call_budget_exceeded: this run")

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_the_caller_is_asked_about_framework_tools_too(backend: Backend) -> None:
    made = plan(calls(*tasks("work", 1)), calls(WAIT), Reply("a"), Reply("b"))

    def approve(call: tw.ToolCall) -> bool:
        return call.name != "cave_wait"

    result = carry_out(made, backend, on_tool_call=approve)
    assert results_of(result.messages)[1].startswith("cave_tool_call_denied")
    assert result.text == "b"


# --- the answer, and the end ----------------------------------------------------------------------


@both_backends
def test_a_declared_output_is_checked_on_the_answer_that_counts(backend: Backend) -> None:
    made = plan(calls(*tasks("work", 1)), Reply("wait a bit"), Reply('{"n": 3}'))
    boss = attrs.evolve(made.boss, output=tw.output({"type": "object", "required": ["n"]}))
    result = carry_out(attrs.evolve(made, boss=boss), backend)
    assert result.output == {"n": 3}
    assert [line.purpose for line in result.receipt.lines] == ["model"] * 3


@both_backends
@pytest.mark.parametrize("of_the_tree", [True, False])
def test_a_model_that_has_no_tool_call_left_to_wait_with_is_not_told_to(
    of_the_tree: bool, backend: Backend
) -> None:
    made = plan(calls(*tasks("work", 2)), Reply("mine"), Reply("ours"), policy="forbid")
    if of_the_tree:
        result = carry_out(made, backend, limits=tw.Limits(max_tool_calls=2))
    else:
        boss = attrs.evolve(made.boss, max_tool_calls=2)
        result = carry_out(attrs.evolve(made, boss=boss), backend)
    assert (result.complete, result.text) == (True, "ours")
    assert len(handed_over(result.messages)) == 2
    assert len(made.planner.requests) == 3


@both_backends
def test_a_failed_sibling_ends_a_wait_but_not_the_one_that_is_waited_for(
    backend: Backend,
) -> None:
    @tw.tool(effect="read", runs="host")
    async def fail() -> str:
        """Fail."""
        await anyio.sleep(1)
        raise ValueError("it is broken")

    made = plan(calls(*tasks("work", 1), WAIT, ("fail", {})), Reply("mine"), Reply("ours"))
    boss = attrs.evolve(
        made.boss, tools=(*made.boss.tools, fail), on_sibling_failure="cancel_siblings"
    )
    result = carry_out(attrs.evolve(made, boss=boss), backend)
    started, waited, _ = results_of(result.messages)
    assert json.loads(started)["status"] == "running"
    assert waited == "cave_run_aborted: fail (call-1-3) of the same reply failed"
    assert [one["text"] for one in handed_over(result.messages)] == ["it worked."]
    assert result.text == "ours"


@both_backends
def test_a_last_answer_that_drops_who_still_runs_is_no_success_either(backend: Backend) -> None:
    """Wrapped up during a tool call; the worker, in a long call of its own, is not waited for."""

    async def scenario() -> None:
        turns = [calls(*tasks("work", 1)), calls(("cave_wait", {"timeout_seconds": 3}))]
        made, witness = plan(*turns, Reply("last", delay=1), policy="cancel"), Witness()
        async with tw.stream(made.boss, "go", **witness.tree_options) as run:
            async for event in run:
                witness.hear(event)
                if len(made.planner.requests) == 2:
                    run.wrap_up("closing time")
                    break
            result = await run.result()
        assert VirtualClock.running().monotonic() == 4.0
        assert (result.stop_reason, result.text) == ("background_dropped", "last")
        assert result.receipt.lines[-1].purpose == "final"
        assert stop_reasons(result.receipt) == ["cancelled"]
        made.check(witness, result.receipt)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_wrapping_up_hands_over_nothing_where_nothing_has_ended(backend: Backend) -> None:
    async def scenario() -> None:
        made = plan(calls(*tasks("work", 1)), calls(("cave_status", {})), policy="cancel")
        async with tw.stream(made.boss, "go") as run:
            async for _ in run:
                if len(made.planner.requests) == 2:
                    run.wrap_up("closing time")
                    break
            result = await run.result()
        assert result.stop_reason == "wrapped_up"
        assert not [m for m in result.messages if m.text.startswith("Results of your")]

    VirtualClock().run(scenario, backend=backend)


@both_backends
@pytest.mark.parametrize("policy", ["wait", "cancel", "forbid"])
def test_wrapping_up_reaches_background_children_and_the_last_answer_knows_their_results(
    policy: Any, backend: Backend
) -> None:
    """Wrapped up at 3 s, while the boss and its workers are all in a call."""

    async def scenario() -> None:
        made = plan(calls(*tasks("work", 2)), Reply("mine", delay=5), Reply("last"), policy=policy)
        witness = Witness()
        async with tw.stream(made.boss, "go", **witness.tree_options) as run:
            async for event in run:
                witness.hear(event)
                if VirtualClock.running().monotonic() == 3.0:
                    run.wrap_up("closing time")
                    break
            result = await run.result()
        if policy == "cancel":
            # Its answer stands; the two are cut off at five seconds.
            assert (result.stop_reason, result.text) == ("background_dropped", "mine")
            assert stop_reasons(result.receipt) == ["cancelled"] * 2
        else:
            assert (result.complete, result.text) == (True, "last")
            assert VirtualClock.running().monotonic() == 10.0
            assert [one["id"] for one in handed_over(result.messages)] == ["work#1", "work#2"]
            assert result.messages[-2].text.startswith("Wrap up now: closing time")
            assert result.receipt.lines[-1].purpose == "final"
        made.check(witness, result.receipt)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_run_that_fails_stops_its_background_children_and_has_a_stop_report(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        made = plan(calls(*tasks("work", 2)), Reply(error="no more", delay=3))
        witness = Witness()
        with pytest.raises(tw.RunError, match="no more") as caught:
            await tw.run(made.boss, "go", **witness.options)
        receipt = caught.value.receipt
        assert [(row.stop_reason, row.reason) for row in receipt.background] == [
            ("cancelled", f"{BOSS} failed: cave_provider_terminal_error")
        ] * 2
        made.check(witness, receipt)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_message_that_comes_while_the_run_waits_for_children_is_answered(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        made = plan(calls(*tasks("work", 1)), Reply("mine"), Reply("ours"))
        async with tw.stream(made.boss, "go") as run:
            async with anyio.create_task_group() as group:

                async def tell() -> None:
                    await anyio.sleep(5)
                    run.send("hurry")

                group.start_soon(tell)
            result = await run.result()
        assert [m.text for m in result.messages if m.role == "user"][-1] == "hurry"
        assert result.text == "ours"

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_the_stop_report_is_kept_in_the_receipts_json(backend: Backend) -> None:
    made = plan(calls(*tasks("work", 2)), Reply("mine", delay=1), policy="cancel")
    receipt = carry_out(made, backend).receipt
    again = Receipt.from_json(json.loads(json.dumps(receipt.to_json())))
    assert again == receipt
    assert [row.stop_reason for row in again.background] == ["cancelled"] * 2


def test_a_receipt_that_was_written_before_there_was_a_background_is_still_read() -> None:
    made = plan(calls(*tasks("work", 1)), Reply("mine"), Reply("ours"))
    receipt = carry_out(made, "asyncio").receipt
    older = receipt.to_json()
    for value in (older, *older["subagents"]):
        del value["background"]
    assert Receipt.from_json(older) == attrs.evolve(receipt, background=())
