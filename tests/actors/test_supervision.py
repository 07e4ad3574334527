"""What supervisors decide (pure), and a supervisor at work in virtual time."""

from __future__ import annotations

from typing import Literal

import anyio
import pytest

from treewarden.actors import (
    Actor,
    ChildSpec,
    Intensity,
    LoopClock,
    Restart,
    RootSupervisor,
    Strategy,
    Supervisor,
    plan_after_end,
)
from treewarden.ledgers import Kind, Outcome, TreeLedger
from treewarden.testing import VirtualClock

CHILDREN = ("a", "b", "c")


def plan(
    strategy: Strategy,
    *,
    ended: str = "b",
    restart: Restart = Restart.PERMANENT,
    failed: bool = True,
    restarted_at: list[float] | None = None,
) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    made = plan_after_end(
        strategy,
        CHILDREN,
        ended,
        restart=restart,
        failed=failed,
        intensity=Intensity(restarts=3, period_seconds=10),
        restarted_at=restarted_at or [],
        now=100.0,
    )
    return made.stop, made.start, made.escalate


def test_one_for_one_starts_the_ended_child_again_and_touches_nobody_else() -> None:
    assert plan(Strategy.ONE_FOR_ONE) == ((), ("b",), False)


def test_rest_for_one_stops_the_later_ones_last_first_and_starts_them_in_order() -> None:
    assert plan(Strategy.REST_FOR_ONE) == (("c",), ("b", "c"), False)


def test_one_for_all_stops_everybody_last_first_and_starts_them_in_order() -> None:
    assert plan(Strategy.ONE_FOR_ALL) == (("c", "a"), ("a", "b", "c"), False)


@pytest.mark.parametrize(
    ("restart", "failed", "comes_back"),
    [
        (Restart.PERMANENT, True, True),
        (Restart.PERMANENT, False, True),
        (Restart.TRANSIENT, True, True),
        (Restart.TRANSIENT, False, False),
        (Restart.TEMPORARY, True, False),
        (Restart.TEMPORARY, False, False),
    ],
)
def test_the_restart_kind_says_who_comes_back(
    restart: Restart, failed: bool, comes_back: bool
) -> None:
    _, start, _ = plan(Strategy.ONE_FOR_ONE, restart=restart, failed=failed)
    assert (start == ("b",)) is comes_back


def test_the_fourth_restart_within_the_period_escalates() -> None:
    assert plan(Strategy.ONE_FOR_ONE, restarted_at=[91.0, 95.0]) == ((), ("b",), False)
    assert plan(Strategy.ONE_FOR_ONE, restarted_at=[91.0, 95.0, 99.0]) == (("c", "a"), (), True)


def test_restarts_before_the_period_are_forgotten() -> None:
    assert plan(Strategy.ONE_FOR_ONE, restarted_at=[1.0, 2.0, 90.0]) == ((), ("b",), False)


async def _supervised(supervisor: Supervisor) -> tuple[Actor, TreeLedger]:
    ledger = TreeLedger()
    root = await RootSupervisor.open(ledger, LoopClock())
    actor = root.start(root.top, "pool", supervisor, kind=Kind.SERVICE)
    await actor.wait()
    await root.close()
    ledger.check_closed()
    return actor, ledger


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_child_that_fails_at_once_is_restarted_three_times_and_then_escalates(
    backend: Literal["asyncio", "trio"],
) -> None:
    starts = 0

    async def crash(actor: Actor) -> None:
        nonlocal starts
        starts += 1
        raise OSError("no such worker")

    supervisor = Supervisor(
        (ChildSpec(name="worker", start=crash),),
        intensity=Intensity(restarts=3, period_seconds=10),
    )
    actor, ledger = VirtualClock().run(_supervised, supervisor, backend=backend)
    assert starts == 4
    assert ledger.counters.restarts == 3
    assert actor.outcome is Outcome.FAILED
    assert isinstance(actor.error, OSError)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_child_that_fails_slowly_goes_on_being_restarted(
    backend: Literal["asyncio", "trio"],
) -> None:
    starts = 0

    async def crash_every_11_seconds(actor: Actor) -> None:
        nonlocal starts
        starts += 1
        if starts > 20:
            return
        await anyio.sleep(11)
        raise OSError("again")

    child = ChildSpec(name="w", start=crash_every_11_seconds, restart=Restart.TRANSIENT)
    supervisor = Supervisor((child,), intensity=Intensity(restarts=3, period_seconds=10))
    actor, ledger = VirtualClock().run(_supervised, supervisor, backend=backend)
    assert actor.outcome is Outcome.OK
    assert ledger.counters.restarts == 20


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_escalation_stops_the_siblings_before_the_supervisor_fails(
    backend: Literal["asyncio", "trio"],
) -> None:
    ended: list[str] = []

    async def live(actor: Actor) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(actor.path)

    async def crash(actor: Actor) -> None:
        await anyio.sleep(1)
        raise OSError("gone")

    supervisor = Supervisor(
        (ChildSpec(name="steady", start=live), ChildSpec(name="crasher", start=crash)),
        intensity=Intensity(restarts=1, period_seconds=60),
    )
    actor, _ = VirtualClock().run(_supervised, supervisor, backend=backend)
    assert ended == ["root/pool#1/steady#1"]
    assert actor.outcome is Outcome.FAILED
