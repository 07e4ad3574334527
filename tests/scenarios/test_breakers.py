"""Public reports about loops and fan-out: what is seen, what is no loop, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import anyio
import pytest

import treewarden as tw
from treewarden.protocols import Receipt
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from .kit import (
    Backend,
    P,
    Witness,
    both_backends,
    check_books,
    price_for_worst_case,
    tasks,
)

USAGE = tw.Usage(input=100, output=10)

# Turns of a model: tool calls, or the final text.
Turn = Callable[[ScriptedRequest], "list[tuple[str, dict[str, Any]]] | str"]


def model_that(turn: Turn) -> ScriptedModel:
    def script(request: ScriptedRequest) -> Reply:
        said = turn(request)
        if isinstance(said, str):
            return Reply(said, usage=USAGE)
        return Reply(tool_calls=said, usage=USAGE)

    return ScriptedModel(script, price=P)


def calls(*names: str, rounds: int) -> Turn:
    """A model that calls these tools one after the other, so many times, and then is done."""

    def turn(request: ScriptedRequest) -> list[tuple[str, dict[str, Any]]] | str:
        if request.turn >= len(names) * rounds:
            return "done"
        return [(names[request.turn % len(names)], {})]

    return turn


def always(text: str, name: str, *, fails: bool = False, effect: Any = "read") -> tw.Tool:
    """A tool that always says the same."""

    async def say() -> str:
        if fails:
            raise RuntimeError(text)
        return text

    return tw.tool(say, name=name, description="Says.", effect=effect, runs="host")


def run(
    backend: Backend, agent: tw.Agent, *models: ScriptedModel, **options: Any
) -> tuple[tw.Result, Witness]:
    """Run it with the breakers on, and check the books."""
    witness = Witness()
    options = {"breakers": tw.Breakers(), **options}

    async def main() -> tw.Result:
        return await tw.run(agent, "go", **options, **witness.options)

    result = VirtualClock().run(main, backend=backend)
    check_books(witness, result.receipt, *models)
    return result, witness


def solo(
    backend: Backend, turn: Turn, *tools: tw.Tool, **options: Any
) -> tuple[tw.Result, ScriptedModel]:
    """Run one agent with these tools."""
    model = model_that(turn)
    agent = tw.agent(id="solo", instructions="Work.", model=model, tools=list(tools))
    result, _ = run(backend, agent, model, **options)
    return result, model


def trips(receipt: Receipt) -> list[tuple[str, str, int | None]]:
    return [(row.kind, row.action, row.count) for row in receipt.breakers]


def hints(model: ScriptedModel) -> list[str]:
    """What a breaker said to the model, as it stands in its last request."""
    messages = model.requests[-1].messages
    texts = [message.text for message in messages if message.role == "user"]
    return [text for text in texts if text.startswith("cave_")]


# --- E64: what repeats is a call with its result -------------------------------------------------


@both_backends
def test_E64_polling_that_sees_something_new_is_no_loop(backend: Backend) -> None:
    read = 0

    @tw.tool(effect="read", runs="host")
    async def read_output(handle: int) -> str:
        """Read."""
        nonlocal read
        read += 1
        return "exited" if read == 20 else f"{read * 512} bytes"

    def turn(request: ScriptedRequest) -> list[tuple[str, dict[str, Any]]] | str:
        return "done" if request.last_text == "exited" else [("read_output", {"handle": 7})]

    result, model = solo(backend, turn, read_output)
    assert result.complete
    assert result.receipt.breakers == ()
    assert len(model.requests) == 21


@both_backends
def test_E64_a_circle_of_three_is_told_in_its_third_round_and_stopped_in_its_fourth(
    backend: Backend,
) -> None:
    tools = [
        always("def f(): ...", "read"),
        always("no such line", "edit", fails=True, effect="write"),
        always("1 failed", "test"),
    ]
    result, model = solo(backend, calls("read", "edit", "test", rounds=50), *tools)
    assert result.stop_reason == "loop_detected"
    assert "read" in result.stop_detail
    # Three in both: of the fourth round the window of eight turns holds no more.
    assert trips(result.receipt) == [
        ("loop_detected", "steered", 3),
        ("loop_detected", "stopped", 3),
    ]
    assert len(model.requests) == 10
    (hint,) = hints(model)
    assert "read, edit, test go round in a circle" in hint
    assert "another tool" in hint


@both_backends
def test_E64_a_circle_that_the_model_leaves_when_it_is_told_is_not_stopped(
    backend: Backend,
) -> None:
    def turn(request: ScriptedRequest) -> list[tuple[str, dict[str, Any]]] | str:
        said = request.messages[-1].text
        names = ("read", "edit", "test")
        return "I give up" if "circle" in said else [(names[request.turn % 3], {})]

    tools = [always(name, name) for name in ("read", "edit", "test")]
    result, _ = solo(backend, turn, *tools)
    assert result.complete
    assert trips(result.receipt) == [("loop_detected", "steered", 3)]


@both_backends
def test_E64_a_test_that_fails_after_every_real_edit_is_no_circle(backend: Backend) -> None:
    @tw.tool(effect="write", runs="host")
    async def edit(text: str) -> str:
        """Edit."""
        return "edited"

    def turn(request: ScriptedRequest) -> list[tuple[str, dict[str, Any]]] | str:
        if request.turn >= 20:
            return "done"
        if request.turn % 2:
            return [("test", {})]
        return [("edit", {"text": f"attempt {request.turn}"})]

    result, _ = solo(backend, turn, edit, always("1 failed", "test", fails=True))
    assert result.complete
    assert result.receipt.breakers == ()


# --- E65: the threshold is the threshold ---------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "actions"), [(2, []), (3, ["steered"]), (4, ["steered", "stopped"])]
)
@both_backends
def test_E65_a_threshold_of_three_fires_at_three(
    times: int, actions: list[str], backend: Backend
) -> None:
    result, _ = solo(backend, calls("look", rounds=times), always("same", "look"))
    assert [row.action for row in result.receipt.breakers] == actions
    assert result.complete is (times < 4)


@both_backends
def test_E65_without_steering_the_third_ends_the_run(backend: Backend) -> None:
    result, model = solo(
        backend,
        calls("look", rounds=50),
        always("same", "look"),
        breakers=tw.Breakers(steer=False),
    )
    assert trips(result.receipt) == [("loop_detected", "stopped", 3)]
    assert len(model.requests) == 3
    assert hints(model) == []


@both_backends
def test_E65_alternation_is_seen_by_its_third_round_and_ended_by_its_fourth(
    backend: Backend,
) -> None:
    tools = [always("one", "a"), always("two", "b")]
    result, model = solo(backend, calls("a", "b", rounds=50), *tools)
    assert result.stop_reason == "loop_detected"
    assert len(model.requests) == 7
    assert "a, b go round in a circle" in hints(model)[0]


@both_backends
def test_E65_waiting_for_a_log_that_grows_is_no_loop(backend: Backend) -> None:
    log: list[str] = []

    @tw.tool(effect="read", runs="host")
    async def build_log() -> str:
        """Read the log."""
        log.append(f"compiled file {len(log)}")
        return "\n".join(log)

    result, _ = solo(backend, calls("build_log", rounds=6), build_log)
    assert result.complete
    assert result.receipt.breakers == ()


# --- E66: subagents that start subagents ---------------------------------------------------------


def line_of_spawners(model: ScriptedModel, levels: int) -> tw.Agent:
    """An agent that can start the next one, which can start the next one, and so on."""
    agent = tw.agent(id=f"level{levels}", instructions="Work.", model=model)
    for level in range(levels - 1, -1, -1):
        spawn = tw.subagent(name="spawn", description="Works.", agent=agent)
        agent = tw.agent(id=f"level{level}", instructions="Work.", model=model, tools=[spawn])
    return agent


def everybody_spawns(width: int) -> tuple[tw.Agent, ScriptedModel]:
    """Everybody starts ``width`` others, and asks again for those that were refused."""

    def script(request: ScriptedRequest) -> Reply:
        usage = tw.Usage(output=10)
        if request.turn < 50:
            return Reply(tool_calls=tasks("spawn", width), usage=usage)
        return Reply("done", usage=usage)

    model = ScriptedModel(script, price=price_for_worst_case("0.001"), max_output=1_000)
    return line_of_spawners(model, 4), model


SPREAD: dict[str, Any] = {"max_depth": 3, "max_subagents": None, "max_concurrent_subagents": None}


@pytest.mark.parametrize(
    ("limits", "first_rule", "most"),
    [
        ({"max_descendants": 20}, "cave_subagent_breadth_limit", 20),
        (
            {"max_descendants": 20, "max_spawns_per_minute": 10},
            "cave_subagent_spawn_rate_limit",
            10,
        ),
    ],
)
@both_backends
def test_E66_agents_that_start_themselves_are_few_and_soon_over(
    limits: dict[str, Any], first_rule: str, most: int, backend: Backend
) -> None:
    agent, model = everybody_spawns(5)
    result, witness = run(
        backend,
        agent,
        model,
        limits=tw.Limits(**SPREAD, **limits),
        budget=tw.Budget(max_usd="1"),
    )
    receipts = list(result.receipt.walk())
    counters = witness.state.counters
    assert counters.admitted == len(receipts) - 1 <= most
    codes = {refusal.code for receipt in receipts for refusal in receipt.refusals}
    assert first_rule in codes
    assert codes <= {first_rule, "cave_subagent_depth_limit"}
    # A refused start costs nothing, and is not asked for again and again.
    assert all(len(receipt.lines) <= 12 for receipt in receipts)
    stopped = [receipt for receipt in receipts if receipt.stop_reason == "loop_detected"]
    assert stopped
    for receipt in stopped:
        assert [row.action for row in receipt.breakers][-2:] == ["steered", "stopped"]


@both_backends
def test_E66_a_tree_within_its_limits_is_left_alone(backend: Backend) -> None:
    def turn(request: ScriptedRequest) -> list[tuple[str, dict[str, Any]]] | str:
        is_root = "/spawn" not in request.agent_path
        return tasks("spawn", 5) if is_root and not request.turn else request.agent_path

    model = model_that(turn)
    limits = tw.Limits(**SPREAD, max_descendants=5, max_spawns_per_minute=5)
    result, witness = run(backend, line_of_spawners(model, 4), model, limits=limits)
    assert result.complete
    assert witness.state.counters.admitted == 5
    assert [(r.refusals, r.breakers) for r in result.receipt.walk()] == [((), ())] * 6


# --- E67: one after the other --------------------------------------------------------------------


def one_after_the_other(count: int) -> tuple[tw.Agent, ScriptedModel]:
    """A child that starts one grandchild after the other, each for something else."""

    def turn(request: ScriptedRequest) -> list[tuple[str, dict[str, Any]]] | str:
        if "/step" in request.agent_path:
            return f"did {request.last_text}"
        if request.turn >= count or "cave_subagent" in request.last_text:
            return "done"
        return [("step", {"task": f"step {request.turn}"})]

    model = model_that(turn)
    worker = tw.agent(id="worker", instructions="Work.", model=model)
    step = tw.subagent(name="step", description="Does.", agent=worker)
    child = tw.agent(
        id="child",
        instructions="Delegate.",
        model=model,
        tools=[step],
        max_model_calls=2_000,
        max_tool_calls=2_000,
    )
    return child, model


@both_backends
def test_E67_a_run_stops_to_start_at_its_own_limit_and_the_tree_has_a_larger_one(
    backend: Backend,
) -> None:
    child, model = one_after_the_other(1_000)
    small, small_model = one_after_the_other(3)
    witness = Witness(is_thorough=False)

    async def main() -> list[tw.Result]:
        limits = tw.Limits(max_subagents=1_000, max_descendants=20)
        async with tw.open_tree(limits=limits, **witness.tree_options) as tree:
            breakers = tw.Breakers()
            first = await tree.run(child, "go", breakers=breakers)
            # The root is driven by a person, and may go on.
            return [first, await tree.run(small, "go", breakers=breakers)]

    first, second = VirtualClock().run(main, backend=backend)
    check_books(witness, [first.receipt, second.receipt], model, small_model)
    assert len(first.receipt.subagents) == 20
    assert [refusal.code for refusal in first.receipt.refusals] == ["cave_subagent_breadth_limit"]
    assert witness.state.counters.peak == 1
    assert len(second.receipt.subagents) == 3
    assert second.receipt.refusals == ()
    assert first.receipt.breakers == second.receipt.breakers == ()


# --- E68: a guard looks at the tree --------------------------------------------------------------


@both_backends
def test_E68_delegating_once_does_not_forbid_to_delegate_again(backend: Backend) -> None:
    child, model = one_after_the_other(6)
    result, _ = run(backend, child, model)
    assert result.complete
    assert [below.stop_reason for below in result.receipt.subagents] == ["complete"] * 6
    assert result.receipt.refusals == ()
    assert result.receipt.breakers == ()


@pytest.mark.parametrize("steer", [True, False])
@both_backends
def test_E68_the_third_equal_refusal_trips_the_breaker(steer: bool, backend: Backend) -> None:
    def turn(request: ScriptedRequest) -> list[tuple[str, dict[str, Any]]] | str:
        if "/fork" in request.agent_path:
            return "forked"
        return [("fork", {"task": "once more"})]

    model = model_that(turn)
    worker = tw.agent(id="worker", instructions="Work.", model=model)
    fork = tw.subagent(name="fork", description="Forks.", agent=worker)
    boss = tw.agent(id="boss", instructions="Fork.", model=model, tools=[fork])
    result, _ = run(
        backend,
        boss,
        model,
        limits=tw.Limits(max_subagents=1),
        breakers=tw.Breakers(steer=steer),
    )
    assert result.stop_reason == "loop_detected"
    assert len(result.receipt.subagents) == 1
    refusals = result.receipt.refusals
    assert len(refusals) == (4 if steer else 3)
    assert all("asking again cannot help" in refusal.message for refusal in refusals)
    assert trips(result.receipt) == (
        [("loop_detected", "steered", 3), ("loop_detected", "stopped", 4)]
        if steer
        else [("loop_detected", "stopped", 3)]
    )


# --- E104: trouble of a provider, a page about errors, and a real failure ------------------------


@both_backends
def test_E104_a_tool_that_is_not_there_is_left_alone_and_is_no_loop(backend: Backend) -> None:
    asked_at: list[float] = []

    @tw.tool(effect="read", runs="host")
    async def fetch() -> str:
        """Fetch."""
        asked_at.append(VirtualClock.running().monotonic())
        if len(asked_at) <= 10:
            raise tw.ToolUnavailable("503 upstream")
        return "the page"

    def turn(request: ScriptedRequest) -> list[tuple[str, dict[str, Any]]] | str:
        return "done" if request.last_text == "the page" else [("fetch", {})]

    result, model = solo(backend, turn, fetch)
    assert result.complete
    seen = model.requests[1].tool_results[-1]
    assert (seen.content, seen.is_error) == ("cave_tool_unavailable: 503 upstream", True)
    gaps = [later - earlier for earlier, later in pairwise(asked_at)]
    assert gaps == [1, 2, 4, 8, 16, 30, 30, 30, 30, 30]
    assert trips(result.receipt) == [("tool_unavailable", "waited", None)] * 10
    assert hints(model) == []


@both_backends
def test_E104_a_deadline_ends_the_wait_for_a_tool(backend: Backend) -> None:
    @tw.tool(effect="read", runs="host")
    async def fetch() -> str:
        """Fetch."""
        raise tw.ToolUnavailable("503 upstream", retry_after_seconds=3_600)

    def turn(request: ScriptedRequest) -> list[tuple[str, dict[str, Any]]] | str:
        return [("fetch", {})]

    result, model = solo(backend, turn, fetch, limits=tw.Limits(deadline=60))
    assert result.stop_reason == "deadline"
    assert len(model.requests) == 2


@both_backends
def test_E104_pages_about_errors_are_no_errors(backend: Backend) -> None:
    @tw.tool(effect="read", runs="host")
    async def search(page: int) -> str:
        """Search."""
        return f"page {page}: what to do about a 404 error, a 503 error and a loop"

    def turn(request: ScriptedRequest) -> list[tuple[str, dict[str, Any]]] | str:
        return "done" if request.turn == 10 else [("search", {"page": request.turn})]

    result, _ = solo(backend, turn, search)
    assert result.complete
    assert result.receipt.breakers == ()


@both_backends
def test_E104_a_test_that_really_fails_again_and_again_is_a_loop(backend: Backend) -> None:
    result, model = solo(backend, calls("test", rounds=10), always("1 failed", "test", fails=True))
    assert result.stop_reason == "loop_detected"
    assert trips(result.receipt) == [
        ("loop_detected", "steered", 3),
        ("loop_detected", "stopped", 4),
    ]
    assert len(model.requests) == 4


@both_backends
def test_E104_trouble_that_a_tool_does_not_say_is_taken_for_its_result(backend: Backend) -> None:
    """Nobody reads meaning into a result: the tool types it, or it is what it is."""
    result, _ = solo(backend, calls("fetch", rounds=10), always("503 upstream", "fetch"))
    assert result.stop_reason == "loop_detected"


# --- who has breakers ----------------------------------------------------------------------------


@both_backends
def test_subagents_and_runs_in_tools_have_the_breakers_of_their_run(backend: Backend) -> None:
    stuck = model_that(calls("look", rounds=50))
    below = tw.agent(id="below", instructions="Look.", model=stuck, tools=[always("same", "look")])
    work = tw.subagent(name="work", description="Works.", agent=below)

    @tw.tool(effect="read", runs="host")
    async def nested() -> str:
        """Run one inside."""
        return (await tw.run(below, "go")).stop_reason

    def turn(request: ScriptedRequest) -> list[tuple[str, dict[str, Any]]] | str:
        return "done" if request.turn else [("nested", {}), *tasks("work", 1)]

    model = model_that(turn)
    boss = tw.agent(id="boss", instructions="Plan.", model=model, tools=[nested, work])
    result, _ = run(backend, boss, model, stuck)
    assert result.complete
    assert [child.stop_reason for child in result.receipt.subagents] == ["loop_detected"] * 2
    assert result.receipt.breakers == ()


@pytest.mark.parametrize("door", ["run", "stream", "tree.run", "tree.stream"])
@both_backends
def test_every_way_to_run_takes_breakers(door: str, backend: Backend) -> None:
    model = model_that(calls("look", rounds=50))
    agent = tw.agent(id="solo", instructions="Look.", model=model, tools=[always("same", "look")])
    breakers = tw.Breakers()

    async def main() -> tw.Result:
        clock = VirtualClock.running()
        if door == "run":
            return await tw.run(agent, "go", breakers=breakers, clock=clock)
        if door == "stream":
            async with tw.stream(agent, "go", breakers=breakers, clock=clock) as run:
                return await run.result()
        async with tw.open_tree(clock=clock) as tree:
            if door == "tree.run":
                return await tree.run(agent, "go", breakers=breakers)
            async with tree.stream(agent, "go", breakers=breakers) as run:
                return await run.result()

    result = VirtualClock().run(main, backend=backend)
    assert result.stop_reason == "loop_detected"
    assert "look was called 4 times within 8 turns" in result.stop_detail


@both_backends
def test_the_judge_sees_calls_in_their_order_whichever_ends_first(backend: Backend) -> None:
    @tw.tool(effect="read", runs="host")
    async def nap(seconds: float) -> str:
        """Sleep."""
        await anyio.sleep(seconds)
        return "slept"

    def turn(request: ScriptedRequest) -> list[tuple[str, dict[str, Any]]] | str:
        return "done" if request.turn == 3 else [("nap", {"seconds": s}) for s in (3.0, 1.0)]

    result, model = solo(backend, turn, nap)
    assert result.complete
    (row,) = result.receipt.breakers
    assert (row.action, row.count) == ("steered", 3)
    assert len(model.requests) == 4


@both_backends
def test_background_subagents_may_be_waited_for_in_small_steps(backend: Backend) -> None:
    async def slow(request: ScriptedRequest) -> Reply:
        return Reply("done", usage=USAGE, delay=100)

    worker_model = ScriptedModel(slow, price=P)
    worker = tw.agent(id="worker", instructions="Work.", model=worker_model)
    work = tw.subagent(name="work", description="Works.", agent=worker, background=True)

    def turn(request: ScriptedRequest) -> list[tuple[str, dict[str, Any]]] | str:
        if not request.turn:
            return tasks("work", 1)
        if request.turn > 1 and '"running"' not in request.last_text:
            return "done"
        return [("cave_wait", {"timeout_seconds": 10})]

    model = model_that(turn)
    boss = tw.agent(id="boss", instructions="Plan.", model=model, tools=[work])
    result, _ = run(backend, boss, model, worker_model)
    assert result.complete
    assert result.receipt.breakers == ()
    assert len(model.requests) > 8


@both_backends
def test_without_breakers_nobody_looks(backend: Backend) -> None:
    result, model = solo(backend, calls("look", rounds=30), always("same", "look"), breakers=None)
    assert result.complete
    assert result.receipt.breakers == ()
    assert len(model.requests) == 31


@both_backends
def test_what_was_said_before_a_run_is_not_part_of_its_window(backend: Backend) -> None:
    model = model_that(lambda request: "done" if request.turn % 3 == 2 else [("look", {})])
    agent = tw.agent(id="solo", instructions="Look.", model=model, tools=[always("same", "look")])
    talk = tw.Conversation()

    async def main() -> list[tw.Result]:
        options: dict[str, Any] = {"clock": VirtualClock.running(), "breakers": tw.Breakers()}
        return [await tw.run(agent, "go", conversation=talk, **options) for _ in range(3)]

    for result in VirtualClock().run(main, backend=backend):
        assert result.complete
        assert result.receipt.breakers == ()
