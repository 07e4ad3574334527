"""What cancelling costs: 1,000 running actors, until everything each of them held is released.

Every actor has a lease with a wallet and a span, and waits. Beside them as many bare tasks of the
same backend, which wait and are cancelled as one scope. Measured is from the cancel to the end of
the last one; starting them is not.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import anyio
import anyio.lowlevel
from _measure import Row, arguments, backends, finish, interleaved, ratio_row

import treewarden as tw
from treewarden.actors import Actor, LoopClock, RootSupervisor, StopKind
from treewarden.ledgers import Caps, Kind, TreeLedger
from treewarden.testing import Reply, ScriptedModel

UNLIMITED = Caps(
    max_depth=8, max_subagents=None, max_concurrent_subagents=None, max_concurrent_calls=None
)
CARVE = 1_000


async def turns() -> None:
    """Let all that was started come to where it waits."""
    for _ in range(3):
        await anyio.lowlevel.checkpoint()


async def bare(count: int) -> float:
    began = 0.0
    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(anyio.sleep_forever)
        await turns()
        began = time.process_time()
        group.cancel_scope.cancel()
    return time.process_time() - began


async def wait(_: Actor) -> None:
    await anyio.sleep_forever()


async def actors(count: int) -> float:
    """One parent with ``count`` children, which is stopped with a reason."""
    ledger = TreeLedger(unit="tokens", max=10**12, caps=UNLIMITED)
    root = await RootSupervisor.open(ledger, LoopClock())

    async def body(parent: Actor) -> None:
        for _ in range(count):
            parent.root.start(parent, "a", wait, kind=Kind.AGENT, cap=CARVE)
        await anyio.sleep_forever()

    parent = root.start(root.top, "run", body, kind=Kind.RUN)
    await turns()
    began = time.process_time()
    parent.stop(StopKind.CANCELLED, "the benchmark is over")
    await parent.wait()
    took = time.process_time() - began
    await root.close()
    ledger.check_closed()
    return took


async def agents(count: int) -> float:
    """The same through the front door: agents in the middle of a call, each charged and told."""
    model = ScriptedModel(lambda r: _hand_out(count) if "/" not in r.agent_path[5:] else STALLS)
    worker = tw.agent(id="w", instructions="Work.", model=model)
    work = tw.subagent(name="work", description="Works.", agent=worker)
    boss = tw.agent(id="b", instructions="Plan.", model=model, tools=[work], max_tool_calls=count)
    limits = tw.Limits(max_subagents=count, max_concurrent_subagents=count)
    async with tw.stream(boss, "go", limits=limits) as run:
        while model.open_requests < count:
            await anyio.lowlevel.checkpoint()
        began = time.process_time()
        run.cancel("the benchmark is over")
        await run.aclose()
        return time.process_time() - began


STALLS = Reply("never", stall_after=0)


def _hand_out(count: int) -> Reply:
    return Reply(tool_calls=[("work", {"task": "it"})] * count)


def main() -> int:
    options = arguments(__doc__ or "")
    count, rounds = (100, 3) if options.quick else (1_000, 15)
    rows: list[Row] = []
    cpu: dict[str, dict[str, float]] = {}
    for backend in backends(options):

        def once(function: Any, backend: str = backend) -> Any:
            return lambda: anyio.run(function, count, backend=backend)

        found = interleaved(
            {"bare": once(bare), "actors": once(actors), "agents": once(agents)}, rounds=rounds
        )
        what = f"{backend}: cancel {count:,} actors / bare tasks"
        rows.append(ratio_row(what, found, "actors", "bare", 6.0))
        cpu[backend] = {
            name: round(1e6 * sorted(times)[len(times) // 2] / count, 2)
            for name, times in found.items()
        }
    return finish("cancel", rows, {"cpu_us_each": cpu})


if __name__ == "__main__":
    sys.exit(main())
