"""Whose turn it is for an agent's slot, against the rule as it is written."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from hypothesis import given
from hypothesis import strategies as st

from treewarden.ledgers import GrantOrder


@attrs.frozen
class Waiter:
    number: int
    run: int
    is_resume: bool
    depth: int

    @property
    def rank(self) -> tuple[bool, int, int]:
        return not self.is_resume, -self.depth, self.number


@attrs.define
class Rule:
    """The grant order, from its text: everything is looked for anew."""

    waiting: list[Waiter] = attrs.field(factory=list[Waiter])
    # Runs in the order in which they had their last grant or began to wait.
    since: list[int] = attrs.field(factory=list[int])
    grants: int = 0

    def add(self, waiter: Waiter) -> None:
        self.waiting.append(waiter)
        if waiter.run not in self.since:
            self.since.append(waiter.run)

    def drop(self, waiter: Waiter) -> None:
        self.waiting.remove(waiter)
        if all(other.run != waiter.run for other in self.waiting):
            self.since.remove(waiter.run)

    def head(self) -> Waiter:
        is_fair_turn = (self.grants + 1) % 8 == 0
        run = self.since[0] if is_fair_turn else min(w.run for w in self.waiting)
        return min((w for w in self.waiting if w.run == run), key=lambda w: w.rank)

    def grant(self, waiter: Waiter) -> None:
        self.grants += 1
        self.since.remove(waiter.run)
        self.since.append(waiter.run)
        self.drop(waiter)


steps = st.one_of(
    st.tuples(st.integers(0, 5), st.booleans(), st.integers(1, 4)),
    st.sampled_from(["grant", "grant", "grant"]),
    st.integers(0, 30),
)


@given(st.lists(steps, max_size=300))
def test_the_order_is_the_rule(
    history: Iterable[tuple[int, bool, int] | str | int],
) -> None:
    rule, order = Rule(), GrantOrder()
    number = 0
    for step in history:
        if isinstance(step, tuple):
            number += 1
            run, is_resume, depth = step
            rule.add(Waiter(number, run, is_resume, depth))
            order.add(number, run=run, is_resume=is_resume, depth=depth)
        elif rule.waiting:
            assert order.head() == rule.head().number
            if isinstance(step, int):
                leaving = rule.waiting[step % len(rule.waiting)]
                rule.drop(leaving)
                order.drop(leaving.number)
            else:
                granted = rule.head()
                rule.grant(granted)
                order.grant(granted.number)
        assert len(order) == len(rule.waiting)
        assert all(waiter.number in order for waiter in rule.waiting)


def test_a_run_that_waits_is_granted_within_eight_times_the_number_of_runs() -> None:
    """However fast the oldest run asks for more."""
    order = GrantOrder()
    for run in range(10):
        order.add(run, run=run, is_resume=False, depth=1)
    next_number, granted = 100, list[int]()
    for _ in range(8 * 10):
        head = order.head()
        order.grant(head)
        granted.append(head)
        if head == 0 or head >= 100:
            order.add(next_number, run=0, is_resume=False, depth=1)
            next_number += 1
    assert set(range(10)) <= set(granted)
    # Without a fair turn the oldest run would have had every one.
    assert sum(number == 0 or number >= 100 for number in granted) == 80 - 9


def test_who_left_is_not_kept() -> None:
    order = GrantOrder()
    order.add(1, run=1, is_resume=False, depth=1)
    for number in range(2, 5_000):
        order.add(number, run=1, is_resume=False, depth=1)
        order.drop(number)
    assert len(order._turns[1].heap) < 200  # pyright: ignore[reportPrivateUsage]
    for run in range(2, 5_000):
        order.add(run, run=run, is_resume=False, depth=1)
        order.drop(run)
    order.grant(1)
    assert len(order) == 0
    assert not order._turns  # pyright: ignore[reportPrivateUsage]
