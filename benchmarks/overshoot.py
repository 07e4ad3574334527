"""Does the ceiling hold under 100 parallel children, and is the money used?

A hundred children loop until they are stopped, on budgets of 50,000, 250,000 and 1,000,000 tokens.
The ceiling must hold to the token, at least 95 % of the calls that an oracle could fund must be
made, and less than one worst-case call may be left. pydantic-ai runs the same beside it where it
installs.
"""

from __future__ import annotations

import sys
from typing import Any

from _measure import Row, arguments, backends, finish
from _peers import peer_overshoot

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

CHILDREN = 100
USAGE = tw.Usage(input=300, output=200)
OUTPUT_LIMIT = 256


@tw.tool(effect="read", runs="host")
async def look() -> str:
    """Look around."""
    return "more"


def tree_of(children: int) -> tuple[tw.Agent, ScriptedModel]:
    busy = Reply(tool_calls=[("look", {})], usage=USAGE, delay=1.0)

    def script(request: ScriptedRequest) -> Reply:
        if "child" in request.agent_path:
            return busy
        if request.turn:
            return Reply("done", usage=tw.Usage(input=10, output=1))
        calls = [("child", {"task": "go on"})] * children
        return Reply(tool_calls=calls, usage=tw.Usage(input=10, output=1))

    model = ScriptedModel(script, max_output=OUTPUT_LIMIT)
    child = tw.agent(
        id="child",
        instructions="Go on.",
        model=model,
        tools=[look],
        max_model_calls=10_000,
        max_tool_calls=10_000,
    )
    root = tw.agent(
        id="root",
        instructions="Delegate.",
        model=model,
        tools=[tw.subagent(name="child", description="Works.", agent=child)],
        max_tool_calls=children,
    )
    return root, model


def ours(budget: int, children: int, backend: str) -> tuple[int, int, int, int]:
    """Spend, calls of children, what an oracle could have funded, and the largest hold."""
    root, model = tree_of(children)
    holds: list[int] = []

    def journal(event: Any) -> None:
        if type(event).__name__ == "Held":
            holds.append(event.amount)

    result = tw.run_sync(
        root,
        "go",
        budget=tw.Budget(max_tokens=budget),
        limits=tw.Limits(max_subagents=children, max_concurrent_subagents=children),
        clock=VirtualClock(),
        journal=journal,
        backend=backend,
    )
    result.receipt.check()
    spent = result.receipt.total.tokens
    assert spent == model.billed_tokens
    child_calls = sum("child" in request.agent_path for request in model.requests)
    own = result.receipt.own.tokens
    return spent, child_calls, (budget - own) // USAGE.total, max(holds)


def main() -> int:
    options = arguments(__doc__ or "")
    budgets = [20_000] if options.quick else [50_000, 250_000, 1_000_000]
    children = 20 if options.quick else CHILDREN
    rows: list[Row] = []
    for backend in backends(options):
        for budget in budgets:
            spent, calls, oracle, worst = ours(budget, children, backend)
            over = max(0, spent - budget)
            label = f"{backend}, {budget:,} tokens"
            rows.append(Row(what=f"{label}: overshoot", value=over, target=0))
            rows.append(
                Row(
                    what=f"{label}: calls / what an oracle could fund",
                    value=calls / oracle,
                    target=0.95,
                    at_most=False,
                )
            )
            rows.append(
                Row(
                    what=f"{label}: left / worst-case call",
                    value=(budget - spent) / worst,
                    target=1.0,
                )
            )
    peers = {} if options.quick else peer_overshoot(budgets, children)
    return finish("overshoot", rows, {"peers_overshoot_percent": peers})


if __name__ == "__main__":
    sys.exit(main())
