"""Treewarden as one of the frameworks of the public kit ``agent-budget-semantics``.

The kit plays a scripted provider on loopback and keeps a ledger of its own; its harness calls
``run`` and compares what we say with what it saw. What a budget of ``n`` means to us: a scenario
about iterations bounds the model calls of the whole tree, a scenario about tokens bounds tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

import treewarden as tw

# In whose scenarios the number is one of tokens.
TOKEN_SCENARIOS = ("S6", "S8", "S9")

# S12 raises its limit to this after the first turn.
RAISED_KEY = "dynamic_increase_after_turn_1"

# The scripted provider writes what it writes, whatever limit it is sent: any output that is left is
# worth a call here.
FLOOR_TOKENS = 1

# What a tool says in a scenario about tokens that does not say it: its prompts grow by an answer
# and ten tokens in each turn, and we hold a token for a byte.
_SHORT_RESULT = "7"

# A tool result that stands for a longer one says how long; a token of it is this many bytes.
_BYTES_PER_TOKEN = 4


@attrs.frozen
class Seen:
    """What our receipt says of one scenario."""

    stop_reason: str
    direct_calls: int
    subtree_calls: int
    subtree_tokens: int
    tool_calls: int


last: list[Seen] = []
"""What each call of ``run`` saw, in order: the harness hands on less than that."""


async def run(scenario: Mapping[str, Any], mock_url: str, budget_value: int) -> Any:
    """Run one scenario of the kit with one budget, and return the kit's ``RunResult``."""
    in_tokens = is_in_tokens(scenario)
    budget = None
    if in_tokens:
        budget = tw.Budget(max_tokens=budget_value, output_floor_tokens=FLOOR_TOKENS)
    limits = tw.Limits(max_depth=4, max_model_calls=None if in_tokens else budget_value)
    async with tw.open_tree(budget=budget, limits=limits) as tree:
        agent = _Agents(scenario, mock_url, tree).top()
        result = await tree.run(agent, scenario.get("task", "Check the weather in some cities."))
    seen = _seen(result.receipt)
    last.append(seen)
    return _kit().RunResult(
        framework="treewarden",
        scenario=scenario["name"],
        budget_param="max_tokens" if in_tokens else "max_model_calls",
        budget_value=budget_value,
        actual_llm_calls=seen.subtree_calls,
        actual_tool_calls=seen.tool_calls,
        stopped_by="natural" if result.stop_reason == "complete" else "budget",
        iteration_budget_consumed=seen.direct_calls,
        iteration_budget_consumed_subtree=seen.subtree_calls,
        token_budget_limit=budget_value if in_tokens else None,
        token_budget_consumed=result.receipt.own.tokens,
        token_budget_consumed_subtree=seen.subtree_tokens,
        raw_output=result.text,
    )


def _kit() -> Any:
    """The kit's own values, once it is unpacked and on the path."""
    return importlib.import_module("runners.base")


def is_in_tokens(scenario: Mapping[str, Any]) -> bool:
    return str(scenario["name"]).startswith(TOKEN_SCENARIOS)


def _seen(receipt: tw.Receipt) -> Seen:
    tools = [row for part in receipt.walk() for row in part.tools]
    return Seen(
        stop_reason=receipt.stop_reason,
        direct_calls=receipt.own.calls,
        subtree_calls=receipt.total.calls,
        subtree_tokens=receipt.total.tokens,
        tool_calls=sum(row.calls for row in tools),
    )


class _Agents:
    """The agents of one scenario: all have its tools, and those it delegates to are runs below."""

    def __init__(self, scenario: Mapping[str, Any], mock_url: str, tree: tw.Tree) -> None:
        self._scenario, self._tree = scenario, tree
        self._model = tw.model(
            "mock/mock-budget-llm", base_url=f"{mock_url}/v1", api_key="mock-key"
        )
        behaviour: Mapping[str, list[Mapping[str, Any]]] = scenario.get("tool_behavior", {})
        self._answers = {name: iter(answers) for name, answers in behaviour.items()}

    def top(self) -> tw.Agent:
        return self._agent("supervisor")

    def _agent(self, id: str) -> tw.Agent:
        definitions = self._scenario.get("tools") or self._scenario.get("tool_definitions", [])
        return tw.agent(
            id=id,
            instructions=self._scenario.get("system_prompt", "Use the tools."),
            model=self._model,
            tools=[self._tool(definition) for definition in definitions],
        )

    def _tool(self, definition: Mapping[str, Any]) -> tw.Tool:
        name = definition["name"]
        return tw.tool(
            self._function(name),
            name=name,
            description=definition["description"],
            parameters=definition["parameters"],
            effect="write",
            runs="host",
        )

    def _function(self, name: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> str:
            if name.startswith("delegate_to"):
                return await self._delegate(arguments)
            self._change_limit()
            return self._answer(name)

        return call

    async def _delegate(self, arguments: Mapping[str, Any]) -> str:
        agent = self._agent(arguments.get("specialist", "researcher"))
        return (await tw.run(agent, arguments["task"])).text

    def _change_limit(self) -> None:
        raised = self._scenario.get("budget", {}).get(RAISED_KEY)
        if raised is not None:
            self._tree.set_limit("max_model_calls", raised)

    def _answer(self, name: str) -> str:
        answers: Iterator[Mapping[str, Any]] = self._answers.get(name, iter(()))
        said = next(answers, None)
        if said is None:
            if is_in_tokens(self._scenario):
                return _SHORT_RESULT
            return str(_kit().default_tool_handler(name, ""))
        if "success" not in said:
            raise tw.ToolFailed("cave_tool_timeout" if said.get("timeout") else name, said["error"])
        return _at_full_length(str(said["success"]))


def _at_full_length(result: str) -> str:
    """A result whose text stands for so many tokens, with as much text."""
    _, marker, rest = result.partition('"token_count": ')
    if not marker:
        return result
    tokens = int(rest.split(",")[0].split("}")[0])
    return result.ljust(_BYTES_PER_TOKEN * tokens, ".")
