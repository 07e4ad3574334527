"""One timer for all deadlines of a tree."""

from __future__ import annotations

from typing import Literal

import anyio
import pytest

from treewarden.actors import Actor, LoopClock, RootSupervisor, StopKind
from treewarden.ledgers import Caps, Kind, Outcome, TreeLedger
from treewarden.testing import VirtualClock

Backend = Literal["asyncio", "trio"]


def in_a_tree(backend: Backend, seconds: list[float | None], work: float) -> list[Actor]:
    """Actors that work for ``work`` seconds with these deadlines, after they have ended."""

    async def scenario() -> list[Actor]:
        caps = Caps(max_subagents=None, max_concurrent_subagents=None)
        root = await RootSupervisor.open(TreeLedger(caps=caps), LoopClock())

        async def body(_: Actor) -> float:
            await anyio.sleep(work)
            return anyio.current_time()

        actors = [
            root.start(root.top, "a", body, kind=Kind.RUN, seconds=limit) for limit in seconds
        ]
        for actor in actors:
            await actor.wait()
        await root.close()
        root.ledger.check_closed()
        return actors

    return VirtualClock().run(scenario, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_each_actor_is_stopped_at_its_own_instant_whatever_order_they_came_in(
    backend: Backend,
) -> None:
    actors = in_a_tree(backend, [30.0, 5.0, None, 20.0, 5.0], work=10.0)
    ends = [a.outcome for a in actors]
    late, ok = Outcome.CANCELLED, Outcome.OK
    assert ends == [ok, late, ok, ok, late]
    asked = actors[1].stop_asked
    assert asked is not None
    assert asked.kind is StopKind.DEADLINE


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_deadline_that_nobody_reaches_holds_nothing_up(backend: Backend) -> None:
    clock = VirtualClock()

    async def scenario() -> None:
        root = await RootSupervisor.open(TreeLedger(), LoopClock())

        async def body(_: Actor) -> None:
            await anyio.sleep(1)

        for _ in range(1_000):
            actor = root.start(root.top, "a", body, kind=Kind.RUN, seconds=3_600)
            await actor.wait()
        await root.close()

    clock.run(scenario, backend=backend)
    assert clock.monotonic() == 1_000
