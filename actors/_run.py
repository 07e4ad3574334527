"""The front door: ``run``, ``run_sync``, ``stream`` and ``open_tree``.

Every way in makes a ``Start``: what was asked for, checked before anything is spent. A start finds
its parent (the actor it was called in, an open tree, or a tree of its own), starts the run there
and hands back what came of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import anyio
from anyio import from_thread

from treewarden.ledgers import Carried, Kind, Lease, TreeLedger, Unit, Wallet, carried_from
from treewarden.protocols import (
    Message,
    RunError,
    RunEvent,
    UsageError,
    user,
)

from ._actor import Actor, StopKind, current_actor, to_the_end
from ._agent import Invocation, Result, RunSettings
from ._clock import Clock, LoopClock
from ._conversation import Conversation, fingerprint_of, require_conversation
from ._definitions import Agent, Subagent, ToolCallback, check_graph
from ._limits import Budget, Funding, Limits
from ._models import Auto, Model, resolve_auto
from ._root import RootSupervisor
from ._sinks import Watched, read_journal
from ._stream import RunStream

if TYPE_CHECKING:
    from treewarden.ledgers import Event

    from ._transport import Transport

Prompt: TypeAlias = str | Iterable[Message]
OnStop: TypeAlias = Literal["return", "raise"]


async def run(
    agent: Agent,
    prompt: Prompt,
    *,
    budget: Budget | None = None,
    limits: Limits | None = None,
    deps: Any = None,
    on_tool_call: ToolCallback | None = None,
    on_stop: OnStop = "return",
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
        deps: What tools get as ``ctx.deps``.
        on_tool_call: Asked with each ToolCall before it runs; False or a text refuses it.
        on_stop: What a limit does: "return" a result that is not ``complete``, or "raise".
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
        deps=deps,
        approve=on_tool_call,
        on_stop=on_stop,
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
    deps: Any = None,
    on_tool_call: ToolCallback | None = None,
    on_stop: OnStop = "return",
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
            deps=deps,
            approve=on_tool_call,
            on_stop=on_stop,
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
        failure = root.failure or root.journal_failure
        if failure is not None and exc is None:
            raise failure

    async def run(
        self,
        agent: Agent,
        prompt: Prompt,
        *,
        budget: Budget | None = None,
        limits: Limits | None = None,
        deps: Any = None,
        on_tool_call: ToolCallback | None = None,
        on_stop: OnStop = "return",
        on_event: Callable[[RunEvent], None] | None = None,
        conversation: Conversation | None = None,
    ) -> Result:
        """Run ``agent`` in this tree. With a ``budget`` it gets a wallet carved from the tree's.

        Raises:
            RefusedError: The tree has no room or no money for it; nothing was started.
            UsageError, RunError: As for ``treewarden.run``.
        """
        start = self._start(
            agent, prompt, budget, limits, deps, on_tool_call, on_stop, conversation
        )
        return await start.run(on_event)

    def stream(
        self,
        agent: Agent,
        prompt: Prompt,
        *,
        budget: Budget | None = None,
        limits: Limits | None = None,
        deps: Any = None,
        on_tool_call: ToolCallback | None = None,
        on_stop: OnStop = "return",
        conversation: Conversation | None = None,
    ) -> RunStream:
        """As ``run``, with the run's events."""
        return RunStream(
            self._start(agent, prompt, budget, limits, deps, on_tool_call, on_stop, conversation)
        )

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

    def _start(
        self,
        agent: Agent,
        prompt: Prompt,
        budget: Budget | None,
        limits: Limits | None,
        deps: Any,
        approve: ToolCallback | None,
        on_stop: OnStop,
        conversation: Conversation | None,
    ) -> Start:
        return Start(
            agent,
            prompt,
            budget=budget,
            limits=limits,
            deps=deps,
            approve=approve,
            on_stop=on_stop,
            conversation=conversation,
            tree=self._tree,
        )


class OpenTree:
    """A root supervisor with what its runs share: options, transport, ids."""

    def __init__(
        self, root: RootSupervisor, budget: Budget | None, ids: random.Random, clock_scope: Any
    ) -> None:
        self.root = root
        self.budget = budget
        self._ids = ids
        self._clock_scope = clock_scope
        self._transport: Transport | None = None

    @classmethod
    async def open(
        cls,
        unit: Unit,
        budget: Budget | None,
        limits: Limits,
        clock: Clock | None,
        seed: int | None,
        journal: Callable[[Event], None] | None,
        resume_from: str | Path | None,
    ) -> OpenTree:
        carried = None if resume_from is None else _carried(resume_from, budget)
        # A clock that drives the loop has to be in place before anything looks at the time.
        clock_scope = _installed(clock)
        try:
            told = clock or LoopClock()
            now, seconds = told.monotonic(), limits.deadline_seconds
            ids = random.Random(seed)
            watched = None if journal is None else Watched(journal)
            with nullcontext() if watched is None else watched.opening():
                ledger = TreeLedger(
                    unit=unit,
                    max=None if budget is None else budget.max,
                    initial=None if budget is None else budget.initial,
                    caps=limits.caps,
                    deadline=None if seconds is None else now + seconds,
                    at=now,
                    new_span_id=lambda: f"{ids.getrandbits(64):016x}",
                    sink=watched,
                    carried_usd=0 if carried is None else carried.usd,
                    carried_tokens=0 if carried is None else carried.tokens,
                )
            root = await RootSupervisor.open(ledger, told, watched)
        except BaseException:
            _uninstall(clock_scope)
            raise
        tree = cls(root, budget, ids, clock_scope)
        root.on_close = tree._give_back
        return tree

    def transport(self) -> Transport:
        """The tree's connections, made at the first call that needs them."""
        if self._transport is None:
            from ._transport import Transport  # httpx is loaded only by who calls a provider

            self._transport = Transport()
        return self._transport

    def new_run_id(self) -> str:
        # A version 4 UUID. Written out here, because uuid.UUID takes longer than a ledger entry.
        digits = f"{self._ids.getrandbits(128):032x}"
        variant = "89ab"[int(digits[16], 16) & 3]
        return (
            f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
        )

    async def close(self) -> None:
        await self.root.close()

    async def _give_back(self) -> None:
        """The tree's own task calls this when all actors are gone."""
        try:
            if self._transport is not None:
                await self._transport.close()
        finally:
            _uninstall(self._clock_scope)


class Start:
    """One run that was asked for."""

    def __init__(
        self,
        agent: Agent,
        prompt: Prompt,
        *,
        budget: Budget | None,
        limits: Limits | None,
        deps: Any,
        approve: ToolCallback | None,
        on_stop: OnStop,
        conversation: Conversation | None = None,
        tree: OpenTree | None = None,
        detached: bool = False,
        clock: Clock | None = None,
        seed: int | None = None,
        journal: Callable[[Event], None] | None = None,
        resume_from: str | Path | None = None,
    ) -> None:
        self._agents = check_graph(agent)
        if on_stop not in ("return", "raise"):
            raise UsageError(
                f'on_stop is {on_stop!r}. Use "return" or "raise".', code="cave_option_invalid"
            )
        self._agent, self._budget, self._limits = agent, budget, limits
        if tree is not None:
            _check_own_limits(limits)
        self._messages = _messages_of(prompt)
        self._conversation = require_conversation(conversation)
        self._deps, self._approve, self._on_stop = deps, approve, on_stop
        self._tree, self._detached = tree, detached
        self._clock, self._seed, self._journal = clock, seed, journal
        self._resume_from = resume_from
        self._is_own_tree = False
        self._actor: Actor | None = None
        self._invocation: Invocation | None = None
        # What on_event raised first.
        self._listener_error: Exception | None = None

    async def run(self, on_event: Callable[[RunEvent], None] | None) -> Result:
        """Begin, wait, and see to it that everything is back before anybody is told."""
        actor, _ = await self.begin(None if on_event is None else self._guarded(on_event))
        try:
            await actor.wait()
        except BaseException:
            actor.stop(StopKind.CANCELLED, "the caller of run was cancelled")
            await to_the_end(actor.wait)
            raise
        finally:
            await self.finish()
        return self.take()

    async def begin(
        self,
        tell: Callable[[RunEvent], None] | None,
        *,
        on_over: Callable[[], None] | None = None,
    ) -> tuple[Actor, Invocation]:
        """Check everything, find the parent and start the run's actor.

        Raises:
            UsageError, RefusedError: Nothing was started.
        """
        above = self._actor_above()
        unit = self._unit(above)
        model = self._model(above)
        self._check_money(model, unit, above)
        conversation = self._conversation
        history: Sequence[Message] = ()
        if conversation is not None:
            history = conversation.begin(fingerprint_of(self._agent, model))
        try:
            tree = self._tree
            if tree is None:
                tree = await self._open_own_tree(unit) if above is None else _tree_of(above)
            self._tree = tree
            self._start_actor(tree, above, model, history, tell, on_over)
        except BaseException:
            self._end_conversation(None)
            await self.finish()
            raise
        assert self._actor is not None, self
        assert self._invocation is not None, self
        tree.root.closes_when_empty = tree.root.closes_when_empty or self._is_own_tree
        return self._actor, self._invocation

    async def finish(self) -> None:
        """Close the tree if it was opened for this run alone; who is cancelled stays to the end."""
        if self._is_own_tree and self._tree is not None:
            await self._tree.close()

    def take(self) -> Result:
        """The result of the run that has ended.

        Raises:
            RunError, SupervisorCancelled: There is none.
        """
        assert self._tree is not None, self
        assert self._invocation is not None, self
        failure, lost = self._tree.root.failure, self._tree.root.journal_failure
        if failure is not None:
            raise failure
        if lost is not None:
            raise RunError(lost.code, lost.message, self._invocation.receipt) from lost.__cause__
        if self._listener_error is not None:
            raise self._listener_failed(self._listener_error) from self._listener_error
        result = self._invocation.take()
        return result.raise_for_stop() if self._on_stop == "raise" else result

    def set_budget(self, budget: Budget) -> None:
        """Move the ceiling of the wallet that bounds this run alone."""
        assert self._actor is not None, self
        root, node = self._actor.root, self._actor.lease.node
        lease = root.ledger.root if self._is_own_tree else self._actor.lease
        if not node.owns_wallet and not self._is_own_tree:
            raise UsageError(
                f"{node.path} draws on {node.wallet.path} and has no ceiling of its own. Start it "
                "with budget=, or change the tree's.",
                code="cave_budget_max_invalid",
            )
        set_ceiling(root, lease, budget)

    # --- who listens ---------------------------------------------------------------------------

    def _guarded(self, on_event: Callable[[RunEvent], None]) -> Callable[[RunEvent], None]:
        """``on_event``, but what it raises ends this run in order and comes out of ``run``.

        Some events are told while a lease is given back. An error there would be one of the
        supervisor's own code and end the whole tree, with the runs of other callers.
        """

        def tell(event: RunEvent) -> None:
            if self._listener_error is not None:
                return  # it is broken, and the run is on its way out
            try:
                on_event(event)
            except Exception as error:
                self._listener_error = error
                assert self._actor is not None, self  # no event comes before the first step
                self._actor.stop(StopKind.CANCELLED, f"on_event raised {error!r}")

        return tell

    def _listener_failed(self, error: Exception) -> RunError:
        assert self._invocation is not None, self
        return RunError(
            "cave_agent_run_failed",
            f"on_event raised {type(error).__name__}: {error}",
            self._invocation.receipt,
        )

    # --- where it runs -------------------------------------------------------------------------

    def _actor_above(self) -> Actor | None:
        """The actor that this is called in, if the run is to be its child."""
        above = current_actor.get()
        if above is None or self._detached:
            return None
        if self._tree is not None and self._tree.root is not above.root:
            return None  # called on another tree that is open
        above.root.require_owner()
        _check_own_limits(self._limits)
        of_a_tree = (self._clock, self._seed, self._journal, self._resume_from)
        if any(option is not None for option in of_a_tree):
            raise UsageError(
                "clock=, seed=, journal= and resume_from= belong to a tree, and this run joins the "
                "one it was called in. Leave them out, or pass detached=True.",
                code="cave_option_invalid",
            )
        return above

    async def _open_own_tree(self, unit: Unit) -> OpenTree:
        tree = await OpenTree.open(
            unit,
            self._budget,
            self._limits or Limits(),
            self._clock,
            self._seed,
            self._journal,
            self._resume_from,
        )
        self._is_own_tree = True
        return tree

    def _start_actor(
        self,
        tree: OpenTree,
        above: Actor | None,
        model: Model,
        history: Sequence[Message],
        tell: Callable[[RunEvent], None] | None,
        on_over: Callable[[], None] | None,
    ) -> None:
        parent = above or tree.root.top
        carves = self._budget is not None and not self._is_own_tree
        shown: Wallet | None = None
        if self._is_own_tree:
            shown = tree.root.ledger.root.node.wallet
        invocation = Invocation(
            self._agent,
            model,
            [*history, *self._messages],
            self._settings(tree, tell),
            is_fixture=_is_below_a_fixture(),
            is_detached=self._detached and current_actor.get() is not None,
            shown_wallet=shown,
        )

        def on_end(actor: Actor) -> None:
            try:
                invocation.conclude(actor)
            finally:
                self._end_conversation(invocation)
                if on_over is not None:
                    on_over()

        self._invocation = invocation
        own_deadline = None if self._is_own_tree or self._limits is None else self._limits
        self._actor = tree.root.start(
            parent,
            self._agent.id,
            invocation,
            kind=Kind.RUN if above is None else Kind.AGENT,
            on_end=on_end,
            seconds=None if own_deadline is None else own_deadline.deadline_seconds,
            cap=self._budget.max if carves and self._budget is not None else None,
        )

    def _end_conversation(self, invocation: Invocation | None) -> None:
        """Keep what was said if the run ended in order, and free the handle."""
        if self._conversation is None:
            return
        result = None if invocation is None else invocation.result
        if result is None:
            self._conversation.roll_back()
        else:
            self._conversation.commit(result.messages)

    def _settings(self, tree: OpenTree, tell: Callable[[RunEvent], None] | None) -> RunSettings:
        budget = self._budget or tree.budget
        return RunSettings(
            tree=tree,
            deps=self._deps,
            approve=self._approve,
            funding=Funding() if budget is None else budget.funding,
            tell=tell,
        )

    # --- checks before anything is spent ---------------------------------------------------------

    def _unit(self, above: Actor | None) -> Unit:
        """The unit that is counted in; a tree has one."""
        if self._tree is not None:
            unit = self._tree.root.ledger.unit
        elif above is not None:
            unit = above.root.ledger.unit
        elif self._budget is not None:
            return self._budget.unit
        else:
            return self._unit_of_subagents()
        if self._budget is not None and self._budget.unit != unit:
            raise UsageError(
                f"the tree counts in {unit}, this budget in {self._budget.unit}. Give both the "
                "same denomination.",
                code="cave_budget_denomination_ambiguous",
            )
        return unit

    def _unit_of_subagents(self) -> Unit:
        caps = [s for a in self._agents for s in a.tools if isinstance(s, Subagent)]
        in_usd = any(s.max_usd is not None for s in caps)
        in_tokens = any(s.max_tokens is not None for s in caps)
        if in_usd and in_tokens:
            raise UsageError(
                "subagents below this run have caps in USD and in tokens; a tree has one "
                "denomination. Use max_usd= or max_tokens= throughout.",
                code="cave_budget_denomination_ambiguous",
            )
        return "tokens" if in_tokens else "usd"

    def _model(self, above: Actor | None) -> Model:
        """The root agent's model; a nested run without one takes its caller's."""
        model = self._agent.model
        if not isinstance(model, Auto):
            return model
        inherited = None if above is None else _model_of(above)
        return inherited or resolve_auto()

    def _check_money(self, root_model: Model, unit: Unit, above: Actor | None) -> None:
        models = {root_model.id: root_model}
        for agent in self._agents:
            if not isinstance(agent.model, Auto):
                models[agent.model.id] = agent.model
        for model in models.values():
            model.require_ready()
            if unit == "usd" and self._has_money_ceiling(above) and model.card.price is None:
                raise UsageError(
                    f"{model.id} has no price, so a budget in USD cannot be kept. Pin one: "
                    f'tw.model("{model.id}", price=tw.Price(input="…", output="…")).',
                    code="cave_budget_denomination_unavailable",
                )

    def _has_money_ceiling(self, above: Actor | None) -> bool:
        if self._budget is not None:
            return True
        if any(s.max_usd for a in self._agents for s in a.tools if isinstance(s, Subagent)):
            return True
        root = self._tree.root if self._tree is not None else None
        if root is None and above is not None:
            root = above.root
        return root is not None and any(w.is_bounded for w in root.ledger.state.wallets.values())


def _carried(journal: str | Path, budget: Budget | None) -> Carried:
    """What a journal says was spent before.

    Raises:
        UsageError: It cannot be read, or there is nothing to count it against.
    """
    if budget is None:
        raise UsageError(
            "resume_from= counts earlier spend against a ceiling, and there is none. Give budget=.",
            code="cave_option_invalid",
        )
    try:
        carried = carried_from(read_journal(journal))
    except OSError as error:
        raise UsageError(
            f"resume_from= cannot be read: {error}", code="cave_journal_invalid"
        ) from error
    if carried.unit != budget.unit:
        raise UsageError(
            f"{journal} counts in {carried.unit}, this budget in {budget.unit}. Give a budget in "
            f"{carried.unit}.",
            code="cave_budget_denomination_ambiguous",
        )
    return carried


def set_ceiling(root: RootSupervisor, lease: Lease, budget: Budget) -> None:
    """Raise or lower the ceiling of a lease's wallet to a budget's maximum."""
    ledger, now = root.ledger, root.clock.monotonic()
    if budget.unit != ledger.unit:
        raise UsageError(
            f"the tree counts in {ledger.unit}, this ceiling is in {budget.unit}.",
            code="cave_budget_denomination_ambiguous",
        )
    if budget.max < lease.node.wallet.max:
        ledger.lower_max(lease, budget.max, now)
    else:
        ledger.raise_max(lease, budget.max, now)


def _tree_of(actor: Actor) -> OpenTree:
    settings = _settings_of(actor)
    assert settings is not None, actor
    return settings.tree


def _model_of(actor: Actor) -> Model | None:
    invocation = _invocation_above(actor)
    return None if invocation is None else invocation.model


def _settings_of(actor: Actor) -> RunSettings | None:
    invocation = _invocation_above(actor)
    return None if invocation is None else invocation.settings


def _is_below_a_fixture() -> bool:
    """A fixture holds for whatever its tools start, a detached tree included."""
    invocation = _invocation_above(current_actor.get())
    return invocation is not None and invocation.is_fixture


def _invocation_above(actor: Actor | None) -> Invocation | None:
    while actor is not None:
        if isinstance(actor.body, Invocation):
            return actor.body
        actor = actor.parent
    return None


def _messages_of(prompt: Any) -> list[Message]:
    if isinstance(prompt, str):
        return [user(prompt)]
    messages = list(prompt)
    for message in messages:
        if not isinstance(message, Message):
            raise UsageError(
                f"the prompt holds {message!r}. Give text, or a list of treewarden messages.",
                code="cave_prompt_invalid",
            )
    return messages


def _check_own_limits(limits: Limits | None) -> None:
    """A run that joins a tree may have a deadline of its own; everything else is the tree's."""
    if limits is not None and limits.caps != Limits().caps:
        raise UsageError(
            "this run joins a tree, and depth, breadth and calls are limits of the whole tree. "
            "Set them where the tree is opened; here only deadline= is kept.",
            code="cave_option_invalid",
        )


def _with_shorthands(
    limits: Limits | None, invocations: int | None, concurrent: int | None
) -> Limits | None:
    if invocations is None and concurrent is None:
        return limits
    caps = (limits or Limits()).caps
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
        deadline=None if limits is None else limits.deadline_seconds,
    )


def _installed(clock: Clock | None) -> Any:
    """Put a clock that drives the event loop in place, and return what takes it out again."""
    install = getattr(clock, "installed", None)
    if install is None:
        return None
    scope = install()
    scope.__enter__()
    return scope


def _uninstall(scope: Any) -> None:
    if scope is not None:
        scope.__exit__(None, None, None)
