"""What an earlier tree has spent, for a later one that goes on under the same limit.

One rule: what is not certain counts in full. A call that was dispatched and never settled cost
between nothing and what was held for it, so the later tree counts the hold; a limit that holds
whatever happened is worth more than a few calls more.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from treewarden.protocols import UsageError

from ._events import Ended, Event, Opened
from ._state import TreeState
from ._wallet import Unit


@attrs.frozen(kw_only=True)
class Carried:
    """What the last tree of a journal counts as spent, in both denominations.

    What is uncertain is counted in the unit of the tree; in the other one nobody knows it.
    """

    unit: Unit
    usd: int
    tokens: int
    # The part that is uncertain: in truth between 0 and this.
    uncertain: int


def carried_from(events: Iterable[Event]) -> Carried:
    """What the last tree in ``events`` has spent, all that it carried itself included.

    Raises:
        UsageError: They are no journal: there is no tree, or they do not follow from each other.
    """
    state: TreeState | None = None
    # The root's totals, kept because the root is gone once it has ended.
    usd = tokens = 0
    for number, event in enumerate(events, 1):
        try:
            if type(event) is Opened:
                state = TreeState()
            assert state is not None, "it does not begin with the opening of a tree"
            if type(event) is Ended and event.node == 0:
                usd, tokens = state.nodes[0].usd, state.nodes[0].tokens
            state.apply(event)
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise _broken(f"event {number} does not follow from those before: {error!r}") from None
    if state is None:
        raise _broken("it holds no tree")
    if 0 in state.nodes:
        usd, tokens = state.nodes[0].usd, state.nodes[0].tokens
    try:
        state.check()
    except AssertionError as error:
        raise _broken(f"its sums do not add up: {error}") from None
    uncertain = sum(hold.amount for hold in state.holds.values() if hold.is_dispatched)
    return Carried(
        unit=state.unit,
        usd=usd + (uncertain if state.unit == "usd" else 0),
        tokens=tokens + (uncertain if state.unit == "tokens" else 0),
        uncertain=uncertain,
    )


def _broken(why: str) -> UsageError:
    return UsageError(
        f"this journal cannot be gone on with: {why}. `treewarden replay` shows what is in it.",
        code="cave_journal_invalid",
    )
