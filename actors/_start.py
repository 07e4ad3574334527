"""One run that was asked for, from its checks to its result.

A start refuses what cannot be before anything is spent. It finds the run's parent (the actor that
it was asked for in, an open tree, or a tree of its own), starts the run there, and hands back what
came of it when everything the run held is back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from treewarden.ledgers import Kind, LeaseRequest, Unit, Wallet
from treewarden.protocols import (
    ActorStopped,
    Message,
    RunError,
    RunEvent,
    UsageError,
    mend_message,
    mend_text,
    user,
)

from ._actor import Actor, StopKind, current_actor, to_the_end
from ._admission import Admission
from ._agent import Invocation, Result
from ._clock import Clock
from ._conversation import Conversation, fingerprint_of, require_conversation
from ._definitions import Agent, Subagent, ToolCallback, check_graph
from ._lifecycle import State
from ._limits import Budget, CallTimes, Funding, Limits
from ._models import Auto, Model, resolve_auto
from ._open_tree import OpenTree, set_ceiling
from ._retry import Retry, Retrying
from ._settings import RunSettings

if TYPE_CHECKING:
    from treewarden.ledgers import Breakers, Event

    from ._slot import Slot


Prompt: TypeAlias = str | Iterable[Message]
OnStop: TypeAlias = Literal["return", "raise"]


class Start:
    """One run that was asked for."""

    def __init__(
        self,
        agent: Agent,
        prompt: Prompt,
        *,
        budget: Budget | None,
        limits: Limits | None,
        breakers: Breakers | None = None,
        deps: Any,
        approve: ToolCallback | None,
        on_stop: OnStop,
        retry: Retry | None = None,
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
        self._breakers = _require_breakers(breakers)
        self._deps, self._approve, self._on_stop = deps, approve, on_stop
        self._retry = _require_retry(retry)
        self._tree, self._detached = tree, detached
        self._clock, self._seed, self._journal = clock, seed, journal
        self._resume_from = resume_from
        self._is_own_tree = False
        self._admission: Admission | None = None
        self._actor: Actor | None = None
        # Where this run is a child: the agent's slot, and which of its calls waits for this run.
        self._slot_above: Slot | None = None
        self._resting: Actor | None = None
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
        await self.let_caller_go_on()
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
        retrying = self._retrying(unit, above)
        conversation = self._conversation
        history: Sequence[Message] = ()
        if conversation is not None:
            history = conversation.begin(fingerprint_of(self._agent, model))
        try:
            tree = self._tree
            if tree is None:
                tree = await self._open_own_tree(unit) if above is None else _tree_of(above)
            self._tree = tree
            settings = self._settings(tree, tell, retrying)
            self._enter(tree, above, model, history, settings, on_over)
            self._rest_caller(above)
            assert self._admission is not None, self
            self._actor = await self._admission.wait()
            if self._actor is None:
                raise UsageError(
                    f"it waited for a slot, and {self._admission.why_left}.",
                    code="cave_tree_closed",
                )
        except BaseException:
            await self._give_up()
            raise
        assert self._invocation is not None, self
        tree.root.closes_when_empty = tree.root.closes_when_empty or self._is_own_tree
        return self._actor, self._invocation

    async def _give_up(self) -> None:
        """The run did not start, or whoever asked for it was cancelled before it was told so."""
        admission = self._admission
        if admission is not None:
            await admission.give_up("the caller of run was cancelled")
        if admission is None or admission.actor is None:
            self._end_conversation(None)
        self._wake_caller()
        await self.finish()

    # --- what the caller does meanwhile ----------------------------------------------------------

    def _rest_caller(self, above: Actor | None) -> None:
        """From here to the run's end the actor that asked for it only waits."""
        agent = _invocation_above(above)
        if agent is not None and agent.slot is not None:
            assert above is not None, self
            self._slot_above, self._resting = agent.slot, _call_of(agent, above)
            self._slot_above.rest(self._resting)

    def _wake_caller(self) -> None:
        resting, self._resting = self._resting, None
        if resting is not None and self._slot_above is not None:
            self._slot_above.wake(resting)

    async def let_caller_go_on(self) -> None:
        """Return when the agent that this run was called in has its slot back."""
        if self._slot_above is not None:
            await self._slot_above.wait()

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
        """Move the ceiling of the wallet that bounds this run alone.

        Raises:
            ActorStopped: The run is over, and its wallet with it.
            UsageError, LedgerError: As for ``RunStream.set_budget``. Nothing changed.
        """
        assert self._actor is not None, self
        if self._actor.state is State.ENDED:
            raise ActorStopped(self._actor.path)
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
                admission = self._admission
                assert admission is not None, self  # no event comes before the first step
                assert admission.actor is not None, self
                admission.actor.stop(StopKind.CANCELLED, f"on_event raised {error!r}")

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

    def _enter(
        self,
        tree: OpenTree,
        above: Actor | None,
        model: Model,
        history: Sequence[Message],
        settings: RunSettings,
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
            settings,
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
        request = LeaseRequest(
            self._agent.id,
            # A service is no agent: what it runs are runs of their own.
            Kind.RUN if _invocation_above(above) is None else Kind.AGENT,
            cap=self._budget.max if carves and self._budget is not None else None,
            seconds=None if own_deadline is None else own_deadline.deadline_seconds,
        )
        self._admission = tree.root.enter(
            parent, request, invocation, on_ending=lambda _: self._wake_caller(), on_end=on_end
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

    def _settings(
        self,
        tree: OpenTree,
        tell: Callable[[RunEvent], None] | None,
        retrying: Retrying | None,
    ) -> RunSettings:
        budget = self._budget or tree.budget
        return RunSettings(
            tree=tree,
            deps=self._deps,
            approve=self._approve,
            funding=Funding() if budget is None else budget.funding,
            times=self._times(tree),
            retrying=retrying,
            breakers=self._breakers or self._breakers_above(tree),
            tell=tell,
        )

    def _retrying(self, unit: Unit, above: Actor | None) -> Retrying | None:
        """Its own retries, inside those of the run that it was called in; else the inherited.

        Raises:
            UsageError: Nothing bounds what they may cost, or not in this denomination.
        """
        caller = _invocation_above(above)
        inherited = None if caller is None else caller.settings.retrying
        if self._retry is None:
            return inherited
        if self._budget is None and not _is_bounded(self._tree, above):
            raise UsageError(
                "retry= repeats calls that cost money, and nothing bounds what this run may cost. "
                "Give budget=, or leave retry= out.",
                code="cave_breaker_retry_requires_budget",
            )
        above_it = None if inherited is None else inherited.purse
        return Retrying(self._retry, self._retry.purse_for(unit, above_it))

    def _times(self, tree: OpenTree) -> CallTimes:
        """Its own where given, else the caller's in the same tree, else the tree's."""
        above = _invocation_above(current_actor.get())
        is_joined = above is not None and above.settings.tree is tree
        inherited = above.settings.times if is_joined and above is not None else tree.times
        return inherited if self._limits is None else self._limits.times.over(inherited)

    def _breakers_above(self, tree: OpenTree) -> Breakers | None:
        above = _invocation_above(current_actor.get())
        return None if above is None or above.settings.tree is not tree else above.settings.breakers

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


def _is_bounded(tree: OpenTree | None, above: Actor | None) -> bool:
    """Whether a wallet that a run would draw on has a ceiling."""
    if above is None:
        return tree is not None and tree.root.ledger.root.node.wallet.is_bounded
    wallet: Wallet | None = above.lease.node.wallet
    while wallet is not None and not wallet.is_bounded:
        wallet = wallet.parent
    return wallet is not None


def _require_retry(retry: Any) -> Retry | None:
    if retry is None or isinstance(retry, Retry):
        return retry
    raise UsageError(
        f"retry is {retry!r}. Write tw.Retry(max_attempts=…), or None for no retries.",
        code="cave_option_invalid",
    )


def _require_breakers(breakers: Any) -> Breakers | None:
    if breakers is None:
        return None
    from treewarden.ledgers import Breakers  # not named by runs that have none

    if not isinstance(breakers, Breakers):
        raise UsageError(
            f"breakers is {breakers!r}. Give tw.Breakers(...), or None for no breakers.",
            code="cave_option_invalid",
        )
    return breakers


def _tree_of(actor: Actor) -> OpenTree:
    tree = actor.root.tree
    assert tree is not None, actor
    return tree


def _model_of(actor: Actor) -> Model | None:
    invocation = _invocation_above(actor)
    return None if invocation is None else invocation.model


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


def _call_of(agent: Invocation, actor: Actor) -> Actor:
    """The running call of ``agent`` that ``actor`` belongs to; its own actor for its loop."""
    while actor.body is not agent and actor.parent is not None and actor.parent.body is not agent:
        actor = actor.parent
    return actor


def _messages_of(prompt: Any) -> list[Message]:
    if isinstance(prompt, str):
        return [user(mend_text(prompt))]
    messages = list(prompt)
    for message in messages:
        if not isinstance(message, Message):
            raise UsageError(
                f"the prompt holds {message!r}. Give text, or a list of treewarden messages.",
                code="cave_prompt_invalid",
            )
    return list(map(mend_message, messages))


def _check_own_limits(limits: Limits | None) -> None:
    """A run that joins a tree may have times of its own; everything else is the tree's."""
    if limits is not None and limits.caps != Limits().caps:
        raise UsageError(
            "this run joins a tree, and depth, breadth and calls are limits of the whole tree. "
            "Set them where the tree is opened; here only deadline=, idle_timeout= and "
            "min_call_seconds= are kept.",
            code="cave_option_invalid",
        )
