"""What supervisors decide (pure), and a supervisor at work in virtual time."""

from __future__ import annotations

import asyncio
from typing import Literal

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import treewarden as tw
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
    running_backend,
)
from treewarden.ledgers import Kind, Outcome, TreeLedger
from treewarden.testing import VirtualClock

from ..scenarios.kit import Backend, both_backends
from .otp import How, Otp, Script, Tie, Trace

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


def test_a_temporary_child_is_stopped_for_another_ones_sake_and_not_started_again() -> None:
    made = plan_after_end(
        Strategy.ONE_FOR_ALL,
        CHILDREN,
        "b",
        restart=Restart.PERMANENT,
        failed=True,
        intensity=Intensity(),
        restarted_at=[],
        now=100.0,
        temporary=frozenset("c"),
    )
    assert (made.stop, made.start) == (("c", "a"), ("a", "b"))


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


# --- against a naive model of OTP ----------------------------------------------------------------

TICKS_PER_SECOND = 64
"""A power of two: instants are exact."""

HOWS: tuple[How, ...] = ("returns", "raises", "is killed")
LIVES = st.tuples(st.integers(1, 2_000), st.sampled_from(HOWS))


@st.composite
def supervised_scripts(draw: st.DrawFn) -> tuple[Script, ...]:
    """Up to four children that start, end and are stopped in every way."""
    return tuple(
        Script(
            name,
            draw(st.sampled_from(["permanent", "permanent", "transient", "temporary"])),
            tuple(draw(st.lists(LIVES, max_size=4))),
            draw(st.sampled_from([0, 0, 1, 7, 130])),
        )
        for name in "abcd"[: draw(st.integers(1, 4))]
    )


class Played:
    """The same scripts, played by children of ours."""

    def __init__(self) -> None:
        self.trace: Trace = []

    def note(self, what: str, who: str) -> None:
        tick = VirtualClock.running().monotonic() * TICKS_PER_SECOND
        assert tick == int(tick), tick
        self.trace.append((int(tick), what, who))

    def child(self, script: Script) -> tw.ChildSpec:
        lives = iter(script.lives)

        async def start(actor: tw.Actor) -> None:
            self.note("starts", script.name)
            ticks, how = next(lives, (None, "is killed"))
            try:
                if ticks is None:
                    await anyio.sleep_forever()
                else:
                    await anyio.sleep(ticks / TICKS_PER_SECOND)
            except anyio.get_cancelled_exc_class():
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(script.clean_up / TICKS_PER_SECOND)
                self.note("is stopped", script.name)
                raise
            self.note(how, script.name)
            if how == "is killed" and (task := native_task()) is not None:
                task.cancel()
                await anyio.lowlevel.checkpoint()
            elif how != "returns":
                raise OSError(script.name)

        return tw.ChildSpec(name=script.name, start=start, restart=script.restart)


def native_task() -> asyncio.Task[object] | None:
    return asyncio.current_task() if running_backend() == "asyncio" else None


async def play(model: Otp) -> tuple[Trace, str, int]:
    played = Played()
    supervisor = tw.Supervisor(
        [played.child(script) for script in model.scripts],
        strategy=model.strategy,
        intensity=tw.Intensity(model.max_restarts, model.period / TICKS_PER_SECOND),
    )
    outcome, services = "over", list[tw.Service]()
    tree = tw.open_tree(clock=VirtualClock.running())
    try:
        async with tree:
            service = tree.supervise(supervisor, name="services")
            services.append(service)
            with anyio.move_on_after(model.until / TICKS_PER_SECOND):
                await service.wait()
            if not service.is_over:
                outcome = "stopped"
                service.stop()
            await service.wait()
    except tw.ServiceFailed:
        outcome = "failed"
    assert services[0].faults == ()
    tree.ledger.check_closed()
    return played.trace, outcome, tree.ledger.counters.restarts


@both_backends
@given(
    scripts=supervised_scripts(),
    strategy=st.sampled_from(["one_for_one", "one_for_all", "rest_for_one"]),
    max_restarts=st.integers(0, 4),
    period=st.sampled_from([64, 640, 6_400]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_happens_to_children_is_what_happens_in_otp(
    backend: Backend, scripts: tuple[Script, ...], strategy: str, max_restarts: int, period: int
) -> None:
    model = Otp(scripts, strategy, max_restarts, period, until=4_001)
    try:
        expected = model.run()
    except Tie:
        reject()
    trace, outcome, restarts = VirtualClock().run(play, model, backend=backend)
    assert trace == expected
    assert (outcome, restarts) == (model.outcome, model.restarts)
