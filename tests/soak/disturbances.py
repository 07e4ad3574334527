"""What happens to a random tree while it runs: each kind is a line in a table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel

from .callers import ORDERLY, Live, native_task
from .choices import dice, one_of
from .trees import tokens_of

Disturbance: TypeAlias = Callable[[Live, Random], None]


async def disturb(live: Live) -> None:
    """A few disturbances at random instants, most of them at an instant when others act, too."""
    random = dice(live.seed, "disturbances")
    for _ in range(random.choice((0, 1, 1, 2, 4, 8))):
        await anyio.sleep(random.choice((0.0, 0.25, 0.5, 0.5, 1.0, 1.7)))
        # And at one turn of the loop or another within that instant.
        for _ in range(random.randint(0, 6)):
            await anyio.lowlevel.checkpoint()
        try:
            one_of(DISTURBANCES, random)(live, random)
        except ORDERLY:
            pass  # it cannot be done now, says so, and has changed nothing


def _cancel_a_run(live: Live, random: Random) -> None:
    if live.streams:
        _some(live.streams, random).cancel("the customer hung up")


def _wrap_a_run_up(live: Live, random: Random) -> None:
    if live.streams:
        _some(live.streams, random).wrap_up("time is short")


def _tell_a_run(live: Live, random: Random) -> None:
    if live.streams:
        _some(live.streams, random).send("and be brief")


def _move_a_runs_ceiling(live: Live, random: Random) -> None:
    if live.streams:
        _some(live.streams, random).set_budget(**_ceiling(live, random))


def _move_the_ceiling(live: Live, random: Random) -> None:
    live.tree.set_budget(**_ceiling(live, random))


def _ceiling(live: Live, random: Random) -> dict[str, Any]:
    usd = random.choice(("0.01", "0.05", "0.20", "1.00", "5.00"))
    return {"max_usd": usd} if live.unit == "usd" else {"max_tokens": tokens_of(usd)}


def _lower_a_limit(live: Live, random: Random) -> None:
    names = (
        "max_subagents",
        "max_concurrent_subagents",
        "max_concurrent_calls",
        "max_model_calls",
        "max_tool_calls",
    )
    live.tree.set_limit(random.choice(names), random.choice((1, 1, 2, 3)))


def _lift_a_limit(live: Live, random: Random) -> None:
    live.tree.set_limit(random.choice(("max_concurrent_calls", "max_model_calls")), None)


def _cancel_a_caller(live: Live, random: Random) -> None:
    if live.scopes:
        _some(live.scopes, random).cancel()


def _cancel_a_callers_task(live: Live, random: Random) -> None:
    tasks = {name: task for name, task in live.tasks.items() if task is not None}
    if tasks:
        _some(tasks, random).cancel()


def _cancel_an_actors_task(live: Live, random: Random) -> None:
    if native_task() is None:
        return
    tasks = {task.get_name(): task for task in asyncio.all_tasks()}
    actors = {name: task for name, task in tasks.items() if name.startswith("root/")}
    if actors:
        _some(actors, random).cancel()


def _some(things: dict[str, Any], random: Random) -> Any:
    return things[random.choice(sorted(things))]


DISTURBANCES: dict[str, tuple[int, Disturbance]] = {
    "run.cancel": (3, _cancel_a_run),
    "run.wrap_up": (1, _wrap_a_run_up),
    "run.send": (1, _tell_a_run),
    "run.set_budget": (2, _move_a_runs_ceiling),
    "tree.set_budget": (2, _move_the_ceiling),
    "a lower limit": (2, _lower_a_limit),
    "no limit": (1, _lift_a_limit),
    "a cancelled scope": (3, _cancel_a_caller),
    "a caller's task, natively": (2, _cancel_a_callers_task),
    "an actor's task, natively": (3, _cancel_an_actors_task),
}
