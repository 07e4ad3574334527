"""Other frameworks beside us, each in an environment of its own, where they install.

They run in a child process, on models of theirs that answer from memory, so that their imports and
ours do not mix. What does not install is absent from the figures and named with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "treewarden-benchmarks"

# What to install, and what to import to see that it is there.
_PACKAGES = {
    "pydantic_ai": ("pydantic-ai-slim", "pydantic_ai"),
    "smolagents": ("smolagents", "smolagents"),
}

_TURN = """
import asyncio, json, statistics, sys, time
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel

turns = int(sys.argv[1])
def answer(messages, info):
    done = sum(isinstance(m, ModelResponse) for m in messages)
    if done < turns - 1:
        return ModelResponse(parts=[ToolCallPart("add", {"a": 1, "b": 2})])
    return ModelResponse(parts=[TextPart("done")])

agent = Agent(FunctionModel(answer))
@agent.tool_plain
async def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

async def once():
    began = time.process_time()
    await agent.run("go", usage_limits=UsageLimits(request_limit=None))
    return (time.process_time() - began) / turns

async def main():
    await once()
    return statistics.median([await once() for _ in range(5)])

print(json.dumps(1e6 * asyncio.run(main())))
"""

_SMOLAGENTS_TURN = """
import json, statistics, sys, time
from smolagents import Tool, ToolCallingAgent
from smolagents.models import (
    ChatMessage, ChatMessageToolCall, ChatMessageToolCallFunction, MessageRole, Model
)
from smolagents.monitoring import LogLevel, TokenUsage

turns = int(sys.argv[1])

class Scripted(Model):
    def __init__(self):
        super().__init__(model_id="scripted")
        self.left = turns

    def generate(self, messages, **options):
        self.left -= 1
        use = ("add", {"a": 1, "b": 2}) if self.left else ("final_answer", {"answer": "done"})
        function = ChatMessageToolCallFunction(name=use[0], arguments=use[1])
        call = ChatMessageToolCall(id=f"call-{self.left}", type="function", function=function)
        usage = TokenUsage(input_tokens=100, output_tokens=20)
        return ChatMessage(
            role=MessageRole.ASSISTANT, content=None, tool_calls=[call], token_usage=usage
        )

class Add(Tool):
    name, description, output_type = "add", "Add two numbers.", "integer"
    inputs = {name: {"type": "integer", "description": name} for name in "ab"}

    def forward(self, a: int, b: int) -> int:
        return a + b

def once():
    agent = ToolCallingAgent(
        tools=[Add()], model=Scripted(), max_steps=turns + 1, verbosity_level=LogLevel.OFF
    )
    began = time.process_time()
    assert agent.run("go") == "done"
    return (time.process_time() - began) / turns

once()
print(json.dumps(1e6 * statistics.median([once() for _ in range(5)])))
"""

_FANOUT = """
import asyncio, json, statistics, sys, time
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel

width = int(sys.argv[1])
FREE = UsageLimits(request_limit=None)

def of_child(messages, info):
    if len(messages) == 1:
        return ModelResponse(parts=[ToolCallPart("add", {"a": 1, "b": 2})])
    return ModelResponse(parts=[TextPart("done")])

def of_root(messages, info):
    if len(messages) == 1:
        calls = [ToolCallPart("delegate", {"task": "add"}) for _ in range(width)]
        return ModelResponse(parts=calls)
    return ModelResponse(parts=[TextPart("done")])

child, root = Agent(FunctionModel(of_child)), Agent(FunctionModel(of_root))

@child.tool_plain
async def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@root.tool_plain
async def delegate(task: str) -> str:
    "Delegate."
    return (await child.run(task, usage_limits=FREE)).output

async def once():
    began = time.process_time()
    await root.run("go", usage_limits=FREE)
    return (time.process_time() - began) / width

async def main():
    await once()
    return statistics.median([await once() for _ in range(5)])

print(json.dumps(1e6 * asyncio.run(main())))
"""

_OVERSHOOT = """
import asyncio, json, sys
from pydantic_ai import Agent, UsageLimits
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.messages import ModelResponse, ToolCallPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.usage import RequestUsage, RunUsage

children, budgets = int(sys.argv[1]), json.loads(sys.argv[2])

async def measure(budget):
    async def answer(messages, info):
        await asyncio.sleep(0.001)
        usage = RequestUsage(input_tokens=300, output_tokens=200)
        return ModelResponse(parts=[ToolCallPart("look", {})], usage=usage)

    agent = Agent(FunctionModel(answer))
    @agent.tool_plain
    async def look() -> str:
        "Look around."
        return "more"

    shared = RunUsage()
    limits = UsageLimits(total_tokens_limit=budget, request_limit=None)
    async def child():
        try:
            await agent.run("go on", usage=shared, usage_limits=limits)
        except UsageLimitExceeded:
            pass
    await asyncio.gather(*(child() for _ in range(children)))
    return 100 * max(0, shared.total_tokens - budget) / budget

print(json.dumps({str(b): asyncio.run(measure(b)) for b in budgets}))
"""


def _python(name: str) -> Path:
    """An interpreter that has the package, installed at the first use.

    Raises:
        subprocess.SubprocessError: It does not install here.
    """
    package, module = _PACKAGES[name]
    home = CACHE / name.replace("_", "-")
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True, timeout=120)
    found = subprocess.run([python, "-c", f"import {module}"], capture_output=True, timeout=120)
    if found.returncode:
        install = [str(python), "-m", "pip", "install", "--quiet", package]
        subprocess.run(install, check=True, timeout=300, stdout=sys.stderr)
    return python


def _version(name: str) -> str:
    package, _ = _PACKAGES[name]
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([_python(name), "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _run(name: str, script: str, *arguments: str) -> Any:
    done = subprocess.run(
        [str(_python(name)), "-c", script, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _measured(scripts: Mapping[str, str], *arguments: str) -> dict[str, Any]:
    """What each peer's script printed, their versions, and ``why`` where there is none."""
    found: dict[str, Any] = {}
    for name, script in scripts.items():
        try:
            found[name] = _run(name, script, *arguments)
            found.setdefault("versions", {})[name] = _version(name)
        except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
            said = getattr(error, "stderr", None) or str(error)
            found[name] = None
            found["why"] = f"{found.get('why', '')} {name}: {str(said).strip()[-300:]}".strip()
    return found


def peer_turn(turns: int) -> dict[str, Any]:
    """CPU microseconds of one turn with one tool call, by peer; None and why where it is absent."""
    return _measured({"pydantic_ai": _TURN, "smolagents": _SMOLAGENTS_TURN}, str(turns))


def peer_fanout(width: int) -> dict[str, Any]:
    """CPU microseconds of one of ``width`` subagents of two turns, by peer."""
    return _measured({"pydantic_ai": _FANOUT}, str(width))


def peer_overshoot(budgets: list[int], children: int) -> dict[str, Any]:
    """Percent of a token budget that was overspent, by peer and budget."""
    return _measured({"pydantic_ai": _OVERSHOOT}, str(children), json.dumps(budgets))
