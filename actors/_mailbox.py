"""What an actor was sent and has not read yet.

Two rules. It is bounded: what does not fit is refused, or waits outside if its asker chose to wait,
so nobody is held up unasked by one who does not read. And a stop is no message: from the moment it
is asked for nothing more is handed out, and everybody who waits for an answer is told so.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal, TypeAlias, final

import anyio
import attrs

from treewarden.protocols import ActorStopped, MailboxFull

CAPACITY = 64

WhenFull: TypeAlias = Literal["refuse", "wait"]
"""What becomes of a question that does not fit."""


@final
@attrs.define(eq=False)
class Letter:
    """One message, and what became of it. Not made directly: see ``Mailbox.put``."""

    message: Any
    _owner: str
    # False where nobody waits for what becomes of it.
    _is_question: bool
    _answer: Any = None
    # Set when it has an answer, or never will have one.
    _news: anyio.Event | None = None
    _is_answered: bool = False
    _is_dropped: bool = False

    def reply(self, answer: Any) -> None:
        """Answer whoever asked. No effect when its actor was stopped, or has answered before."""
        if self.is_open:
            self._answer, self._is_answered = answer, True
            self._tell()

    @property
    def is_open(self) -> bool:
        """Whether somebody waits for an answer that may still come."""
        return self._is_question and not self._is_answered and not self._is_dropped

    def drop(self) -> None:
        """It will not be answered any more. No effect when it was."""
        if self.is_open:
            self._is_dropped = True
            self._tell()

    async def wait(self) -> Any:
        """The answer.

        Raises:
            ActorStopped: Its actor was stopped, or ended, before it answered.
        """
        if self.is_open:
            self._news = self._news or anyio.Event()
            await self._news.wait()
        if self._is_dropped:
            raise ActorStopped(self._owner)
        return self._answer

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()


@final
@attrs.define(eq=False)
class Mailbox:
    """A bounded queue that belongs to one actor, ``owner``."""

    owner: str
    capacity: int = CAPACITY
    _unread: deque[Letter] = attrs.field(factory=deque[Letter])
    # Questions that did not fit and whose askers wait, oldest first. Swept when one joins them.
    _outside: deque[Letter] = attrs.field(factory=deque[Letter])
    # Questions that were read and not answered, oldest first. Swept at the next one that is read.
    _read: list[Letter] = attrs.field(factory=list[Letter])
    _is_closed: bool = False
    _news: anyio.Event | None = None

    def put(
        self, message: Any, *, is_question: bool = False, when_full: WhenFull = "refuse"
    ) -> Letter:
        """Leave a message; ``is_question`` if its answer is waited for.

        With ``when_full="wait"`` a question that does not fit is taken when there is room, in turn
        and before anything that comes later, unless it was dropped by then.

        Raises:
            ActorStopped: Its owner takes no messages any more.
            MailboxFull: ``capacity`` messages are unread. This one was not taken.
        """
        if self._is_closed:
            raise ActorStopped(self.owner)
        letter = Letter(message, self.owner, is_question)
        if len(self._unread) >= self.capacity:
            if when_full == "refuse" or not is_question:
                raise MailboxFull(self.owner, self.capacity)
            self._outside = deque((*self._waiting(), letter))
            return letter
        self._unread.append(letter)
        if self._news is not None:
            self._news.set()
        return letter

    async def take(self) -> Letter:
        """The oldest message that is unread; waits for one.

        Raises:
            ActorStopped: Its owner was stopped. What is unread stays so.
        """
        while not self._unread and not self._is_closed:
            self._news = anyio.Event()
            await self._news.wait()
        if self._is_closed:
            raise ActorStopped(self.owner)
        letter = self._unread.popleft()
        self._let_in()
        if letter.is_open:
            self._read = [*(earlier for earlier in self._read if earlier.is_open), letter]
        return letter

    def take_all(self) -> list[Any]:
        """The messages that are unread, oldest first; none when its owner was stopped."""
        messages = [letter.message for letter in self._unread]
        self._unread.clear()
        self._let_in()
        return messages

    def close(self) -> None:
        """Hand out nothing more, and tell so whoever waits for an answer."""
        self._is_closed = True
        for letter in (*self._read, *self._unread, *self._outside):
            letter.drop()
        self._read.clear()
        self._outside.clear()
        self._unread.clear()
        if self._news is not None:
            self._news.set()

    def _waiting(self) -> list[Letter]:
        return [letter for letter in self._outside if letter.is_open]

    def _let_in(self) -> None:
        """Give the room there is to those who wait for it; who gave up needs none."""
        while self._outside and len(self._unread) < self.capacity:
            letter = self._outside.popleft()
            if letter.is_open:
                self._unread.append(letter)

    def __len__(self) -> int:
        return len(self._unread)
