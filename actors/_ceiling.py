"""The most input tokens that a request can be, without looking at it whole.

A token is at least a byte, so bytes are a ceiling from the first call on. Once the provider has
counted a request, only what was added after it has to be taken as bytes. Each message is measured
once, so a ceiling costs no more in a long conversation than in a short one.
"""

from __future__ import annotations

from collections.abc import Sequence

from treewarden.protocols import Message

from ._models import ModelSession

TOKENS_PER_MESSAGE = 16
"""What a provider may add around a message (contract 5.4)."""


class InputCeiling:
    """The sizes of one growing conversation."""

    def __init__(self, session: ModelSession) -> None:
        self._session = session
        # Messages that were measured, and their bytes as they are sent.
        self._messages = 0
        self._bytes = 0
        # The input the provider counted last, and the bytes and messages that was for.
        self._counted: tuple[int, int, int] | None = None

    def measure(self, messages: Sequence[Message]) -> None:
        """Take in what was added to the conversation."""
        for message in messages[self._messages :]:
            self._bytes += self._session.measure(message)
        self._messages = len(messages)

    def tokens(self, window: int | None) -> int:
        """The most that a request with all that was measured can have."""
        if self._counted is None:
            ceiling = self._session.head_bytes + self._bytes + TOKENS_PER_MESSAGE * self._messages
        else:
            counted, up_to_bytes, up_to_messages = self._counted
            ceiling = counted + self._bytes - up_to_bytes
            ceiling += TOKENS_PER_MESSAGE * (self._messages - up_to_messages)
        return ceiling if window is None else min(ceiling, window)

    def note_count(self, tokens: int) -> None:
        """The provider counted the request with all that was measured, its answer not included."""
        self._counted = tokens, self._bytes, self._messages
