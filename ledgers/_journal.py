"""The journal: the events of a tree, and the fold that turns them back into its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ._events import Event
from ._state import StateCopy, TreeState


def fold(events: Iterable[Event], *, onto: Mapping[str, Any] | None = None) -> TreeState:
    """The state after ``events``, from nothing or from a snapshot made by ``TreeState.plain``."""
    state = TreeState() if onto is None else TreeState.from_plain(onto)
    for event in events:
        state.apply(event)
    return state


class Journal:
    """A bounded tail of events over a snapshot; ``sink`` sees every event once.

    Invariant: ``fold(tail, onto=base)`` is the present state. The tail is cut when it is longer
    than four times what is alive, so a snapshot costs O(1) per event, and memory follows what is
    alive (W10).
    """

    def __init__(
        self, state: TreeState, *, keep: int = 4096, sink: Callable[[Event], None] | None = None
    ) -> None:
        self._state = state
        self._keep = keep
        self._sink = sink
        # None: the fold starts from nothing.
        self._base: StateCopy | None = None
        self.tail: list[Event] = []

    @property
    def base(self) -> Mapping[str, Any] | None:
        """The snapshot that ``tail`` goes on from, made by ``TreeState.plain``; None: nothing."""
        return None if self._base is None else self._base.plain()

    @property
    def is_whole(self) -> bool:
        """Whether ``tail`` still begins with the first event of the tree."""
        return self._base is None

    def record(self, event: Event) -> None:
        """Write ``event`` down and carry it out."""
        tail = self.tail
        if len(tail) >= self._keep:
            self._cut()
        tail.append(event)
        self._state.apply(event)
        if self._sink is not None:
            self._sink(event)

    def _cut(self) -> None:
        state = self._state
        waiting = len(state.waiting) + len(state.entries)
        if len(self.tail) >= 4 * (len(state.nodes) + len(state.holds) + waiting):
            self._base = self._state.copy()
            self.tail.clear()
