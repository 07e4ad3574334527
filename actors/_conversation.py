"""A conversation that goes on over several runs.

A handle has one owner at a time, and a run changes it all at once or not at all: what a run said is
kept if it ended in order (a planned stop is in order), and forgotten if it failed or was cancelled.
Nothing here is shared between processes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from treewarden.protocols import (
    JSON,
    Message,
    Part,
    ToolCall,
    ToolResult,
    UsageError,
    digest,
    mend_message,
)

from ._definitions import Agent
from ._models import Model

UNANSWERED = "cancelled: this call never got a result"


class Conversation:
    """The memory of several runs. Pass it as ``conversation=``; one run at a time.

    Args:
        messages: What was said before, for example saved by an earlier process. A history that no
            provider would accept is repaired, and ``repairs`` says how.

    Attributes:
        session_id: ``conversation-<uuid>``.
        epoch: How often what comes before the messages (agent, model, instructions, tools) has
            changed. A provider's cache is cold after each change.
        repairs: What was mended in the messages that it was made with.
    """

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self.session_id = f"conversation-{uuid.uuid4()}"
        self.epoch = 0
        mended, repairs = repair(_checked(messages))
        self.repairs: tuple[str, ...] = tuple(repairs)
        self._messages = mended
        self._fingerprint: str | None = None
        self._is_busy = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything that was said and kept, uncompacted."""
        return self._messages

    @property
    def is_busy(self) -> bool:
        """A run has it. It is free again when everything that run held is back."""
        return self._is_busy

    def begin(self, fingerprint: str) -> tuple[Message, ...]:
        """Take it for a run and return what was said so far.

        Raises:
            UsageError: Another run has it.
        """
        if self._is_busy:
            raise UsageError(
                f"{self.session_id} is in use by another run. Wait for its end, or use another "
                "conversation.",
                code="cave_conversation_in_use",
            )
        self._is_busy = True
        if self._fingerprint is not None and self._fingerprint != fingerprint:
            self.epoch += 1
        self._fingerprint = fingerprint
        return self._messages

    def commit(self, messages: Sequence[Message]) -> None:
        """Keep what the run said, and give the handle back."""
        # A run that a deadline ended in the middle of its tools leaves calls without results.
        self._messages, _ = repair(messages)
        self._is_busy = False

    def roll_back(self) -> None:
        """Forget what the run said, and give the handle back."""
        self._is_busy = False

    def __repr__(self) -> str:
        state = "busy" if self._is_busy else "free"
        return f"<Conversation {self.session_id}, {len(self._messages)} messages, {state}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Conversation belongs to this process and cannot be pickled. Save its .messages and "
            "make a new one from them."
        )


def require_conversation(value: Any) -> Conversation | None:
    """``value``, if it is a conversation or None."""
    if value is None or isinstance(value, Conversation):
        return value
    raise UsageError(
        f"conversation is {value!r}. Make one with tw.Conversation().",
        code="cave_conversation_invalid",
    )


def fingerprint_of(agent: Agent, model: Model) -> str:
    """What a provider's cache of this agent's requests depends on, as a digest (contract 2.13)."""
    tools: list[JSON] = [
        {"name": s.name, "description": s.description, "parameters": s.parameters}
        for s in agent.specs
    ]
    prefix = digest({"instructions": agent.instructions, "tools": tools})
    return digest(
        {
            "agentId": agent.id,
            "provider": model.provider,
            "model": model.name,
            "prefixDigest": prefix,
        }
    )


def repair(messages: Sequence[Message]) -> tuple[tuple[Message, ...], list[str]]:
    """A history that every provider accepts, and what had to be changed for that.

    Every call gets exactly one result, right after the reply that asked; results without a call
    are dropped; lone surrogates become U+FFFD.
    """
    mended: list[Message] = []
    repairs: list[str] = []
    at = 0
    while at < len(messages):
        message = _clean(messages[at], repairs)
        at += 1
        if message.role == "tool":
            ids = ", ".join(p.call_id for p in message.parts if isinstance(p, ToolResult))
            repairs.append(f"dropped results without a call: {ids}")
            continue
        mended.append(message)
        calls = message.tool_calls
        if not calls:
            continue
        results: list[Part] = []
        while at < len(messages) and messages[at].role == "tool":
            results.extend(_clean(messages[at], repairs).parts)
            at += 1
        mended.append(Message("tool", _paired(calls, results, repairs)))
    return tuple(mended), repairs


def _paired(
    calls: Sequence[ToolCall], results: Sequence[Part], repairs: list[str]
) -> tuple[Part, ...]:
    known = {call.id for call in calls}
    by_id: dict[str, ToolResult] = {}
    for result in results:
        if not isinstance(result, ToolResult):
            continue
        if result.call_id not in known or result.call_id in by_id:
            repairs.append(f"dropped a result without a call: {result.call_id}")
            continue
        by_id[result.call_id] = result
    for call in calls:
        if call.id not in by_id:
            repairs.append(f"answered a call without a result: {call.id}")
            by_id[call.id] = ToolResult(call.id, call.name, UNANSWERED, is_error=True)
    return tuple(by_id[call.id] for call in calls)


def _clean(message: Message, repairs: list[str]) -> Message:
    mended = mend_message(message)
    if mended is not message:
        repairs.append(f"replaced lone surrogates in a message ({message.role})")
    return mended


def _checked(messages: Iterable[Any]) -> list[Message]:
    checked = list(messages)
    for message in checked:
        if not isinstance(message, Message):
            raise UsageError(
                f"the history holds {message!r}. Give treewarden messages, as in result.messages.",
                code="cave_conversation_invalid",
            )
    return checked
