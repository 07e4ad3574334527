"""The same tree of agents on another model.

Definitions are immutable, so the tree is made anew. Agents are reached through their subagent
tools, some of which give theirs only when asked; so each agent is replaced when somebody asks for
it, and always by the same one.
"""

from __future__ import annotations

import os

import attrs

import treewarden as tw
from treewarden.actors import Agent, Auto, HttpModel, Model, Subagent

from ._errors import CommandError


def with_model(root: Agent, model: str | None, base_url: str | None) -> Agent:
    """``root`` on the model that ``--model`` and ``--base-url`` say, and with it every agent below
    that left its model open.

    Raises:
        CommandError, UsageError: No such model can be made.
    """
    if model is None and base_url is None:
        return root
    chosen = tw.model(model, base_url=base_url) if model else _moved(root.model, base_url)
    return _Replacement(root, chosen).of(root)


def _moved(model: Model | Auto, base_url: str | None) -> Model:
    """A root agent's own model at another address."""
    if isinstance(model, HttpModel):
        limit = {} if model.declared_limit is None else {"max_tokens": model.declared_limit}
        return tw.model(
            model.id,
            base_url=base_url,
            api_key=model.key,
            price=model.pinned_price,
            context_window=model.pinned_window,
            settings={**model.settings, **limit},
            extra_body=model.extra_body,
        )
    named = os.environ.get("CAVE_MODEL")
    if isinstance(model, Auto) and named:
        return tw.model(named, base_url=base_url)
    raise CommandError(
        "--base-url alone moves the agent's own model, and this agent names none that is reached "
        "over HTTP. Give --model provider/name as well."
    )


class _Replacement:
    """Every agent below ``root``, on ``model`` where it is the root or left its model open."""

    def __init__(self, root: Agent, model: Model) -> None:
        self._root, self._model = root, model
        # By identity of the original, which is kept so that its identity stays its own.
        self._made: dict[int, tuple[Agent, Agent]] = {}

    def of(self, agent: Agent) -> Agent:
        if id(agent) not in self._made:
            self._made[id(agent)] = (agent, self._make(agent))
        return self._made[id(agent)][1]

    def _make(self, agent: Agent) -> Agent:
        is_open = agent is self._root or isinstance(agent.model, Auto)
        return attrs.evolve(
            agent,
            model=self._model if is_open else agent.model,
            tools=tuple(self._tool(t) if isinstance(t, Subagent) else t for t in agent.tools),
        )

    def _tool(self, tool: Subagent) -> Subagent:
        return attrs.evolve(tool, target=lambda: self.of(tool.agent))
