"""What one subagent of a hundred costs, beside a bare task.

A parent starts a hundred subagents side by side; each has a wallet of its own, two turns and one
tool call between them. The model answers from memory. pydantic-ai does the same beside it where it
installs.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import anyio
from _measure import Row, arguments, backends, finish, interleaved, ratio_row
from _peers import peer_fanout

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel

USAGE = tw.Usage(input=100, output=20)


@tw.tool(effect="read", runs="host")
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def bare_task(count: int) -> float:
    async def noop() -> None:
        pass

    began = time.process_time()
    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(noop)
    return (time.process_time() - began) / count


async def hundred_subagents(width: int) -> float:
    """CPU seconds per subagent: two turns each, a tool call in between, all side by side."""
    call = Reply(tool_calls=[("add", {"a": 1, "b": 2})], usage=USAGE)
    last = Reply("done", usage=USAGE)
    model = ScriptedModel(lambda request: last if request.turn else call)
    child = tw.agent(id="child", instructions="Add.", model=model, tools=[add])
    spawn = Reply(tool_calls=[("child", {"task": "add"})] * width, usage=USAGE)
    root = tw.agent(
        id="root",
        instructions="Delegate.",
        model=ScriptedModel(lambda request: last if request.turn else spawn),
        tools=[tw.subagent(name="child", description="Adds.", agent=child, max_usd="1")],
        max_tool_calls=width,
    )
    limits = tw.Limits(max_subagents=width, max_concurrent_subagents=width)
    async with tw.open_tree(budget=tw.Budget(max_usd="1000"), limits=limits) as tree:
        began = time.process_time()
        result = await tree.run(root, "go")
        took = time.process_time() - began
        assert tree.ledger.counters.concurrency_rejections == 0
    assert result.receipt.total.calls == 2 * width + 2
    return took / width


def main() -> int:
    options = arguments(__doc__ or "")
    rounds, width = (2, 10) if options.quick else (9, 100)
    rows: list[Row] = []
    peers: dict[str, Any] = {}
    for backend in backends(options):

        def once(function: Any, *args: Any, backend: str = backend) -> Any:
            return lambda: anyio.run(function, *args, backend=backend)

        found = interleaved(
            {"bare": once(bare_task, 10 * width), "fanout": once(hundred_subagents, width)},
            rounds=rounds,
        )
        rows.append(
            ratio_row(
                f"{backend}: one of {width} subagents / bare task", found, "fanout", "bare", 12.0
            )
        )
        if backend == "asyncio" and not options.quick:
            peers = peer_fanout(width)
            if peers["pydantic_ai"] is not None:
                ours_us = 1e6 * sorted(found["fanout"])[rounds // 2]
                what = "asyncio: one subagent / that of pydantic_ai"
                rows.append(Row(what=what, value=ours_us / peers["pydantic_ai"], target=1 / 10))
    return finish("fanout", rows, {"peers_subagent_us": peers})


if __name__ == "__main__":
    sys.exit(main())
