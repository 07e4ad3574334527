"""pydantic-ai beside us, in an environment of its own, where it installs.

It is run in a child process, on its own FunctionModel, so that its imports and ours do not mix.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "treewarden-benchmarks"

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


def _python() -> Path:
    """An interpreter that has pydantic-ai, installed at the first use.

    Raises:
        subprocess.SubprocessError: It does not install here.
    """
    home = CACHE / "pydantic-ai"
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True, timeout=120)
    found = subprocess.run([python, "-c", "import pydantic_ai"], capture_output=True, timeout=120)
    if found.returncode:
        install = [str(python), "-m", "pip", "install", "--quiet", "pydantic-ai-slim"]
        subprocess.run(install, check=True, timeout=300, stdout=sys.stderr)
    return python


def _run(script: str, *arguments: str) -> Any:
    done = subprocess.run(
        [str(_python()), "-c", script, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _measured(script: str, *arguments: str) -> dict[str, Any]:
    try:
        return {"pydantic_ai": _run(script, *arguments)}
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return {"pydantic_ai": None, "why": str(said).strip()[-300:]}


def peer_turn(turns: int) -> dict[str, Any]:
    """CPU microseconds of one turn with one tool call, by peer; None and why where it is absent."""
    return _measured(_TURN, str(turns))


def peer_overshoot(budgets: list[int], children: int) -> dict[str, Any]:
    """Percent of a token budget that was overspent, by peer and budget."""
    return _measured(_OVERSHOOT, str(children), json.dumps(budgets))
