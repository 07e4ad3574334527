"""Whoever cancels while a supervised tree works, restarts or shuts down: nothing is left.

The scene has a service that fails and takes the later ones with it, a supervisor below the
supervisor, a question, runs inside services, a service that cleans up longer than its patience, and
an ordered end. Somebody cancels at each of its instants, in a run of its own.
"""

from __future__ import annotations

import anyio
import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel, VirtualClock, explore_cancellations


def worker() -> tw.Agent:
    model = ScriptedModel(lambda _: Reply(chunks=("a", "b"), chunk_delay=0.5, delay=0.5))
    return tw.agent(id="worker", instructions="Work.", model=model)


async def scenario_services() -> None:
    lives = 0

    async def relay(actor: tw.Actor) -> None:
        while True:
            letter = await actor.receive()
            await anyio.sleep(1)
            letter.reply(letter.message)

    async def crash_once(_: tw.Actor) -> None:
        nonlocal lives
        lives += 1
        await tw.run(worker(), "go")
        if lives == 1:
            raise OSError("once")
        await anyio.sleep_forever()

    async def dawdle(_: tw.Actor) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(2)

    async def runs(_: tw.Actor) -> None:
        async with anyio.create_task_group() as group:
            for _number in range(2):
                group.start_soon(tw.run, worker(), "go")

    below = tw.Supervisor(
        [tw.ChildSpec(name="runs", start=runs, restart="transient")], strategy="one_for_all"
    )
    supervisor = tw.Supervisor(
        [
            tw.ChildSpec(name="relay", start=relay),
            tw.ChildSpec(name="crasher", start=crash_once),
            tw.ChildSpec(name="dawdler", start=dawdle, shutdown_seconds=1),
            tw.ChildSpec(name="below", start=below, restart="transient"),
        ],
        strategy="rest_for_one",
    )
    async with tw.open_tree(clock=VirtualClock.running()) as tree:
        service = tree.supervise(supervisor, name="services")
        await service.wait_started()
        assert await service.ask("relay", "hello") == "hello"
        await anyio.sleep(3)
        service.stop("enough")
        await service.wait()


@pytest.mark.slow
def test_a_supervised_tree_is_clean_wherever_somebody_cancels() -> None:
    found = explore_cancellations(scenario_services)
    print(found)
    found.check()
