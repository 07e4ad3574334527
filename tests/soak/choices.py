"""What a random tree may be made of: every choice is a line in a table.

A new option of the package needs one line here. What is drawn from a table for one call, one node
or one caller depends on the tree's seed and on its own path alone, never on who came first, so the
same seed makes the same tree in every order of its events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, TypeAlias, TypeVar

import treewarden as tw
from treewarden.testing import AUTO

T = TypeVar("T")

Options: TypeAlias = dict[str, Any]
Draw: TypeAlias = Callable[[Random], Options]


def dice(*key: object) -> Random:
    """Random numbers that belong to ``key``."""
    return Random("/".join(map(str, key)))


def some_of(table: Mapping[str, Draw], random: Random, *, chance: float) -> Options:
    """The options of those lines that come up."""
    drawn: Options = {}
    for draw in table.values():
        if random.random() < chance:
            drawn |= draw(random)
    return drawn


def one_of(table: Mapping[str, tuple[int, T]], random: Random) -> T:
    """One line; its first number says how often it comes up beside the others."""
    lines = list(table.values())
    ((_, chosen),) = random.choices(lines, [weight for weight, _ in lines])
    return chosen


# What tw.open_tree gets as its limits.
LIMITS: dict[str, Draw] = {
    "depth": lambda r: {"max_depth": r.randint(1, 4)},
    "runs": lambda r: {"max_runs": r.randint(1, 5)},
    "subagents": lambda r: {"max_subagents": r.randint(1, 40)},
    "subagents at once": lambda r: {"max_concurrent_subagents": r.randint(1, 8)},
    "calls at once": lambda r: {"max_concurrent_calls": r.randint(1, 4)},
    "model calls": lambda r: {"max_model_calls": r.randint(1, 60)},
    "tool calls": lambda r: {"max_tool_calls": r.randint(1, 60)},
    "time": lambda r: {"deadline": r.choice((0.5, 3.0, 10.0, 30.0))},
    "waiting": lambda r: {"admission": "wait"},
    "waiting in a narrow tree": lambda r: {"admission": "wait", "max_concurrent_subagents": 1},
    "silence": lambda r: {"idle_timeout": r.choice((0.4, 1.5, 5.0))},
    "least time": lambda r: {"min_call_seconds": r.choice((0, 0.25, 2.0))},
}

# What tw.Budget gets beside its ceiling.
FUNDING: dict[str, Draw] = {
    "clamp": lambda r: {"clamp": r.random() < 0.5},
    "floor": lambda r: {"output_floor_tokens": r.choice((1, 100, 500))},
    "contention": lambda r: {"on_contention": r.choice(("wait", "stop"))},
    "patience": lambda r: {"max_wait": r.choice((0.5, 2.0))},
}

# What tw.subagent gets beside its agent, whatever the tree counts in.
SUBAGENT: dict[str, Draw] = {
    "attempts": lambda r: {"max_calls": r.randint(1, 4)},
    "time": lambda r: {"timeout_seconds": r.choice((0.5, 2.0, 5.0))},
    "input": lambda r: {"max_input_chars": r.choice((4, 1_000))},
    "beside": lambda r: {"background": True},
    "beside, too": lambda r: {"background": True},
}

# What tw.agent gets beside its model and its tools.
AGENT: dict[str, Draw] = {
    "model calls": lambda r: {"max_model_calls": r.randint(1, 6)},
    "tool calls": lambda r: {"max_tool_calls": r.randint(1, 8)},
    "output": lambda r: {"output": tw.output({"type": "object"}, retries=r.randint(0, 1))},
    "siblings": lambda r: {"on_sibling_failure": "cancel_siblings"},
    "background": lambda r: {"background": r.choice(("wait", "cancel", "forbid"))},
}

# How a model's reply goes: what Reply gets beside its tool calls, in eight pieces if it is slow.
REPLIES: dict[str, tuple[int, Draw]] = {
    "in order": (24, lambda r: {"delay": r.choice((0.0, 0.5, 1.0, 1.0, 2.0))}),
    "piece by piece": (6, lambda r: {"chunks": 8, "chunk_delay": r.choice((0.0, 0.25))}),
    "up to the limit": (4, lambda r: {"usage": tw.Usage(output=100_000), "delay": 1.0}),
    "without usage": (3, lambda r: {"usage": None}),
    "with growing usage": (3, lambda r: {"usage": _growing(r), "chunks": 4, "chunk_delay": 0.25}),
    "an error instead": (2, lambda r: {"error": r.choice((400, 429, 500, "overloaded"))}),
    "an error midway": (1, lambda r: {"error": 529, "break_after": 2, **_slow()}),
    "broken off": (2, lambda r: {"break_after": r.randint(0, 7), **_slow()}),
    "stalled": (2, lambda r: {"stall_after": r.randint(0, 7), **_slow()}),
    "a client that crashes": (1, lambda r: {"error": RuntimeError("the client has a bug")}),
    "another model": (1, lambda r: {"model": "another", "usage": AUTO}),
}


def _slow() -> Options:
    return {"chunks": 8, "chunk_delay": 0.25}


def _growing(random: Random) -> list[tw.Usage]:
    step = random.randint(1, 100)
    return [tw.Usage(input=10, output=step * n) for n in (1, 2, 3, 4)]
