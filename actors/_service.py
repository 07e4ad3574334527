"""A supervisor in an open tree, as the one who opened it sees it."""

from __future__ import annotations

from typing import Any, final

import anyio

from treewarden.ledgers import Kind, Outcome
from treewarden.protocols import ActorStopped, ServiceFailed, UsageError

from ._actor import Actor, StopKind
from ._child import Child
from ._lifecycle import State
from ._mailbox import Letter, WhenFull
from ._root import RootSupervisor
from ._supervisor import Supervisor, require_name


@final
class Service:
    """A supervisor at work, and all it keeps alive. Not made directly: see ``Tree.supervise``."""

    def __init__(self, root: RootSupervisor, supervisor: Supervisor, name: str) -> None:
        require_name(name)
        if not isinstance(supervisor, Supervisor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{supervisor!r} is no supervisor. Give tw.Supervisor([...]).")
        self._root, self._supervisor = root, supervisor
        # Set when its children have started, or never will.
        self._started = anyio.Event()
        self._actor = root.start(
            root.top, name, self._live, kind=Kind.SERVICE, on_end=self._note_end
        )

    @property
    def path(self) -> str:
        """Its place in the tree."""
        return self._actor.path

    @property
    def is_over(self) -> bool:
        return self._actor.state is State.ENDED

    @property
    def faults(self) -> tuple[str, ...]:
        """What went wrong beside the outcome: who did not end in time, what a clean-up raised."""
        lease = self._actor.lease
        return tuple(lease.recorder.faults) if lease.has_record else ()

    async def wait_started(self) -> None:
        """Return when every child has made its first step, or the service has ended before."""
        await self._started.wait()

    async def wait(self) -> None:
        """Return when it has ended with all below it, by itself or because it was stopped.

        Whoever is cancelled here only stops waiting.

        Raises:
            ServiceFailed: Too many restarts, or its task was cancelled from outside. Everything
                below it has ended, and its tree is ending.
            SupervisorCancelled: Its tree was ended from outside.
        """
        await self._actor.wait()
        failure = self._root.failure or self._failure(self._actor)
        if failure is not None:
            raise failure

    def stop(self, reason: str = "the service was stopped") -> None:
        """Stop its children in reverse start order. ``wait`` returns when all of it has ended."""
        self._root.require_owner()
        self._actor.stop(StopKind.CANCELLED, reason)

    # --- messages --------------------------------------------------------------------------------

    def send(self, name: str, message: Any) -> None:
        """Leave a message for the child ``name``, which gets it by ``await actor.receive()``.

        Raises:
            ActorStopped: The child does not run at the moment, or is ending.
            MailboxFull: It has not read what it was sent before.
            UsageError: There is no such child.
        """
        self._put(name, message, is_question=False)

    async def ask(self, name: str, message: Any, *, when_full: WhenFull = "refuse") -> Any:
        """Leave a message and return what the child replies with ``letter.reply(answer)``.

        A question is for the child as it runs now. One that is started again knows nothing of it.

        Args:
            when_full: What becomes of a question that its mailbox has no room for: "refuse" raises,
                "wait" waits for its turn. Whoever is cancelled meanwhile leaves no trace.

        Raises:
            ActorStopped: The child does not run, or was asked to end before it replied.
            MailboxFull: As for ``send``, and only with "refuse".
            UsageError: As for ``send``, or ``when_full`` is neither.
        """
        if when_full not in ("refuse", "wait"):
            raise UsageError(
                f'when_full is {when_full!r}. Use "refuse" or "wait".', code="cave_option_invalid"
            )
        letter = self._put(name, message, is_question=True, when_full=when_full)
        try:
            return await letter.wait()
        finally:
            letter.drop()

    def _put(
        self, name: str, message: Any, *, is_question: bool, when_full: WhenFull = "refuse"
    ) -> Letter:
        self._root.require_owner()
        if all(spec.name != name for spec in self._supervisor.children):
            raise UsageError(f"{self.path} has no child {name!r}.", code="cave_option_invalid")
        for actor in (self._actor.children or {}).values():
            if isinstance(actor.body, Child) and actor.body.name == name:
                box = actor.letterbox()
                return box.put(message, is_question=is_question, when_full=when_full)
        raise ActorStopped(f"{self.path}/{name}")

    # --- its life and end ------------------------------------------------------------------------

    async def _live(self, actor: Actor) -> None:
        await self._supervisor.supervise(actor, self._started.set)

    def _failure(self, actor: Actor) -> ServiceFailed | None:
        if actor.outcome is Outcome.FAILED:
            return ServiceFailed(actor.path, repr(actor.error), actor.error)
        asked = actor.stop_asked
        if asked is not None and asked.kind is StopKind.NATIVE:
            return ServiceFailed(actor.path, asked.reason)
        return None

    def _note_end(self, actor: Actor) -> None:
        self._started.set()
        # Nobody is above it who could start it again: as in OTP, all that depends on it ends too.
        if (failure := self._failure(actor)) is not None:
            self._root.end_for(failure)
