"""Supervised services of an open tree, through the public surface."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

import treewarden as tw
from treewarden.protocols import JournalFailed
from treewarden.testing import Reply, ScriptedModel, VirtualClock

from ..scenarios.kit import Backend, both_backends

Told = list[tuple[float, str]]


def now() -> float:
    return VirtualClock.running().monotonic()


def lives(
    told: Told,
    name: str,
    *,
    clean_up: float = 0.0,
    fails_after: float | None = None,
    **options: Any,
) -> tw.ChildSpec:
    """A child that tells its starts and ends, and fails once where that is asked for."""
    fails = iter([fails_after])

    async def start(actor: tw.Actor) -> None:
        told.append((now(), f"{name} starts"))
        seconds = next(fails, None)
        if seconds is not None:
            await anyio.sleep(seconds)
            raise OSError(name)
        try:
            await anyio.sleep_forever()
        finally:
            told.append((now(), f"{name} is asked to end"))
            with anyio.CancelScope(shield=True):
                await anyio.sleep(clean_up)
            told.append((now(), f"{name} ends"))

    return tw.ChildSpec(name=name, start=start, **options)


def crasher(*, every: float = 1.0, name: str = "crasher") -> tw.ChildSpec:
    async def start(_: tw.Actor) -> None:
        await anyio.sleep(every)
        raise OSError("gone")

    return tw.ChildSpec(name=name, start=start)


def slow_agent() -> tw.Agent:
    model = ScriptedModel(lambda _: Reply("done", delay=100))
    return tw.agent(id="slow", instructions="Be slow.", model=model)


def in_virtual_time(main: Callable[[], Awaitable[None]], backend: Backend) -> None:
    VirtualClock().run(main, backend=backend)


def tree(**options: Any) -> tw.Tree:
    return tw.open_tree(clock=VirtualClock.running(), seed=1, **options)


# --- restarts -------------------------------------------------------------------------------------


@both_backends
def test_the_later_ones_end_last_first_and_start_again_in_order_in_their_old_places(
    backend: Backend,
) -> None:
    told: Told = []

    async def main() -> None:
        children = [
            lives(told, "a"),
            lives(told, "b", fails_after=1),
            lives(told, "c", clean_up=1),
            lives(told, "d", clean_up=2),
        ]
        async with tree() as opened:
            service = opened.supervise(
                tw.Supervisor(children, strategy="rest_for_one"), name="services"
            )
            await service.wait_started()
            before = set(opened.ledger.state.nodes)
            await anyio.sleep(10)
            assert set(opened.ledger.state.nodes) == before
            assert opened.ledger.counters.restarts == 3
            assert service.faults == ()
            told.append((now(), "closing"))

    in_virtual_time(main, backend)
    assert told[: told.index((10.0, "closing"))] == [
        (0.0, "a starts"),
        (0.0, "b starts"),
        (0.0, "c starts"),
        (0.0, "d starts"),
        (1.0, "d is asked to end"),
        (3.0, "d ends"),
        (3.0, "c is asked to end"),
        (4.0, "c ends"),
        (4.0, "b starts"),
        (4.0, "c starts"),
        (4.0, "d starts"),
    ]


@both_backends
def test_one_failure_that_restarts_everybody_counts_once_against_the_intensity(
    backend: Backend,
) -> None:
    told: Told = []

    async def main() -> None:
        children = [lives(told, "a"), crasher(every=1), lives(told, "c")]
        intensity = tw.Intensity(restarts=2, period_seconds=60)
        supervisor = tw.Supervisor(children, strategy="one_for_all", intensity=intensity)
        with pytest.raises(tw.ServiceFailed, match="gone"):
            async with tree() as opened:
                service = opened.supervise(supervisor, name="services")
                with pytest.raises(tw.ServiceFailed):
                    await service.wait()
                assert now() == 3.0
                assert opened.ledger.counters.restarts == 6

    in_virtual_time(main, backend)
    assert [what for _, what in told].count("a starts") == 3


@both_backends
def test_a_run_that_an_incarnation_left_behind_ends_with_it(backend: Backend) -> None:
    streams: list[tw.RunStream] = []

    async def leave(_: tw.Actor) -> None:
        run = tw.stream(slow_agent(), "go")
        await run.__aenter__()  # and no exit: whoever wrote this forgot it
        streams.append(run)
        await anyio.sleep(1)
        raise OSError("gone")

    async def main() -> None:
        intensity = tw.Intensity(restarts=1, period_seconds=60)
        supervisor = tw.Supervisor([tw.ChildSpec(name="a", start=leave)], intensity=intensity)
        with pytest.raises(tw.ServiceFailed):
            async with tree() as opened:
                with pytest.raises(tw.ServiceFailed):
                    await opened.supervise(supervisor, name="services").wait()
                assert opened.ledger.counters.runs == 2
        for run in streams:
            with pytest.raises(tw.RunCancelled, match=r"root/services#1/a#1 has ended"):
                await run.result()
        assert now() == 2.0

    in_virtual_time(main, backend)


@both_backends
def test_a_failed_supervisor_is_started_again_by_the_one_above_with_new_children(
    backend: Backend,
) -> None:
    paths: list[str] = []

    async def fail(actor: tw.Actor) -> None:
        paths.append(actor.path)
        await anyio.sleep(1)
        raise OSError("gone")

    async def main() -> None:
        inner = tw.Supervisor(
            [tw.ChildSpec(name="a", start=fail)], intensity=tw.Intensity(1, period_seconds=60)
        )
        outer = tw.Supervisor(
            [tw.ChildSpec(name="inner", start=inner)], intensity=tw.Intensity(1, period_seconds=60)
        )
        with pytest.raises(tw.ServiceFailed, match="gone"):
            async with tree() as opened:
                with pytest.raises(tw.ServiceFailed, match="gone"):
                    await opened.supervise(outer, name="services").wait()
                # Budgets of restarts multiply up the tree.
                assert now() == 4.0

    in_virtual_time(main, backend)
    inner = "root/services#1/inner#1"
    assert paths == [f"{inner}/a#1", f"{inner}/a#1", f"{inner}/a#2", f"{inner}/a#2"]


# --- ends -----------------------------------------------------------------------------------------


@both_backends
def test_a_laggard_holds_up_the_next_no_longer_than_its_patience_and_is_waited_for(
    backend: Backend,
) -> None:
    told: Told = []

    async def main() -> None:
        children = [
            lives(told, "a", clean_up=1),
            lives(told, "b", clean_up=20, shutdown_seconds=3),
            lives(told, "c", clean_up=2),
        ]
        async with tree() as opened:
            service = opened.supervise(tw.Supervisor(children), name="services")
            await service.wait_started()
            service.stop("enough")
            await service.wait()
            assert service.faults == (
                "root/services#1/b#2 did not end within 3 s of being asked to",
            )

    in_virtual_time(main, backend)
    assert told[3:] == [
        (0.0, "c is asked to end"),
        (2.0, "c ends"),
        (2.0, "b is asked to end"),
        (5.0, "a is asked to end"),
        (6.0, "a ends"),
        (22.0, "b ends"),
    ]


@both_backends
def test_leaving_the_tree_stops_services_in_order_and_a_deadline_all_at_once(
    backend: Backend,
) -> None:
    def ends(told: Told) -> list[tuple[float, str]]:
        return [(at, what[0]) for at, what in told if what.endswith("is asked to end")]

    async def main() -> None:
        left, struck = Told(), Told()
        children = [lives(left, "a", clean_up=1), lives(left, "b", clean_up=1)]
        async with tree() as opened:
            await opened.supervise(tw.Supervisor(children), name="services").wait_started()
        assert ends(left) == [(0.0, "b"), (1.0, "a")]

        children = [lives(struck, "a", clean_up=1), lives(struck, "b", clean_up=1)]
        async with tree(limits=tw.Limits(deadline=5)) as opened:
            await opened.supervise(tw.Supervisor(children), name="services").wait()
        assert sorted(ends(struck)) == [(7.0, "a"), (7.0, "b")]

    in_virtual_time(main, backend)


@both_backends
def test_a_journal_that_cannot_be_written_waits_for_nobodys_turn(backend: Backend) -> None:
    told: Told = []

    def disk(event: object) -> None:
        if type(event).__name__ == "Held":
            raise OSError("disk full")

    async def main() -> None:
        children = [lives(told, "a", clean_up=1), lives(told, "b", clean_up=1)]
        opened = tree(journal=disk)
        with pytest.raises(JournalFailed):
            async with opened:
                service = opened.supervise(tw.Supervisor(children), name="services")
                await service.wait_started()
                with pytest.raises(tw.RunError):
                    await opened.run(slow_agent(), "go")
                await service.wait()
        assert now() == 1.0

    in_virtual_time(main, backend)
    assert sorted(what for _, what in told[2:4]) == ["a is asked to end", "b is asked to end"]


@both_backends
def test_when_a_service_fails_the_runs_of_its_tree_are_stopped_with_that_reason(
    backend: Backend,
) -> None:
    async def main() -> None:
        supervisor = tw.Supervisor([crasher()], intensity=tw.Intensity(restarts=0))
        with pytest.raises(tw.ServiceFailed, match=r"root/services#1 failed: OSError\('gone'\)"):
            async with tree() as opened:
                opened.supervise(supervisor, name="services")
                with pytest.raises(tw.RunCancelled, match="services#1 failed") as cancelled:
                    await opened.run(slow_agent(), "go")
                assert now() == 1.0
                assert "services#1 failed" in (cancelled.value.receipt.reason or "")
                with pytest.raises(tw.ServiceFailed):
                    await opened.run(slow_agent(), "go")
                with pytest.raises(tw.ServiceFailed):
                    opened.supervise(supervisor, name="more")

    in_virtual_time(main, backend)


@both_backends
def test_a_stopped_service_is_no_failure_and_the_tree_goes_on(backend: Backend) -> None:
    async def main() -> None:
        told = Told()
        async with tree() as opened:
            service = opened.supervise(tw.Supervisor([lives(told, "a")]), name="services")
            service.stop("before its first step")
            await service.wait()
            assert service.is_over
            assert told == []
            again = opened.supervise(tw.Supervisor([lives(told, "a")]), name="services")
            await again.wait_started()
            assert (service.path, again.path) == ("root/services#1", "root/services#2")

    in_virtual_time(main, backend)


def test_a_child_that_is_killed_natively_is_started_again_and_its_siblings_never_notice() -> None:
    async def main() -> None:
        told, tasks = Told(), dict[str, asyncio.Task[object]]()

        async def victim(actor: tw.Actor) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks[actor.path] = task
            told.append((now(), "victim starts"))
            await anyio.sleep_forever()

        children = [
            tw.ChildSpec(name="victim", start=victim, restart="transient"),
            lives(told, "sibling"),
        ]
        async with tree() as opened:
            service = opened.supervise(tw.Supervisor(children), name="services")
            await anyio.sleep(1)
            tasks["root/services#1/victim#1"].cancel()
            await anyio.sleep(1)
            assert told == [
                (0.0, "victim starts"),
                (0.0, "sibling starts"),
                (1.0, "victim starts"),
            ]
            assert opened.ledger.counters.restarts == 1
            assert not service.is_over

    in_virtual_time(main, "asyncio")


def test_a_supervisor_that_is_killed_below_another_one_is_started_again_in_its_place() -> None:
    async def main() -> None:
        told = Told()
        inner = tw.Supervisor([lives(told, "a", clean_up=1)])
        outer = tw.Supervisor([tw.ChildSpec(name="inner", start=inner)])
        async with tree() as opened:
            service = opened.supervise(outer, name="services")
            await service.wait_started()
            await anyio.sleep(1)
            path = f"{service.path}/inner#1"
            (task,) = [t for t in asyncio.all_tasks() if t.get_name() == path]
            task.cancel()
            await anyio.sleep(2)
            assert told == [
                (0.0, "a starts"),
                (1.0, "a is asked to end"),
                (2.0, "a ends"),
                (2.0, "a starts"),
            ]
            places = [node.path for node in opened.ledger.state.nodes.values()]
            assert places[2:] == [path, f"{path}/a#2"]

    in_virtual_time(main, "asyncio")


def test_a_child_that_is_killed_while_it_keeps_its_place_is_started_again() -> None:
    async def main() -> None:
        told = Told()

        async def once(_: tw.Actor) -> None:
            told.append((now(), "once starts"))

        children = [tw.ChildSpec(name="once", start=once, restart="transient"), lives(told, "b")]
        async with tree() as opened:
            service = opened.supervise(
                tw.Supervisor(children, strategy="rest_for_one"), name="services"
            )
            await anyio.sleep(1)
            path = f"{service.path}/once#1"
            (task,) = [t for t in asyncio.all_tasks() if t.get_name() == path]
            task.cancel()
            await anyio.sleep(1)
            assert opened.ledger.counters.restarts == 2
            assert (1.0, "once starts") in told
            assert told[-1] == (1.0, "b starts")

    in_virtual_time(main, "asyncio")


def test_a_service_that_is_killed_natively_ends_its_tree_loudly() -> None:
    async def main() -> None:
        told = Told()
        with pytest.raises(tw.ServiceFailed, match="its task was cancelled from outside"):
            async with tree() as opened:
                service = opened.supervise(tw.Supervisor([lives(told, "a")]), name="services")
                await service.wait_started()
                (task,) = [t for t in asyncio.all_tasks() if t.get_name() == service.path]
                task.cancel()
                with pytest.raises(tw.RunCancelled, match="services#1 failed"):
                    await opened.run(slow_agent(), "go")
                assert told[-1] == (0.0, "a ends")

    in_virtual_time(main, "asyncio")


# --- messages -------------------------------------------------------------------------------------


@both_backends
def test_a_child_that_starts_again_reads_nothing_that_was_meant_for_its_earlier_life(
    backend: Backend,
) -> None:
    read: list[str] = []

    async def reader(actor: tw.Actor) -> None:
        while True:
            letter = await actor.receive()
            read.append(letter.message)
            await anyio.sleep(1)
            if letter.message == "crash":
                raise OSError("gone")

    async def main() -> None:
        async with tree() as opened:
            service = opened.supervise(
                tw.Supervisor([tw.ChildSpec(name="a", start=reader)]), name="services"
            )
            await service.wait_started()
            for message in ("crash", "never read"):
                service.send("a", message)
            with pytest.raises(tw.ActorStopped):
                await service.ask("a", "a question to the one that crashes")
            await anyio.sleep(0.5)
            service.send("a", "hello")
            await anyio.sleep(1)

    in_virtual_time(main, backend)
    assert read == ["crash", "hello"]


@both_backends
def test_a_full_mailbox_refuses_and_takes_again_when_it_was_read(backend: Backend) -> None:
    async def slow_reader(actor: tw.Actor) -> None:
        while True:
            await anyio.sleep(1)
            await actor.receive()

    async def main() -> None:
        async with tree() as opened:
            service = opened.supervise(
                tw.Supervisor([tw.ChildSpec(name="a", start=slow_reader)]), name="services"
            )
            await service.wait_started()
            for number in range(64):
                service.send("a", number)
            with pytest.raises(tw.MailboxFull, match="a#1 has 64 unread messages"):
                service.send("a", 64)
            await anyio.sleep(1.5)
            service.send("a", 64)
            with pytest.raises(tw.UsageError, match="has no child 'b'"):
                service.send("b", 0)

    in_virtual_time(main, backend)


@both_backends
def test_an_asker_who_waits_for_room_has_his_turn_and_who_gives_up_leaves_nothing(
    backend: Backend,
) -> None:
    read: list[object] = []
    replies: list[tuple[float, str]] = []

    async def slow_reader(actor: tw.Actor) -> None:
        await anyio.sleep(10)
        while True:
            letter = await actor.receive()
            read.append(letter.message)
            await anyio.sleep(1)
            letter.reply(f"reply to {letter.message}")

    async def main() -> None:
        async with tree() as opened:
            service = opened.supervise(
                tw.Supervisor([tw.ChildSpec(name="a", start=slow_reader)]), name="services"
            )
            await service.wait_started()
            for number in range(64):
                service.send("a", number)

            async def ask(question: str) -> None:
                reply = await service.ask("a", question, when_full="wait")
                replies.append((now(), reply))

            async with anyio.create_task_group() as group:
                group.start_soon(ask, "first")
                with anyio.move_on_after(1):
                    await service.ask("a", "given up", when_full="wait")
                group.start_soon(ask, "second")
                await anyio.sleep(8)
                with pytest.raises(tw.MailboxFull):
                    await service.ask("a", "refused")
                await anyio.sleep(1.5)  # one was read, and its room is the first asker's
                with pytest.raises(tw.MailboxFull):
                    service.send("a", "later")

    in_virtual_time(main, backend)
    assert read == [*range(64), "first", "second"]
    assert replies == [(75.0, "reply to first"), (76.0, "reply to second")]


@both_backends
def test_whoever_waits_for_room_is_told_when_the_child_ends(backend: Backend) -> None:
    told: Told = []

    async def main() -> None:
        async with tree() as opened:
            supervisor = tw.Supervisor([crasher(every=5), crasher(every=100, name="b")])
            service = opened.supervise(supervisor, name="services")
            await service.wait_started()

            async def ask(name: str) -> None:
                with pytest.raises(tw.ActorStopped):
                    await service.ask(name, "hello", when_full="wait")
                told.append((now(), name))

            async with anyio.create_task_group() as group:
                for name in ("crasher", "b"):
                    for number in range(64):
                        service.send(name, number)
                    group.start_soon(ask, name)
                await anyio.sleep(7)
                service.stop("enough")
            with pytest.raises(tw.UsageError, match="when_full is 'drop'"):
                await service.ask("b", "hello", when_full=cast("Any", "drop"))

    in_virtual_time(main, backend)
    assert told == [(5.0, "crasher"), (7.0, "b")]


@both_backends
def test_a_stop_is_no_message_and_an_answer_after_it_is_dropped(backend: Backend) -> None:
    async def stubborn(actor: tw.Actor) -> None:
        letter = await actor.receive()
        try:
            await anyio.sleep(60)
        finally:
            letter.reply("too late")
            with pytest.raises(tw.ActorStopped):
                await actor.receive()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(4)

    async def main() -> None:
        async with tree() as opened:
            service = opened.supervise(
                tw.Supervisor([tw.ChildSpec(name="a", start=stubborn)]), name="services"
            )
            await service.wait_started()

            async def ask() -> None:
                with pytest.raises(tw.ActorStopped):
                    await service.ask("a", "hello")
                assert now() == 1.0

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await anyio.sleep(1)
                service.stop("enough")
            await service.wait()
            assert now() == 5.0

    in_virtual_time(main, backend)


# --- what cannot be -------------------------------------------------------------------------------


async def idle(_: tw.Actor) -> None:
    await anyio.lowlevel.checkpoint()


def shut_down_within(seconds: Any) -> tw.ChildSpec:
    return tw.ChildSpec(name="a", start=idle, shutdown_seconds=seconds)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: tw.Supervisor([], strategy="all_for_one"), '"one_for_all", "rest_for_one"'),
        (lambda: tw.ChildSpec(name="a", start=idle, restart="always"), '"permanent", "transient"'),
        (lambda: tw.ChildSpec(name="a/b", start=idle), "a service's name is 'a/b'"),
        (lambda: tw.ChildSpec(name="a", start=idle, shutdown_seconds=-1), "shutdown_seconds of a"),
        (lambda: tw.Supervisor([tw.ChildSpec(name="a", start=idle)] * 2), "a is there more than"),
        (lambda: shut_down_within("5"), "shutdown_seconds of a is '5'"),
        (lambda: shut_down_within(True), "shutdown_seconds of a is True"),
        (lambda: tw.Supervisor(cast("Any", ["a"])), "'a' is no child"),
        (lambda: tw.Supervisor([], intensity=cast("Any", 3)), "intensity is 3"),
        (lambda: tw.Intensity(restarts=-1), "restarts is -1"),
        (lambda: tw.Intensity(period_seconds=cast("Any", "5")), "period_seconds is '5'"),
        (lambda: tw.Intensity(period_seconds=float("nan")), "period_seconds is nan"),
        (lambda: tw.Intensity(period_seconds=0), "period_seconds is 0"),
    ],
)
def test_what_cannot_be_is_said_at_once(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(tw.UsageError, match=complaint):
        make()
