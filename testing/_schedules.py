"""Run one scenario in many orders, and count how many there really were.

A test of a race that sees the same order two hundred times has tested nothing, so what comes back
says how many different orders of events the seeds made, and a failure says how to repeat itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Literal, TypeVar

import attrs

from ._virtual import VirtualClock

T = TypeVar("T")
Backend = Literal["asyncio", "trio"]


@attrs.frozen
class Schedules:
    """How often a scenario ran on each backend, and in how many different orders."""

    runs: dict[str, int]
    # Never more than runs; equal seeds give equal orders, different seeds may.
    distinct: dict[str, int]

    def __str__(self) -> str:
        return "; ".join(
            f"{backend}: {runs} runs, {self.distinct[backend]} distinct event orders"
            for backend, runs in self.runs.items()
        )


def run_seeded(
    scenario: Callable[[], Awaitable[T]],
    *,
    seeds: Iterable[int] | int = 200,
    backends: Sequence[Backend] = ("asyncio", "trio"),
    order_of: Callable[[T], Hashable],
) -> Schedules:
    """Run ``scenario`` in virtual time once for each backend and seed.

    Each run has a clock of its own, which the scenario finds by ``VirtualClock.running()``.

    Args:
        seeds: The seeds, or how many: 200 means 0 to 199.
        order_of: Tells from a scenario's result the order in which its events came.

    Raises:
        BaseException: What the scenario raised first, with a note that says how to repeat it.
    """
    numbers = range(seeds) if isinstance(seeds, int) else tuple(seeds)
    orders: dict[Backend, list[Hashable]] = {
        backend: [_run_once(scenario, backend, seed, order_of) for seed in numbers]
        for backend in backends
    }
    return Schedules(
        runs={backend: len(seen) for backend, seen in orders.items()},
        distinct={backend: len(set(seen)) for backend, seen in orders.items()},
    )


def _run_once(
    scenario: Callable[[], Awaitable[T]],
    backend: Backend,
    seed: int,
    order_of: Callable[[T], Hashable],
) -> Hashable:
    try:
        return order_of(VirtualClock().run(scenario, backend=backend, seed=seed))
    except BaseException as error:
        error.add_note(
            f"on {backend} with seed {seed}; to repeat it: "
            f"VirtualClock().run(scenario, backend={backend!r}, seed={seed})"
        )
        raise
