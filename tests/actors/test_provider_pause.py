"""A provider's pause: everybody waits, one asks, and whoever goes away holds nobody up."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import anyio

from treewarden.testing import VirtualClock

from ..scenarios.kit import Backend, both_backends

now = anyio.current_time

# Not public: a tree makes them.
_module = import_module("treewarden.actors._provider_pause")
ProviderPause, Turn = _module.ProviderPause, _module.Turn


async def turn_of(pause: Any, latest: float = math.inf) -> Any:
    turn = await pause.turn(now, latest)
    pause.check()
    return turn


def opened(*, until: float = 10.0) -> Any:
    pause = ProviderPause()
    Turn(pause, is_probe=False).overloaded(until)
    assert pause.is_on
    return pause


class Caller:
    """Somebody who asks for a turn and keeps it."""

    def __init__(self, pause: Any) -> None:
        self.pause, self.scope = pause, anyio.CancelScope()
        self.turn: Any = None
        self.at = math.nan

    async def __call__(self) -> None:
        with self.scope:
            self.turn = await turn_of(self.pause)
            self.at = now()


@both_backends
def test_without_a_pause_nobody_waits(backend: Backend) -> None:
    async def main() -> None:
        turn = await turn_of(ProviderPause())
        assert not turn.is_probe

    VirtualClock().run(main, backend=backend)


@both_backends
def test_at_its_end_one_asks_and_the_others_go_when_it_is_answered(backend: Backend) -> None:
    async def main() -> None:
        pause = opened(until=10)
        callers = [Caller(pause) for _ in range(3)]
        first = callers[0]
        async with anyio.create_task_group() as group:
            for caller in callers:
                group.start_soon(caller)
            await anyio.sleep(15)
            assert [caller.turn is not None for caller in callers].count(True) == 1
            (first,) = [caller for caller in callers if caller.turn is not None]
            assert first.turn.is_probe
            assert first.at == 10
            first.turn.answered()
        assert [caller.at for caller in callers if caller is not first] == [15, 15]
        assert not pause.is_on
        assert pause.waiting == 0

    VirtualClock().run(main, backend=backend)


@both_backends
def test_a_probe_that_is_turned_away_begins_it_anew_for_the_next_in_line(backend: Backend) -> None:
    async def main() -> None:
        pause = opened(until=10)
        callers = [Caller(pause) for _ in range(3)]
        seen: list[float] = []
        async with anyio.create_task_group() as group:
            for caller in callers:
                group.start_soon(caller)
            for until in (20, 30, 40):
                await anyio.sleep_until(until - 5)
                (probe,) = [c for c in callers if c.turn is not None and c.turn.is_probe]
                seen.append(probe.at)
                callers.remove(probe)
                probe.turn.overloaded(until)
        assert seen == [10, 20, 30]
        assert pause.rounds == 4

    VirtualClock().run(main, backend=backend)


@both_backends
def test_who_leaves_the_line_or_the_probe_holds_nobody_up(backend: Backend) -> None:
    async def main() -> None:
        pause = opened(until=10)
        callers = [Caller(pause) for _ in range(3)]
        async with anyio.create_task_group() as group:
            for caller in callers:
                group.start_soon(caller)
                await anyio.lowlevel.checkpoint()
            await anyio.sleep(5)
            callers[0].scope.cancel()
            await anyio.sleep(6)
            second = callers[1]
            assert (second.at, callers[2].turn) == (10, None)
            second.turn.leave()
            second.turn.leave()
        assert callers[2].at == 11
        assert callers[2].turn.is_probe

    VirtualClock().run(main, backend=backend)


@both_backends
def test_nobody_waits_past_the_last_instant_that_is_of_use(backend: Backend) -> None:
    async def main() -> None:
        pause = opened(until=10)
        assert await turn_of(pause, latest=9) is None
        assert now() == 0
        probing = Caller(pause)
        async with anyio.create_task_group() as group:
            group.start_soon(probing)
            await anyio.sleep(11)
            assert await turn_of(pause, latest=12) is None
            assert now() == 12
        assert pause.waiting == 0

    VirtualClock().run(main, backend=backend)


@both_backends
def test_an_answer_to_a_call_from_before_does_not_end_it(backend: Backend) -> None:
    async def main() -> None:
        pause = ProviderPause()
        early, late = await turn_of(pause), await turn_of(pause)
        early.overloaded(10)
        late.answered()
        assert pause.is_on
        assert (early.round, pause.rounds) == (1, 1)

    VirtualClock().run(main, backend=backend)
