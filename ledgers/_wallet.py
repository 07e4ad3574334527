"""Wallets: a sum with parts of it spoken for, in one unit, arranged as a tree.

Two rules keep this file simple. A wallet only does arithmetic: who may ask, who queues and what
is recorded is decided elsewhere. And every column is changed by one method here, so W1 to W3 can
be checked by reading this file alone.

Amounts are integers: 10^-12 USD in a USD tree, tokens in a token tree.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

Unit: TypeAlias = Literal["usd", "tokens"]

UNBOUNDED = 10**30
"""The ``max`` of a wallet without a ceiling: more than any sum of calls can reach."""


@attrs.define(eq=False, slots=True)
class Wallet:
    """What one node, and all below it that have no wallet of their own, may spend."""

    id: int
    # Where the wallet belongs, for refusals and snapshots.
    path: str
    # The wallet this one was carved from. None: the tree's root wallet.
    parent: Wallet | None
    # The ceiling. settled may pass it (a provider charged more than was held): then is_breached.
    max: int
    # What may be used until the next tranche. Invariant: released <= max.
    released: int
    # What finished calls have cost, here and below. Only charge() adds to it; nothing takes away.
    settled: int = 0
    # Sum of the call holds that are open on this wallet itself.
    held: int = 0
    # How many those are.
    open_holds: int = 0
    # Sum over live child wallets of what each has left of its carve.
    carved: int = 0
    # Finalisation reserves of live nodes that draw on this wallet.
    set_aside: int = 0
    # What those nodes asked for. Above set_aside where a lowered ceiling ate from it.
    reserves: int = 0
    # What was charged beyond the hold or carve it came through. Only grows.
    overrun: int = 0
    # What the parent's `carved` still has for this wallet. 0 for the root.
    carve_left: int = 0
    # True once revoke() was called; never false again.
    is_revoked: bool = False
    # What lower_max() asked for and could not reach yet, else None.
    target: int | None = None
    # True once the carve went back to the parent. Ending twice is an error.
    is_ended: bool = False
    # How many calls queue here. While any does, nothing is carved and nobody passes.
    queued: int = 0
    # How many live child wallets it has.
    live_carves: int = 0
    # The part of settled that was spent before this tree was opened. 0 but for the root.
    carried_in: int = 0

    @property
    def committed(self) -> int:
        return self.settled + self.held + self.carved

    @property
    def free(self) -> int:
        """What a new hold or carve may use. Never negative."""
        free = self.released - self.settled - self.held - self.carved - self.set_aside
        return free if free > 0 else 0

    @property
    def left(self) -> int:
        """What is neither spent nor promised, the set-aside included."""
        return max(0, self.released - self.committed)

    @property
    def is_bounded(self) -> bool:
        return self.max < UNBOUNDED

    @property
    def is_breached(self) -> bool:
        return self.settled > self.max

    @property
    def is_over_target(self) -> bool:
        return self.target is not None and self.max > self.target

    @property
    def overspent(self) -> int:
        return max(0, self.settled - self.max)

    def blocked_by(self) -> Wallet | None:
        """The nearest wallet on the way up that funds nothing, or None (W7). O(depth)."""
        wallet: Wallet | None = self
        while wallet is not None:
            if (
                wallet.is_revoked
                or wallet.settled > wallet.max
                or (wallet.target is not None and wallet.max > wallet.target)
            ):
                return wallet
            wallet = wallet.parent
        return None

    def carry_in(self, amount: int) -> None:
        """Count what was spent before, as a new wallet's first charge. It came through no hold."""
        self.carried_in = self.settled = amount
        self.overrun = max(0, amount - self.released)

    # --- grants and their ends -------------------------------------------------------------------

    def hold(self, amount: int) -> None:
        self.held += amount
        self.open_holds += 1

    def drop_hold(self, amount: int) -> None:
        self.held -= amount
        self.open_holds -= 1
        if self.target is not None:
            self._approach_target()

    def charge(self, amount: int, *, through_hold: int) -> None:
        """Book what a call cost, here and at every ancestor, in one step.

        A provider may charge more than was held. The call is made and the money gone, so it is
        booked as it is; what its hold or carve did not cover is overrun.
        """
        self.held -= through_hold
        self.open_holds -= 1
        self.settled += amount
        if amount > through_hold:
            self.overrun += amount - through_hold
        any_target = self.target is not None
        child, wallet = self, self.parent
        while wallet is not None:
            covered = amount if amount < child.carve_left else child.carve_left
            child.carve_left -= covered
            wallet.carved -= covered
            wallet.settled += amount
            wallet.overrun += amount - covered
            any_target = any_target or wallet.target is not None
            child, wallet = wallet, wallet.parent
        if any_target:  # only once the books are straight on the whole path
            self._approach_targets_upwards()

    def carve(self, child: Wallet, amount: int) -> None:
        self.carved += amount
        self.live_carves += 1
        child.carve_left = amount

    def end_carve(self) -> None:
        """Give the parent back what was not spent. Exactly once."""
        assert not self.is_ended, self
        self.is_ended = True
        parent = self.parent
        if parent is None:
            return
        parent.carved -= self.carve_left
        parent.live_carves -= 1
        self.carve_left = 0
        if parent.target is not None:
            parent._approach_target()

    def reserve(self, amount: int) -> None:
        self.set_aside += amount
        self.reserves += amount

    def end_reserve(self, amount: int) -> None:
        """Give back what a node set aside.

        What a lowered ceiling ate counts as the loss of whoever ends first, so that no live node
        loses its reserve to one that has ended.
        """
        self.reserves -= amount
        self.set_aside = min(self.set_aside, self.reserves)

    # --- limits that change while running --------------------------------------------------------

    def release(self, amount: int) -> None:
        self.released += amount

    def lower_max(self, to: int) -> None:
        """Set a target and go as far towards it as what is committed allows (W1b)."""
        self.target = to
        self._approach_target()

    def raise_max(self, to: int) -> None:
        """Lift the ceiling; a carved wallet takes the difference from its parent.

        Where everything was released, the new part is too; staged releases stay staged.
        """
        if self.released == self.max:
            self.released = to
        self.max = to
        self.target = None
        if self.parent is not None:
            more = max(0, to - self.settled) - self.carve_left
            self.carve_left += more
            self.parent.carved += more

    def _approach_targets_upwards(self) -> None:
        wallet: Wallet | None = self
        while wallet is not None:
            if wallet.target is not None:
                wallet._approach_target()
            wallet = wallet.parent

    def _approach_target(self) -> None:
        assert self.target is not None, self
        committed = self.committed
        self.max = min(self.max, max(self.target, committed))
        self.released = min(self.released, self.max)
        self.set_aside = min(self.set_aside, max(0, self.max - committed))
        if self.max <= self.target:
            self.target = None
        if self.parent is not None and not self.is_ended:
            # A carved wallet whose ceiling sank needs less of its carve.
            back = self.carve_left - max(0, self.max - self.settled)
            self.carve_left -= back
            self.parent.carved -= back
            if self.parent.target is not None:
                self.parent._approach_target()

    # --- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        for column in ("settled", "held", "carved", "set_aside", "overrun", "carve_left"):
            assert getattr(self, column) >= 0, (column, self)
        assert self.released <= self.max, self
        assert self.set_aside <= self.reserves, self
        assert 0 <= self.carried_in <= self.settled, self
        # W1: only a charge that its hold or carve did not cover may pass what was released.
        assert self.committed + self.set_aside <= self.released + self.overrun, self
        assert (self.open_holds == 0) <= (self.held == 0), self
        if self.parent is None or self.is_ended:
            assert self.carve_left == 0, self
        else:
            assert self.carve_left == max(0, self.max - self.settled), self
        assert self.is_ended <= (self.held == self.carved == self.queued == 0), self
