"""One provider's pause, shared by a whole tree: nobody asks a provider that asked for quiet.

When a call is turned away for overload, every call of the tree to that provider waits. When the
pause is over, one of those that wait asks first (a half-open circuit breaker: M. Nygard, *Release
It!*, 2007). If it is answered, all go on; if not, the pause begins anew, and the next in line is
the one to ask. So the requests of a bad hour do not grow with the number of agents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import anyio
import attrs

from ._waiting import wait_until


@attrs.define(eq=False)
class Turn:
    """Leave to make one attempt. Its end says what became of it, exactly once."""

    _pause: ProviderPause
    is_probe: bool
    _is_over: bool = False

    @property
    def round(self) -> int:
        """Which pause in a row it would be if this attempt were turned away, from 1."""
        pause = self._pause
        return pause.rounds + (self.is_probe or not pause.is_on)

    def answered(self) -> None:
        """The provider answered, if only to refuse the request for what it is."""
        if self._end() and self.is_probe:
            self._pause.lift()

    def overloaded(self, until: float) -> None:
        """The provider turned the call away; nobody is to ask before that instant."""
        if self._end():
            self._pause.begin(until, counts=self.is_probe)

    def leave(self) -> None:
        """Nothing was learned: cancelled, not paid for, never sent. No effect once it is over."""
        if self._end():
            self._pause.wake_first()

    def _end(self) -> bool:
        was_over, self._is_over = self._is_over, True
        if not was_over and self.is_probe:
            self._pause.is_probed = False
        return not was_over


class ProviderPause:
    """Whether one provider may be asked."""

    def __init__(self) -> None:
        # Times in a row that it turned away a call that was not sent into a pause.
        self.rounds = 0
        # The instant before which nobody asks, in the tree's clock. Means nothing at 0 rounds.
        self.until = 0.0
        self.is_probed = False
        self._line: OrderedDict[int, anyio.Event] = OrderedDict()
        self._last_ticket = 0

    @property
    def is_on(self) -> bool:
        return self.rounds > 0

    @property
    def waiting(self) -> int:
        """How many wait for it to end."""
        return len(self._line)

    async def turn(self, now: Callable[[], float], latest: float) -> Turn | None:
        """Return when the provider may be asked; None when that is later than ``latest``."""
        if not self.is_on:
            return Turn(self, is_probe=False)
        self._last_ticket = ticket = self._last_ticket + 1
        try:
            while self.is_on:
                is_first = not self.is_probed and next(iter(self._line), ticket) == ticket
                if is_first and now() >= self.until:
                    self.is_probed = True
                    return Turn(self, is_probe=True)
                if self.until > latest or now() >= latest:
                    return None
                woken = self._line[ticket] = anyio.Event()
                await wait_until(woken, self.until if is_first else latest)
            return Turn(self, is_probe=False)
        finally:
            self._line.pop(ticket, None)
            self.wake_first()

    def begin(self, until: float, *, counts: bool) -> None:
        """Begin a pause, or make it longer.

        Args:
            counts: Whether this was learned by asking in the pause, not by a call sent before it.
        """
        self.rounds += counts or not self.is_on
        self.until = max(self.until, until)
        self.wake_first()

    def lift(self) -> None:
        """The provider answers again: everybody may go."""
        self.rounds = 0
        for woken in self._line.values():
            woken.set()

    def wake_first(self) -> None:
        """Let the next in line look at what is so now."""
        if self._line and not self.is_probed:
            next(iter(self._line.values())).set()

    def check(self) -> None:
        """Assert that it is never probed by two, and that nobody waits for a pause that is over."""
        assert self.rounds >= 0, self.rounds
        assert self.is_on or not self.is_probed, "probed without a pause"
        assert self.is_on or all(woken.is_set() for woken in self._line.values()), self._line
