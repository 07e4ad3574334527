"""What one turn of an agent costs: a model call, a tool call, and the bookkeeping of both.

Beside it a bare loop written by hand (the same messages, the same tool as a task of its own, no
limits, no ledger), and pydantic-ai and smolagents where they install. The model answers from memory
everywhere.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import anyio
import anyio.lowlevel
from _measure import Row, arguments, backends, finish, interleaved, ratio_row
from _peers import peer_turn

import treewarden as tw
from treewarden.protocols import Message, Text
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest

USAGE = tw.Usage(input=100, output=20)


@tw.tool(effect="read", runs="host")
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def turning_model(turns: int) -> ScriptedModel:
    call = Reply(tool_calls=[("add", {"a": 1, "b": 2})], usage=USAGE)
    last = Reply("done", usage=USAGE)
    left = turns

    def script(_: ScriptedRequest) -> Reply:
        nonlocal left
        left -= 1
        if left > 0:
            return call
        left = turns
        return last

    return ScriptedModel(script)


def agent_of(turns: int) -> tw.Agent:
    return tw.agent(
        id="a",
        instructions="Add.",
        model=turning_model(turns),
        tools=[add],
        max_model_calls=turns + 1,
        max_tool_calls=turns + 1,
    )


async def ours(turns: int, history: list[Message]) -> float:
    """CPU seconds of one turn, in a run of ``turns`` turns under a budget, journal on."""
    agent = agent_of(turns)
    async with tw.open_tree(budget=tw.Budget(max_usd="1000")) as tree:
        began = time.process_time()
        result = await tree.run(agent, [*history, Message("user", (Text("go"),))])
        took = time.process_time() - began
    assert result.complete
    return took / turns


async def by_hand(turns: int) -> float:
    """The same loop as anybody would write it: no limits, no accounts."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    began = time.process_time()
    for turn in range(turns):
        await anyio.lowlevel.checkpoint()  # the model
        if turn == turns - 1:
            messages.append({"role": "assistant", "content": "done"})
            break
        arguments = {"a": 1, "b": 2}
        call = {"id": f"call-{turn}", "name": "add", "arguments": arguments}
        messages.append({"role": "assistant", "tool_calls": [call]})
        results: list[str] = []

        async def work(arguments: dict[str, int], results: list[str] = results) -> None:
            results.append(str(arguments["a"] + arguments["b"]))

        async with anyio.create_task_group() as group:
            group.start_soon(work, arguments)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": results[0]})
    return (time.process_time() - began) / turns


def main() -> int:
    options = arguments(__doc__ or "")
    turns, rounds = (5, 2) if options.quick else (60, 9)
    long_history = [Message("user", (Text("x" * 1_000),)) for _ in range(400)]
    rows: list[Row] = []
    peers: dict[str, Any] = {}
    for backend in backends(options):

        def once(function: Any, *args: Any, backend: str = backend) -> Any:
            return lambda: anyio.run(function, *args, backend=backend)

        found = interleaved(
            {
                "hand": once(by_hand, turns),
                "ours": once(ours, turns, []),
                "long": once(ours, turns, long_history),
            },
            rounds=rounds,
        )
        rows.append(ratio_row(f"{backend}: turn / loop by hand", found, "ours", "hand", 6.0))
        rows.append(
            ratio_row(f"{backend}: turn at 400 KB of history / turn", found, "long", "ours", 1.5)
        )
        if backend == "asyncio" and not options.quick:
            peers = peer_turn(turns)
            turn_us = 1e6 * sorted(found["ours"])[rounds // 2]
            for peer, target in (("pydantic_ai", 1 / 20), ("smolagents", 1 / 2)):
                if peers[peer] is not None:
                    what = f"asyncio: turn / that of {peer}"
                    rows.append(Row(what=what, value=turn_us / peers[peer], target=target))
    return finish("turn", rows, {"peers_turn_us": peers})


if __name__ == "__main__":
    sys.exit(main())
