"""The front door: ``run``, ``run_sync``, ``stream`` and ``open_tree``.

Every way in makes a ``Start`` (see _start.py) and waits for it in its own way.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
from anyio import from_thread

from treewarden.ledgers import TreeLedger, Unit
from treewarden.protocols import RunEvent, UsageError

from ._actor import current_actor
from ._agent import Result
from ._clock import Clock
from ._conversation import Conversation
from ._definitions import Agent, ToolCallback
from ._limits import Budget, Limits
from ._open_tree import OpenTree, set_ceiling
from ._retry import Retry
from ._start import OnStop, Prompt, Start
from ._stream import RunStream

if TYPE_CHECKING:
    from treewarden.ledgers import Breakers, Event

    from ._service import Service
    from ._supervisor import Supervisor


async def run(
    agent: Agent,
    prompt: Prompt,
    *,
    budget: Budget | None = None,
    limits: Limits | None = None,
    breakers: Breakers | None = None,
    deps: Any = None,
    on_tool_call: ToolCallback | None = None,
    on_stop: OnStop = "return",
    retry: Retry | None = None,
    on_event: Callable[[RunEvent], None] | None = None,
    conversation: Conversation | None = None,
    detached: bool = False,
    clock: Clock | None = None,
    seed: int | None = None,
    journal: Callable[[Event], None] | None = None,
    resume_from: str | Path | None = None,
    max_subagent_invocations: int | None = None,
    max_concurrent_subagents: int | None = None,
) -> Result:
    """Run ``agent`` and return what came of it.

    Called inside a running tool or agent, it starts a child of that actor: its wallet, depth,
    deadline and caps; ``budget`` then carves from its wallet.

    Args:
        budget: A ceiling for this run and everything below it. None: counted, not bounded.
        limits: Depth, breadth, calls and time.
        breakers: When an agent of this run that goes round in circles is told so, and when it is
            stopped. None: never; a run inside another one takes that one's.
        deps: What tools get as ``ctx.deps``.
        on_tool_call: Asked with each ToolCall before it runs; False or a text refuses it.
        on_stop: What a limit does: "return" a result that is not ``complete``, or "raise".
        retry: Whether a failed model call is made again, here and in everything below. None: as
            in the run that it is called in, else no.
        on_event: Called with every event of the run, as it happens. What it raises ends the run.
        conversation: What was said before; this run adds to it if it ends in order.
        detached: Inside an actor, open a tree of its own instead; shown on the receipt.
        clock: Tells the time (see ``treewarden.testing.VirtualClock``).
        seed: Makes ids repeatable.
        journal: Gets every ledger event, in order. What it raises ends the run.
        resume_from: A journal file. What the last tree in it spent counts as spent under
            ``budget`` from the start; what is uncertain counts in full. The limit is ``budget``,
            whatever the file says.
        max_subagent_invocations, max_concurrent_subagents: Shorthands of ``limits``.

    Raises:
        UsageError: Something asked for cannot be; nothing was started.
        RunError: The run failed after it started; carries the receipt.
    """
    start = Start(
        agent,
        prompt,
        budget=budget,
        limits=_with_shorthands(limits, max_subagent_invocations, max_concurrent_subagents),
        breakers=breakers,
        deps=deps,
        approve=on_tool_call,
        on_stop=on_stop,
        retry=retry,
        conversation=conversation,
        detached=detached,
        clock=clock,
        seed=seed,
        journal=journal,
        resume_from=resume_from,
    )
    return await start.run(on_event)


def run_sync(agent: Agent, prompt: Prompt, *, backend: str = "asyncio", **options: Any) -> Result:
    """``run`` for scripts: starts an event loop, runs, and returns the result.

    Args:
        backend: "asyncio" or "trio".
        **options: As for ``run``.
    """

    async def main() -> Result:
        return await run(agent, prompt, **options)

    above = current_actor.get()
    if above is not None and not above.root.is_own_thread:
        # A tool's thread: the run belongs to the tool, so it runs in the tree's own loop.
        return from_thread.run(main, token=above.root.token)
    try:
        return anyio.run(main, backend=backend)
    except RuntimeError as error:
        if "Already running" not in str(error):
            raise
        raise UsageError(
            "run_sync() was called where an event loop runs already. Write `await tw.run(...)`."
        ) from None


def stream(
    agent: Agent,
    prompt: Prompt,
    *,
    budget: Budget | None = None,
    limits: Limits | None = None,
    breakers: Breakers | None = None,
    deps: Any = None,
    on_tool_call: ToolCallback | None = None,
    on_stop: OnStop = "return",
    retry: Retry | None = None,
    conversation: Conversation | None = None,
    detached: bool = False,
    clock: Clock | None = None,
    seed: int | None = None,
    journal: Callable[[Event], None] | None = None,
    resume_from: str | Path | None = None,
    max_subagent_invocations: int | None = None,
    max_concurrent_subagents: int | None = None,
) -> RunStream:
    """Run ``agent`` and read its events.

    ``async with tw.stream(...) as run:`` starts it, ``async for event in run:`` reads along. The
    run goes on whether its events are read or not. Arguments and errors are those of ``run``.
    """
    return RunStream(
        Start(
            agent,
            prompt,
            budget=budget,
            limits=_with_shorthands(limits, max_subagent_invocations, max_concurrent_subagents),
            breakers=breakers,
            deps=deps,
            approve=on_tool_call,
            on_stop=on_stop,
            retry=retry,
            conversation=conversation,
            detached=detached,
            clock=clock,
            seed=seed,
            journal=journal,
            resume_from=resume_from,
        )
    )


def open_tree(
    *,
    budget: Budget | None = None,
    limits: Limits | None = None,
    clock: Clock | None = None,
    seed: int | None = None,
    journal: Callable[[Event], None] | None = None,
    resume_from: str | Path | None = None,
) -> Tree:
    """One ledger for many runs: ``async with tw.open_tree(budget=..., limits=...) as tree``.

    For services: the budget and the limits hold over everything that runs in the tree. Leaving
    the block cancels what still runs and waits for it. Arguments are those of ``run``.

    Raises:
        UsageError: (on entry) Something asked for cannot be; nothing was started.
        JournalFailed: (on leaving) The journal could not be written to its end.
        ServiceFailed: (on leaving) A service failed, and everything else was stopped.
    """
    return Tree(
        budget=budget,
        limits=limits or Limits(),
        clock=clock,
        seed=seed,
        journal=journal,
        resume_from=resume_from,
    )


class Tree:
    """An open tree. Belongs to the event loop that opened it."""

    def __init__(
        self,
        *,
        budget: Budget | None,
        limits: Limits,
        clock: Clock | None,
        seed: int | None,
        journal: Callable[[Event], None] | None,
        resume_from: str | Path | None,
    ) -> None:
        self._budget, self._limits = budget, limits
        self._clock, self._seed, self._journal = clock, seed, journal
        self._resume_from = resume_from
        self._open: OpenTree | None = None

    async def __aenter__(self) -> Tree:
        if self._open is not None:
            raise UsageError("this tree was opened before. Call tw.open_tree(...) again.")
        unit: Unit = "usd" if self._budget is None else self._budget.unit
        self._open = await OpenTree.open(
            unit,
            self._budget,
            self._limits,
            self._clock,
            self._seed,
            self._journal,
            self._resume_from,
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._tree.close()
        root = self._tree.root
        failure = root.failure or root.journal_failure or root.service_failure
        if failure is not None and exc is None:
            raise failure

    async def run(
        self,
        agent: Agent,
        prompt: Prompt,
        *,
        budget: Budget | None = None,
        limits: Limits | None = None,
        breakers: Breakers | None = None,
        deps: Any = None,
        on_tool_call: ToolCallback | None = None,
        on_stop: OnStop = "return",
        retry: Retry | None = None,
        on_event: Callable[[RunEvent], None] | None = None,
        conversation: Conversation | None = None,
    ) -> Result:
        """Run ``agent`` in this tree. With a ``budget`` it gets a wallet carved from the tree's.

        Raises:
            RefusedError: The tree has no room or no money for it; nothing was started.
            UsageError, RunError: As for ``treewarden.run``.
        """
        start = Start(
            agent,
            prompt,
            budget=budget,
            limits=limits,
            breakers=breakers,
            retry=retry,
            deps=deps,
            approve=on_tool_call,
            on_stop=on_stop,
            conversation=conversation,
            tree=self._tree,
        )
        return await start.run(on_event)

    def stream(
        self,
        agent: Agent,
        prompt: Prompt,
        *,
        budget: Budget | None = None,
        limits: Limits | None = None,
        breakers: Breakers | None = None,
        deps: Any = None,
        on_tool_call: ToolCallback | None = None,
        on_stop: OnStop = "return",
        retry: Retry | None = None,
        conversation: Conversation | None = None,
    ) -> RunStream:
        """As ``run``, with the run's events."""
        return RunStream(
            Start(
                agent,
                prompt,
                budget=budget,
                limits=limits,
                breakers=breakers,
                retry=retry,
                deps=deps,
                approve=on_tool_call,
                on_stop=on_stop,
                conversation=conversation,
                tree=self._tree,
            )
        )

    def supervise(self, supervisor: Supervisor, *, name: str) -> Service:
        """Start a supervisor that keeps services alive as long as the tree is open.

        What its children run with ``tw.run`` are their runs, and draw on the tree's wallet: a
        restart gives nothing back. When the supervisor fails, nobody is above it: everything in
        the tree is stopped with that reason, and leaving the tree raises ``ServiceFailed``.

        Args:
            name: Its place in the tree, a part of its path.

        Raises:
            UsageError: The name cannot be, or the tree is closed; nothing was started.
            ServiceFailed: Another one has failed, so the tree is ending.
        """
        from ._service import Service  # what most trees never need

        return Service(self._tree.root, supervisor, name)

    def run_from_thread(self, agent: Agent, prompt: Prompt, **options: Any) -> Result:
        """``run`` from a thread that is not the tree's own; blocks that thread until the end."""
        token = self._tree.root.token

        async def message() -> Result:
            return await self.run(agent, prompt, **options)

        return from_thread.run(message, token=token)

    def set_budget(
        self, *, max_usd: str | int | Decimal | None = None, max_tokens: int | None = None
    ) -> None:
        """Raise or lower the tree's ceiling while it runs.

        A lowered ceiling goes down as far as what is spent and held allows, and further as holds
        come back; it never breaches.

        Raises:
            UsageError: The tree counts in the other denomination.
        """
        root = self._tree.root
        root.require_owner()
        set_ceiling(root, root.ledger.root, Budget(max_usd=max_usd, max_tokens=max_tokens))

    def set_limit(self, name: str, value: int | None) -> None:
        """Change one of the tree's limits by its name in ``Limits``; None lifts it.

        A lowered limit may stay exceeded until what runs has ended.

        Raises:
            LedgerError: There is no such limit, or the value is out of range. Nothing changed.
        """
        root = self._tree.root
        root.require_owner()
        root.ledger.set_cap(name, value, root.clock.monotonic())

    def snapshot(self) -> dict[str, Any]:
        """What is so right now: nodes, wallets, counters and waiters (see docs/snapshot.md)."""
        return self._tree.root.ledger.snapshot()

    def check(self) -> None:
        """Assert every invariant of the ledger."""
        self._tree.root.ledger.check()

    @property
    def ledger(self) -> TreeLedger:
        """The tree's ledger. Read it; only the tree changes it."""
        return self._tree.root.ledger

    @property
    def _tree(self) -> OpenTree:
        if self._open is None:
            raise UsageError("the tree is not open. Write `async with tw.open_tree(...) as tree:`.")
        return self._open


def _with_shorthands(
    limits: Limits | None, invocations: int | None, concurrent: int | None
) -> Limits | None:
    if invocations is None and concurrent is None:
        return limits
    limits = limits or Limits()
    caps = limits.caps
    return Limits(
        max_runs=caps.max_runs,
        max_depth=caps.max_depth,
        max_subagents=invocations if invocations is not None else caps.max_subagents,
        max_concurrent_subagents=(
            concurrent if concurrent is not None else caps.max_concurrent_subagents
        ),
        max_concurrent_calls=caps.max_concurrent_calls,
        max_model_calls=caps.max_model_calls,
        max_tool_calls=caps.max_tool_calls,
        max_descendants=caps.max_descendants,
        max_spawns_per_minute=caps.max_spawns_per_minute,
        deadline=limits.deadline_seconds,
        idle_timeout=limits.times.idle_timeout_seconds,
        min_call_seconds=limits.times.min_call_seconds,
        admission=caps.admission,
    )
