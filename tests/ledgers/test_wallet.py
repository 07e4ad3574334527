"""A wallet's columns: what moves down at once, comes back once, and what a lowered ceiling eats."""

from __future__ import annotations

import pytest

from treewarden.ledgers import UNBOUNDED, Wallet


def root(max: int = 100, *, released: int | None = None) -> Wallet:
    return Wallet(0, "root", None, max, max if released is None else released)


def carve(parent: Wallet, amount: int, *, id: int = 1) -> Wallet:
    child = Wallet(id, f"{parent.path}/child#{id}", parent, amount, amount)
    parent.carve(child, amount)
    return child


def spend(wallet: Wallet, amount: int, *, held: int | None = None) -> None:
    held = amount if held is None else held
    wallet.hold(held)
    wallet.charge(amount, through_hold=held)


def check(*wallets: Wallet) -> None:
    for wallet in wallets:
        wallet.check()


# --- holds and charges ---------------------------------------------------------------------------


def test_a_hold_takes_from_what_is_free_and_gives_it_back() -> None:
    wallet = root(100)
    wallet.hold(60)
    assert (wallet.free, wallet.held, wallet.open_holds) == (40, 60, 1)
    wallet.drop_hold(60)
    assert (wallet.free, wallet.held, wallet.open_holds) == (100, 0, 0)
    check(wallet)


def test_a_charge_below_its_hold_gives_back_the_rest() -> None:
    wallet = root(100)
    spend(wallet, 10, held=40)
    assert (wallet.settled, wallet.free, wallet.overrun) == (10, 90, 0)
    check(wallet)


def test_a_charge_above_its_hold_is_booked_as_it_is_and_overruns() -> None:
    wallet = root(100)
    spend(wallet, 140, held=50)
    assert (wallet.settled, wallet.overrun, wallet.overspent) == (140, 90, 40)
    assert wallet.is_breached and wallet.free == 0
    assert wallet.blocked_by() is wallet
    check(wallet)


def test_an_overrun_within_the_ceiling_is_no_breach() -> None:
    wallet = root(100)
    spend(wallet, 60, held=50)
    assert (wallet.overrun, wallet.is_breached, wallet.free) == (10, False, 40)
    check(wallet)


def test_exactly_the_ceiling_is_no_breach() -> None:
    wallet = root(100)
    spend(wallet, 100)
    assert not wallet.is_breached and wallet.blocked_by() is None
    check(wallet)


def test_what_is_not_released_cannot_be_used() -> None:
    wallet = root(100, released=30)
    assert (wallet.free, wallet.left) == (30, 30)
    wallet.release(50)
    assert (wallet.free, wallet.released) == (80, 80)
    check(wallet)


def test_a_wallet_without_a_ceiling_counts_all_the_same() -> None:
    wallet = root(UNBOUNDED)
    spend(wallet, 10**20)
    assert (wallet.settled, wallet.is_bounded, wallet.is_breached) == (10**20, False, False)
    check(wallet)


# --- carves --------------------------------------------------------------------------------------


def test_a_carve_moves_money_down_at_once_and_the_rest_comes_back_once() -> None:
    parent = root(80)
    child = carve(parent, 50)
    assert (parent.free, parent.carved, child.free) == (30, 50, 50)
    spend(child, 10)
    assert (parent.settled, parent.carved, parent.free) == (10, 40, 30)
    check(parent, child)
    child.end_carve()
    assert (parent.settled, parent.carved, parent.free) == (10, 0, 70)
    with pytest.raises(AssertionError):
        child.end_carve()
    assert (parent.carved, parent.free) == (0, 70)
    check(parent, child)


def test_what_a_carve_does_not_cover_overruns_its_parent() -> None:
    """Of 60 spent in a wallet of 10, the parent had promised 10; 50 come on top."""
    parent = root(200)
    child = carve(parent, 10)
    spend(child, 60, held=10)
    assert (child.overspent, child.is_breached) == (50, True)
    assert (parent.settled, parent.carved, parent.overrun) == (60, 0, 50)
    assert not parent.is_breached and parent.free == 140
    check(parent, child)


def test_a_charge_is_booked_at_every_ancestor_and_each_carve_covers_what_it_can() -> None:
    top = root(100)
    middle = carve(top, 60)
    bottom = carve(middle, 20, id=2)
    spend(bottom, 30, held=20)
    assert (bottom.settled, middle.settled, top.settled) == (30, 30, 30)
    assert (bottom.overrun, middle.overrun, top.overrun) == (10, 10, 0)
    assert (middle.carved, top.carved) == (0, 30)
    assert (middle.free, top.free) == (30, 40)
    check(top, middle, bottom)


def test_an_overspent_child_does_not_breach_a_parent_that_stays_below_its_own_ceiling() -> None:
    parent, poor = root(1000), root(40)
    for wallet, is_breached in ((parent, False), (poor, True)):
        child = carve(wallet, 10)
        spend(child, 50, held=10)
        assert child.is_breached and wallet.is_breached is is_breached
        check(wallet, child)


@pytest.mark.parametrize("state", ["revoked", "breached", "over its target"])
def test_a_wallet_that_funds_nothing_blocks_all_below_it(state: str) -> None:
    top = root(100)
    middle = carve(top, 60)
    bottom = carve(middle, 20, id=2)
    if state == "revoked":
        middle.is_revoked = True
    elif state == "breached":
        spend(middle, 61, held=40)
    else:
        middle.hold(40)
        middle.lower_max(10)
    assert bottom.blocked_by() is middle
    assert middle.blocked_by() is middle
    assert top.blocked_by() is None


# --- lowering a ceiling (W1b) --------------------------------------------------------------------


def test_lowering_a_ceiling_with_nothing_committed_takes_effect_at_once() -> None:
    wallet = root(100)
    wallet.lower_max(40)
    assert (wallet.max, wallet.released, wallet.target) == (40, 40, None)
    check(wallet)


def test_a_ceiling_sinks_as_far_as_what_is_committed_and_further_as_that_comes_back() -> None:
    wallet = root(100)
    wallet.hold(60)
    wallet.lower_max(40)
    assert (wallet.max, wallet.released, wallet.target) == (60, 60, 40)
    assert wallet.is_over_target and not wallet.is_breached and wallet.free == 0
    wallet.charge(20, through_hold=60)
    assert (wallet.max, wallet.released, wallet.target) == (40, 40, None)
    assert not wallet.is_over_target and wallet.free == 20
    check(wallet)


def test_a_ceiling_below_what_is_spent_stops_there_and_never_breaches() -> None:
    wallet = root(100)
    spend(wallet, 70)
    wallet.lower_max(40)
    assert (wallet.max, wallet.target) == (70, 40)
    assert wallet.is_over_target and not wallet.is_breached
    check(wallet)


def test_lowering_eats_the_set_aside_before_it_eats_what_is_committed() -> None:
    wallet = root(100)
    wallet.reserve(20)
    wallet.hold(70)
    wallet.lower_max(75)
    assert (wallet.max, wallet.set_aside, wallet.target) == (75, 5, None)
    check(wallet)


def test_a_lowered_child_returns_to_its_parent_what_it_needs_no_more() -> None:
    parent = root(100)
    child = carve(parent, 80)
    child.hold(50)
    child.lower_max(30)
    # At once: all but the open hold.
    assert (child.max, child.carve_left, parent.carved, parent.free) == (50, 50, 50, 50)
    check(parent, child)
    child.charge(10, through_hold=50)
    # Then the rest: it may spend 30 in all, of which 10 are spent.
    assert (child.max, child.carve_left, child.free) == (30, 20, 20)
    assert (parent.settled, parent.carved, parent.free) == (10, 20, 70)
    check(parent, child)


def test_what_a_lowered_child_returns_brings_its_parent_to_its_own_target() -> None:
    parent = root(100)
    child = carve(parent, 80)
    child.hold(50)
    parent.lower_max(40)
    assert (parent.max, parent.target) == (80, 40)
    child.lower_max(20)
    assert (child.max, parent.max) == (50, 50)
    child.drop_hold(50)
    assert (child.max, child.target) == (20, None)
    assert (parent.max, parent.target, parent.free) == (40, None, 20)
    check(parent, child)


def test_the_end_of_a_carve_brings_its_parent_to_its_target() -> None:
    parent = root(100)
    child = carve(parent, 80)
    spend(child, 30)
    parent.lower_max(40)
    assert (parent.max, parent.is_over_target) == (80, True)
    child.end_carve()
    assert (parent.max, parent.is_over_target, parent.free) == (40, False, 10)
    check(parent, child)


def test_a_staged_wallet_keeps_what_is_released_when_the_ceiling_sinks_to_above_it() -> None:
    wallet = root(100, released=30)
    wallet.lower_max(50)
    assert (wallet.max, wallet.released) == (50, 30)
    wallet.lower_max(20)
    assert (wallet.max, wallet.released) == (20, 20)
    check(wallet)


# --- raising one ---------------------------------------------------------------------------------


def test_raising_a_ceiling_ends_a_target_and_releases_where_all_was_released() -> None:
    wallet = root(100)
    wallet.hold(60)
    wallet.lower_max(40)
    wallet.raise_max(90)
    assert (wallet.max, wallet.released, wallet.target, wallet.free) == (90, 90, None, 30)
    check(wallet)


def test_raising_a_staged_ceiling_releases_nothing() -> None:
    wallet = root(100, released=30)
    wallet.raise_max(150)
    assert (wallet.max, wallet.released) == (150, 30)
    check(wallet)


def test_a_raised_child_takes_the_difference_from_its_parent() -> None:
    parent = root(100)
    child = carve(parent, 40)
    spend(child, 10)
    child.raise_max(60)
    assert (child.free, parent.carved, parent.free) == (50, 50, 40)
    check(parent, child)


def test_a_raised_child_that_is_overspent_takes_only_what_is_left_of_the_raise() -> None:
    parent = root(100)
    child = carve(parent, 10)
    spend(child, 25, held=10)
    child.raise_max(20)
    assert (child.is_breached, child.carve_left, parent.carved) == (True, 0, 0)
    child.raise_max(40)
    assert (child.is_breached, child.free, parent.carved, parent.free) == (False, 15, 15, 60)
    check(parent, child)


# --- finalisation reserves -----------------------------------------------------------------------


def test_a_reserve_is_not_free_and_is_left() -> None:
    wallet = root(100)
    wallet.reserve(30)
    assert (wallet.free, wallet.left) == (70, 100)
    wallet.end_reserve(30)
    assert (wallet.free, wallet.left) == (100, 100)
    check(wallet)


def test_what_a_lowered_ceiling_ate_is_lost_to_whoever_ends_first() -> None:
    """Of 50 + 50 set aside, 40 are eaten. The first to end has lost them; the other keeps 50."""
    wallet = root(100)
    wallet.reserve(50)
    wallet.reserve(50)
    wallet.lower_max(60)
    assert wallet.set_aside == 60
    wallet.end_reserve(50)
    assert (wallet.set_aside, wallet.free) == (50, 10)
    wallet.end_reserve(50)
    assert (wallet.set_aside, wallet.free) == (0, 60)
    check(wallet)


def test_the_end_of_one_reserve_does_not_touch_a_later_one() -> None:
    wallet = root(100)
    wallet.reserve(50)
    wallet.lower_max(10)  # eats 40 of it
    wallet.raise_max(60)
    wallet.reserve(20)
    assert wallet.set_aside == 30
    wallet.end_reserve(50)
    assert wallet.set_aside == 20
    check(wallet)
