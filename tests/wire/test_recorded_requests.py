"""What we would send is what recorded clients of these providers sent."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from treewarden.protocols import (
    AnthropicCodec,
    Codec,
    Message,
    ModelRequest,
    Opaque,
    OpenAIChatCodec,
    Part,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    ToolSpec,
)

from ._recordings import ANTHROPIC, OPENAI_CHAT, Exchange, cases, exchanges

# A message of role "system" in the middle of a conversation is nothing that a ``Message`` can be.
NOT_OURS = {
    ("anthropic/cache-prefix-reused-opus-4-8.json", 0),
    ("anthropic/cache-prefix-reused-opus-4-8.json", 1),
    ("anthropic/fable-5-tool-3-turns.json", 1),
    ("anthropic/fable-5-tool-3-turns.json", 2),
}
ANTHROPIC_REQUESTS = [
    e
    for e in exchanges(ANTHROPIC)
    if "count_tokens" not in e.uri and (e.file, e.place) not in NOT_OURS
]
CHAT_REQUESTS = exchanges(OPENAI_CHAT)
THINKING_FIELD = {"deepseek": "reasoning_content", "cerebras": "reasoning", "ollama": "reasoning"}
LIMITS = ("max_completion_tokens", "max_tokens")


def chat_codec(exchange: Exchange) -> OpenAIChatCodec:
    limit = next((field for field in LIMITS if field in exchange.request), LIMITS[0])
    return OpenAIChatCodec(limit_field=limit, thinking_field=THINKING_FIELD.get(exchange.provider))


def encoded(codec: Codec, request: ModelRequest) -> dict[str, Any]:
    messages = [codec.encode_message(message) for message in request.messages]
    body: dict[str, Any] = json.loads(codec.join(codec.encode_head(request), messages))
    return body


@pytest.mark.parametrize("exchange", cases(ANTHROPIC_REQUESTS))
def test_an_anthropic_request_means_what_the_recorded_one_means(exchange: Exchange) -> None:
    ours = encoded(AnthropicCodec(), anthropic_request(exchange.request))
    assert plain_anthropic(ours) == plain_anthropic(exchange.request)


@pytest.mark.parametrize("exchange", cases(CHAT_REQUESTS))
def test_a_chat_request_means_what_the_recorded_one_means(exchange: Exchange) -> None:
    codec = chat_codec(exchange)
    ours = encoded(codec, chat_request(exchange.request, thinking_field=codec.thinking_field))
    if not any(field in exchange.request for field in LIMITS):
        # We always send a limit, and ask for the usage of a stream.
        del ours[LIMITS[0]]
    assert plain_chat(ours) == plain_chat(exchange.request)


def next_turns(wire: str, files: Iterable[str]) -> list[Exchange]:
    """Return the exchanges whose answer the recorded client sent back with its next request."""
    there = [e for e in exchanges(wire) if e.file in files]
    return [e for e in there if following(e, there)]


def following(exchange: Exchange, there: Iterable[Exchange]) -> Exchange | None:
    return next(
        (e for e in there if (e.file, e.place) == (exchange.file, exchange.place + 1)), None
    )


def sent_back(exchange: Exchange, wire: str) -> dict[str, Any]:
    """Return the recorded answer as it stands in the next recorded request."""
    after = following(exchange, exchanges(wire))
    assert after
    message: dict[str, Any] = after.request["messages"][len(exchange.request["messages"])]
    assert message["role"] == "assistant"
    return message


@pytest.mark.parametrize(
    "exchange",
    cases(
        next_turns(
            ANTHROPIC,
            {
                "anthropic/cache-write-read.json",
                "anthropic/code-execution.json",
                "anthropic/fable-5-tool-3-turns.json",
                "anthropic/parallel-tools.json",
                "anthropic/server-tool-search-stream.json",
            },
        )
    ),
)
def test_an_anthropic_answer_goes_back_as_the_recorded_client_sent_it(exchange: Exchange) -> None:
    codec = AnthropicCodec()
    if exchange.is_stream:
        decoder = codec.stream_decoder()
        decoder.feed(exchange.body)
        reply = decoder.finish()
    else:
        reply = codec.decode_response(exchange.body, provider="anthropic")
    assert json.loads(codec.encode_message(reply.message)) == sent_back(exchange, ANTHROPIC)


@pytest.mark.parametrize(
    "exchange",
    cases(
        next_turns(
            OPENAI_CHAT,
            {
                "deepseek/cache-hit-tool-loop.json",
                "cerebras/multiturn-thinking.json",
                "ollama/tool-output.json",
            },
        )
    ),
)
def test_a_chat_answer_goes_back_as_the_recorded_client_sent_it(exchange: Exchange) -> None:
    codec = chat_codec(exchange)
    reply = codec.decode_response(exchange.body, provider=exchange.provider)
    ours = json.loads(codec.encode_message(reply.message))
    assert plain_assistant(ours) == plain_assistant(sent_back(exchange, OPENAI_CHAT))


# ── from recorded bodies to our values ───────────────────────────────────────────────────────────


def anthropic_request(body: dict[str, Any]) -> ModelRequest:
    known = {"model", "max_tokens", "system", "messages", "tools", "stream"}
    tools = body.get("tools", [])
    ours = all(tool.keys() == {"name", "description", "input_schema"} for tool in tools)
    return ModelRequest(
        model=body["model"],
        system=plain_text(body.get("system", "")),
        messages=tuple(anthropic_messages(body["messages"])),
        tools=tuple(
            ToolSpec(
                name=tool["name"],
                description=tool["description"],
                parameters=tool["input_schema"],
            )
            for tool in tools
            if ours
        ),
        output_limit=body["max_tokens"],
        settings={key: value for key, value in body.items() if key not in known},
        # Tools that run on the provider's side are no tools of ours.
        extra_body={} if ours else {"tools": tools},
        stream=body.get("stream", False),
    )


def anthropic_messages(messages: list[dict[str, Any]]) -> Iterable[Message]:
    for message in messages:
        parts = tuple(anthropic_part(block) for block in plain_content(message["content"]))
        holds_results = any(isinstance(part, ToolResult) for part in parts)
        yield Message("tool" if holds_results else message["role"], parts)


def anthropic_part(block: dict[str, Any]) -> Part:
    match block:
        case {"type": "text", "text": text, **rest} if not rest:
            return Text(text)
        case {"type": "tool_use", "id": id, "name": name, "input": arguments}:
            return ToolCall(id, name, arguments)
        case {"type": "tool_result", "tool_use_id": id, "content": content, **rest}:
            return ToolResult(id, "", content, is_error=rest.get("is_error", False))
        case _:
            return Opaque("anthropic", block)


def chat_request(body: dict[str, Any], *, thinking_field: str | None) -> ModelRequest:
    known = {"model", "messages", "tools", "stream", *LIMITS}
    system, messages = split_system(body["messages"])
    tools = body.get("tools", [])
    ours = all(
        tool.get("function", {}).keys() == {"name", "description", "parameters"} for tool in tools
    )
    limit = next((body[field] for field in LIMITS if field in body), 8192)
    return ModelRequest(
        model=body["model"],
        system=system,
        messages=tuple(chat_messages(messages, thinking_field=thinking_field)),
        tools=tuple(ToolSpec(**tool["function"]) for tool in tools if ours),
        output_limit=limit,
        settings={key: value for key, value in body.items() if key not in known},
        extra_body={} if ours else {"tools": tools},
        stream=body.get("stream", False),
    )


def chat_messages(
    messages: list[dict[str, Any]], *, thinking_field: str | None
) -> Iterable[Message]:
    results: list[ToolResult] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(ToolResult(message["tool_call_id"], "", message["content"]))
            continue
        if results:
            yield Message("tool", tuple(results))
            results = []
        yield Message(message["role"], tuple(chat_parts(message, thinking_field)))
    if results:
        yield Message("tool", tuple(results))


def chat_parts(message: dict[str, Any], thinking_field: str | None) -> Iterable[Part]:
    if thinking_field and message.get(thinking_field):
        yield Thinking(message[thinking_field])
    for part in plain_content(message.get("content") or []):
        yield Text(part["text"]) if part.keys() == {"type", "text"} else Opaque("openai_chat", part)
    for call in message.get("tool_calls", []):
        raw = call["function"]["arguments"]
        yield ToolCall(call["id"], call["function"]["name"], json.loads(raw), raw)


# ── differences that mean nothing ────────────────────────────────────────────────────────────────


def plain_anthropic(body: dict[str, Any]) -> dict[str, Any]:
    """Write in one way what may be written in several: a text or a list of one, no or false."""
    plain = {**body, "messages": [plain_message(message) for message in body["messages"]]}
    if "system" in body:
        plain["system"] = plain_text(body["system"])
    if not body.get("stream"):
        plain.pop("stream", None)
    return plain


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": message["role"], "content": plain_content(message["content"])}


def plain_content(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [plain_result(block) if block["type"] == "tool_result" else block for block in content]


def plain_result(block: dict[str, Any]) -> dict[str, Any]:
    plain = dict(block)
    if isinstance(plain["content"], list):
        plain["content"] = plain_text(plain["content"])
    if not plain.get("is_error"):
        plain.pop("is_error", None)
    return plain


def plain_text(system: Any) -> str:
    (block,) = plain_content(system)
    assert block.keys() == {"type", "text"}
    return str(block["text"])


def split_system(messages: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Several system messages in a row say what one says."""
    leading = [message["content"] for message in messages if message["role"] == "system"]
    return "\n\n".join(leading), messages[len(leading) :]


def plain_chat(body: dict[str, Any]) -> dict[str, Any]:
    system, messages = split_system(body["messages"])
    plain = {**body, "system": system, "messages": [plain_chat_message(m) for m in messages]}
    for off in ("stream", "tools"):
        if not body.get(off):
            plain.pop(off, None)
    # Whether the usage of a stream was asked for is no part of what the request means.
    plain.pop("stream_options", None)
    return plain


def plain_chat_message(message: dict[str, Any]) -> dict[str, Any]:
    return plain_assistant(message) if message["role"] == "assistant" else message


def plain_assistant(message: dict[str, Any]) -> dict[str, Any]:
    """No content is no content, whether it is empty, null or absent; so with thoughts."""
    plain = {key: value for key, value in message.items() if value}
    plain["tool_calls"] = [
        {**call, "function": {**call["function"], "arguments": json.loads(raw)}}
        for call in message.get("tool_calls", [])
        for raw in [call["function"]["arguments"]]
    ]
    return plain
