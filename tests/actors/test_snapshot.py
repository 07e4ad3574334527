"""What a snapshot of a tree says fits its published schema, whatever state the tree is in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import jsonschema_rs
import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from ..scenarios.kit import Backend, both_backends, model_of_worst_case

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "snapshot.schema.json").read_text(encoding="utf-8")
)
FITS = jsonschema_rs.validator_for(SCHEMA)


def as_json(tree: tw.Tree) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(json.dumps(tree.snapshot(), default=str))
    return shown


def checked(tree: tw.Tree) -> dict[str, Any]:
    shown = as_json(tree)
    FITS.validate(shown)
    return shown


def test_the_schema_is_a_schema_and_refuses_what_is_no_snapshot() -> None:
    jsonschema_rs.meta.validate(SCHEMA)
    assert not FITS.is_valid({})
    with pytest.raises(jsonschema_rs.ValidationError):
        FITS.validate({"unit": "euro", "nodes": {}, "wallets": {}, "counters": {}, "waiters": []})


def script(request: ScriptedRequest) -> Reply:
    if request.agent_path.count("/") == 1 and request.turn == 0:
        return Reply(tool_calls=[("work", {"task": str(n)}) for n in range(4)], delay=1)
    return Reply("done", usage=tw.Usage(output=request.output_limit), delay=1)


@both_backends
@pytest.mark.parametrize(
    "budget",
    [
        tw.Budget(max_usd="0.50", initial_usd="0.40", clamp=False),
        tw.Budget(max_tokens=40_000, clamp=False),
        None,
    ],
    ids=["usd", "tokens", "no ceiling"],
)
def test_a_snapshot_fits_its_schema_at_every_event_of_a_tree(
    budget: tw.Budget | None, backend: Backend
) -> None:
    async def scenario() -> None:
        model = model_of_worst_case("0.15", script)
        worker = tw.agent(id="worker", instructions="Work.", model=model)
        caps: dict[str, Any] = {"max_usd": "0.15"} if budget and budget.unit == "usd" else {}
        work = tw.subagent(name="work", description="Works.", agent=worker, **caps)
        boss = tw.agent(id="boss", instructions="Plan.", model=model, tools=[work])
        limits = tw.Limits(deadline=60, max_concurrent_calls=1, max_concurrent_subagents=3)
        seen: list[dict[str, Any]] = []
        tree = tw.open_tree(
            budget=budget,
            limits=limits,
            clock=VirtualClock.running(),
            journal=lambda _: seen.append(checked(tree)) if tree_is_open else None,
        )
        tree_is_open = False
        async with tree:
            tree_is_open = True
            checked(tree)
            await tree.run(boss, "go", limits=tw.Limits(deadline=30))
            checked(tree)
            if budget is not None:
                # A ceiling below what was spent, and a tree that is over it.
                amount: dict[str, Any] = {"max_usd": "0.01"}
                tree.set_budget(**(amount if budget.unit == "usd" else {"max_tokens": 1}))
                checked(tree)
            tree_is_open = False
        assert checked(tree)["counters"]["active"] == 0
        assert any(shown["waiters"] for shown in seen)
        kinds = {node["kind"] for shown in seen for node in shown["nodes"].values()}
        assert kinds == {"root", "run", "agent"}
        assert {shown["unit"] for shown in seen} == {budget.unit if budget else "usd"}

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_a_snapshot_fits_its_schema_while_tools_work_and_a_stream_is_cancelled(
    backend: Backend,
) -> None:
    @tw.tool(effect="read", runs="host", timeout_seconds=5)
    async def look() -> str:
        """Look."""
        await anyio.sleep(100)
        return "seen"

    async def scenario() -> None:
        model = ScriptedModel([Reply(tool_calls=[("look", {})])])
        agent = tw.agent(id="one", instructions="Look.", model=model, tools=[look])
        async with tw.open_tree(clock=VirtualClock.running()) as tree:
            async with tree.stream(agent, "go") as run:
                await anyio.sleep(1)
                nodes = checked(tree)["nodes"]
                assert [node["kind"] for node in nodes.values()] == ["root", "run", "tool"]
                run.cancel("enough")
                checked(tree)
            assert list(checked(tree)["nodes"]) == ["root"]

    VirtualClock().run(scenario, backend=backend)
