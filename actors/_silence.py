"""How long a model call has been silent, and what is done about it."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import attrs

WARN_AT = 0.8
"""The part of its time that a silent call may use before that is told."""


@attrs.define(eq=False)
class Silence:
    """The silence of one open call: its provider is heard, or it is ended.

    Being heard only notes the instant, because that happens at every delta. The alarm looks when a
    call that was never heard again would be due, and sleeps on if it was.
    """

    limit_seconds: float
    heard_at: float
    # Called with the seconds of a silence, once for each that lasts that long.
    warn: Callable[[float], None]
    # Ends the call.
    scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    # The instant of the last sign before the silence that was told of.
    _warned_of: float | None = None
    # How long it was when the call was ended.
    ended_after_seconds: float | None = None

    @property
    def rings_at(self) -> float:
        """When to look next, if nothing is heard."""
        part = 1.0 if self._warned_of == self.heard_at else WARN_AT
        return self.heard_at + part * self.limit_seconds

    def ring(self, now: float) -> float | None:
        """Look; return when to look again.

        Instants are compared and never spans of time: a sum and a difference of the same numbers
        need not agree to the last bit, and an alarm that is due and not due rings for ever.
        """
        if now < self.rings_at:
            return self.rings_at
        if self._warned_of != self.heard_at:
            self._warned_of = self.heard_at
            self.warn(now - self.heard_at)
            return self.rings_at
        self.ended_after_seconds = now - self.heard_at
        self.scope.cancel()
        return None
