"""What a random tree is made of: agents, each with its own tools, subagents and model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any, TypeAlias

import anyio
import attrs

import treewarden as tw
from treewarden.actors import Subagent
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest

from ..scenarios.kit import P, price_for_worst_case
from .choices import AGENT, REPLIES, SUBAGENT, dice, one_of, some_of


def tokens_of(usd: str) -> int:
    """A ceiling in tokens that is about as tight as one in USD."""
    return int(float(usd) * 50_000)


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
        tools: list[tw.Tool | Subagent] = [
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
            **some_of(AGENT, random, chance=0.1),
        )

    def subagent(self, name: str, agent: tw.Agent) -> Subagent:
        options = some_of(SUBAGENT, self.random, chance=0.1)
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
        if names and request.turn < random.randint(0, 4):
            # Mostly subagents, so that the tree grows.
            subs = [name for name in names if name.startswith("sub_")] * 2
            chosen = random.choices(names + subs, k=random.randint(1, 4))
            calls = [self.call(name) for name in chosen]
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
