"""Six small trees that may be cancelled at any instant, and nothing is left behind.

    python -m treewarden.testing.explore examples/explored_trees.py

Each ``scenario_*`` is run once undisturbed, and then once for every step that a task of it makes:
there its caller is cancelled, or one of its tasks. What a cancellation may change (whether a run is
complete, what it cost) is not asserted here; what it may not change is what the explorer looks for.
"""

from __future__ import annotations

from typing import Any

import anyio

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest

# A call may cost 0.30 USD at most: input is free, and 1,000 tokens of output are 0.30 USD.
PRICE = tw.Price(input="0", cache_read="0", cache_write="0", output="300")
BOUNDED: dict[str, Any] = {"price": PRICE, "max_output": 1_000}
SMALL = tw.Usage(output=10)


def is_top(request: ScriptedRequest) -> bool:
    """True for the agent that a caller has run, False below it."""
    return request.agent_path.count("/") == 1


async def scenario_leaf_with_retries() -> None:
    """One agent that asks twice at a time and again, because its tool fails before it answers."""
    failures = iter([OSError("busy"), OSError("still busy")])

    @tw.tool(effect="read", runs="host")
    async def look(what: str) -> str:
        """Look something up.

        Args:
            what: What to look up.
        """
        await anyio.sleep(1)
        for failure in failures:
            raise failure
        return f"{what}: found"

    def script(request: ScriptedRequest) -> Reply:
        if request.turn < 3:
            calls = [("look", {"what": f"part {n}"}) for n in range(2)]
            return Reply(tool_calls=calls, delay=1, usage=SMALL)
        return Reply(chunks=("all ", "found"), chunk_delay=1, usage=SMALL)

    model = ScriptedModel(script, **BOUNDED)
    leaf = tw.agent(id="leaf", instructions="Look things up.", model=model, tools=[look])
    await tw.run(leaf, "go", budget=tw.Budget(max_usd="2.00"), limits=tw.Limits(deadline=60))


async def scenario_workers_compete() -> None:
    """Three workers: two calls are paid for at a time, and one may be on its way."""

    @tw.tool(effect="read", runs="host")
    async def look() -> str:
        """Look."""
        await anyio.sleep(1)
        return "seen"

    def script(request: ScriptedRequest) -> Reply:
        if not is_top(request):
            calls: list[tuple[str, dict[str, Any]]] = [("look", {})] if request.turn == 0 else []
            return Reply(chunks=("a", "b"), chunk_delay=1, tool_calls=calls, usage=SMALL)
        tasks = [("work", {"task": f"part {n}"}) for n in range(3)]
        return Reply("done", tool_calls=tasks if request.turn == 0 else [], usage=SMALL)

    model = ScriptedModel(script, **BOUNDED)
    worker = tw.agent(id="worker", instructions="Work.", model=model, tools=[look])
    work = tw.subagent(name="work", description="Does a part.", agent=worker)
    boss = tw.agent(id="boss", instructions="Hand out work.", model=model, tools=[work])
    budget = tw.Budget(max_usd="0.70", clamp=False)
    await tw.run(boss, "go", budget=budget, limits=tw.Limits(max_concurrent_calls=1))


async def scenario_nested_runs() -> None:
    """Tools that run agents of their own: in their caller's wallet, in a carve of it, detached."""
    model = ScriptedModel(lambda _: Reply("deep", delay=1, usage=SMALL), **BOUNDED)
    inner = tw.agent(id="inner", instructions="Think.", model=model)

    @tw.tool(effect="read", runs="host")
    async def think(ctx: tw.Context[None], how: str) -> str:
        """Think.

        Args:
            how: "shared", "carved" or "detached".
        """
        options: dict[str, Any] = {"detached": how == "detached"}
        if how != "shared":
            options["budget"] = tw.Budget(max_usd="0.40")
        return (await tw.run(inner, how, **options)).text

    def script(request: ScriptedRequest) -> Reply:
        ways = [("think", {"how": how}) for how in ("shared", "carved", "detached")]
        return Reply("thought", tool_calls=ways if request.turn == 0 else [], usage=SMALL)

    outer_model = ScriptedModel(script, **BOUNDED)
    outer = tw.agent(id="outer", instructions="Let think.", model=outer_model, tools=[think])
    await tw.run(outer, "go", budget=tw.Budget(max_usd="1.50"))


async def scenario_reader_breaks() -> None:
    """Two streams in one tree: one whose reader leaves early, one that is told to wrap up."""

    def script(request: ScriptedRequest) -> Reply:
        return Reply(chunks=("once ", "upon ", "a ", "time"), chunk_delay=1, usage=SMALL)

    model = ScriptedModel(script, **BOUNDED)
    teller = tw.agent(id="teller", instructions="Tell.", model=model)
    async with tw.open_tree(budget=tw.Budget(max_usd="1.00")) as tree:
        async with tree.stream(teller, "a story") as first:
            async for _ in first:
                break
        async with tree.stream(teller, "another one") as second:
            second.wrap_up("it is late")
            await second.result()


async def scenario_lent_slots() -> None:
    """Two parents and their children in a tree with one slot; one child goes on in the background.

    Whoever waits for the slot may be cancelled right when it is given to it.
    """

    def script(request: ScriptedRequest) -> Reply:
        level, turn = request.agent_path.count("/"), request.turn
        if turn or level == 3:
            return Reply("done", delay=1, usage=SMALL)
        if level == 1:
            return Reply(tool_calls=[("lead", {"task": f"part {n}"}) for n in range(2)])
        return Reply(tool_calls=[("work", {"task": "this"}), ("watch", {"task": "that"})])

    model = ScriptedModel(script, **BOUNDED)
    worker = tw.agent(id="worker", instructions="Work.", model=model)
    work = tw.subagent(name="work", description="Works.", agent=worker, max_usd="0.35")
    watch = tw.subagent(name="watch", description="Watches.", agent=worker, background=True)
    leader = tw.agent(id="leader", instructions="Lead.", model=model, tools=[work, watch])
    lead = tw.subagent(name="lead", description="Leads.", agent=leader)
    boss = tw.agent(id="boss", instructions="Let lead.", model=model, tools=[lead])
    limits = tw.Limits(max_concurrent_subagents=1, admission="wait")
    await tw.run(boss, "go", budget=tw.Budget(max_usd="3.00"), limits=limits)


async def scenario_wallets_in_wallets() -> None:
    """Carves two levels deep, two runs side by side, and a conversation that goes on after."""

    def script(request: ScriptedRequest) -> Reply:
        below = {1: "lead", 2: "work"}.get(request.agent_path.count("/"))
        if below is None or request.turn or request.agent_path.startswith("root/aside"):
            return Reply("done", delay=1, usage=SMALL)
        return Reply(tool_calls=[(below, {"task": "go on"})], usage=SMALL)

    model = ScriptedModel(script, **BOUNDED)
    worker = tw.agent(id="worker", instructions="Work.", model=model)
    work = tw.subagent(name="work", description="Works.", agent=worker, max_usd="0.35")
    leader = tw.agent(id="leader", instructions="Lead.", model=model, tools=[work])
    lead = tw.subagent(name="lead", description="Leads.", agent=leader, max_usd="0.80")
    boss = tw.agent(id="boss", instructions="Let lead.", model=model, tools=[lead])
    aside = tw.agent(id="aside", instructions="Answer.", model=model)
    conversation = tw.Conversation()
    async with tw.open_tree(budget=tw.Budget(max_usd="3.00")) as tree:
        async with anyio.create_task_group() as group:
            group.start_soon(_run_carved, tree, aside)
            await tree.run(boss, "go", conversation=conversation)
        await tree.run(boss, "and again", conversation=conversation)


async def _run_carved(tree: tw.Tree, agent: tw.Agent) -> None:
    await tree.run(agent, "go", budget=tw.Budget(max_usd="0.50"))
