"""Random trees with random disturbances on both backends: no violation, and nothing left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import attrs
import pytest

from treewarden.testing import VirtualClock

from ..scenarios.kit import Backend, Measured, both_backends
from .census import no_task_is_left, nothing_is_left, settled
from .life import SoakWitness, live
from .seconds import TREES, soak_seconds


@attrs.define
class Seen:
    """How many trees there were, and in how many orders their events came."""

    trees: int = 0
    events: int = 0
    orders: set[int] = attrs.field(factory=set[int])

    def add(self, witness: SoakWitness) -> None:
        self.trees += 1
        self.events += len(witness.journal)
        self.orders.add(hash(witness.order))

    def __str__(self) -> str:
        return (
            f"{self.trees} trees, {self.events} ledger events, "
            f"{len(self.orders)} distinct event orders"
        )


def grow(backend: Backend, seed: int) -> SoakWitness:
    """One tree from its seed to its end, and everything checked.

    Raises:
        BaseException: What did not hold, with a note that says how to repeat this one tree.
    """

    async def scenario() -> SoakWitness:
        with no_task_is_left():
            witness = await live(seed)
            await settled()
        return witness

    try:
        with nothing_is_left():
            # Threads are waited for briefly: most trees have none, some have one that hangs.
            return VirtualClock(patience=0.02).run(scenario, backend=backend, seed=seed)
    except BaseException as error:
        error.add_note(
            f"the tree of seed {seed} on {backend}; to repeat it: "
            f"SOAK_SEED={seed} make soak ARGS='tests/soak -k {backend}'"
        )
        raise


def seeds() -> Iterable[int]:
    """The one that was asked for, or one after the other until the time is up."""
    only = os.environ.get("SOAK_SEED")
    if only is not None:
        yield int(only)
        return
    until = time.monotonic() + soak_seconds(TREES) / 2  # there are two backends
    seed = 0
    while time.monotonic() < until:
        yield seed
        seed += 1


@pytest.mark.soak
@pytest.mark.timeout(0)
@both_backends
def test_whatever_happens_to_a_tree_its_books_balance_and_nothing_is_left(
    backend: Backend, record_property: Measured
) -> None:
    seen = Seen()
    for seed in seeds():
        seen.add(grow(backend, seed))
    record_property("measured", f"soak on {backend}: {seen}")
    print(f"soak on {backend}: {seen}")
    assert len(seen.orders) > seen.trees // 2


@both_backends
def test_a_few_random_trees_leave_nothing_behind(
    backend: Backend, record_property: Measured
) -> None:
    seen = Seen()
    for seed in range(40):
        seen.add(grow(backend, seed))
    record_property("measured", f"random trees on {backend}: {seen}")
    assert len(seen.orders) >= 30


@both_backends
def test_a_seed_grows_the_same_tree_twice(backend: Backend) -> None:
    # This one uses no threads, whose pace nobody decides.
    assert grow(backend, 1).journal == grow(backend, 1).journal
