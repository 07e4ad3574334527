"""Chat Completions: what we send, and what we make of answers that were never recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import pytest

from treewarden.protocols import (
    BadArguments,
    CredentialsError,
    FinishReason,
    Message,
    ModelRequest,
    Opaque,
    OpenAIChatCodec,
    ProtocolError,
    ProviderError,
    ProviderInterrupted,
    Reply,
    Text,
    TextDelta,
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

from ._streams import CHAT, DONE, USAGE, chunk, decoded, fed, fragment, sse

TOOL = ToolSpec(name="f", description="does f", parameters={"type": "object"})
COMPATIBLE = OpenAIChatCodec(limit_field="max_tokens", thinking_field="reasoning_content")


def request(**more: Any) -> ModelRequest:
    values: dict[str, Any] = {
        "model": "gpt",
        "system": "Be brief.",
        "messages": (user("Hi"),),
        "output_limit": 100,
    }
    return ModelRequest(**values | more)


def written(message: Message, codec: OpenAIChatCodec = CHAT) -> list[Any]:
    objects: list[Any] = json.loads(b"[" + codec.encode_message(message) + b"]")
    return objects


def whole(message: Mapping[str, Any], finish: str | None = "stop", **more: Any) -> Reply:
    choice = {"index": 0, "message": message, "finish_reason": finish}
    body = {"id": "chat-1", "model": "gpt", "choices": [choice], "usage": USAGE, **more}
    return CHAT.decode_response(json.dumps(body).encode(), provider="acme")


def usage_of(**reported: Any) -> Usage | None:
    return decoded(CHAT, chunk("Hi"), chunk(finish="stop", usage=USAGE | reported)).usage


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def test_a_body_is_its_head_with_the_messages_after_the_system_message() -> None:
    asked = request(tools=(TOOL,))
    first, second = (CHAT.encode_message(user(text)) for text in ("Hi", "日本"))
    body = CHAT.join(CHAT.encode_head(asked), [first, second])
    assert body.decode() == (
        '{"model":"gpt","max_completion_tokens":100,"tools":[{"type":"function","function":'
        '{"name":"f","description":"does f","parameters":{"type":"object"}}}],'
        '"stream":true,"stream_options":{"include_usage":true},"messages":['
        '{"role":"system","content":"Be brief."},'
        '{"role":"user","content":"Hi"},{"role":"user","content":"日本"}]}'
    )


@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_body_is_json_with_and_without_system_and_messages(system: str, count: int) -> None:
    body = CHAT.join(
        CHAT.encode_head(request(system=system)), [CHAT.encode_message(user("Hi"))] * count
    )
    roles = [message["role"] for message in json.loads(body)["messages"]]
    assert roles == ["system"] * bool(system) + ["user"] * count


def test_a_request_that_does_not_stream_says_nothing_about_streams() -> None:
    head = json.loads(CHAT.encode_head(request(stream=False)))
    assert not {"stream", "stream_options"} & head.keys()
    plain = OpenAIChatCodec(asks_for_usage=False)
    assert "stream_options" not in json.loads(plain.encode_head(request()))


def test_a_server_of_ones_own_needs_no_key() -> None:
    assert CHAT.headers("key")["authorization"] == "Bearer key"
    assert "authorization" not in CHAT.headers("")


def test_the_limit_that_counts_is_the_one_on_the_wire() -> None:
    def limit(codec: OpenAIChatCodec = CHAT, **more: Any) -> int | None:
        return codec.output_limit_on_the_wire(codec.encode_head(request(**more)))

    assert limit() == limit(COMPATIBLE) == 100
    assert limit(extra_body={"max_completion_tokens": 900}) == 900
    # Under another name it still takes the place of ours, and does not stand beside it.
    assert limit(extra_body={"max_tokens": 50}) == 50
    assert limit(settings={"max_tokens": 50}, extra_body={"max_completion_tokens": 60}) == 60
    assert limit(extra_body={"max_tokens": 50, "max_completion_tokens": 60}) == 60
    assert limit(extra_body={"max_completion_tokens": None}) is None
    # Each of three answers may be that long.
    assert limit(settings={"n": 3}) == 300


def test_no_request_asks_for_cache_writes_here() -> None:
    head = CHAT.encode_head(request(settings={"cache_control": {"type": "ephemeral"}}))
    assert not CHAT.can_write_cache(head)


def test_settings_cannot_hold_the_conversation() -> None:
    with pytest.raises(UsageError, match="they are the conversation"):
        CHAT.encode_head(request(extra_body={"messages": []}))


def test_each_result_is_a_tool_message_and_errors_say_so() -> None:
    message = Message("tool", (ToolResult("a", "f", "1"), ToolResult("b", "f", "no", True)))
    assert written(message) == [
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no"},
    ]


def test_text_beside_results_follows_them() -> None:
    message = Message("tool", (ToolResult("a", "f", "1"), Text("and now?")))
    assert [one["role"] for one in written(message)] == ["tool", "user"]


def test_a_message_without_content_is_still_a_valid_one() -> None:
    for message in (
        Message("assistant", ()),
        Message("assistant", (Text(""),)),
        Message("assistant", (Thinking("unsent"),)),
        Message("assistant", (Opaque("anthropic", {"type": "compaction"}),)),
        Message("user", (Opaque("anthropic", {"type": "image"}),)),
        Message("tool", ()),
        user(""),
    ):
        (one,) = written(message)
        assert one["content"] == "(no content)"


def test_content_of_the_provider_stands_where_it_stood() -> None:
    image: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:,"}}
    message = Message("user", (Text("see"), Opaque("openai_chat", image), Text("this")))
    (one,) = written(message)
    assert [part["type"] for part in one["content"]] == ["text", "image_url", "text"]


def test_thoughts_go_back_where_a_server_wants_them_unless_somebody_else_sealed_them() -> None:
    message = Message("assistant", (Thinking("mine"), Thinking("sealed", "sig"), Text("4")))
    assert written(message) == [{"role": "assistant", "content": "4"}]
    assert written(message, COMPATIBLE) == [
        {"role": "assistant", "content": "4", "reasoning_content": "mine"}
    ]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (ToolCall("a", "f", {"x": 1}, '{ "x": 1 }'), '{ "x": 1 }'),
        (ToolCall("a", "f", {"x": 1}), '{"x":1}'),
        (ToolCall("a", "f", {}), "{}"),
        (ToolCall("a", "f", {}, '{"x"', BadArguments.NOT_JSON), "{}"),
        (ToolCall("a", "f", {}, "[1]", BadArguments.NOT_AN_OBJECT), "{}"),
    ],
)
def test_a_call_goes_back_with_arguments_that_are_an_object(call: ToolCall, arguments: str) -> None:
    (one,) = written(Message("assistant", (call,)))
    assert one["content"] is None
    assert one["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    ]


# ── tool calls ───────────────────────────────────────────────────────────────────────────────────

A, B = '{"to":"a"}', '{"to":"b"}'
NAMED = [fragment(None, id, "f", arguments) for id, arguments in (("A", A), ("B", B))]


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param(
            [[fragment(i, n, "f", a)] for i, n, a in ((0, "A", A), (1, "B", B))], id="both"
        ),
        pytest.param([NAMED], id="no index"),
        pytest.param([[fragment(0) | call] for call in NAMED], id="every index 0"),
        pytest.param(
            [
                [fragment(None, "A", "f", A[:4])],
                [fragment(None, None, None, A[4:])],
                [fragment(None, "B", "f", B[:4])],
                [fragment(None, "A", None, "")],
                [fragment(None, "B", None, B[4:])],
            ],
            id="no index, in pieces",
        ),
        pytest.param(
            [
                [fragment(0, "A", "f", A[:4])],
                [fragment(0, "A", "f", A[4:])],
                [fragment(0, "A", "f", "")],
                [fragment(1, "B", "f", B[:4])],
                [fragment(1, "B", "f", B[4:])],
            ],
            id="id and name on every piece",
        ),
        pytest.param(
            [
                [fragment(0, None, "f", "")],
                [fragment(1, None, "f", "")],
                [fragment(1, "B", None, B[:4]), fragment(0, "A", None, A[:4])],
                [fragment(0, None, None, A[4:]), fragment(1, None, None, B[4:])],
            ],
            id="the id comes late",
        ),
        pytest.param(
            [
                [fragment(0, "A", "f", A[:4])],
                [fragment(1, "B", "f", "")],
                [fragment(2, "A", None, A[4:])],
                [fragment(3, "B", None, B)],
            ],
            id="an index for every piece",
        ),
    ],
)
def test_a_piece_goes_to_its_call_however_a_server_names_it(
    chunks: Sequence[Sequence[Mapping[str, Any]]],
) -> None:
    reply = decoded(CHAT, *(chunk(calls=calls) for calls in chunks), chunk(finish="tool_calls"))
    assert [(c.id, c.raw_arguments) for c in reply.message.tool_calls] == [("A", A), ("B", B)]


@pytest.mark.parametrize("index", [None, 0])
def test_whole_calls_without_ids_are_told_apart_and_get_ids(index: int | None) -> None:
    calls = [fragment(index, None, "f", A), fragment(index, "", "f", B), fragment(index, name="g")]
    reply = decoded(CHAT, *(chunk(calls=[call]) for call in calls), chunk(finish="stop"))
    assert [(c.id, c.name, c.raw_arguments) for c in reply.message.tool_calls] == [
        ("call_chat-1_0", "f", A),
        ("call_chat-1_1", "f", B),
        ("call_chat-1_2", "g", ""),
    ]
    assert reply.finish_reason is FinishReason.TOOL_CALLS


@pytest.mark.parametrize("indexes", [(0, 1), (None, None)])
def test_calls_with_the_same_id_are_told_apart_and_get_ids_of_their_own(
    indexes: tuple[int | None, int | None],
) -> None:
    calls = [fragment(i, "same", "f", a) for i, a in zip(indexes, (A, B), strict=True)]
    reply = decoded(CHAT, *(chunk(calls=[call]) for call in calls), chunk(finish="tool_calls"))
    assert [(c.id, c.raw_arguments) for c in reply.message.tool_calls] == [
        ("same", A),
        ("same_1", B),
    ]


def test_the_calls_of_a_whole_answer_are_read_the_same_way() -> None:
    reply = whole({"content": None, "tool_calls": NAMED}, "tool_calls")
    assert [(c.id, c.raw_arguments) for c in reply.message.tool_calls] == [("A", A), ("B", B)]


def test_arguments_given_as_an_object_are_read() -> None:
    call = {"id": "A", "function": {"name": "f", "arguments": {"to": "a"}}}
    (read,) = whole({"tool_calls": [call]}, "tool_calls").message.tool_calls
    assert read == ToolCall("A", "f", {"to": "a"}, A)


def test_deltas_say_which_call_they_are_part_of() -> None:
    decoder = CHAT.stream_decoder()
    stream = sse(chunk(calls=[fragment(0, "A", "f", "")]), chunk(calls=[fragment(0, arguments=A)]))
    assert decoder.feed(stream) == [ToolCallDelta(0, "f", ""), ToolCallDelta(0, "f", A)]
    assert (decoder.output_deltas, decoder.output_bytes) == (1, len(A))


# ── content ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "thought",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]},
    ],
)
def test_thoughts_are_read_wherever_a_server_puts_them(thought: Mapping[str, Any]) -> None:
    decoder = CHAT.stream_decoder()
    assert decoder.feed(sse(chunk(delta=thought))) == [ThinkingDelta("hm")]
    decoder.feed(sse(chunk("4"), chunk(finish="stop")))
    assert decoder.finish().message.parts == (Thinking("hm"), Text("4"))


def test_thoughts_in_the_routers_own_form_go_back_in_it() -> None:
    def detail(**more: Any) -> dict[str, Any]:
        return {"reasoning_details": [{"index": 0, **more}]}

    message = decoded(
        CHAT,
        chunk(delta={"reasoning": "Let me "} | detail(type="reasoning.text", text="Let me ")),
        chunk(delta={"reasoning": "see."} | detail(type="reasoning.text", text="see.")),
        chunk(delta=detail(type="reasoning.text", signature="sig", text=None)),
        chunk(delta=detail(type="reasoning.encrypted", data="xyz")),
        chunk("4"),
        chunk(finish="stop"),
    ).message
    assert message.parts[0] == Thinking("Let me see.")
    (one,) = written(message, COMPATIBLE)
    assert "reasoning_content" not in one
    assert one["reasoning_details"] == [
        {"index": 0, "type": "reasoning.text", "text": "Let me see.", "signature": "sig"},
        {"index": 0, "type": "reasoning.encrypted", "data": "xyz"},
    ]


def test_a_refusal_is_text_and_the_reason_why_the_answer_ended() -> None:
    decoder = CHAT.stream_decoder()
    assert decoder.feed(sse(chunk(delta={"refusal": "I can"}))) == [TextDelta("I can")]
    decoder.feed(sse(chunk(delta={"refusal": "not."}), chunk(finish="stop")))
    reply = decoder.finish()
    assert (reply.message.text, reply.finish_reason) == ("I cannot.", FinishReason.REFUSAL)


@pytest.mark.parametrize(
    ("raw", "finish_reason"),
    [
        ("stop", FinishReason.STOP),
        ("length", FinishReason.LENGTH),
        ("model_length", FinishReason.LENGTH),
        ("content_filter", FinishReason.REFUSAL),
        ("invented", FinishReason.OTHER),
    ],
)
def test_a_finish_reason_has_one_meaning(raw: str, finish_reason: FinishReason) -> None:
    reply = decoded(CHAT, chunk("Hi"), chunk(finish=raw))
    assert (reply.finish_reason, reply.raw_finish_reason) == (finish_reason, raw)


def test_further_answers_are_counted_and_not_read() -> None:
    other = chunk("Hello")
    other["choices"][0]["index"] = 1
    decoder = fed(CHAT, chunk("Hi"), other, chunk(finish="stop"))
    assert decoder.finish().message.text == "Hi"
    assert (decoder.output_deltas, decoder.output_bytes) == (2, 7)


def test_chunks_without_choices_and_with_empty_content_change_nothing() -> None:
    azure = {"choices": [], "model": "", "prompt_filter_results": [{"prompt_index": 0}]}
    events = [azure, chunk(""), chunk("Hi"), chunk(finish=""), " ", chunk(finish="stop")]
    decoder = fed(CHAT, *events)
    assert decoder.finish() == decoded(CHAT, chunk("Hi"), chunk(finish="stop"))
    assert decoder.output_deltas == 1


def test_lone_surrogates_become_replacement_characters() -> None:
    text = json.dumps(chunk("a?")).replace("?", "\\ud83d")
    assert decoded(CHAT, text, chunk(finish="stop")).message.text == "a\ufffd"


@pytest.mark.parametrize("garbage", ["hello", "[1]", "{", '{"a":' * 100_000, '{"a":NaN}'])
def test_what_is_not_this_protocol_is_a_protocol_error(garbage: str) -> None:
    decoder = fed(CHAT, chunk("Hi"))
    with pytest.raises(ProtocolError):
        decoder.feed(sse(garbage))
    assert decoder.partial().text == "Hi"


def test_fields_of_a_wrong_type_read_as_absent() -> None:
    odd = {"content": 5, "tool_calls": {"a": 1}, "reasoning": [1], "refusal": {}}
    events = [chunk(delta=odd), {"choices": 7, "model": 3, "usage": [1]}, chunk(finish="stop")]
    assert decoded(CHAT, *events).message.parts == ()


def test_a_whole_answer_without_choices_is_no_answer() -> None:
    for garbage in (b"<html>", b"{}", b'{"choices":[]}', b"[]"):
        with pytest.raises(ProtocolError):
            CHAT.decode_response(garbage, provider="acme")


def test_a_whole_answer_that_is_an_error_is_raised_with_its_usage() -> None:
    with pytest.raises(ProviderError, match="acme answered 502: no") as caught:
        whole({"content": None}, error={"code": 502, "message": "no"})
    assert caught.value.usage == Usage(input=12, output=7)
    assert not isinstance(caught.value, ProviderInterrupted)
    with pytest.raises(CredentialsError):
        whole({"content": None}, error={"code": 401, "message": "no"})


# ── usage ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "cached",
    [
        {"prompt_tokens_details": {"cached_tokens": 5}},
        {"prompt_cache_hit_tokens": 5, "prompt_cache_miss_tokens": 7},
        {"cached_tokens": 5},
    ],
)
def test_what_was_read_from_a_cache_lies_inside_the_prompt(cached: dict[str, Any]) -> None:
    assert usage_of(**cached) == Usage(input=7, cache_read=5, output=7)


def test_what_was_written_to_a_cache_lies_inside_the_prompt_too() -> None:
    details = {"cached_tokens": 5, "cache_write_tokens": 4}
    assert usage_of(prompt_tokens_details=details) == Usage(
        input=3, cache_read=5, cache_write=4, output=7
    )


def test_reasoning_lies_inside_the_output() -> None:
    details = {"reasoning_tokens": 3}
    assert usage_of(completion_tokens_details=details) == Usage(input=12, output=7, reasoning=3)


def test_reasoning_that_the_total_shows_beside_the_completion_is_output_too() -> None:
    usage = usage_of(completion_tokens_details={"reasoning_tokens": 30}, total_tokens=49)
    assert usage == Usage(input=12, output=37, reasoning=30)


@pytest.mark.parametrize(
    "reported",
    [
        {"total_tokens": 20},
        {"total_tokens": 0},
        {"total_tokens": "19"},
        {"completion_tokens": -7, "total_tokens": 5},
        {"completion_tokens": None},
        {"completion_tokens": 7.0},
        {"prompt_tokens": "12"},
        {"prompt_tokens": 0, "total_tokens": 7},
        {"prompt_tokens_details": {"cached_tokens": 13}},
        {"prompt_tokens_details": {"cached_tokens": -1}},
        {"prompt_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 6}},
        {"completion_tokens": 2**53, "total_tokens": 2**53 + 12},
    ],
)
def test_usage_that_cannot_be_true_is_no_usage(reported: dict[str, Any]) -> None:
    assert usage_of(**reported) is None


def test_the_total_may_be_left_out() -> None:
    assert usage_of(total_tokens=None) == Usage(input=12, output=7)


def test_the_cost_that_a_router_reports_is_kept_to_the_last_digit() -> None:
    text = json.dumps(chunk(finish="stop", usage={**USAGE, "cost": 0}))
    text = text.replace('"cost": 0', '"cost": 0.012345678901234567890123')
    usage = decoded(CHAT, chunk("Hi"), text).usage
    assert usage and usage.reported_cost_usd == Decimal("0.012345678901234567890123")


@pytest.mark.parametrize(
    ("reported", "cost"),
    [
        ({}, None),
        ({"cost": 0}, Decimal(0)),
        ({"cost": -1}, None),
        ({"cost": "0.1"}, None),
        ({"cost": {"total_cost": 0.1}}, None),
        (
            {"cost": 0.01, "is_byok": False, "cost_details": {"upstream_inference_cost": 0.5}},
            "0.01",
        ),
        ({"cost": 0, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.5}}, "0.5"),
        ({"cost": 0.01, "is_byok": True}, None),
    ],
)
def test_a_cost_is_what_the_answer_costs_in_all_or_none(
    reported: dict[str, Any], cost: str | Decimal | None
) -> None:
    usage = usage_of(**reported)
    assert usage
    assert usage.reported_cost_usd == (None if cost is None else Decimal(cost))


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


def test_an_error_of_a_router_says_what_the_provider_behind_it_said() -> None:
    body = {"error": {"code": 429, "message": "upstream", "metadata": {"raw": "try later"}}}
    error = CHAT.decode_error(429, {}, json.dumps(body).encode(), provider="acme")
    assert error.message == "upstream: try later"
    assert (error.status, error.kind) == (429, None)


def test_the_status_of_the_answer_wins_over_the_one_in_its_text() -> None:
    body = b'{"error":{"code":"500","message":"no"}}'
    assert CHAT.decode_error(503, {}, body, provider="acme").status == 503


def test_what_comes_after_done_is_not_part_of_the_answer() -> None:
    plain = decoded(CHAT, chunk("Hi"), chunk(finish="stop", usage=USAGE), DONE)
    more = ["not JSON", chunk("more"), {"error": {"message": "no"}}]
    assert decoded(CHAT, chunk("Hi"), chunk(finish="stop", usage=USAGE), DONE, *more) == plain


def test_done_without_a_finish_reason_is_an_interruption() -> None:
    with pytest.raises(ProviderInterrupted):
        decoded(CHAT, chunk("Hi"), DONE)
