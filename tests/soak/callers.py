"""Whoever asks a random tree for runs: each kind is a line in a table."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeAlias

import anyio
import attrs

import treewarden as tw
from treewarden.protocols import LedgerError, Receipt
from treewarden.testing import ScriptedModel

from .choices import FUNDING, one_of, some_of
from .trees import tokens_of

# What may come out of a run, a start or a steering call. Anything else is a bug.
ORDERLY = (
    tw.RunError,
    tw.RefusedError,
    tw.UsageError,
    tw.ActorStopped,
    tw.SupervisorCancelled,
    LedgerError,
)


@attrs.define(eq=False)
class Live:
    """A random tree while it lives."""

    seed: int
    unit: str
    agent: tw.Agent
    models: list[ScriptedModel]
    tree: tw.Tree
    # Streams that are open, by the name of who reads them.
    streams: dict[str, tw.RunStream] = attrs.field(factory=dict[str, tw.RunStream])
    # Scopes around callers, and on asyncio their tasks, by the same names.
    scopes: dict[str, anyio.CancelScope] = attrs.field(factory=dict[str, anyio.CancelScope])
    tasks: dict[str, asyncio.Task[Any] | None] = attrs.field(
        factory=dict[str, asyncio.Task[Any] | None]
    )
    # What the callers got.
    receipts: list[Receipt] = attrs.field(factory=list[Receipt])
    # Runs whose receipt nobody has got, because whoever asked for them was gone.
    untold: int = 0

    def budget(self, random: Random, *amounts: str) -> tw.Budget:
        """A ceiling of one of these amounts, in the tree's unit."""
        usd = random.choice(amounts)
        funding = some_of(FUNDING, random, chance=0.25)
        if self.unit == "usd":
            return tw.Budget(max_usd=usd, **funding)
        return tw.Budget(max_tokens=tokens_of(usd), **funding)

    def keep(self, receipt: Receipt) -> None:
        self.receipts.append(receipt)


Caller: TypeAlias = Callable[[Live, str, Random, dict[str, Any]], Awaitable[None]]


async def _waits(live: Live, name: str, random: Random, options: dict[str, Any]) -> None:
    try:
        live.keep((await live.tree.run(live.agent, "go", **options)).receipt)
    except tw.RunError as error:
        live.keep(error.receipt)
    except anyio.get_cancelled_exc_class():
        live.untold += 1
        raise


async def _reads_all(live: Live, name: str, random: Random, options: dict[str, Any]) -> None:
    await _read(live, name, options, most=10**9, pause=0.0)


async def _reads_slowly(live: Live, name: str, random: Random, options: dict[str, Any]) -> None:
    await _read(live, name, options, most=10**9, pause=random.choice((0.5, 3.0)))


async def _leaves_early(live: Live, name: str, random: Random, options: dict[str, Any]) -> None:
    await _read(live, name, options, most=random.randint(0, 12), pause=0.0)


async def _read(live: Live, name: str, options: dict[str, Any], *, most: int, pause: float) -> None:
    stream = live.tree.stream(live.agent, "go", **options)
    try:
        async with stream as run:
            live.streams[name] = run
            async for _ in run:
                most -= 1
                if most < 0:
                    break
                if pause:
                    await anyio.sleep(pause)
    finally:
        # Whatever cancels this reader, its run has ended, and says what it cost.
        if live.streams.pop(name, None) is not None:
            with anyio.CancelScope(shield=True):
                await _keep_result(live, stream)


async def _closes_elsewhere(live: Live, name: str, random: Random, options: dict[str, Any]) -> None:
    stream = live.tree.stream(live.agent, "go", **options)
    run = await stream.__aenter__()
    live.streams[name] = run
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_close_after, run, random.choice((0.0, 0.5, 2.0)))
            async for _ in run:
                pass
    finally:
        with anyio.CancelScope(shield=True):
            await run.aclose()
            live.streams.pop(name, None)
            await _keep_result(live, run)


async def _close_after(run: tw.RunStream, seconds: float) -> None:
    await anyio.sleep(seconds)
    await run.aclose()


async def _drops(live: Live, name: str, random: Random, options: dict[str, Any]) -> None:
    run = await live.tree.stream(live.agent, "go", **options).__aenter__()
    live.untold += 1
    for _ in range(random.randint(0, 5)):
        await anext(run, None)


async def _keep_result(live: Live, run: tw.RunStream) -> None:
    try:
        live.keep((await run.result()).receipt)
    except tw.RunError as error:
        live.keep(error.receipt)


async def _converses(live: Live, name: str, random: Random, options: dict[str, Any]) -> None:
    talk = tw.Conversation()
    for _ in range(random.randint(2, 3)):
        assert not talk.is_busy
        await _waits(live, name, random, {**options, "conversation": talk})
        assert not talk.is_busy, "a run has ended and its conversation is not free"


async def _shares_a_conversation(
    live: Live, name: str, random: Random, options: dict[str, Any]
) -> None:
    talk = tw.Conversation()
    for n in range(2):
        try:
            await _read(live, f"{name}-{n}", {**options, "conversation": talk}, most=3, pause=0.0)
        except ORDERLY:
            pass
        assert not talk.is_busy, "a run has ended and its conversation is not free"


CALLERS: dict[str, tuple[int, Caller]] = {
    "waits for the result": (4, _waits),
    "reads all": (3, _reads_all),
    "reads slowly": (1, _reads_slowly),
    "leaves early": (2, _leaves_early),
    "has it closed elsewhere": (1, _closes_elsewhere),
    "drops it": (1, _drops),
    "converses": (1, _converses),
    "shares a conversation": (1, _shares_a_conversation),
}


async def ask(live: Live, name: str, random: Random) -> None:
    """One caller, who may be cancelled by a scope around it or natively."""
    options: dict[str, Any] = {}
    if random.random() < 0.4:
        options["budget"] = live.budget(random, "0.05", "0.20", "0.60")
    if random.random() < 0.2:
        options["limits"] = tw.Limits(deadline=random.choice((0.5, 2.0, 10.0)))
    await anyio.sleep(random.choice((0.0, 0.0, 0.5, 1.0)))
    live.tasks[name] = task = native_task()
    try:
        with anyio.CancelScope() as scope:
            live.scopes[name] = scope
            await one_of(CALLERS, random)(live, name, random, options)
    except ORDERLY:
        pass
    except anyio.get_cancelled_exc_class():
        if task is None or not task.cancelling():
            raise
        # A disturbance did it natively: no scope of anybody has to be told.
        while task.cancelling():
            task.uncancel()
    finally:
        live.scopes.pop(name, None)
        live.tasks.pop(name, None)


def native_task() -> asyncio.Task[Any] | None:
    """The running task of asyncio; None on trio, which has no such cancellation."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
