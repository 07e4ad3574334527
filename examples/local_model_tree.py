"""Run a tree of agents on a real model, offline: the wires, the tokens and the receipt are real.

    python examples/local_model_tree.py       # a small local model; see examples/local_model

A desk hands three jobs to real agents side by side: name a thing, explain a word, and look up a
number with a tool. It runs twice: once over the OpenAI-compatible wire, once over the Anthropic
wire. The local model is tiny, so the desk itself follows a script; what its agents write, how they
call the tool and every token on the receipt come from the model.

With ``ANTHROPIC_API_KEY`` or ``OPENAI_API_KEY`` set it runs once, on that provider, desk included.
The tool only reads a table, and it runs in this process (``runs="host"``).
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from local_model.running import LocalModel, LocalModelNotInstalled

import treewarden as tw
from treewarden.protocols import ToolResult
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest

HEIGHTS_M = {"oak": 25, "birch": 20, "spruce": 40, "yew": 15}


@tw.tool(effect="read", runs="host")
def height_of_tree(kind: str) -> dict[str, Any]:
    """Say how high a kind of tree grows, in metres.

    Args:
        kind: For example oak, birch, spruce or yew.
    """
    return {"kind": kind, "metres": HEIGHTS_M.get(kind.lower())}


def desk_script(request: ScriptedRequest) -> Reply:
    """What the desk says: three jobs at once, then the answers one below the other."""
    if request.turn == 0:
        jobs = [
            ("name_it", {"task": "Name a tool that keeps the books of a forest. One name only."}),
            ("explain", {"task": "What does a tree warden do? One sentence."}),
            ("look_up", {"task": "How high does an oak grow? Use the tool."}),
        ]
        return Reply("Three jobs.", tool_calls=jobs)
    return Reply("\n".join(f"{r.name}: {answer_of(r)}" for r in request.tool_results))


def answer_of(result: ToolResult) -> str:
    """What an agent answered, or in words why it did not."""
    if result.is_error:
        return f"no answer ({result.content})"
    text: str = json.loads(result.content)["text"]
    return text.strip()


def build_tree(model: Any, desk: Any) -> tw.Agent:
    """The desk and its three agents."""

    def job(name: str, description: str, worker: tw.Agent) -> Any:
        return tw.subagent(name=name, description=description, agent=worker, max_tokens=4_000)

    def worker(id: str, instructions: str, its_model: Any, *tools: tw.Tool) -> tw.Agent:
        return tw.agent(
            id=id,
            instructions=instructions,
            model=its_model,
            tools=tools,
            output=tw.output(max_tokens=60),
            max_model_calls=2,
        )

    return tw.agent(
        id="desk",
        instructions="Give each job to the right agent, all in one reply; then list the answers.",
        model=desk,
        tools=[
            job("name_it", "Finds names.", worker("namer", "You find short names.", model)),
            job("explain", "Explains words.", worker("explainer", "You explain briefly.", model)),
            job(
                "look_up",
                "Knows how high trees grow.",
                worker("forester", "You look numbers up.", model, height_of_tree),
            ),
        ],
    )


def on_the_local_model(base_url: str, wire: str) -> tw.Result:
    if wire == "anthropic":
        id_, address = "anthropic/smollm2-135m", base_url
    else:
        id_, address = "local/smollm2-135m", f"{base_url}/v1"
    steady = {"temperature": 0, "seed": 7}
    model = tw.model(id_, base_url=address, context_window=4_096, extra_body=steady)
    return run(build_tree(model, ScriptedModel(desk_script, id="script/desk")))


def run(desk: tw.Agent) -> tw.Result:
    return tw.run_sync(
        desk,
        "Do today's three jobs.",
        budget=tw.Budget(max_tokens=40_000),
        limits=tw.Limits(deadline=240, max_concurrent_calls=2),
    )


def show(title: str, result: tw.Result) -> None:
    print(f"--- {title}: {result.stop_reason}")
    print(result.text)
    print(f"{'who':36} {'model':28} {'in':>6} {'cached':>7} {'out':>5}  basis")
    for part in result.receipt.walk():
        for line in part.lines:
            model = f"{line.provider}/{line.model}"[:28]
            read = line.input_tokens + line.cache_write_tokens
            print(
                f"{part.path:36} {model:28} {read:>6} {line.cache_read_tokens:>7} "
                f"{line.output_tokens:>5}  {line.basis}"
            )
    total = result.receipt.total
    print(f"total {total.tokens} tokens of {result.receipt.max}, {total.calls} calls\n")


def main() -> int:
    if os.environ.get("ANTHROPIC_API_KEY") or os.environ.get("OPENAI_API_KEY"):
        auto = tw.auto()
        result = run(build_tree(auto, auto))
        show("your provider", result)
        return 0 if result.complete else 3
    try:
        with LocalModel() as base_url:
            results = {wire: on_the_local_model(base_url, wire) for wire in ("openai", "anthropic")}
    except LocalModelNotInstalled as missing:
        print(missing, file=sys.stderr)
        return 1
    for wire, result in results.items():
        show(f"local model over the {wire} wire", result)
    parts = [part for result in results.values() for part in result.receipt.walk()]
    return 1 if any(part.error_code for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
