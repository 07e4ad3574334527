"""Whatever bytes come, a decoder answers, or raises an error of ours; it never hangs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewarden.protocols import Codec, Message, TreewardenError, Usage

from ._streams import ANTHROPIC, CHAT, sse

both = pytest.mark.parametrize("codec", [ANTHROPIC, CHAT], ids=lambda codec: codec.name)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def texts(*words: str) -> st.SearchStrategy[Any]:
    """Mostly a word of the protocol, sometimes anything."""
    return st.sampled_from(words) | VALUES


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly an object with any of these fields, sometimes anything."""
    return st.fixed_dictionaries({}, optional={k: v | VALUES for k, v in fields.items()}) | VALUES


COUNTS = st.integers(-1, 50)
INDEXES = st.integers(0, 2) | st.none()
PIECES = st.sampled_from(["", "{", "}", '{"a":1}', "\\ud83d", "\ud83d", "text"])
ANTHROPIC_USAGE = objects(
    input_tokens=COUNTS,
    output_tokens=COUNTS,
    cache_creation=objects(ephemeral_1h_input_tokens=COUNTS),
    iterations=st.lists(
        objects(
            type=texts("message", "compaction", "fallback_message"),
            input_tokens=COUNTS,
            output_tokens=COUNTS,
        ),
        max_size=3,
    ),
)
ANTHROPIC_EVENTS = objects(
    type=texts(
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ),
    index=INDEXES,
    message=objects(id=PIECES, model=PIECES, usage=ANTHROPIC_USAGE),
    content_block=objects(
        type=texts("text", "thinking", "redacted_thinking", "tool_use", "server_tool_use"),
        id=PIECES,
        name=PIECES,
        text=PIECES,
        input=objects(a=VALUES),
    ),
    delta=objects(
        type=texts("text_delta", "thinking_delta", "signature_delta", "input_json_delta"),
        text=PIECES,
        thinking=PIECES,
        partial_json=PIECES,
        stop_reason=texts("end_turn", "max_tokens"),
    ),
    usage=ANTHROPIC_USAGE,
    error=objects(type=PIECES, message=PIECES),
)
CHAT_CALLS = objects(index=INDEXES, id=PIECES, function=objects(name=PIECES, arguments=PIECES))
CHAT_CONTENT = objects(
    content=PIECES,
    reasoning=PIECES,
    refusal=PIECES,
    tool_calls=st.lists(CHAT_CALLS, max_size=3),
    reasoning_details=st.lists(
        objects(type=texts("reasoning.text"), index=INDEXES, text=PIECES), max_size=3
    ),
)
CHAT_EVENTS = st.just("[DONE]") | objects(
    id=PIECES,
    choices=st.lists(
        objects(
            index=INDEXES,
            delta=CHAT_CONTENT,
            message=CHAT_CONTENT,
            finish_reason=texts("stop", "length"),
        ),
        max_size=2,
    ),
    usage=objects(
        prompt_tokens=COUNTS, completion_tokens=COUNTS, total_tokens=COUNTS, cost=st.floats()
    ),
)


def check(codec: Codec, pieces: Iterable[bytes]) -> None:
    decoder = codec.stream_decoder(provider="acme")
    try:
        for piece in pieces:
            decoder.feed(piece)
        reply = decoder.finish()
    except TreewardenError:
        message, usage = decoder.partial(), decoder.usage
    else:
        message, usage = reply.message, reply.usage
    check_message(codec, message)
    check_usage(usage)
    assert 0 <= decoder.output_deltas <= decoder.output_bytes


def check_message(codec: Codec, message: Message) -> None:
    """What was read can be sent back, and its calls can be told apart."""
    json.loads(codec.encode_message(message).decode())
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == len(ids)
    assert all(
        call.id and (call.arguments == {} or not call.bad_arguments) for call in message.tool_calls
    )


def check_usage(usage: Usage | None) -> None:
    assert usage is None or (usage.problem() is None and usage.total > 0)


def answered(decode: Callable[[], object]) -> None:
    try:
        decode()
    except TreewardenError:
        pass


@both
@given(st.lists(st.binary()))
def test_arbitrary_bytes_are_an_answer_or_an_error_of_ours(
    codec: Codec, pieces: list[bytes]
) -> None:
    check(codec, pieces)


@given(st.lists(ANTHROPIC_EVENTS, max_size=8))
def test_arbitrary_anthropic_events_are_an_answer_or_an_error_of_ours(events: list[Any]) -> None:
    check(ANTHROPIC, [sse(*map(json.dumps, events))])


@given(st.lists(CHAT_EVENTS, max_size=8))
def test_arbitrary_chunks_are_an_answer_or_an_error_of_ours(events: list[Any]) -> None:
    check(CHAT, [sse(*(e if e == "[DONE]" else json.dumps(e) for e in events))])


@both
@given(st.binary() | VALUES.map(lambda value: json.dumps(value).encode()))
def test_an_arbitrary_whole_body_is_an_answer_or_an_error_of_ours(
    codec: Codec, body: bytes
) -> None:
    answered(lambda: codec.decode_response(body, provider="acme"))


@both
@given(
    st.integers(100, 599),
    st.dictionaries(st.text(), st.text()),
    st.binary() | VALUES.map(lambda v: json.dumps({"error": v}).encode()),
)
def test_an_arbitrary_error_is_an_error_of_ours(
    codec: Codec, status: int, headers: dict[str, str], body: bytes
) -> None:
    error = codec.decode_error(status, headers, body, provider="acme")
    assert (error.status, error.provider) == (status, "acme")
    str(error).encode()
