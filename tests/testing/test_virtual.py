"""Virtual time, on both backends: by a run of its own, and installed into a running loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import import_module
from pathlib import Path
from typing import Literal

import anyio
import anyio.lowlevel
import pytest
import trio
import trio.testing
from anyio.abc import SocketAttribute, SocketStream
from anyio.lowlevel import EventLoopToken
from hypothesis import given
from hypothesis import strategies as st

from treewarden.actors import Clock, LoopClock, running_backend
from treewarden.testing import DeadlockError, VirtualClock

Backend = Literal["asyncio", "trio"]
BACKENDS: tuple[Backend, ...] = ("asyncio", "trio")
HOUR = 3600.0
ROOT = Path(__file__).parents[2]

# Far above what any of these takes, far below what it would take in real time.
NO_TIME = 5.0

on_each_backend = pytest.mark.parametrize("backend", BACKENDS)
inside_each_loop = pytest.mark.parametrize("anyio_backend", BACKENDS)


class Stopwatch:
    def __init__(self) -> None:
        self.start = time.perf_counter()

    def real(self) -> float:
        return time.perf_counter() - self.start


async def never() -> None:
    await anyio.Event().wait()


# Running a program in virtual time


@on_each_backend
def test_sleeping_a_thousand_hours_takes_no_real_time(backend: Backend) -> None:
    watch, clock = Stopwatch(), VirtualClock()

    async def sleep_often() -> None:
        for _ in range(1000):
            await anyio.sleep(HOUR)

    clock.run(sleep_often, backend=backend)
    assert clock.monotonic() == 1000 * HOUR
    assert watch.real() < NO_TIME


@on_each_backend
@given(
    start=st.floats(0, 1e12),
    delays=st.lists(st.floats(0, 1e7), min_size=1, max_size=5),
)
def test_a_sleep_ends_at_exactly_its_time(
    backend: Backend, start: float, delays: list[float]
) -> None:
    async def ends() -> list[tuple[float, float]]:
        seen: list[tuple[float, float]] = []
        for delay in delays:
            due = anyio.current_time() + delay
            await anyio.sleep(delay)
            seen.append((anyio.current_time(), due))
        return seen

    assert all(now == due for now, due in VirtualClock(start).run(ends, backend=backend))


@on_each_backend
def test_a_deadline_cancels_at_exactly_its_time(backend: Backend) -> None:
    clock = VirtualClock(0.1)

    async def time_out() -> float:
        with anyio.CancelScope(deadline=0.3) as scope:
            await never()
        assert scope.cancelled_caught
        return anyio.current_time()

    assert clock.run(time_out, backend=backend) == 0.3


@on_each_backend
def test_the_clock_and_the_loop_tell_the_same_time(backend: Backend) -> None:
    clock = VirtualClock(12.5)

    async def readings() -> list[tuple[float, float]]:
        seen = [(clock.monotonic(), anyio.current_time())]
        await anyio.sleep(0.7)
        return [*seen, (clock.monotonic(), anyio.current_time())]

    assert clock.run(readings, backend=backend) == [(12.5, 12.5), (13.2, 13.2)]


@on_each_backend
def test_the_wall_clock_is_a_fixed_day_plus_virtual_time(backend: Backend) -> None:
    clock = VirtualClock()
    new_year_2020 = 1_577_836_800 * 10**9
    assert clock.wall_ns() == new_year_2020
    clock.run(anyio.sleep, 0.1, backend=backend)
    assert clock.wall_ns() == new_year_2020 + 100_000_000


@on_each_backend
def test_a_second_run_goes_on_where_the_first_ended(backend: Backend) -> None:
    clock = VirtualClock()
    clock.run(anyio.sleep, 1, backend=backend)
    clock.run(anyio.sleep, 2, backend=backend)
    assert clock.monotonic() == 3


@on_each_backend
def test_time_moved_by_hand_fires_what_is_due(backend: Backend) -> None:
    clock = VirtualClock(patience=NO_TIME)

    async def program() -> float:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 10)
            await anyio.wait_all_tasks_blocked()
            clock.advance(25)
        return anyio.current_time()

    # On asyncio wait_all_tasks_blocked() sleeps for a tenth of a second before it looks again.
    assert clock.run(program, backend=backend) == pytest.approx(25, abs=0.11)


def test_time_cannot_be_moved_back_or_to_infinity() -> None:
    with pytest.raises(ValueError, match="cannot move by -1"):
        VirtualClock().advance(-1)
    with pytest.raises(ValueError, match="cannot move by inf"):
        VirtualClock().advance(float("inf"))


@on_each_backend
def test_a_program_gets_its_arguments_and_gives_its_result(backend: Backend) -> None:
    async def add(a: int, b: int) -> int:
        return a + b

    assert VirtualClock().run(add, 2, 3, backend=backend) == 5


@on_each_backend
def test_what_a_program_raises_is_what_run_raises(backend: Backend) -> None:
    error = LookupError("as it is")

    async def fail() -> None:
        await anyio.sleep(1)
        raise error

    with pytest.raises(LookupError) as caught:
        VirtualClock().run(fail, backend=backend)
    assert caught.value is error


@on_each_backend
def test_an_async_generator_left_open_is_closed(backend: Backend) -> None:
    closed: list[float] = []
    clock = VirtualClock()

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(clock.monotonic())

    kept = numbers()

    async def take_one() -> int:
        return await anext(kept)

    assert clock.run(take_one, backend=backend) == 1
    assert closed == [0.0]


def test_a_native_task_left_over_is_cancelled_and_may_clean_up_in_virtual_time() -> None:
    watch, clock = Stopwatch(), VirtualClock()
    left: list[asyncio.Task[None]] = []
    cleaned: list[float] = []

    async def linger() -> None:
        try:
            await asyncio.sleep(2 * HOUR)
        finally:
            await asyncio.sleep(HOUR)
            cleaned.append(clock.monotonic())

    async def leave() -> None:
        left.append(asyncio.create_task(linger()))
        await asyncio.sleep(1)

    clock.run(leave)
    assert cleaned == [1 + HOUR]
    assert left[0].cancelled()
    assert watch.real() < NO_TIME


@on_each_backend
def test_a_clock_drives_one_loop_at_a_time(backend: Backend) -> None:
    clock = VirtualClock()

    async def nested() -> None:
        with pytest.raises(RuntimeError, match="drives a loop already"):
            clock.run(never)
        with pytest.raises(RuntimeError, match="Already running"):
            VirtualClock().run(never)
        with pytest.raises(RuntimeError, match="another VirtualClock"), VirtualClock().installed():
            pass

    clock.run(nested, backend=backend)


@on_each_backend
def test_a_clock_can_be_used_again_after_a_failed_run(backend: Backend) -> None:
    clock = VirtualClock()
    for _ in range(2):
        with pytest.raises(DeadlockError):
            clock.run(never, backend=backend)


@on_each_backend
def test_installing_the_clock_that_runs_the_program_changes_nothing(backend: Backend) -> None:
    clock = VirtualClock()

    async def program() -> None:
        with clock.installed() as installed, clock.installed():
            assert installed is clock
            await anyio.sleep(HOUR)
        await anyio.sleep(HOUR)

    clock.run(program, backend=backend)
    assert clock.monotonic() == 2 * HOUR


@on_each_backend
def test_the_clock_of_a_run_can_be_found_inside_it(backend: Backend) -> None:
    clock = VirtualClock()

    async def find() -> VirtualClock:
        return VirtualClock.running()

    assert clock.run(find, backend=backend) is clock


@inside_each_loop
async def test_in_real_time_no_clock_is_found() -> None:
    with pytest.raises(RuntimeError, match="in real time"):
        VirtualClock.running()


# Deadlock


@on_each_backend
@pytest.mark.parametrize("wait", [never, anyio.sleep_forever])
def test_waiting_for_what_cannot_happen_is_an_error_that_says_where(
    backend: Backend, wait: Callable[[], Awaitable[None]]
) -> None:
    async def wait_here() -> None:
        await anyio.sleep(2)
        await wait()

    with pytest.raises(DeadlockError, match=r"virtual time 2\.0") as caught:
        VirtualClock().run(wait_here, backend=backend)
    assert caught.value.now == 2
    (line,) = caught.value.waiting
    assert "wait_here: " in line
    assert "test_virtual.py:" in line


@on_each_backend
def test_a_deadlock_names_every_task_that_waits(backend: Backend) -> None:
    async def wait_together() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(never, name="left")
            tasks.start_soon(never, name="right")

    with pytest.raises(DeadlockError) as caught:
        VirtualClock().run(wait_together, backend=backend)
    assert len(caught.value.waiting) == 3
    assert [line.partition(":")[0] for line in caught.value.waiting if "in never" in line] == [
        "left",
        "right",
    ]


@on_each_backend
def test_after_a_deadlock_the_clean_up_runs_in_virtual_time(backend: Backend) -> None:
    clock, cleaned = VirtualClock(), list[float]()

    async def clean_up() -> None:
        try:
            await never()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(HOUR)
                cleaned.append(anyio.current_time())

    with pytest.raises(DeadlockError):
        clock.run(clean_up, backend=backend)
    assert cleaned == [HOUR]


@on_each_backend
def test_a_deadlock_behind_a_shield_is_found_too(backend: Backend) -> None:
    async def shielded() -> None:
        with anyio.CancelScope(shield=True):
            await never()

    with pytest.raises(DeadlockError):
        VirtualClock().run(shielded, backend=backend)


@on_each_backend
def test_a_program_that_swallows_the_end_of_a_deadlock_does_not_hide_it(backend: Backend) -> None:
    async def swallow() -> str:
        try:
            await never()
        except BaseException:
            return "fine"
        return "never"

    with pytest.raises(DeadlockError):
        VirtualClock().run(swallow, backend=backend)


@on_each_backend
def test_a_deadlock_leaves_nothing_behind(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(DeadlockError):
        VirtualClock().run(never, backend=backend)
    gc.collect()  # an open socket or a lost coroutine would warn, and a warning is an error here
    assert caplog.records == []


# Seeds


async def race() -> tuple[tuple[int, int], ...]:
    """Six tasks take five steps each; the order in which they come through."""
    seen: list[tuple[int, int]] = []

    async def runner(number: int) -> None:
        for step in range(5):
            await anyio.lowlevel.checkpoint()
            seen.append((number, step))

    async with anyio.create_task_group() as tasks:
        for number in range(6):
            tasks.start_soon(runner, number)
    return tuple(seen)


async def race_of_the_cancelled() -> tuple[int, ...]:
    """Nine tasks are cancelled at once. Both backends keep them in a set, ordered by address."""
    seen: list[int] = []

    async def victim(number: int) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            seen.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(9):
            tasks.start_soon(victim, number)
        await anyio.sleep(1)
        tasks.cancel_scope.cancel()
    return tuple(seen)


@on_each_backend
@pytest.mark.parametrize("scenario", [race, race_of_the_cancelled])
def test_equal_seeds_give_equal_orders(
    backend: Backend, scenario: Callable[[], Awaitable[tuple[object, ...]]]
) -> None:
    for seed in range(5):
        seen = {VirtualClock().run(scenario, backend=backend, seed=seed) for _ in range(10)}
        assert len(seen) == 1


@on_each_backend
def test_a_seed_gives_the_same_order_in_another_process(backend: Backend) -> None:
    code = (
        "from tests.testing.test_virtual import VirtualClock, race_of_the_cancelled as race\n"
        f"print(VirtualClock().run(race, backend={backend!r}, seed=7))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    here = VirtualClock().run(race_of_the_cancelled, backend=backend, seed=7)
    assert there.stdout.strip() == str(here)


def test_a_seeded_run_leaves_the_scheduler_of_trio_as_it_was() -> None:
    inside = import_module("trio._core._run")
    before = inside._ALLOW_DETERMINISTIC_SCHEDULING, inside._r.getstate()
    VirtualClock().run(race, backend="trio", seed=1)
    assert (inside._ALLOW_DETERMINISTIC_SCHEDULING, inside._r.getstate()) == before


# The world outside


@on_each_backend
def test_a_quick_thread_takes_no_virtual_time(backend: Backend) -> None:
    clock = VirtualClock(patience=NO_TIME)

    async def call() -> float:
        with anyio.fail_after(HOUR):
            await anyio.to_thread.run_sync(time.sleep, 0.05)
        return anyio.current_time()

    assert clock.run(call, backend=backend) == 0


@on_each_backend
def test_a_deadline_around_a_stuck_thread_still_comes(backend: Backend) -> None:
    watch, clock, gate = Stopwatch(), VirtualClock(patience=0.02), threading.Event()

    async def call() -> float:
        with anyio.move_on_after(HOUR):
            await anyio.to_thread.run_sync(gate.wait, abandon_on_cancel=True)
        gate.set()
        return anyio.current_time()

    assert clock.run(call, backend=backend) == HOUR
    assert watch.real() < NO_TIME


@on_each_backend
def test_a_thread_may_sleep_in_virtual_time(backend: Backend) -> None:
    clock = VirtualClock(patience=0.05)

    async def call() -> float:
        with anyio.fail_after(2 * HOUR):
            await anyio.to_thread.run_sync(anyio.from_thread.run, anyio.sleep, HOUR)
        return anyio.current_time()

    assert clock.run(call, backend=backend) == HOUR


def report_after(seconds: float, report: Callable[[], object], to: EventLoopToken) -> None:
    time.sleep(seconds)
    anyio.from_thread.run_sync(report, token=to)


@on_each_backend
@pytest.mark.parametrize("timer", [HOUR, None])
def test_a_thread_of_ones_own_is_waited_for(backend: Backend, timer: float | None) -> None:
    async def program() -> float:
        done = anyio.Event()
        token = anyio.lowlevel.current_token()
        thread = threading.Thread(target=report_after, args=(0.25, done.set, token))
        thread.start()
        with anyio.fail_after(timer):
            await done.wait()
        thread.join()
        return anyio.current_time()

    assert VirtualClock(patience=NO_TIME).run(program, backend=backend) == 0


@on_each_backend
def test_a_thread_that_ends_without_a_word_leaves_a_deadlock(backend: Backend) -> None:
    async def program() -> None:
        threading.Thread(target=time.sleep, args=(0.05,)).start()
        await never()

    with pytest.raises(DeadlockError):
        VirtualClock().run(program, backend=backend)


class Writer(threading.Thread):
    """Lives long, has nothing to do, and says so."""

    idle = True

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(target=gate.wait)


@on_each_backend
def test_a_thread_that_is_idle_is_not_waited_for(backend: Backend) -> None:
    watch, gate = Stopwatch(), threading.Event()

    async def program() -> None:
        Writer(gate).start()
        await anyio.sleep(HOUR)
        await never()

    with pytest.raises(DeadlockError):
        VirtualClock(patience=60).run(program, backend=backend)
    gate.set()
    assert watch.real() < NO_TIME


@on_each_backend
def test_a_worker_thread_without_work_is_not_waited_for(backend: Backend) -> None:
    watch = Stopwatch()
    all_here = threading.Barrier(12)  # more at once than an earlier test may have left in a cache

    async def meet() -> None:
        await anyio.to_thread.run_sync(all_here.wait)

    async def program() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(12):
                tasks.start_soon(meet)
        await anyio.sleep(HOUR)
        await never()

    with pytest.raises(DeadlockError):
        VirtualClock(patience=60).run(program, backend=backend)
    assert watch.real() < NO_TIME


def test_a_call_in_an_executor_takes_no_virtual_time() -> None:
    async def call() -> float:
        async with asyncio.timeout(HOUR):
            await asyncio.to_thread(time.sleep, 0.05)
        return anyio.current_time()

    assert VirtualClock(patience=NO_TIME).run(call) == 0


@on_each_backend
def test_what_a_socket_has_to_say_is_heard_before_time_moves(backend: Backend) -> None:
    answers: list[bytes] = []

    async def echo(stream: SocketStream) -> None:
        async with stream:
            await stream.send(await stream.receive())

    async def talk() -> float:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            port = listener.extra(SocketAttribute.local_port)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listener.serve, echo)
                async with await anyio.connect_tcp("127.0.0.1", port) as client:
                    await client.send(b"hello")
                    with anyio.fail_after(HOUR):
                        answers.append(await client.receive())
                tasks.cancel_scope.cancel()
        return anyio.current_time()

    assert VirtualClock().run(talk, backend=backend) == 0
    assert answers == [b"hello"]


@on_each_backend
def test_with_patience_for_files_a_child_process_takes_no_virtual_time(backend: Backend) -> None:
    code = "import time; time.sleep(0.1); print('done')"

    async def call() -> tuple[bytes, float]:
        with anyio.fail_after(HOUR):
            finished = await anyio.run_process([sys.executable, "-I", "-S", "-c", code])
        return finished.stdout, anyio.current_time()

    clock = VirtualClock(io_patience=NO_TIME)
    assert clock.run(call, backend=backend) == (b"done\n", 0.0)


# Installed into a running loop


@inside_each_loop
async def test_an_installed_clock_makes_the_running_loop_virtual() -> None:
    watch, clock = Stopwatch(), VirtualClock()
    with clock.installed():
        start = anyio.current_time()
        assert clock.monotonic() == start
        await anyio.sleep(HOUR)
        assert anyio.current_time() == clock.monotonic() == start + HOUR
        with anyio.move_on_after(HOUR):
            await never()
        assert anyio.current_time() == start + HOUR + HOUR
    assert watch.real() < NO_TIME


@inside_each_loop
async def test_after_an_installed_clock_time_is_real_again() -> None:
    clock = VirtualClock()
    with clock.installed():
        await anyio.sleep(HOUR)
    watch, then = Stopwatch(), anyio.current_time()
    await anyio.sleep(0.05)
    assert watch.real() >= 0.04
    assert 0.04 <= anyio.current_time() - then < NO_TIME
    with pytest.raises(RuntimeError, match="in real time"):
        VirtualClock.running()


@inside_each_loop
async def test_a_loop_can_be_virtual_many_times() -> None:
    clock = VirtualClock()
    for _ in range(2000):  # would exhaust the stack, if each time were told by way of the last
        with clock.installed():
            await anyio.sleep(1)
    await anyio.sleep(0.001)
    assert clock.wall_ns() - VirtualClock().wall_ns() == pytest.approx(2000 * 1e9, abs=1e6)


@inside_each_loop
async def test_a_timer_keeps_the_delay_it_has_left() -> None:
    left: list[float] = []

    def look(scope: anyio.CancelScope) -> None:
        left.append(scope.deadline - anyio.current_time())

    with anyio.move_on_after(50) as scope:
        look(scope)
        with VirtualClock().installed():
            look(scope)
            await anyio.sleep(20)
            look(scope)
        look(scope)
    assert left == pytest.approx([50, 50, 30, 30], abs=1)
    assert not scope.cancelled_caught


@inside_each_loop
async def test_a_timer_set_before_fires_in_virtual_time() -> None:
    watch = Stopwatch()
    with anyio.move_on_after(HOUR) as scope, VirtualClock().installed():
        await anyio.sleep(HOUR + 1)
    assert scope.cancelled_caught
    assert watch.real() < NO_TIME


@inside_each_loop
async def test_other_tasks_of_the_loop_live_in_virtual_time_too() -> None:
    watch = Stopwatch()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, HOUR)
        with VirtualClock().installed():
            await anyio.sleep(HOUR + 1)
    assert watch.real() < NO_TIME


@inside_each_loop
async def test_nested_installs_of_a_clock_end_with_the_outermost() -> None:
    watch, clock = Stopwatch(), VirtualClock()
    with clock.installed():
        with clock.installed():
            await anyio.sleep(HOUR)
        await anyio.sleep(HOUR)
    assert watch.real() < NO_TIME
    with pytest.raises(RuntimeError, match="in real time"):
        VirtualClock.running()


@inside_each_loop
async def test_a_second_clock_is_refused_on_a_virtual_loop() -> None:
    with VirtualClock().installed():
        with pytest.raises(RuntimeError, match="another VirtualClock"), VirtualClock().installed():
            pass
        await anyio.sleep(HOUR)


@inside_each_loop
async def test_the_body_of_an_installed_clock_may_raise() -> None:
    clock = VirtualClock()
    with pytest.raises(LookupError), clock.installed():
        raise LookupError
    with pytest.raises(RuntimeError, match="in real time"):
        VirtualClock.running()


@inside_each_loop
async def test_with_no_timer_an_installed_clock_waits_for_a_thread() -> None:
    done = anyio.Event()
    token = anyio.lowlevel.current_token()
    with VirtualClock().installed():
        start = anyio.current_time()
        thread = threading.Thread(target=report_after, args=(0.25, done.set, token))
        thread.start()
        await done.wait()
        assert anyio.current_time() == start
    thread.join()


@inside_each_loop
async def test_an_installed_clock_takes_no_wait_for_a_deadlock() -> None:
    done = anyio.Event()
    token = anyio.lowlevel.current_token()
    # A thread from before the clock came: nothing tells that it has to do with this loop.
    thread = threading.Thread(target=report_after, args=(0.25, done.set, token))
    thread.start()
    with VirtualClock().installed():
        await done.wait()
    thread.join()


@inside_each_loop
async def test_threads_still_work_under_an_installed_clock() -> None:
    gate = threading.Event()
    with VirtualClock(patience=NO_TIME).installed(), anyio.fail_after(HOUR):
        start = anyio.current_time()
        assert await anyio.to_thread.run_sync(gate.wait, 0.05) is False
        assert anyio.current_time() == start


def test_a_run_under_a_mock_clock_is_refused() -> None:
    async def install() -> None:
        with pytest.raises(RuntimeError, match="MockClock"), VirtualClock().installed():
            pass

    trio.run(install, clock=trio.testing.MockClock(autojump_threshold=0))


# The clock of the tree follows


@on_each_backend
def test_a_loop_clock_made_before_follows_an_installed_clock(backend: Backend) -> None:
    async def readings() -> None:
        clock: Clock = LoopClock()
        assert running_backend() == backend
        with VirtualClock().installed():
            await anyio.sleep(HOUR)
            assert clock.monotonic() == anyio.current_time()
        assert abs(clock.monotonic() - anyio.current_time()) < NO_TIME
        assert abs(clock.wall_ns() - time.time_ns()) < NO_TIME * 1e9

    anyio.run(readings, backend=backend)


def test_a_loop_clock_needs_a_loop() -> None:
    with pytest.raises(anyio.NoEventLoopError):
        LoopClock()


def test_a_virtual_clock_is_a_clock_of_the_tree() -> None:
    clock: Clock = VirtualClock(5)
    assert clock.monotonic() == 5


def test_virtual_time_on_asyncio_does_not_load_trio() -> None:
    code = (
        "import sys, anyio; from treewarden.testing import VirtualClock\n"
        "VirtualClock().run(anyio.sleep, 1); assert 'trio' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
