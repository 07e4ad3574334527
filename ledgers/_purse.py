"""A purse: a second bound on some of a tree's calls, beside the wallet they draw on.

Retries have one. What a purse pays for is paid by the wallet too, so a purse holds no money of its
own: it says how much of the wallet's may go this way. The ledger moves both in the same
transaction, so whatever way a call ends, the purse knows.
"""

from __future__ import annotations

import attrs


@attrs.define(eq=False, slots=True)
class Purse:
    """How much may be spent on one thing, in the tree's unit.

    ``parent`` is a purse that the same spending counts against, too.
    """

    limit: int
    parent: Purse | None = None
    settled: int = 0
    held: int = 0

    @property
    def free(self) -> int:
        """What another call may hold; at least 0."""
        own = max(0, self.limit - self.settled - self.held)
        return own if self.parent is None else min(own, self.parent.free)

    def hold(self, amount: int) -> None:
        """Count a hold that was granted."""
        self.held += amount
        if self.parent is not None:
            self.parent.hold(amount)

    def give_back(self, amount: int) -> None:
        """A hold is over, and nothing was charged."""
        self.held -= amount
        if self.parent is not None:
            self.parent.give_back(amount)

    def settle(self, amount: int, charge: int) -> None:
        """A hold is over, and came to this charge."""
        self.held -= amount
        self.settled += charge
        if self.parent is not None:
            self.parent.settle(amount, charge)

    def check(self) -> None:
        """Assert that nothing is negative. A charge may be above its hold, as in a wallet."""
        assert self.limit >= 0, self
        assert self.held >= 0, self
        assert self.settled >= 0, self
