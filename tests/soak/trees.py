"""One random tree: its agents, its tools, its model, and whoever asks it for runs.

``live`` is the scenario. It runs in virtual time, is disturbed while it runs (see
disturbances.py), and asserts at its end that the books balance and that nothing is left.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeAlias

import anyio
import attrs

import treewarden as tw
from treewarden.ledgers import Event, TreeState
from treewarden.protocols import LedgerError, Receipt
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest

from ..scenarios.kit import P, Witness, check_books, check_closed, price_for_worst_case
from .choices import AGENT, FUNDING, LIMITS, REPLIES, SUBAGENT, dice, one_of, some_of

# What may come out of a run, a start or a steering call. Anything else is a bug.
ORDERLY = (
    tw.RunError,
    tw.RefusedError,
    tw.UsageError,
    tw.ActorStopped,
    tw.SupervisorCancelled,
    LedgerError,
)

LONGEST = 200.0
"""Virtual seconds after which a tree is closed, whatever still stalls in it."""


@attrs.define
class SoakWitness(Witness):
    """Checks after every event what no single state can show: W5, and W8 at many prefixes."""

    # The ledger itself, once the tree is open.
    ledger: tw.TreeLedger | None = None

    def write(self, event: Event) -> None:
        refused = type(event).__name__ == "Refused"
        before = _granted(self.state) if refused else None
        Witness.write(self, event)
        if refused:
            assert _granted(self.state) == before, event
        if self.ledger is not None and len(self.journal) % 16 == 0:
            assert self.ledger.state.plain() == self.state.plain(), event


def _granted(state: TreeState) -> dict[str, Any]:
    """Everything that somebody has or waits for."""
    plain = state.plain()
    return {what: plain[what] for what in ("wallets", "holds", "waiting", "caps", "tranches")}


@attrs.define(eq=False)
class Live:
    """A random tree while it lives."""

    seed: int
    witness: SoakWitness
    unit: str
    agent: tw.Agent
    models: list[ScriptedModel]
    tree: tw.Tree
    # Streams that are open, by the name of who reads them.
    streams: dict[str, tw.RunStream] = attrs.field(factory=dict[str, tw.RunStream])
    # Scopes around callers, and on asyncio their tasks, by the same names.
    scopes: dict[str, anyio.CancelScope] = attrs.field(factory=dict[str, anyio.CancelScope])
    tasks: dict[str, Any] = attrs.field(factory=dict[str, Any])
    # What the callers got.
    receipts: list[Receipt] = attrs.field(factory=list[Receipt])
    # Runs whose receipt nobody has got, because whoever asked for them was gone.
    untold: int = 0
    # Threads that do not stop when they are asked to wait for this.
    release: threading.Event = attrs.field(factory=threading.Event)

    def budget(self, random: Random, *amounts: str) -> tw.Budget:
        """A ceiling of one of these amounts, in the tree's unit."""
        usd = random.choice(amounts)
        funding = some_of(FUNDING, random, chance=0.25)
        if self.unit == "usd":
            return tw.Budget(max_usd=usd, **funding)
        return tw.Budget(max_tokens=tokens_of(usd), **funding)

    def keep(self, receipt: Receipt) -> None:
        self.receipts.append(receipt)


def tokens_of(usd: str) -> int:
    """A ceiling in tokens that is about as tight as one in USD."""
    return int(float(usd) * 50_000)


# --- what it is made of --------------------------------------------------------------------------


@attrs.define
class Grower:
    """Makes the agents of one tree, each with its own tools and model."""

    seed: int
    unit: str
    random: Random
    uses_threads: bool
    made: int = 0
    models: list[ScriptedModel] = attrs.field(factory=list[ScriptedModel])
    # A thread waits for this; set when the tree is closed.
    release: threading.Event = attrs.field(factory=threading.Event)

    def model(self) -> ScriptedModel:
        if self.models and self.random.random() < 0.7:
            return self.random.choice(self.models)
        price = self.random.choice((P, price_for_worst_case("0.05")))
        id = f"scripted/model-{len(self.models)}"
        model = ScriptedModel(
            self.script,
            id=id,
            price=price,
            max_output=self.random.choice((400, 1_000)),
            reasons_invisibly=self.random.random() < 0.1,
        )
        self.models.append(model)
        return model

    def agent(self, depth: int, width: int) -> tw.Agent:
        """An agent with up to ``width`` kinds of subagents on each of ``depth`` levels below."""
        self.made += 1
        name, random = f"agent-{self.made}", self.random
        tools: list[tw.Tool | tw.Subagent] = [
            make(self) for make in TOOLS.values() if random.random() < 0.3
        ]
        if self.uses_threads:
            tools += [make(self) for make in BLOCKING_TOOLS.values() if random.random() < 0.5]
        if depth:
            for n in range(random.randint(1, width)):
                tools.append(self.subagent(f"sub_{n}", self.agent(depth - 1, width)))
        return tw.agent(
            id=name,
            instructions="Grow.",
            model=self.model(),
            tools=tools,
            **some_of(AGENT, random, chance=0.2),
        )

    def subagent(self, name: str, agent: tw.Agent) -> tw.Subagent:
        options = some_of(SUBAGENT, self.random, chance=0.2)
        if self.random.random() < 0.5:
            most = self.random.choice(("0.06", "0.20", "0.60"))
            if self.unit == "usd":
                options["max_usd"] = most
                options["min_usd"] = self.random.choice((most, "0.01"))
            else:
                options["max_tokens"] = tokens_of(most)
                options["min_tokens"] = self.random.choice((tokens_of(most), 500))
        return tw.subagent(name=name, description="Grows.", agent=agent, **options)

    def script(self, request: ScriptedRequest) -> Reply:
        """What the model answers depends on who asks how often, and on nothing else."""
        random = dice(self.seed, request.agent_path, len(request.messages))
        fields = one_of(REPLIES, random)(random)
        names = [tool.name for tool in request.tools]
        calls: list[tuple[str, dict[str, Any]]] = []
        if names and request.turn < random.randint(0, 3):
            calls = [self.call(random.choice(names)) for _ in range(random.randint(1, 4))]
        fields.setdefault("usage", tw.Usage(output=random.randint(1, request.output_limit)))
        return Reply('{"answer": "some words of it"}', tool_calls=calls, **fields)

    def call(self, name: str) -> tuple[str, dict[str, Any]]:
        return name, {"task": "grow"} if name.startswith("sub_") else {}


# --- tools ---------------------------------------------------------------------------------------

MakeTool: TypeAlias = Callable[[Grower], tw.Tool]


def _look(grower: Grower) -> tw.Tool:
    @tw.tool(effect="read", runs="host")
    async def look(ctx: tw.Context[None]) -> str:
        """Take a while."""
        await anyio.sleep(dice(grower.seed, ctx.path).choice((0.0, 0.5, 1.0, 1.0)))
        return "seen"

    return look


def _write(grower: Grower) -> tw.Tool:
    @tw.tool(effect="write", runs="host", timeout_seconds=1)
    async def write(ctx: tw.Context[None]) -> str:
        """Take a while, sometimes too long."""
        await anyio.sleep(dice(grower.seed, ctx.path).choice((0.0, 0.5, 1.0, 2.0)))
        return "written"

    return write


def _fail(grower: Grower) -> tw.Tool:
    @tw.tool(effect="read", runs="host")
    async def fail(ctx: tw.Context[None]) -> str:
        """Fail in one of several ways."""
        random = dice(grower.seed, ctx.path)
        await anyio.sleep(random.choice((0.0, 0.5)))
        raise random.choice((ValueError("no"), tw.ToolFailed("mine", "no"), TimeoutError()))

    return fail


def _tidy(grower: Grower) -> tw.Tool:
    @tw.tool(effect="read", runs="host")
    async def tidy(ctx: tw.Context[None]) -> str:
        """Take a while, and some more to clean up, whoever cancels."""
        random = dice(grower.seed, ctx.path)
        try:
            await anyio.sleep(random.choice((0.5, 1.0, 5.0)))
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(random.choice((0.0, 0.5)))
            if random.random() < 0.2:
                raise RuntimeError("the clean-up failed")
        return "tidied"

    return tidy


def _nest(grower: Grower) -> tw.Tool:
    inner = grower.agent(0, 0)
    unit = grower.unit

    @tw.tool(effect="read", runs="host")
    async def nest(ctx: tw.Context[None]) -> str:
        """Run another agent as a child of this tool."""
        random = dice(grower.seed, ctx.path)
        budget = None
        if random.random() < 0.5:
            is_usd = unit == "usd"
            budget = tw.Budget(max_usd="0.06") if is_usd else tw.Budget(max_tokens=3_000)
        if random.random() < 0.5:
            return (await tw.run(inner, "go", budget=budget)).text
        async with tw.stream(inner, "go", budget=budget) as run:
            async for _ in run:
                if random.random() < 0.2:
                    return "that is enough"
            return (await run.result()).text

    return nest


TOOLS: dict[str, MakeTool] = {
    "one that takes a while": _look,
    "one that may take too long": _write,
    "one that fails": _fail,
    "one that is slow to clean up": _tidy,
    "one that runs another agent": _nest,
}


def _compute(grower: Grower) -> tw.Tool:
    @tw.tool(effect="read", runs="host")
    def compute() -> str:
        """Work in a thread."""
        return str(sum(range(1_000)))

    return compute


def _hang(grower: Grower) -> tw.Tool:
    @tw.tool(effect="read", runs="host", timeout_seconds=1)
    def hang(ctx: tw.Context[None]) -> str:
        """Block a thread that does not listen, once in a while."""
        if dice(grower.seed, ctx.path).random() < 0.2:
            grower.release.wait(30)
        return "late"

    return hang


BLOCKING_TOOLS: dict[str, MakeTool] = {
    "one that works in a thread": _compute,
    "one that ignores its time in a thread": _hang,
}


# --- who asks for runs ---------------------------------------------------------------------------

Caller: TypeAlias = Callable[[Live, str, Random, dict[str, Any]], Awaitable[None]]


async def _waits(live: Live, name: str, random: Random, options: dict[str, Any]) -> None:
    try:
        live.keep((await live.tree.run(live.agent, "go", **options)).receipt)
    except tw.RunError as error:
        live.keep(error.receipt)
    except anyio.get_cancelled_exc_class():
        live.untold += 1
        raise


async def _reads_all(live: Live, name: str, random: Random, options: dict[str, Any]) -> None:
    await _read(live, name, options, most=10**9, pause=0.0)


async def _reads_slowly(live: Live, name: str, random: Random, options: dict[str, Any]) -> None:
    await _read(live, name, options, most=10**9, pause=random.choice((0.5, 3.0)))


async def _leaves_early(live: Live, name: str, random: Random, options: dict[str, Any]) -> None:
    await _read(live, name, options, most=random.randint(0, 12), pause=0.0)


async def _read(
    live: Live, name: str, options: dict[str, Any], *, most: int, pause: float
) -> None:
    stream = live.tree.stream(live.agent, "go", **options)
    try:
        async with stream as run:
            live.streams[name] = run
            async for _ in run:
                most -= 1
                if most < 0:
                    break
                if pause:
                    await anyio.sleep(pause)
    finally:
        # Whatever cancels this reader, its run has ended, and says what it cost.
        if live.streams.pop(name, None) is not None:
            with anyio.CancelScope(shield=True):
                await _keep_result(live, stream)


async def _closes_elsewhere(
    live: Live, name: str, random: Random, options: dict[str, Any]
) -> None:
    stream = live.tree.stream(live.agent, "go", **options)
    run = await stream.__aenter__()
    live.streams[name] = run
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_close_after, run, random.choice((0.0, 0.5, 2.0)))
            async for _ in run:
                pass
    finally:
        with anyio.CancelScope(shield=True):
            await run.aclose()
            live.streams.pop(name, None)
            await _keep_result(live, run)


async def _close_after(run: tw.RunStream, seconds: float) -> None:
    await anyio.sleep(seconds)
    await run.aclose()


async def _drops(live: Live, name: str, random: Random, options: dict[str, Any]) -> None:
    run = await live.tree.stream(live.agent, "go", **options).__aenter__()
    live.untold += 1
    for _ in range(random.randint(0, 5)):
        await run.__anext__()


async def _keep_result(live: Live, run: tw.RunStream) -> None:
    try:
        live.keep((await run.result()).receipt)
    except tw.RunError as error:
        live.keep(error.receipt)


async def _converses(live: Live, name: str, random: Random, options: dict[str, Any]) -> None:
    talk = tw.Conversation()
    for _ in range(random.randint(2, 3)):
        assert not talk.is_busy
        await _waits(live, name, random, {**options, "conversation": talk})
        assert not talk.is_busy, "a run has ended and its conversation is not free"


async def _shares_a_conversation(
    live: Live, name: str, random: Random, options: dict[str, Any]
) -> None:
    talk = tw.Conversation()
    for n in range(2):
        try:
            await _read(live, f"{name}-{n}", {**options, "conversation": talk}, most=3, pause=0.0)
        except ORDERLY:
            pass
        assert not talk.is_busy, "a run has ended and its conversation is not free"


CALLERS: dict[str, tuple[int, Caller]] = {
    "waits for the result": (4, _waits),
    "reads all": (3, _reads_all),
    "reads slowly": (1, _reads_slowly),
    "leaves early": (2, _leaves_early),
    "has it closed elsewhere": (1, _closes_elsewhere),
    "drops it": (1, _drops),
    "converses": (1, _converses),
    "shares a conversation": (1, _shares_a_conversation),
}


async def ask(live: Live, name: str, random: Random) -> None:
    """One caller, who may be cancelled by a scope around it or natively."""
    cancelled = anyio.get_cancelled_exc_class()
    options: dict[str, Any] = {}
    if random.random() < 0.4:
        options["budget"] = live.budget(random, "0.05", "0.20", "0.60")
    if random.random() < 0.2:
        options["limits"] = tw.Limits(deadline=random.choice((0.5, 2.0, 10.0)))
    await anyio.sleep(random.choice((0.0, 0.0, 0.5, 1.0)))
    if "asyncio" in sys.modules and threading.current_thread():
        live.tasks[name] = native_task()
    try:
        with anyio.CancelScope() as scope:
            live.scopes[name] = scope
            await one_of(CALLERS, random)(live, name, random, options)
    except ORDERLY:
        pass
    except StopAsyncIteration:
        pass
    except cancelled:
        # Natively, by a disturbance: no scope of anybody asked for it.
        task = live.tasks[name]
        if task is None or not task.cancelling():
            raise
        while task.cancelling():
            task.uncancel()
    finally:
        live.scopes.pop(name, None)
        live.tasks.pop(name, None)


def native_task() -> Any:
    """The running task of asyncio; None on trio, which has no such cancellation."""
    asyncio = sys.modules["asyncio"]
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


# --- the scenario --------------------------------------------------------------------------------


async def live(seed: int) -> SoakWitness:
    """Grow a tree, disturb it, and check what is left of it."""
    from .disturbances import disturb

    random = dice(seed, "tree")
    unit = random.choice(("usd", "usd", "tokens"))
    grower = Grower(seed, unit, random, uses_threads=random.random() < 0.08)
    agent = grower.agent(random.randint(0, 3), random.randint(1, 3))
    witness = SoakWitness()
    budget = None
    if unit == "tokens" or random.random() < 0.8:
        # Room for a few calls, or for all of them.
        amount = random.choice(("0.10", "0.50", "0.50", "2.00", "50.00"))
        funding = some_of(FUNDING, random, chance=0.25)
        given = {"max_usd": amount} if unit == "usd" else {"max_tokens": tokens_of(amount)}
        budget = tw.Budget(**given, **funding)
    limits = tw.Limits(**some_of(LIMITS, random, chance=0.3))
    tree = tw.open_tree(budget=budget, limits=limits, **witness.tree_options)
    now = Live(seed, witness, unit, agent, grower.models, tree, release=grower.release)
    try:
        async with tree:
            witness.ledger = tree.ledger
            await _let_live(now, random, disturb)
    except tw.SupervisorCancelled:
        now.untold += 1
    finally:
        grower.release.set()
    _check(now)
    return witness


async def _let_live(
    now: Live, random: Random, disturb: Callable[[Live], Awaitable[None]]
) -> None:
    async def body() -> None:
        async with anyio.create_task_group() as callers:
            for n in range(random.randint(1, 4)):
                callers.start_soon(ask, now, f"caller-{n}", dice(now.seed, "caller", n))

    with anyio.move_on_after(LONGEST) as scope:
        now.scopes["all"] = scope
        async with anyio.create_task_group() as group:
            group.start_soon(disturb, now)
            await body()
            group.cancel_scope.cancel()
    now.scopes.pop("all", None)
    now.tree.check()


def _check(now: Live) -> None:
    witness = now.witness
    for receipt in now.receipts:
        receipt.check()
    if not now.untold:
        check_books(witness, now.receipts, *now.models)
        return
    check_closed(witness)
    asked = [request for model in now.models for request in model.requests]
    assert witness.charged_calls() == len(asked)
    assert all(request.ended is not None for request in asked)
    settled = [e._asdict() for e in witness.journal if type(e).__name__ == "Settled"]
    column = "usd" if now.unit == "usd" else "tokens"
    assert sum(fields[column] for fields in settled) == witness.state.wallets[0].settled
