"""Streams written by hand, for what was never recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treewarden.protocols import AnthropicCodec, Codec, OpenAIChatCodec, Reply, StreamDecoder

ANTHROPIC = AnthropicCodec()
CHAT = OpenAIChatCodec()


def sse(*events: Any) -> bytes:
    """Return ``events`` as a stream; a text stands for itself, anything else for its JSON."""
    written = (e if isinstance(e, str) else json.dumps(e, ensure_ascii=False) for e in events)
    return "".join(f"data: {text}\n\n" for text in written).encode()


def decoded(codec: Codec, *events: Any) -> Reply:
    decoder = fed(codec, *events)
    return decoder.finish()


def fed(codec: Codec, *events: Any) -> StreamDecoder:
    decoder = codec.stream_decoder(provider="acme")
    decoder.feed(sse(*events))
    return decoder


# ── Anthropic Messages ───────────────────────────────────────────────────────────────────────────


def started(**usage: Any) -> dict[str, Any]:
    reported = {"input_tokens": 12, "output_tokens": 1, **usage}
    message: dict[str, Any] = {"id": "msg_1", "model": "claude", "content": [], "usage": reported}
    return {"type": "message_start", "message": message}


def block(index: int, start: Mapping[str, Any], *deltas: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def text_block(index: int, *texts: str) -> list[dict[str, Any]]:
    deltas = [{"type": "text_delta", "text": text} for text in texts]
    return block(index, {"type": "text", "text": ""}, *deltas)


def tool_block(index: int, *fragments: str, id: str = "a", name: str = "f") -> list[dict[str, Any]]:
    start: dict[str, Any] = {"type": "tool_use", "id": id, "name": name, "input": {}}
    deltas = [{"type": "input_json_delta", "partial_json": text} for text in fragments]
    return block(index, start, *deltas)


def ended(stop_reason: str = "end_turn", **usage: Any) -> list[dict[str, Any]]:
    reported = {"output_tokens": 7, **usage}
    delta = {"type": "message_delta", "delta": {"stop_reason": stop_reason}, "usage": reported}
    return [delta, {"type": "message_stop"}]


# ── Chat Completions ─────────────────────────────────────────────────────────────────────────────

DONE = "[DONE]"
USAGE = {"prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19}


def chunk(
    content: str | None = None,
    *,
    finish: str | None = None,
    calls: Sequence[Mapping[str, Any]] = (),
    delta: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    whole = {"content": content, **({"tool_calls": calls} if calls else {}), **(delta or {})}
    choice = {"index": 0, "delta": whole, "finish_reason": finish}
    return {"id": "chat-1", "model": "gpt", "choices": [choice], **more}


def usage_only(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chunk that comes after the last content, and has none."""
    return {"choices": [], "usage": usage}


def fragment(
    index: int | None = None, id: str | None = None, name: str | None = None, arguments: str = ""
) -> dict[str, Any]:
    """Return a piece of a tool call that says only what is given."""
    told = {"index": index, "id": id}
    function = {"arguments": arguments} | ({"name": name} if name is not None else {})
    return {key: value for key, value in told.items() if value is not None} | {"function": function}
