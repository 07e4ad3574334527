"""Anthropic Messages: what we send, and what we make of answers that were never recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from treewarden.protocols import (
    AnthropicCodec,
    BadArguments,
    CredentialsError,
    FinishReason,
    Message,
    ModelRequest,
    Opaque,
    ProtocolError,
    ProviderError,
    ProviderInterrupted,
    Text,
    Thinking,
    ThinkingDelta,
    ToolCall,
    ToolCallDelta,
    ToolResult,
    ToolSpec,
    Usage,
    UsageError,
    user,
)

from ._streams import ANTHROPIC, block, decoded, ended, fed, sse, started, text_block, tool_block

TOOL = ToolSpec(name="f", description="does f", parameters={"type": "object"})


def request(**more: Any) -> ModelRequest:
    values: dict[str, Any] = {
        "model": "claude",
        "system": "Be brief.",
        "messages": (user("Hi"),),
        "output_limit": 100,
    }
    return ModelRequest(**values | more)


def head(**more: Any) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(ANTHROPIC.encode_head(request(**more)))
    return parsed


def blocks(message: Message) -> list[Any]:
    content: list[Any] = json.loads(ANTHROPIC.encode_message(message))["content"]
    return content


def usage_of(**reported: Any) -> Usage | None:
    return decoded(ANTHROPIC, started(), *text_block(0, "Hi"), *ended(**reported)).usage


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def test_a_body_is_its_head_with_the_messages_in_it() -> None:
    asked = request(tools=(TOOL,))
    first, second = (ANTHROPIC.encode_message(user(text)) for text in ("Hi", "日本"))
    body = ANTHROPIC.join(ANTHROPIC.encode_head(asked), [first, second])
    assert body.decode() == (
        '{"model":"claude","max_tokens":100,"system":"Be brief.",'
        '"tools":[{"name":"f","description":"does f","input_schema":{"type":"object"}}],'
        '"stream":true,"messages":['
        '{"role":"user","content":[{"type":"text","text":"Hi"}]},'
        '{"role":"user","content":[{"type":"text","text":"日本"}]}]}'
    )
    assert json.loads(ANTHROPIC.join(ANTHROPIC.encode_head(asked), []))["messages"] == []


def test_headers_hold_the_key_the_version_and_the_betas() -> None:
    assert AnthropicCodec(betas=("one", "two")).headers("key") == {
        "anthropic-version": "2023-06-01",
        "content-type": "application/json",
        "x-api-key": "key",
        "anthropic-beta": "one,two",
    }
    assert "x-api-key" not in ANTHROPIC.headers("")


def test_settings_are_merged_and_the_extra_body_wins() -> None:
    merged = head(settings={"temperature": 0, "top_k": 1}, extra_body={"temperature": 1})
    assert (merged["temperature"], merged["top_k"]) == (1, 1)


def test_tools_of_the_settings_stand_beside_ours_and_those_of_the_extra_body_replace_them() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    both = head(tools=(TOOL,), settings={"tools": [search]})["tools"]
    assert [tool["name"] for tool in both] == ["f", "web_search"]
    assert head(tools=(TOOL,), extra_body={"tools": [search]})["tools"] == [search]
    assert head(settings={"tools": [search]})["tools"] == [search]


@pytest.mark.parametrize("where", ["settings", "extra_body"])
def test_settings_cannot_hold_the_conversation_or_turn_the_stream_off(where: str) -> None:
    with pytest.raises(UsageError, match="they are the conversation"):
        ANTHROPIC.encode_head(request(**{where: {"messages": []}}))
    with pytest.raises(UsageError, match="cannot turn 'stream' to False"):
        ANTHROPIC.encode_head(request(**{where: {"stream": False}}))
    assert head(**{where: {"stream": True}})["stream"] is True


def test_settings_that_are_no_json_are_a_mistake_of_the_caller() -> None:
    for value in (object(), float("nan"), {1, 2}):
        with pytest.raises(UsageError, match="must be JSON"):
            ANTHROPIC.encode_head(request(settings={"temperature": value}))


def test_the_limit_that_counts_is_the_one_on_the_wire() -> None:
    def limit(**more: Any) -> int | None:
        return ANTHROPIC.output_limit_on_the_wire(ANTHROPIC.encode_head(request(**more)))

    assert limit() == 100
    assert limit(settings={"max_tokens": 50}) == 50
    assert limit(settings={"max_tokens": 50}, extra_body={"max_tokens": 900}) == 900
    assert limit(extra_body={"max_tokens": None}) is None
    assert limit(extra_body={"max_tokens": "900"}) is None


def test_a_request_can_write_the_cache_iff_it_says_where() -> None:
    def can_write(**more: Any) -> bool:
        return ANTHROPIC.can_write_cache(ANTHROPIC.encode_head(request(**more)))

    mark: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
    assert not can_write()
    assert not can_write(system='say "cache_control":{}')
    assert can_write(settings=mark)
    assert can_write(extra_body={"system": [{"type": "text", "text": "Be brief."} | mark]})
    assert can_write(settings={"tools": [{"type": "web_search_20250305", "name": "s"} | mark]})
    marked = Message("user", (Opaque("anthropic", {"type": "text", "text": "Hi"} | mark),))
    assert ANTHROPIC.can_write_cache(ANTHROPIC.encode_message(marked))


def test_results_of_one_reply_are_one_user_message_and_errors_are_flagged() -> None:
    message = Message("tool", (ToolResult("a", "f", "1"), ToolResult("b", "f", "no", True)))
    assert json.loads(ANTHROPIC.encode_message(message)) == {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "1"},
            {"type": "tool_result", "tool_use_id": "b", "content": "no", "is_error": True},
        ],
    }


def test_a_message_without_content_is_still_a_valid_one() -> None:
    for message in (
        Message("assistant", ()),
        Message("assistant", (Text(""),)),
        Message("assistant", (Thinking("unsigned"),)),
        Message("assistant", (Opaque("openai_chat", {"reasoning_details": []}),)),
        user(""),
    ):
        assert blocks(message) == [{"type": "text", "text": "(no content)"}]


def test_thoughts_go_back_signed_or_sealed_or_not_at_all() -> None:
    message = Message(
        "assistant",
        (Thinking("a", "sig"), Thinking("", "sig"), Thinking(redacted="x"), Thinking("b")),
    )
    assert blocks(message) == [
        {"type": "thinking", "thinking": "a", "signature": "sig"},
        {"type": "thinking", "thinking": "", "signature": "sig"},
        {"type": "redacted_thinking", "data": "x"},
    ]


def test_ids_of_other_providers_are_written_in_letters_that_are_allowed() -> None:
    call, result = ToolCall("functions.f:0", "f", {}), ToolResult("functions.f:0", "f", "1")
    assert blocks(Message("assistant", (call,)))[0]["id"] == "functions_f_0"
    assert blocks(Message("tool", (result,)))[0]["tool_use_id"] == "functions_f_0"


def test_lone_surrogates_are_never_sent() -> None:
    assert blocks(user("a\ud83d"))[0]["text"] == "a\ufffd"


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


def test_a_signed_thought_is_read_and_sent_back_unchanged() -> None:
    decoder = ANTHROPIC.stream_decoder()
    thought = block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "Let me "},
        {"type": "thinking_delta", "thinking": "see."},
        {"type": "signature_delta", "signature": "sig"},
    )
    deltas = decoder.feed(sse(*thought, *text_block(1, "4"), *ended()))
    assert deltas[:2] == [ThinkingDelta("Let me "), ThinkingDelta("see.")]
    message = decoder.finish().message
    assert message.parts == (Thinking("Let me see.", "sig"), Text("4"))
    assert blocks(message)[0] == {
        "type": "thinking",
        "thinking": "Let me see.",
        "signature": "sig",
    }


def test_a_thought_that_the_limit_cut_off_is_not_sent_back() -> None:
    thought = block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "Let me"},
    )
    reply = decoded(ANTHROPIC, started(), *thought, *ended("max_tokens"))
    assert reply.message.parts == (Thinking("Let me"),)
    # Unsigned, it would make the next request invalid.
    assert b"thinking" not in ANTHROPIC.encode_message(reply.message)


def test_blocks_of_the_provider_go_back_word_for_word() -> None:
    tool_use: dict[str, Any] = {
        "type": "server_tool_use",
        "id": "s1",
        "name": "web_search",
        "input": {},
    }
    result = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"x": 1.5}]}
    message = decoded(
        ANTHROPIC,
        started(),
        *block(
            0,
            tool_use,
            {"type": "input_json_delta", "partial_json": '{"q":"a'},
            {"type": "input_json_delta", "partial_json": '"}'},
        ),
        *block(1, result),
        *block(
            2,
            {"type": "compaction", "content": None},
            {"type": "compaction_delta", "content": "in short"},
        ),
        *block(3, {"type": "not_yet_known", "field": ["x"]}),
        *ended(),
    ).message
    assert blocks(message) == [
        {**tool_use, "input": {"q": "a"}},
        result,
        {"type": "compaction", "content": "in short"},
        {"type": "not_yet_known", "field": ["x"]},
    ]
    assert {part.provider for part in message.parts if isinstance(part, Opaque)} == {"anthropic"}


def test_a_block_of_the_provider_that_is_not_whole_is_not_kept() -> None:
    tool_use: dict[str, Any] = {
        "type": "server_tool_use",
        "id": "s1",
        "name": "web_search",
        "input": {},
    }
    decoder = fed(ANTHROPIC, started(), *block(0, tool_use)[:-1])
    assert decoder.partial().parts == ()


@pytest.mark.parametrize(
    ("raw", "arguments", "problem"),
    [
        ("", {}, None),
        ('{"a":1}', {"a": 1}, None),
        ('{"a":', {}, BadArguments.NOT_JSON),
        ('{"a":NaN}', {}, BadArguments.NOT_JSON),
        ('{"a":1e999}', {}, BadArguments.NOT_JSON),
        ("[1]", {}, BadArguments.NOT_AN_OBJECT),
        ("null", {}, BadArguments.NOT_AN_OBJECT),
        ('{"a":"\\ud83d"}', {"a": "\ufffd"}, None),
    ],
)
def test_arguments_are_an_object_or_say_what_is_wrong(
    raw: str, arguments: dict[str, Any], problem: BadArguments | None
) -> None:
    reply = decoded(ANTHROPIC, started(), *tool_block(0, raw), *ended("tool_use"))
    assert reply.finish_reason is FinishReason.TOOL_CALLS
    assert reply.message.tool_calls == (ToolCall("a", "f", arguments, raw, problem),)


def test_arguments_given_with_the_start_of_a_block_are_read() -> None:
    start = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
    decoder = ANTHROPIC.stream_decoder()
    deltas = decoder.feed(sse(*block(0, start), *ended("tool_use")))
    assert deltas == [ToolCallDelta(0, "f", ""), ToolCallDelta(0, "f", '{"x":1}')]
    assert decoder.finish().message.tool_calls[0].arguments == {"x": 1}


def test_calls_with_the_same_id_get_ids_of_their_own() -> None:
    calls = [event for i, id in enumerate(("a", "a", "")) for event in tool_block(i, id=id)]
    reply = decoded(ANTHROPIC, started(), *calls, *ended("tool_use"))
    assert [call.id for call in reply.message.tool_calls] == ["a", "a_1", "call_msg_1_2"]


@pytest.mark.parametrize(
    ("stop_reason", "finish_reason"),
    [
        ("end_turn", FinishReason.STOP),
        ("stop_sequence", FinishReason.STOP),
        ("max_tokens", FinishReason.LENGTH),
        ("model_context_window_exceeded", FinishReason.LENGTH),
        ("refusal", FinishReason.REFUSAL),
        ("pause_turn", FinishReason.PAUSE),
        ("invented", FinishReason.OTHER),
    ],
)
def test_a_stop_reason_has_one_meaning(stop_reason: str, finish_reason: FinishReason) -> None:
    reply = decoded(ANTHROPIC, started(), *text_block(0, "Hi"), *ended(stop_reason))
    assert (reply.finish_reason, reply.raw_finish_reason) == (finish_reason, stop_reason)


def test_lone_surrogates_and_bytes_that_are_no_text_become_replacement_characters() -> None:
    lone = (
        '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a\\ud83d"}}'
    )
    decoder = fed(ANTHROPIC, started(), text_block(0)[0], lone)
    decoder.feed(sse(text_block(0, "b?")[1]).replace(b"?", b"\xff"))
    assert decoder.partial().text == "a\ufffdb\ufffd"


def test_pings_and_events_not_yet_known_change_nothing() -> None:
    plain = decoded(ANTHROPIC, started(), *text_block(0, "Hi"), *ended())
    ping, unknown = {"type": "ping"}, {"type": "content_block_sigh", "index": 9}
    assert decoded(ANTHROPIC, ping, started(), unknown, *text_block(0, "Hi"), *ended()) == plain


def test_nothing_after_the_end_is_part_of_the_answer() -> None:
    plain = decoded(ANTHROPIC, started(), *text_block(0, "Hi"), *ended())
    events = [started(), *text_block(0, "Hi"), *ended(), *text_block(1, "more"), "not JSON"]
    assert decoded(ANTHROPIC, *events) == plain


@pytest.mark.parametrize("garbage", ["hello", "[1]", "{", tool_block(7, "x")[1]])
def test_what_is_not_this_protocol_is_a_protocol_error(garbage: Any) -> None:
    decoder = fed(ANTHROPIC, started(), *text_block(0, "Hi"))
    with pytest.raises(ProtocolError):
        decoder.feed(sse(garbage))
    assert decoder.partial().text == "Hi"


def test_a_whole_answer_that_is_an_error_is_raised() -> None:
    body = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    with pytest.raises(ProviderError, match="529 overloaded_error") as caught:
        ANTHROPIC.decode_response(json.dumps(body).encode(), provider="acme")
    assert not isinstance(caught.value, ProviderInterrupted)
    for garbage in (b"<html>", b"{}", b"\xff"):
        with pytest.raises(ProtocolError):
            ANTHROPIC.decode_response(garbage, provider="acme")


def test_a_model_that_took_over_is_the_one_that_answered() -> None:
    fallback = {"type": "fallback", "from": {"model": "claude"}, "to": {"model": "other"}}
    reply = decoded(
        ANTHROPIC,
        started(),
        *block(0, fallback),
        *text_block(1, "Hi"),
        *ended(
            input_tokens=412,
            output_tokens=264,
            iterations=[
                iteration("message", 408, 3, model="claude"),
                iteration("fallback_message", 412, 264, model="other"),
            ],
        ),
    )
    assert reply.model == "other"
    assert reply.usage == Usage(
        input=412, output=264, extra=(Usage(input=408, output=3, model="claude"),)
    )


# ── usage ────────────────────────────────────────────────────────────────────────────────────────


def iteration(kind: str, input: int, output: int, **more: Any) -> dict[str, Any]:
    return {"type": kind, "input_tokens": input, "output_tokens": output, **more}


def test_cache_reads_and_writes_stand_beside_the_input() -> None:
    written = {"ephemeral_5m_input_tokens": 30, "ephemeral_1h_input_tokens": 20}
    usage = usage_of(
        cache_read_input_tokens=100, cache_creation_input_tokens=50, cache_creation=written
    )
    assert usage == Usage(input=12, output=7, cache_read=100, cache_write=50, cache_write_1h=20)
    assert usage and usage.context_tokens == 162


def test_writes_that_a_later_frame_adds_count_as_kept_for_an_hour_if_any_are() -> None:
    written = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 20}
    start = started(cache_creation_input_tokens=20, cache_creation=written)
    end = ended(cache_creation_input_tokens=50)
    usage = decoded(ANTHROPIC, start, *text_block(0, "Hi"), *end).usage
    assert usage == Usage(input=12, output=7, cache_write=50, cache_write_1h=50)


def test_a_field_that_the_last_frame_leaves_out_keeps_its_value() -> None:
    start = started(cache_read_input_tokens=100)
    assert decoded(
        ANTHROPIC, start, *text_block(0, "Hi"), *ended(input_tokens=None)
    ).usage == Usage(input=12, output=7, cache_read=100)


def test_a_later_frame_replaces_and_never_adds() -> None:
    frames = [ended(output_tokens=n)[0] for n in (3, 5, 7)]
    reply = decoded(ANTHROPIC, started(), *text_block(0, "Hi"), *frames, ended()[1])
    assert reply.usage == Usage(input=12, output=7)


def test_advice_of_another_model_and_compaction_stand_beside_the_answer() -> None:
    usage = usage_of(
        iterations=[
            iteration("message", 5, 4),
            iteration("advisor_message", 50, 9, model="wise"),
            iteration("compaction", 1000, 80, cache_read_input_tokens=300),
            iteration("message", 7, 3),
        ]
    )
    assert usage == Usage(
        input=12,
        output=7,
        is_aggregate=True,
        extra=(
            Usage(input=50, output=9, model="wise"),
            Usage(input=1000, output=80, cache_read=300),
        ),
    )
    assert usage and usage.total == 19 + 59 + 1380


def test_an_inner_answer_that_the_sum_already_holds_is_not_added_again() -> None:
    inner = [iteration("message", 5, 4), iteration("invented", 7, 3)]
    assert usage_of(iterations=inner) == Usage(input=12, output=7)


def test_one_inner_request_is_no_sum() -> None:
    usage = usage_of(iterations=[iteration("message", 12, 7)])
    assert usage == Usage(input=12, output=7)


@pytest.mark.parametrize(
    "reported",
    [
        {"output_tokens": -1},
        {"output_tokens": "7"},
        {"output_tokens": 7.0},
        {"output_tokens": True},
        {"input_tokens": 2**53},
        {"input_tokens": 0},
        {"cache_read_input_tokens": -1},
        {"iterations": [iteration("compaction", -1, 1)]},
        {"iterations": [{"type": "compaction"}]},
    ],
)
def test_usage_that_cannot_be_true_is_no_usage(reported: dict[str, Any]) -> None:
    assert usage_of(**reported) is None


def test_server_tool_requests_are_counted() -> None:
    requests = {"web_search_requests": 2, "web_fetch_requests": 0}
    usage = usage_of(server_tool_use=requests)
    assert usage and usage.server_tool_requests == (("web_search_requests", 2),)


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


def test_529_is_an_error_that_says_when_to_come_back() -> None:
    body = b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}'
    error = ANTHROPIC.decode_error(529, {"Retry-After": "17"}, body, provider="anthropic")
    assert type(error) is ProviderError
    assert (error.status, error.kind) == (529, "overloaded_error")
    assert (error.message, error.retry_after_seconds) == ("Overloaded", 17.0)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_a_matter_of_credentials(status: int) -> None:
    body = b'{"type":"error","error":{"type":"authentication_error","message":"no"}}'
    error = ANTHROPIC.decode_error(status, {}, body, provider="anthropic")
    assert isinstance(error, CredentialsError)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "2.5"}, 2.5),
        ({"RETRY-AFTER-MS": "1500", "retry-after": "2"}, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "2"}, 2.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "9" * 400}, None),
    ],
)
def test_the_wait_that_a_provider_asks_for_is_read_in_seconds(
    headers: dict[str, str], seconds: float | None
) -> None:
    error = ANTHROPIC.decode_error(429, headers, b"", provider="anthropic")
    assert error.retry_after_seconds == seconds


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "no explanation"),
        (b"<h1>Bad Gateway</h1>", "<h1>Bad Gateway</h1>"),
        (b"\xff", "\ufffd"),
        (b'{"error":"no"}', "no"),
        (b'{"detail":"no"}', "no"),
        (b'{"message":"no"}', "no"),
        (b'{"error":{"why":"no"}}', '{"why":"no"}'),
    ],
)
def test_an_error_keeps_whatever_text_it_came_with(body: bytes, message: str) -> None:
    assert ANTHROPIC.decode_error(500, {}, body, provider="acme").message == message


def test_usage_inside_an_error_is_kept() -> None:
    body = b'{"error":{"message":"no"},"usage":{"input_tokens":12,"output_tokens":7}}'
    error = ANTHROPIC.decode_error(500, {}, body, provider="acme")
    assert error.usage == Usage(input=12, output=7)
