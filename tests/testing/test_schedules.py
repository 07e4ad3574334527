"""Scenarios under many seeds: different orders come about, and what anyio promises holds in all."""

from __future__ import annotations

import asyncio
from typing import Literal

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import ObjectSendStream, SocketAttribute, SocketStream, TaskGroup, TaskStatus

from treewarden.testing import Schedules, VirtualClock, run_seeded

from .test_virtual import race

SEEDS = 200


def test_two_hundred_seeds_make_at_least_a_hundred_orders_on_each_backend() -> None:
    seen = run_seeded(race, order_of=tuple)
    print(seen)
    assert seen.runs == {"asyncio": 200, "trio": 200}
    assert seen.distinct["asyncio"] >= 100
    assert seen.distinct["trio"] >= 100


def test_a_report_reads_as_a_sentence() -> None:
    seen = Schedules(runs={"trio": 3}, distinct={"trio": 2})
    assert str(seen) == "trio: 3 runs, 2 distinct event orders"


def test_seeds_may_be_named_one_by_one() -> None:
    seen = run_seeded(race, seeds=iter([4, 4, 4]), order_of=tuple)
    assert seen.runs == {"asyncio": 3, "trio": 3}
    assert seen.distinct == {"asyncio": 1, "trio": 1}


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_failure_says_how_to_repeat_it(backend: Literal["asyncio", "trio"]) -> None:
    async def fragile() -> None:
        order = await race()
        assert order[0] != (3, 0), "three must not come first"

    with pytest.raises(AssertionError, match="three must not come first") as caught:
        run_seeded(fragile, backends=[backend], order_of=str)
    (note,) = caught.value.__notes__
    assert note.startswith(f"on {backend} with seed ")
    seed = int(note.partition("with seed ")[2].partition(";")[0])
    assert f"VirtualClock().run(scenario, backend={backend!r}, seed={seed})" in note
    with pytest.raises(AssertionError, match="three must not come first"):
        VirtualClock().run(fragile, backend=backend, seed=seed)
    for fine in range(seed):
        VirtualClock().run(fragile, backend=backend, seed=fine)


def test_each_run_has_a_clock_of_its_own() -> None:
    async def scenario() -> float:
        await anyio.sleep(1)
        return VirtualClock.running().monotonic()

    assert run_seeded(scenario, seeds=3, order_of=float).distinct == {"asyncio": 1, "trio": 1}


# What anyio promises holds in every order


def test_a_lock_admits_one_task_at_a_time_in_every_order() -> None:
    async def scenario() -> tuple[int, ...]:
        lock, inside, seen = anyio.Lock(), list[int](), list[int]()

        async def enter(number: int) -> None:
            await anyio.lowlevel.checkpoint()
            async with lock:
                assert inside == []
                inside.append(number)
                await anyio.lowlevel.checkpoint()
                inside.remove(number)
            seen.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(enter, number)
        return tuple(seen)

    seen = run_seeded(scenario, seeds=SEEDS, order_of=tuple)
    assert min(seen.distinct.values()) >= 100


def test_an_event_wakes_all_who_wait_in_every_order() -> None:
    async def scenario() -> tuple[int, ...]:
        event, woken = anyio.Event(), list[int]()

        async def wait(number: int) -> None:
            await event.wait()
            woken.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(wait, number)
            await anyio.sleep(1)
            event.set()
        assert sorted(woken) == [0, 1, 2, 3, 4, 5]
        return tuple(woken)

    seen = run_seeded(scenario, seeds=SEEDS, order_of=tuple)
    assert min(seen.distinct.values()) >= 100


def test_sleepers_of_one_instant_wake_in_many_orders_and_no_instant_early() -> None:
    async def scenario() -> tuple[int, ...]:
        woken: list[tuple[float, int]] = []

        async def sleep(number: int) -> None:
            await anyio.sleep(number // 3)
            woken.append((anyio.current_time(), number))

        async with anyio.create_task_group() as tasks:
            for number in range(9):
                tasks.start_soon(sleep, number)
        assert [now for now, _ in woken] == [0] * 3 + [1] * 3 + [2] * 3
        return tuple(number for _, number in woken)

    seen = run_seeded(scenario, seeds=SEEDS, order_of=tuple)
    assert min(seen.distinct.values()) >= 100


def test_a_message_stream_keeps_its_order_in_every_order() -> None:
    async def scenario() -> tuple[str, ...]:
        send, receive = anyio.create_memory_object_stream[str](2)
        got: list[str] = []

        async def produce(name: str, mine: ObjectSendStream[str]) -> None:
            async with mine:
                for number in range(4):
                    await mine.send(f"{name}{number}")

        async with anyio.create_task_group() as tasks:
            for name in "abc":
                tasks.start_soon(produce, name, send.clone())
            send.close()
            async with receive:
                async for item in receive:
                    got.append(item)
        for name in "abc":
            assert [item for item in got if item[0] == name] == [f"{name}{i}" for i in range(4)]
        return tuple(got)

    run_seeded(scenario, seeds=SEEDS, order_of=tuple)


def test_a_failing_child_cancels_its_siblings_and_is_raised_in_every_order() -> None:
    async def scenario() -> tuple[str, ...]:
        seen: list[str] = []

        async def fail() -> None:
            await anyio.lowlevel.checkpoint()
            raise LookupError("one")

        async def wait(name: str) -> None:
            try:
                await anyio.sleep(100)
            except anyio.get_cancelled_exc_class():
                seen.append(name)
                raise

        with pytest.raises(BaseExceptionGroup) as caught:
            async with anyio.create_task_group() as tasks:
                for name in "abc":
                    tasks.start_soon(wait, name)
                tasks.start_soon(fail)
        assert [type(error) for error in caught.value.exceptions] == [LookupError]
        assert anyio.current_time() == 0
        return tuple(seen)

    run_seeded(scenario, seeds=SEEDS, order_of=tuple)


def test_deadlines_and_shields_hold_in_every_order() -> None:
    async def scenario() -> tuple[str, ...]:
        seen: list[str] = []

        async def work(number: int) -> None:
            with anyio.move_on_after(number % 3 + 1) as scope:
                try:
                    await anyio.sleep_forever()
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(0.5)
                    seen.append(f"cleaned {number}")
            assert scope.cancelled_caught
            assert anyio.current_time() == number % 3 + 1.5
            seen.append(f"left {number}")

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(work, number)
        return tuple(seen)

    run_seeded(scenario, seeds=SEEDS, order_of=tuple)


def test_a_child_that_is_awaited_is_ready_in_every_order() -> None:
    async def scenario() -> tuple[int, ...]:
        started: list[int] = []

        async def serve(
            number: int, *, task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED
        ) -> None:
            await anyio.lowlevel.checkpoint()
            started.append(number)
            task_status.started(number)
            await anyio.sleep_forever()

        async def start(tasks: TaskGroup, number: int) -> None:
            assert await tasks.start(serve, number) == number
            assert number in started

        async with anyio.create_task_group() as servers:
            async with anyio.create_task_group() as tasks:
                for number in range(5):
                    tasks.start_soon(start, servers, number)
            servers.cancel_scope.cancel()
        return tuple(started)

    run_seeded(scenario, seeds=SEEDS, order_of=tuple)


def test_native_cancels_and_native_groups_behave_in_every_order() -> None:
    async def scenario() -> tuple[str, ...]:
        seen: list[str] = []

        async def work(name: str) -> None:
            try:
                async with asyncio.timeout(5):
                    await asyncio.sleep(3)
                seen.append(f"{name} done")
            except asyncio.CancelledError:
                seen.append(f"{name} cancelled")
                raise

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work(name)) for name in "abcd"]
            await asyncio.sleep(1)
            tasks[1].cancel()
            tasks[2].cancel()
        assert [task.cancelled() for task in tasks] == [False, True, True, False]
        assert sorted(seen) == ["a done", "b cancelled", "c cancelled", "d done"]
        return tuple(seen)

    run_seeded(scenario, seeds=SEEDS, backends=["asyncio"], order_of=tuple)


def test_a_done_callback_runs_before_whoever_awaits_the_task_in_every_order() -> None:
    async def scenario() -> tuple[str, ...]:
        seen: list[str] = []

        async def child(name: str) -> None:
            await asyncio.sleep(0)

        async def parent(name: str) -> None:
            task = asyncio.create_task(child(name))
            task.add_done_callback(lambda _: seen.append(f"{name} called back"))
            await task
            assert f"{name} called back" in seen
            seen.append(name)

        await asyncio.gather(*map(parent, "abcd"))
        return tuple(seen)

    run_seeded(scenario, seeds=SEEDS, backends=["asyncio"], order_of=tuple)


def test_callbacks_keep_the_order_they_were_scheduled_in() -> None:
    async def scenario() -> tuple[str, ...]:
        seen: list[str] = []
        loop = asyncio.get_running_loop()

        async def step(name: str) -> None:
            seen.append(name)
            loop.call_soon(seen.append, name.upper())
            await asyncio.sleep(0)
            assert name.upper() in seen, "a step overtook a callback scheduled before it"

        for number in range(5):
            loop.call_soon(seen.append, str(number))
        await asyncio.gather(*map(step, "abcdef"))
        callbacks = [name for name in seen if not name.islower()]
        steps = [name for name in seen if name.islower()]
        assert callbacks == [*"01234", *map(str.upper, steps)]
        return tuple(steps)

    seen = run_seeded(scenario, seeds=SEEDS, backends=["asyncio"], order_of=tuple)
    assert seen.distinct["asyncio"] >= 100


def test_timers_due_at_one_instant_fire_in_many_orders_and_others_in_theirs() -> None:
    async def scenario() -> tuple[int, ...]:
        fired: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(12):
            loop.call_at(number // 6 + 1, fired.append, number)
        await asyncio.sleep(3)
        assert sorted(fired[:6]) == [0, 1, 2, 3, 4, 5]
        return tuple(fired)

    seen = run_seeded(scenario, seeds=SEEDS, backends=["asyncio"], order_of=tuple)
    assert seen.distinct["asyncio"] >= 100


def test_timers_that_are_late_together_fire_by_their_times() -> None:
    async def scenario() -> tuple[int, ...]:
        fired: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(1, 7):
            loop.call_at(number, fired.append, number)
        VirtualClock.running().advance(10)
        await asyncio.sleep(1)
        assert fired == [1, 2, 3, 4, 5, 6]
        return tuple(fired)

    run_seeded(scenario, seeds=SEEDS, backends=["asyncio"], order_of=tuple)


def test_sockets_work_in_every_order() -> None:
    async def scenario() -> tuple[bytes, ...]:
        seen: list[bytes] = []

        async def echo(stream: SocketStream) -> None:
            async with stream:
                await stream.send(await stream.receive())

        async def talk(port: int, text: bytes) -> None:
            async with await anyio.connect_tcp("127.0.0.1", port) as client:
                await client.send(text)
                assert await client.receive() == text
                seen.append(text)

        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            port = listener.extra(SocketAttribute.local_port)
            async with anyio.create_task_group() as servers:
                servers.start_soon(listener.serve, echo)
                async with anyio.create_task_group() as clients:
                    for text in (b"a", b"b", b"c"):
                        clients.start_soon(talk, port, text)
                servers.cancel_scope.cancel()
        return tuple(seen)

    run_seeded(scenario, seeds=20, order_of=tuple)
