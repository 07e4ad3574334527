"""An actor: a lease, a task and the actors below it.

Two rules. An actor's body never gives anything back: its supervisor does, synchronously, on every
exit (see _frame.py). And an actor is stopped through ``stop()``, which carries a reason to
everything below it; cancelling its task is only how that reaches the code that runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import anyio
import attrs

from treewarden.ledgers import Lease, Outcome
from treewarden.protocols import ActorStopped

from ._lifecycle import Moment, State, after
from ._mailbox import Letter, Mailbox

if TYPE_CHECKING:
    from ._root import RootSupervisor


Body: TypeAlias = "Callable[[Actor], Awaitable[Any]]"
"""What an actor's task runs."""


class StopKind(Enum):
    """Who asked an actor to stop."""

    CANCELLED = "cancelled"  # somebody called cancel(reason)
    DEADLINE = "deadline"  # its instant has passed
    NATIVE = "native"  # its task was cancelled behind our back
    CLOSED = "closed"  # its tree was closed


@attrs.frozen
class StopAsked:
    kind: StopKind
    reason: str


@attrs.define(eq=False, slots=True)
class Actor:
    """One living thing of the tree."""

    root: RootSupervisor
    lease: Lease
    parent: Actor | None
    # What its task runs; None for the top of a tree, which has no task.
    body: Any
    state: State = State.ADMITTED
    # Its task, from right after its admission; None for the top. The handle has the scope that
    # cancels the task; cancelling it before the first step is remembered.
    task: anyio.TaskHandle[None] | None = None
    # The first stop that was asked for. Never replaced: the first reason is the true one.
    stop_asked: StopAsked | None = None
    # Set when the body is over.
    outcome: Outcome = Outcome.FAILED_TO_START
    value: Any = None
    error: BaseException | None = None
    # Live children by lease id, in start order. None: it never had one.
    children: dict[int, Actor] | None = None
    # Its body stops the children, one after the other: see ``stop``.
    stops_in_order: bool = False
    # What it was sent, made with the first message.
    mailbox: Mailbox | None = None
    # Called once, synchronously, right before the lease is given back.
    on_ending: Callable[[Actor], None] | None = None
    # Called once, synchronously, when the lease is given back.
    on_end: Callable[[Actor], None] | None = None
    # Set when the last child is gone, while the actor waits for that.
    _children_gone: anyio.Event | None = None
    # Set at the end, while somebody waits for that.
    _ended: anyio.Event | None = None

    @property
    def path(self) -> str:
        return self.lease.node.path

    def stop(self, kind: StopKind, reason: str) -> None:
        """Ask this actor and all below it to end, children in reverse start order.

        The first reason stays. No effect on an actor that has ended. A supervisor passes it on
        itself and in order, except where there is no time for that.
        """
        if self.state is State.ENDED:
            return
        if self.stop_asked is None:
            self.stop_asked = StopAsked(kind, reason)
        self.lease.takes_no_more = True
        if self.mailbox is not None:
            self.mailbox.close()
        is_urgent = kind is StopKind.DEADLINE or self.root.journal_failure is not None
        if is_urgent or not self.stops_in_order:
            self.stop_below(kind, reason)
        self.state = after(self.state, Moment.STOP_ASKED)
        if self.task is not None:
            self.task.cancel()

    def strike(self, now: float) -> None:
        """Its deadline is here."""
        self.stop(StopKind.DEADLINE, "its deadline has passed")

    def stop_below(self, kind: StopKind, reason: str) -> None:
        """Ask all below it to end, and not the actor itself."""
        for child in reversed(list((self.children or {}).values())):
            child.stop(kind, reason)

    async def receive(self) -> Letter:
        """The next message that it was sent, oldest first; waits for one."""
        return await self.letterbox().take()

    def letterbox(self) -> Mailbox:
        """Its mailbox, made when it is first asked for.

        Raises:
            ActorStopped: It was asked to end, or has ended.
        """
        if self.stop_asked is not None or self.state is State.ENDED:
            raise ActorStopped(self.path)
        if self.mailbox is None:
            self.mailbox = Mailbox(self.path)
        return self.mailbox

    async def wait(self) -> None:
        """Return when the actor has ended and given everything back."""
        if self.state is State.ENDED:
            return
        if self._ended is None:
            self._ended = anyio.Event()
        await self._ended.wait()

    async def wait_for_children(self) -> None:
        while self.children:
            self._children_gone = anyio.Event()
            await self._children_gone.wait()

    def below(self) -> list[Actor]:
        """Every live actor below, parents before their children, in start order."""
        found: list[Actor] = []
        for child in (self.children or {}).values():
            found.append(child)
            found.extend(child.below())
        return found

    def adopt(self, child: Actor) -> None:
        if self.children is None:
            self.children = {}
        self.children[child.lease.id] = child

    def lose(self, child: Actor) -> None:
        assert self.children is not None, self
        del self.children[child.lease.id]
        if not self.children and self._children_gone is not None:
            self._children_gone.set()

    def mark_ended(self) -> None:
        if self.mailbox is not None:
            self.mailbox.close()
        if self._ended is not None:
            self._ended.set()


def without_cancellation(
    error: BaseException, cancelled: type[BaseException]
) -> BaseException | None:
    """What is left of an error when its cancellations are taken out of it."""
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).split(cancelled)[1]
    return None if isinstance(error, cancelled) else error


async def to_the_end(wait: Callable[[], Awaitable[object]]) -> None:
    """Await ``wait()`` to its end, whoever cancels meanwhile; only then be cancelled.

    A shield keeps out the scopes of anyio and trio. A native ``task.cancel()`` of asyncio comes
    through it, once for each call, so ``wait`` is called again and has to be good for that.
    """
    cancelled = anyio.get_cancelled_exc_class()
    caught: BaseException | None = None
    while True:
        try:
            with anyio.CancelScope(shield=True):
                await wait()
            break
        except cancelled as error:
            caught = error
    if caught is not None:
        raise caught


current_actor: ContextVar[Actor | None] = ContextVar("treewarden_actor", default=None)
"""The actor whose task (or thread) this is. A run that starts here is its child."""
