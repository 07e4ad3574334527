"""The root supervisor: one tree, its ledger, and the group all its tasks live in.

A run never lives in a scope that a caller entered. One host task per event loop owns the trees that
are open on it; a tree's own task owns the group in which every actor of that tree runs. What a
caller does (``async with``, ``await``, dropping, cancelling) only signals and waits.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.lowlevel
import attrs

from treewarden.ledgers import Kind, Lease, LeaseRequest, Outcome, TreeLedger
from treewarden.protocols import (
    JournalFailed,
    RefusedError,
    ServiceFailed,
    SupervisorCancelled,
    TreeCrashed,
    UsageError,
)

from ._actor import Actor, Body, StopKind, to_the_end
from ._admission import Admission
from ._clock import Clock, loop_teller, running_backend
from ._deadlines import Deadlines, Ring
from ._frame import frame
from ._lifecycle import Moment, State, after
from ._sinks import Watched
from ._threads import send_to_loop

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from ._open_tree import OpenTree


tree_observer: ContextVar[Callable[[RootSupervisor], None] | None] = ContextVar(
    "treewarden_tree_observer", default=None
)
"""Told of every tree that is opened, before it is; for tests that look for what is left behind."""

_CLEAN_UP_SECONDS = 5.0
"""How long closing connections may take once everything else is over."""


class RootSupervisor:
    """Owns one tree. Only its own event loop may use it.

    Not made directly: ``await RootSupervisor.open(ledger, clock)``.
    """

    def __init__(self, ledger: TreeLedger, clock: Clock) -> None:
        self.ledger = ledger
        self.clock = clock
        # What a cancelled task sees on this backend.
        self.cancelled_type: type[BaseException] = anyio.get_cancelled_exc_class()
        # The parent of all top-level runs. It has no task of its own.
        self.top = Actor(self, ledger.root, None, None, state=State.RUNNING)
        # Why the tree ended before it was closed, or None. Whoever waits for a run raises it.
        self.failure: BaseException | None = None
        # Why the tree could not be written down to its end, or None. Its runs have receipts.
        self.journal_failure: JournalFailed | None = None
        # The service that failed first, or None. Everything else was stopped because of it.
        self.service_failure: ServiceFailed | None = None
        # What its runs share, where it was opened for runs.
        self.tree: OpenTree | None = None
        # It ends by itself with its last top-level run: nobody else would close it.
        self.closes_when_empty = False
        # What the tree owns beside its actors and is given back when they are gone.
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self.is_closing = False
        self.is_closed = False
        self._is_on_asyncio = running_backend() == "asyncio"
        self._thread = threading.get_ident()
        self._token = anyio.lowlevel.current_token()
        self._running_loop = loop_teller()
        self._loop = self._running_loop()
        self._group: TaskGroup | None = None
        # Made with the first deadline.
        self._deadlines: Deadlines | None = None
        self._close_asked = anyio.Event()
        self._ready = anyio.Event()
        self._closed = anyio.Event()
        self._host: Host | None = None
        # The tree's own task, from when it is started on its host.
        self.task: anyio.TaskHandle[None] | None = None

    # --- opening and closing -----------------------------------------------------------------

    @classmethod
    async def open(
        cls, ledger: TreeLedger, clock: Clock, journal: Watched | None = None
    ) -> RootSupervisor:
        """Open a tree on the running loop's host.

        Args:
            journal: The ledger's sink, if its failure is to end the tree.

        Raises:
            SupervisorCancelled: Its task was cancelled natively before its first step.
        """
        root = cls(ledger, clock)
        if (observe := tree_observer.get()) is not None:
            observe(root)
        if journal is not None:
            journal.on_failure = root.lose_journal
        root._host = Host.take(root)
        try:
            await to_the_end(root._ready.wait)
            if root.failure is not None:
                raise root.failure
        except BaseException:
            await root.close()
            raise
        return root

    async def close(self, reason: str = "the tree was closed") -> None:
        """Stop everything that is left, and return when all of it has ended.

        Safe to call twice, and from any task of the loop. A caller that is cancelled meanwhile
        stays to the end, so that nobody goes on beside a tree that is still closing.
        """
        self.stop_admitting()
        self.top.stop_below(StopKind.CLOSED, reason)
        self._close_asked.set()
        await to_the_end(self._wait_until_closed)

    def stop_admitting(self) -> None:
        """Start nothing more, not even what waits for its turn."""
        self.is_closing = True
        self.ledger.root.takes_no_more = True

    def lose_journal(self, cause: Exception) -> None:
        """End all that runs, because what happens is not written down any more.

        Called in the middle of a ledger's transaction, so it only asks; whoever was about to send
        a request looks here first.
        """
        self.journal_failure = JournalFailed(cause)
        self.stop_admitting()
        self.top.stop_below(StopKind.CLOSED, self.journal_failure.message)

    def end_for(self, failure: ServiceFailed) -> None:
        """End all that runs, because a service failed that nobody can start again."""
        if self.service_failure is None:
            self.service_failure = failure
        self.stop_admitting()
        self.top.stop_below(StopKind.CLOSED, failure.message)

    async def _wait_until_closed(self) -> None:
        await self._closed.wait()
        if self._host is not None:
            await self._host.wait_if_leaving()

    @property
    def has_lived(self) -> bool:
        """True once its own task has made a step, or will never make one."""
        return self._ready.is_set()

    async def live(self) -> None:
        """The body of the tree's own task."""
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                self._ready.set()
                try:
                    await self._close_asked.wait()
                    await self.top.wait_for_children()
                    if self._deadlines is not None:
                        self._deadlines.end()
                except self.cancelled_type:
                    # Either the host is going, or the group collapsed under a native cancel.
                    await self._settle_what_never_started()
                    raise
        except Exception as crash:
            # A bug of ours in one tree must not take the host's other trees with it. Everything
            # in this one was cancelled by the group and has ended.
            self.failure = TreeCrashed(crash)
        except BaseExceptionGroup as errors:
            # An actor raised what ends the program. asyncio has told the program already; on trio
            # it would be an internal error if it came out of the host. What else there is in the
            # group are cancellations, and they are passed on.
            ending, rest = errors.split((KeyboardInterrupt, SystemExit))
            if ending is None:
                raise
            self.failure = _first_of(ending)
            if rest is not None:
                raise rest from None
        finally:
            self._shut_books()
            await self._give_back()

    async def _give_back(self) -> None:
        """Clean up what has to be awaited; money and slots are back already."""
        try:
            if self.on_close is not None:
                with anyio.move_on_after(_CLEAN_UP_SECONDS, shield=True):
                    await self.on_close()
        finally:
            self.is_closed = True
            self._closed.set()
            if self._host is not None:
                self._host.let_go(self)

    def lose(self) -> None:
        """End a tree whose own task was cancelled natively before its first step.

        Nothing was started in it: there was no group to start it in.
        """
        if self.task is not None:
            self.task.coro.close()
        self.failure = SupervisorCancelled("treewarden host", ("the task of the tree",))
        self._shut_books()
        self.is_closing = self.is_closed = True
        self._closed.set()
        self._ready.set()

    async def _settle_what_never_started(self) -> None:
        """End the leases of tasks that are gone without a word.

        A task makes its first step in the next turn of the loop, whatever cancels it; what has not
        made one after two turns was cancelled natively and never will.
        """
        self.stop_admitting()
        for _ in range(2):
            await anyio.lowlevel.cancel_shielded_checkpoint()
        lost = [a for a in self.top.below() if a.state is State.ADMITTED]
        if lost:
            self.failure = SupervisorCancelled("root", tuple(a.path for a in lost))
        for actor in reversed(lost):
            if actor.task is not None:
                actor.task.coro.close()
            self._end_unstarted(actor)

    def _shut_books(self) -> None:
        self._group = None
        self.ledger.end(self.ledger.root, Outcome.OK, self.clock.monotonic())
        self.top.state = State.ENDED

    # --- actors ------------------------------------------------------------------------------

    def start(
        self,
        parent: Actor,
        name: str,
        body: Body,
        *,
        kind: Kind,
        on_end: Callable[[Actor], None] | None = None,
        seconds: float | None = None,
        cap: int | None = None,
    ) -> Actor:
        """Admit an actor below ``parent`` and start its task; no await in between.

        Args:
            on_end: Called synchronously when its lease is given back.
            seconds: How long it may live at most; the parent's deadline holds where it is earlier.
            cap: Carve a wallet of this much for it; None: it draws on its parent's.

        Raises:
            RefusedError: Nothing was started.
            UsageError: The tree is closed, or belongs to another loop.
        """
        self._require_open(parent)
        now = self.clock.monotonic()
        lease = self.ledger.admit(
            parent.lease,
            name,
            kind=kind,
            at=now,
            cap=cap,
            deadline=None if seconds is None else now + seconds,
        )
        actor = Actor(self, lease, parent, body, on_end=on_end)
        self._launch(actor)
        return actor

    def enter(
        self,
        parent: Actor,
        request: LeaseRequest,
        body: Body,
        *,
        on_ending: Callable[[Actor], None] | None = None,
        on_end: Callable[[Actor], None] | None = None,
        on_refused: Callable[[RefusedError], None] | None = None,
        max_attempts: int | None = None,
    ) -> Admission:
        """Start an actor below ``parent`` as soon as the tree has room for it.

        Args:
            on_ending, on_end: Called synchronously right before and after its lease is given back.
            on_refused: Called when it is refused after it waited; it must not ask the ledger.

        Raises:
            RefusedError: Nothing was started, and waiting would not help or is not allowed.
            UsageError: The tree is closed, or belongs to another loop.
        """
        self._require_open(parent)
        now = self.clock.monotonic()
        got = self.ledger.enter(parent.lease, request, now, max_attempts=max_attempts)
        admission = Admission(self)

        def actor_of(lease: Lease) -> Actor:
            return Actor(self, lease, parent, body, on_ending=on_ending, on_end=on_end)

        if isinstance(got, Lease):
            admission.actor = actor_of(got)
            self._launch(admission.actor)
            return admission
        admission.entry = got

        def answered() -> None:
            # In the middle of a ledger's transaction, which must not be asked for anything now.
            if isinstance(got.outcome, Lease):
                admission.actor = actor_of(got.outcome)
                self._launch_later(admission.actor)
                admission.tell()
            elif got.outcome is None:
                admission.leave(f"{parent.path} is closing")
            else:
                if on_refused is not None:
                    on_refused(got.outcome)
                admission.tell()

        got.on_ready = answered
        return admission

    def _require_open(self, parent: Actor) -> None:
        self.require_owner()
        if self.journal_failure is not None:
            raise self.journal_failure
        if self.service_failure is not None:
            raise self.service_failure
        is_over = parent.state in (State.STOPPING, State.ENDED)
        if self._group is None or self.is_closing or is_over:
            raise UsageError(
                f"{parent.path} is closing; nothing can start below it.", code="cave_tree_closed"
            )

    def _launch(self, actor: Actor) -> None:
        """Give an actor that has a lease its place below its parent, and its task."""
        try:
            self._run_task(actor)
        except BaseException:
            self._end_unstarted(actor)
            raise

    def _launch_later(self, actor: Actor) -> None:
        """``_launch`` in the middle of somebody else's transaction, where no lease can be ended."""
        try:
            self._run_task(actor)
        except Exception as error:
            actor.error = error
            self.signal(functools.partial(self._end_unstarted, actor))

    def _run_task(self, actor: Actor) -> None:
        group = self._group
        assert actor.parent is not None, actor
        actor.parent.adopt(actor)
        assert group is not None, actor
        self._set_deadline(actor, group)
        actor.task = group.create_task(frame(actor, actor.body), name=actor.lease.node.path)
        if self.journal_failure is not None:
            # Its own admission could not be written.
            actor.stop(StopKind.CLOSED, self.journal_failure.message)

    def _end_unstarted(self, actor: Actor) -> None:
        """End an actor whose task never made a step. No effect on one that has ended."""
        if actor.state is State.ENDED:
            return
        actor.state = after(actor.state, Moment.LOST)
        self._end(actor)

    def _set_deadline(self, actor: Actor, group: TaskGroup) -> None:
        # Only a deadline of its own is watched: an inherited one strikes the ancestor that has it,
        # and that stops everything below. The top has no task that could be struck.
        node, parent = actor.lease.node, actor.parent
        assert parent is not None, actor
        deadline = node.deadline
        if deadline is None or (parent is not self.top and deadline == parent.lease.node.deadline):
            return
        self._set_alarm(group, actor.lease.id, deadline, actor.strike)

    def watch(self, id_: int, instant: float, ring: Ring) -> None:
        """Have ``ring`` called at ``instant``, for a call with this id, until ``unwatch``."""
        assert self._group is not None, id_
        self._set_alarm(self._group, id_, instant, ring)

    def unwatch(self, id_: int) -> None:
        """Have nothing called any more. Good to call twice."""
        if self._deadlines is not None:
            self._deadlines.drop(id_)

    def _set_alarm(self, group: TaskGroup, id_: int, instant: float, ring: Ring) -> None:
        if self._deadlines is None:
            self._deadlines = Deadlines(self.clock)
            group.start_soon(self._deadlines.watch, name="treewarden deadlines")
        self._deadlines.set(id_, instant, ring)

    def see_off(self, actor: Actor, *, raised: BaseException | None = None) -> None:
        """End an actor whose body is over and whose children are gone. Never awaits."""
        if actor.state is State.ENDED:
            return
        if raised is not None:
            # The program is ending: what is below cannot be waited for, only be given back.
            below = actor.below()
            for ending in (actor, *below):
                ending.lease.takes_no_more = True
            for child in reversed(below):
                child.state = State.ENDED
                self._end(child)
        actor.state = after(after(actor.state, Moment.BODY_OVER), Moment.CHILDREN_GONE)
        self._end(actor)

    def _end(self, actor: Actor) -> None:
        try:
            if actor.on_ending is not None:
                actor.on_ending(actor)
            self.ledger.end(actor.lease, actor.outcome, self.clock.monotonic())
            if actor.on_end is not None:
                actor.on_end(actor)
        finally:
            self.unwatch(actor.lease.id)
            if actor.parent is not None:
                actor.parent.lose(actor)
            actor.mark_ended()
            if self.closes_when_empty and not self.top.children:
                self.is_closing = True
                self._close_asked.set()

    # --- cancellation that is not ours ---------------------------------------------------------

    @property
    def is_cancelled_from_outside(self) -> bool:
        """True when the running task is inside a cancelled scope of the tree or its host."""
        return anyio.current_effective_deadline() == -math.inf

    @property
    def has_native_cancel(self) -> bool:
        """True when somebody called ``task.cancel()`` on the running task and nobody took it back.

        Nothing but asyncio has such a thing.
        """
        return self._is_on_asyncio and bool(sys.modules["asyncio"].current_task().cancelling())

    def forget_native_cancel(self) -> None:
        """Take note of a native ``task.cancel()`` so that the task can end in order."""
        if self._is_on_asyncio:
            task = sys.modules["asyncio"].current_task()
            while task.cancelling():
                task.uncancel()

    def fault(self, actor: Actor, what: str) -> None:
        """Write down what went wrong beside the outcome."""
        actor.lease.recorder.faults.append(what)

    # --- who may use it ------------------------------------------------------------------------

    def require_owner(self) -> None:
        """One tree belongs to one loop.

        Raises:
            UsageError: This is another thread or another event loop.
        """
        if not self.is_own_thread or not self._is_current_loop():
            raise UsageError(
                "one tree belongs to one event loop, and this is another thread or loop. Use "
                "tree.run_from_thread(...) there, or open a tree of its own.",
                code="cave_tree_foreign_loop",
            )

    @property
    def is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def _is_current_loop(self) -> bool:
        try:
            return self._running_loop() is self._loop
        except RuntimeError:
            return False

    def signal(self, message: Callable[[], None]) -> None:
        """Have ``message`` called in the tree's loop, from any thread and from a finaliser.

        Nothing happens when that loop is gone.
        """
        send_to_loop(self._token, message)

    @property
    def token(self) -> Any:
        """The loop's token, to send it a message from a thread."""
        return self._token


def _first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


@attrs.define(eq=False)
class Host:
    """The one task of ours on an event loop: the trees' tasks run in its group.

    It is there while a tree is, so nothing of ours outlives the last tree.
    """

    # The trees that are open on it.
    _trees: dict[RootSupervisor, None] = attrs.field(factory=dict["RootSupervisor", None])
    _is_leaving: bool = False
    # None before its first step, and after its last.
    _group: TaskGroup | None = None
    _idle: anyio.Event = attrs.field(factory=anyio.Event)
    _gone: anyio.Event = attrs.field(factory=anyio.Event)
    # asyncio keeps only a weak reference to a task.
    _task: Any = None

    @classmethod
    def take(cls, tree: RootSupervisor) -> Host:
        """This loop's host, started if there is none, with the task of ``tree`` started on it."""
        host = _host_of_loop.get(None)
        if host is None or host._is_leaving:
            host = cls()
            _host_of_loop.set(host)
            host._launch()
        host._trees[tree] = None
        if host._group is not None:
            host._start(tree, host._group)
        return host

    def _start(self, tree: RootSupervisor, group: TaskGroup) -> None:
        tree.task = group.create_task(tree.live(), name="treewarden tree")

    async def wait_if_leaving(self) -> None:
        """Return when the host is gone, if nobody needs it any more."""
        if self._is_leaving:
            await self._gone.wait()

    def let_go(self, tree: RootSupervisor) -> None:
        """Give the host back; it goes with the last tree."""
        self._trees.pop(tree, None)
        if not self._trees:
            self._is_leaving = True
            self._idle.set()

    def _launch(self) -> None:
        # The only two native task creations of the project: a host belongs to its loop, not to the
        # task group of whoever came first.
        if running_backend() == "trio":
            trio: Any = sys.modules["trio"]
            self._task = trio.lowlevel.spawn_system_task(self._live, name="treewarden host")
        else:
            loop = sys.modules["asyncio"].get_running_loop()
            self._task = loop.create_task(self._live(), name="treewarden host")
            # Of a task that is cancelled before its first step nothing ever runs, except for this.
            self._task.add_done_callback(self._end)

    async def _live(self) -> None:
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                for tree in self._trees:
                    self._start(tree, group)
                try:
                    await self._idle.wait()
                except anyio.get_cancelled_exc_class():
                    await self._lose_what_never_started()
                    raise
        finally:
            self._end()

    async def _lose_what_never_started(self) -> None:
        """Tell whoever waits for a tree that it will never be open.

        At once, and not only when the others have ended: an actor of another tree may be the one
        who waits. As with actors, what has not made a step after two turns never will.
        """
        for _ in range(2):
            await anyio.lowlevel.cancel_shielded_checkpoint()
        for tree in [tree for tree in self._trees if not tree.has_lived]:
            del self._trees[tree]
            tree.lose()

    def _end(self, _: object = None) -> None:
        """Nothing runs on it any more. No effect when called again."""
        self._is_leaving = True
        self._group = None
        while self._trees:
            # One that has lived has let go of its host.
            tree, _ = self._trees.popitem()
            tree.lose()
        self._gone.set()


_host_of_loop: anyio.lowlevel.RunVar[Host | None] = anyio.lowlevel.RunVar("treewarden_host")
