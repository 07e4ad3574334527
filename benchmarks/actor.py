"""What an actor costs beside a bare task.

It is admitted with a wallet and a span, started, joined and given back. The journal is on. Anchors,
in the same run: a bare anyio task, and for reading beside it an asyncio.TaskGroup task or a trio
nursery task. Everything is alive at once in some rows and a hundred at a time in others, because
more that lives at once makes every collection of garbage dearer, for us and for bare tasks.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import anyio
import anyio.lowlevel
from _measure import Row, arguments, backends, finish, interleaved, ratio_row, resident_bytes

from treewarden.actors import Actor, LoopClock, RootSupervisor
from treewarden.ledgers import Caps, Kind, TreeLedger

UNLIMITED = Caps(
    max_depth=8, max_subagents=None, max_concurrent_subagents=None, max_concurrent_calls=None
)
CARVE = 1_000


def new_ledger() -> TreeLedger:
    return TreeLedger(unit="tokens", max=10**12, caps=UNLIMITED)


async def noop() -> None:
    pass


async def leaf(_: Actor) -> None:
    pass


async def bare(count: int, at_once: int) -> float:
    began = time.process_time()
    for _ in range(count // at_once):
        async with anyio.create_task_group() as group:
            for _ in range(at_once):
                group.start_soon(noop)
    return time.process_time() - began


async def native(count: int, backend: str) -> float:
    began = time.process_time()
    if backend == "asyncio":
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                tasks.create_task(noop())
    else:
        import trio

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(noop)
    return time.process_time() - began


async def in_a_run(body: Any) -> float:
    """CPU of ``body`` inside a top-level run's actor."""
    root = await RootSupervisor.open(new_ledger(), LoopClock())
    took: list[float] = []

    async def run(actor: Actor) -> None:
        began = time.process_time()
        await body(actor)
        took.append(time.process_time() - began)

    actor = root.start(root.top, "run", run, kind=Kind.RUN)
    await actor.wait()
    await root.close()
    root.ledger.check_closed()
    if actor.error is not None:
        raise actor.error
    return took[0]


def start_agent(parent: Actor, body: Any) -> Actor:
    return parent.root.start(parent, "a", body, kind=Kind.AGENT, cap=CARVE)


async def leaves(count: int, at_once: int) -> float:
    return await batches(leaf, count, at_once)


async def pairs(count: int, at_once: int) -> float:
    """``count`` actors that each start one more and wait for it: twice as many in all."""

    async def parent(actor: Actor) -> None:
        await actor.root.start(actor, "c", leaf, kind=Kind.AGENT, cap=CARVE // 10).wait()

    return await batches(parent, count, at_once)


async def batches(body_of_each: Any, count: int, at_once: int) -> float:
    async def body(top: Actor) -> None:
        for _ in range(count // at_once):
            for _ in range(at_once):
                start_agent(top, body_of_each)
            await top.wait_for_children()

    return await in_a_run(body)


async def parents(count: int) -> float:
    """``count`` actors in all: each parent has four children and outlives them."""

    async def family(parent: Actor) -> None:
        for _ in range(4):
            parent.root.start(parent, "c", leaf, kind=Kind.AGENT, cap=CARVE // 10)
        await parent.wait_for_children()

    async def body(top: Actor) -> None:
        for _ in range(count // 5):
            start_agent(top, family)
        await top.wait_for_children()

    return await in_a_run(body)


async def idle_bytes(count: int) -> float:
    """Memory of one actor that waits."""
    ready, taken = anyio.Event(), 0.0

    async def wait(_: Actor) -> None:
        await ready.wait()

    async def body(parent: Actor) -> None:
        nonlocal taken
        before = resident_bytes()
        for _ in range(count):
            start_agent(parent, wait)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        taken = (resident_bytes() - before) / count
        ready.set()
        await parent.wait_for_children()

    await in_a_run(body)
    return taken


def main() -> int:
    options = arguments(__doc__ or "")
    count, rounds = (200, 2) if options.quick else (2_000, 9)
    rows: list[Row] = []
    anchors: dict[str, dict[str, float]] = {}
    for backend in backends(options):

        def once(function: Any, *args: Any, backend: str = backend) -> Any:
            return lambda: anyio.run(function, *args, backend=backend) / count

        found = interleaved(
            {
                "bare": once(bare, count, count),
                "native": once(native, count, backend),
                "leaf": once(leaves, count, count),
                "parents": once(parents, count),
                "bare by 100": once(bare, count, 100),
                "leaf by 100": once(leaves, count, 100),
                "pair by 100": once(pairs, count, 100),
            },
            rounds=rounds,
        )
        found["parent by 100"] = [
            pair - child
            for pair, child in zip(found["pair by 100"], found["leaf by 100"], strict=True)
        ]
        rows.append(ratio_row(f"{backend}: leaf actor / bare task", found, "leaf", "bare", 2.0))
        rows.append(
            ratio_row(f"{backend}: actor in families / bare task", found, "parents", "bare", 2.6)
        )
        for case, target in (("leaf by 100", 2.0), ("parent by 100", 2.6)):
            what = f"{backend}: {case} / bare task by 100"
            rows.append(ratio_row(what, found, case, "bare by 100", target))
        idle = anyio.run(idle_bytes, 500 if options.quick else 100_000, backend=backend)
        rows.append(Row(what=f"{backend}: KiB per idle actor", value=idle / 1024, target=8.0))
        anchors[backend] = {
            name: round(1e6 * sorted(times)[len(times) // 2], 2) for name, times in found.items()
        }
    return finish("actor", rows, {"cpu_us": anchors})


if __name__ == "__main__":
    sys.exit(main())
