"""One trial of a stress test: a tree of scripted agents on the real runtime, in virtual time.

Every agent above the last level asks for ``fan_out`` subagents in its first reply and answers in
its second one; those of the last level answer at once. Replies differ in length and duration, by
seed. While the tree runs, the journal is folded into a second state whose invariants are checked
over and over; when it is closed, everything must be back and every account must agree.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import attrs

import treewarden as tw
from treewarden.actors import Agent, RunStream, Tree
from treewarden.ledgers import Event, TreeState
from treewarden.protocols import Receipt, RunError
from treewarden.testing import DeadlockError, Reply, ScriptedModel, ScriptedRequest, VirtualClock

from ._options import Backend

# What a call may write at most; the replies stay far below it, as most real ones do. Asking for
# many subagents takes more: a reply that is cut off starts none.
_OUTPUT_LIMIT = 1024
_TOKENS_PER_SUBAGENT = 16
_WORDS = ("alpha ", "bravo ", "charlie ", "delta ", "echo ", "foxtrot ")
_FEWEST_WORDS, _MOST_WORDS = 40, 400

# How often a task that is over may still be on its way out, in turns of the loop.
_TURNS_TO_LEAVE = 3


@attrs.frozen(kw_only=True)
class Configuration:
    """What is tried."""

    fan_out: int
    depth: int
    backend: Backend
    seed: int = 0
    # None: no ceiling.
    budget_tokens: int | None = None
    # How many subagents may live at the same time. None: all of them.
    max_concurrent_subagents: int | None = None
    # How long a model call takes on average.
    call_seconds: float = 1.0
    # Which part of the subagents' calls goes wrong.
    failure_rate: float = 0.0
    cancel_after: float | None = None

    @property
    def subagents(self) -> int:
        return sum(self.fan_out**level for level in range(1, self.depth + 1))

    def __str__(self) -> str:
        return f"fan-out {self.fan_out}, depth {self.depth}, {self.backend}"


@attrs.frozen(kw_only=True)
class Leaks:
    """What was still there when the tree was closed."""

    holds: int
    slots: int
    spans: int
    tasks: int

    @property
    def total(self) -> int:
        return self.holds + self.slots + self.spans + self.tasks


@attrs.frozen(kw_only=True)
class Trial:
    """What came of it."""

    configuration: Configuration
    # Counted by the ledger: subagents started, most alive at a time, refused starts, model calls.
    admitted: int
    peak: int
    rejections: int
    calls: int
    tokens: int
    usd: str
    # Tokens beyond the budget. None: there was no budget.
    overshoot: int | None
    leaks: Leaks
    # Invariants that did not hold, in words.
    violations: tuple[str, ...]
    events: int
    stop_reason: str
    virtual_seconds: float
    wall_seconds: float

    @property
    def is_good(self) -> bool:
        return not (self.violations or self.overshoot or self.leaks.total)

    def to_json(self) -> dict[str, Any]:
        """One flat object, with the configuration first."""
        result = attrs.asdict(self)
        return {**result.pop("configuration"), **result, "ok": self.is_good}


def run_trial(configuration: Configuration) -> Trial:
    """Run one configuration; takes as long as the computing does, whatever the calls take."""
    began, clock = time.perf_counter(), VirtualClock()
    trial = _Trial(configuration, clock)
    try:
        clock.run(trial.run, backend=configuration.backend, seed=configuration.seed)
    except DeadlockError as error:
        trial.violations.append(f"the tree can go no further: {error}")
    return trial.result(wall_seconds=time.perf_counter() - began)


class _Trial:
    def __init__(self, configuration: Configuration, clock: VirtualClock) -> None:
        self._configuration, self._clock = configuration, clock
        self._model = ScriptedModel(_Script(configuration), context_window=None, max_output=None)
        # The ledger's state a second time, made of nothing but its journal.
        self._folded = TreeState()
        self._unchecked = 0
        self._receipt: Receipt | None = None
        self._leaked_tasks = 0
        self.violations: list[str] = []

    async def run(self) -> None:
        conf, tasks_before = self._configuration, _running_tasks()
        budget = None if conf.budget_tokens is None else tw.Budget(max_tokens=conf.budget_tokens)
        tree = tw.open_tree(
            budget=budget,
            limits=_limits(conf),
            clock=self._clock,
            seed=conf.seed,
            journal=self._note,
        )
        async with tree:
            self._receipt = await self._one_run(tree)
        for _ in range(_TURNS_TO_LEAVE):
            await anyio.lowlevel.checkpoint()
        self._leaked_tasks = max(0, _running_tasks() - tasks_before)
        self._check_the_end(tree)

    async def _one_run(self, tree: Tree) -> Receipt:
        agent = _agents(self._configuration, self._model)
        async with tree.stream(agent, "Divide the work.") as run:
            async with anyio.create_task_group() as group:
                group.start_soon(_cancel_later, run, self._configuration.cancel_after)
                async for _ in run:
                    pass
                group.cancel_scope.cancel()
            try:
                return (await run.result()).receipt
            except RunError as error:
                return error.receipt

    # --- what must hold --------------------------------------------------------------------------

    def _note(self, event: Event) -> None:
        """Fold an event, and check all invariants once per so many events as there are things
        alive: so checking costs as much as the running, at any width."""
        self._folded.apply(event)
        self._unchecked += 1
        if self._unchecked > len(self._folded.nodes) + len(self._folded.holds):
            self._unchecked = 0
            self._expect(f"event {self._folded.events}", self._folded.check)

    def _check_the_end(self, tree: Tree) -> None:
        assert self._receipt is not None, self
        ledger, receipt, model = tree.ledger, self._receipt, self._model
        self._expect("the closed ledger", ledger.check_closed)
        self._expect("the receipt", receipt.check)
        total, settled = receipt.total, self._folded.wallets[0].settled
        spent = total.tokens if ledger.unit == "tokens" else int(total.usd.scaleb(12))
        facts = {
            "the journal replays to another state": self._folded.plain() == ledger.state.plain(),
            f"the receipt says {spent}, the ledger {settled}": spent == settled,
            f"the provider billed {model.billed_tokens} tokens, the receipt says "
            f"{total.low_tokens} to {total.high_tokens}": (
                total.low_tokens <= model.billed_tokens <= total.high_tokens
            ),
            f"{model.open_requests} requests are still open": not model.open_requests,
        }
        self.violations += [what for what, holds in facts.items() if not holds]

    def _expect(self, what: str, check: Callable[[], None]) -> None:
        # Only noted: raised in the ledger's journal it would end the run instead of showing it.
        try:
            check()
        except AssertionError as error:
            self.violations.append(f"{what}: {error}")

    # --- the account -----------------------------------------------------------------------------

    def result(self, *, wall_seconds: float) -> Trial:
        conf, state = self._configuration, self._folded
        counters, root = state.counters, state.wallets[0]
        receipt = self._receipt
        is_bounded = conf.budget_tokens is not None
        rejections = (
            counters.invocation_rejections
            + counters.concurrency_rejections
            + counters.other_rejections
        )
        return Trial(
            configuration=conf,
            admitted=counters.admitted,
            peak=counters.peak,
            rejections=rejections,
            calls=counters.model_calls,
            tokens=0 if receipt is None else receipt.total.tokens,
            usd="0" if receipt is None else f"{receipt.total.usd:f}",
            overshoot=max(0, root.settled - root.max) if is_bounded else None,
            leaks=Leaks(
                holds=len(state.holds) + len(state.waiting),
                slots=counters.active + counters.calls_in_flight + counters.queued_slots,
                spans=counters.open_spans,
                tasks=self._leaked_tasks,
            ),
            violations=tuple(self.violations),
            events=state.events,
            stop_reason="deadlock" if receipt is None else receipt.stop_reason,
            virtual_seconds=self._clock.monotonic(),
            wall_seconds=round(wall_seconds, 3),
        )


class _Script:
    """What the scripted provider answers; the same for the same seed and place in the tree."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration

    def __call__(self, request: ScriptedRequest) -> Reply:
        conf = self._configuration
        dice = random.Random(f"{conf.seed} {request.agent_path} {request.turn}")
        level = request.agent_path.count("/") - 1
        delay = conf.call_seconds * dice.uniform(0.5, 1.5)
        if level and dice.random() < conf.failure_rate:
            return _failure(dice, delay)
        if level < conf.depth and not request.turn:
            calls = [("work", {"task": f"part {at}"}) for at in range(conf.fan_out)]
            return Reply(tool_calls=calls, delay=delay)
        return Reply(_text(dice), delay=delay)


def _failure(dice: random.Random, delay: float) -> Reply:
    """A provider that answers with an error, or breaks off in the middle of an answer."""
    if dice.random() < 0.5:
        return Reply(error=529, delay=delay)
    return Reply(_text(dice), delay=delay, chunks=4, break_after=dice.randint(1, 3))


def _text(dice: random.Random) -> str:
    count = dice.randint(_FEWEST_WORDS, _MOST_WORDS)
    return "".join(dice.choice(_WORDS) for _ in range(count))


def _agents(configuration: Configuration, model: ScriptedModel) -> Agent:
    """A chain of definitions, one per level; the tree grows out of their calls."""
    below: Agent | None = None
    asking = _TOKENS_PER_SUBAGENT * configuration.fan_out
    for level in range(configuration.depth, -1, -1):
        tools = [] if below is None else [_subagent(below)]
        below = tw.agent(
            id=f"level-{level}",
            instructions="Divide the work." if tools else "Do the work.",
            model=model,
            tools=tools,
            output=tw.output(max_tokens=max(_OUTPUT_LIMIT, len(tools) * asking)),
            max_tool_calls=configuration.fan_out,
        )
    assert below is not None, configuration
    return below


def _subagent(agent: Agent) -> Any:
    return tw.subagent(name="work", description="Do a part of the work.", agent=agent)


def _limits(configuration: Configuration) -> tw.Limits:
    width = configuration.subagents
    return tw.Limits(
        max_depth=configuration.depth,
        max_subagents=width,
        max_concurrent_subagents=configuration.max_concurrent_subagents or width,
    )


async def _cancel_later(run: RunStream, seconds: float | None) -> None:
    if seconds is not None:
        await anyio.sleep(seconds)
        run.cancel(f"cancelled after {seconds:g} seconds")


def _running_tasks() -> int:
    return len(anyio.get_running_tasks())
