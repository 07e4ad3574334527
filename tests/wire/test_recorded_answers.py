"""Every recorded answer decodes, whatever way its bytes are cut, and its usage adds up."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import attrs
import pytest

from treewarden.protocols import (
    AnthropicCodec,
    Codec,
    Delta,
    FinishReason,
    Message,
    OpenAIChatCodec,
    ProviderError,
    ProviderInterrupted,
    Reply,
    TextDelta,
    Thinking,
    ToolCallDelta,
    Usage,
)

from ._recordings import ANTHROPIC, OPENAI_CHAT, TRAFFIC, Exchange, cases, cuts, exchanges

CODECS: dict[str, Codec] = {ANTHROPIC: AnthropicCodec(), OPENAI_CHAT: OpenAIChatCodec()}
RECORDED = [*exchanges(ANTHROPIC), *exchanges(OPENAI_CHAT)]
ANSWERS = [e for e in RECORDED if e.is_answer]
STREAMS = [e for e in ANSWERS if e.is_stream]
ERRORS = [e for e in RECORDED if e.status != 200]
# Recorded with HTTP 200: what each is after all.
ERRORS_WITH_STATUS_200 = {
    "azure-openai/content-filter-prompt.json": (ProviderError, 400, "content_filter"),
    "groq/stream-error-event.json": (ProviderInterrupted, 400, "tool_use_failed"),
    "openrouter/stream-error.json": (ProviderInterrupted, 400, None),
}
WHOLE_STREAMS = [e for e in STREAMS if e.file not in ERRORS_WITH_STATUS_200]


def codec_for(exchange: Exchange) -> Codec:
    assert exchange.wire
    return CODECS[exchange.wire]


@attrs.frozen
class Outcome:
    """All that a decoder says about a stream, however that ended."""

    reply: Reply | None
    error: tuple[type, str] | None
    # None after an error: what came in the same read as the error is only in ``partial``.
    deltas: list[Delta] | None
    partial: Message
    usage: Usage | None
    output_deltas: int
    output_bytes: int


def outcome(exchange: Exchange, pieces: Iterable[bytes]) -> Outcome:
    decoder = codec_for(exchange).stream_decoder(provider=exchange.provider)
    reply, error, deltas = None, None, list[Delta]()
    try:
        for piece in pieces:
            deltas += decoder.feed(piece)
        reply = decoder.finish()
    except ProviderError as e:
        error = type(e), str(e)
    return Outcome(
        reply,
        error,
        None if error else deltas,
        decoder.partial(),
        decoder.usage,
        decoder.output_deltas,
        decoder.output_bytes,
    )


def reply_to(exchange: Exchange) -> Reply:
    codec = codec_for(exchange)
    if not exchange.is_stream:
        return codec.decode_response(exchange.body, provider=exchange.provider)
    decoder = codec.stream_decoder(provider=exchange.provider)
    decoder.feed(exchange.body)
    return decoder.finish()


@pytest.mark.parametrize("exchange", cases(STREAMS))
def test_a_recorded_stream_decodes_to_the_same_in_whatever_pieces_it_comes(
    exchange: Exchange,
) -> None:
    whole = outcome(exchange, [exchange.body])
    for pieces in cuts(exchange.body):
        assert outcome(exchange, pieces) == whole, [len(piece) for piece in pieces][:2]


@pytest.mark.parametrize("exchange", cases(ANSWERS))
def test_a_recorded_answer_is_a_reply_or_the_error_that_it_says(exchange: Exchange) -> None:
    if exchange.file in ERRORS_WITH_STATUS_200:
        kind_of_error, status, kind = ERRORS_WITH_STATUS_200[exchange.file]
        with pytest.raises(kind_of_error) as caught:
            reply_to(exchange)
        assert (caught.value.status, caught.value.kind) == (status, kind)
        return
    reply = reply_to(exchange)
    assert reply.finish_reason is not FinishReason.OTHER
    assert reply.model and reply.response_id
    assert all(call.bad_arguments is None for call in reply.message.tool_calls)
    assert (reply.finish_reason is FinishReason.TOOL_CALLS) == bool(reply.message.tool_calls)


@pytest.mark.parametrize("exchange", cases([e for e in ANSWERS if e.usage]))
def test_the_usage_of_a_recorded_answer_adds_up_to_what_was_reported(exchange: Exchange) -> None:
    assert exchange.usage
    try:
        usage = reply_to(exchange).usage
    except ProviderError as error:
        usage = error.usage
    assert usage
    assert usage.problem() is None
    check = _check_anthropic if exchange.wire == ANTHROPIC else _check_chat
    check(usage, exchange.usage)


def _check_anthropic(usage: Usage, reported: dict[str, Any]) -> None:
    iterations = reported.get("iterations", [])
    beside = [i for i in iterations if i["type"] != "message"]
    assert usage.total == sum(map(_anthropic_total, [reported, *beside]))
    assert usage.input == reported["input_tokens"]
    assert usage.output == reported["output_tokens"]
    assert usage.cache_read == reported.get("cache_read_input_tokens", 0)
    assert usage.cache_write == reported.get("cache_creation_input_tokens", 0)
    assert usage.reasoning == reported.get("output_tokens_details", {}).get("thinking_tokens", 0)
    assert [inner.model for inner in usage.extra] == [i.get("model") for i in beside]
    assert dict(usage.server_tool_requests) == reported.get("server_tool_use", {})


def _anthropic_total(reported: dict[str, Any]) -> int:
    fields = ("input_tokens", "output_tokens")
    cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(reported.get(field, 0) for field in fields + cached)


def _check_chat(usage: Usage, reported: dict[str, Any]) -> None:
    prompt_details: dict[str, int] = reported.get("prompt_tokens_details") or {}
    assert usage.total == reported["total_tokens"]
    assert usage.context_tokens == reported["prompt_tokens"]
    assert usage.output == reported["completion_tokens"]
    assert usage.cache_read == prompt_details.get("cached_tokens", 0)
    assert usage.cache_write == prompt_details.get("cache_write_tokens", 0)
    if "cost" in reported:
        assert usage.reported_cost_usd == Decimal(str(reported["cost"]))


@pytest.mark.parametrize("exchange", cases(WHOLE_STREAMS))
def test_the_deltas_of_a_recorded_stream_are_its_text_and_its_arguments(
    exchange: Exchange,
) -> None:
    result = outcome(exchange, [exchange.body])
    assert result.reply is not None and result.deltas is not None
    text = "".join(delta.text for delta in result.deltas if isinstance(delta, TextDelta))
    assert text == result.reply.message.text
    for place, call in enumerate(result.reply.message.tool_calls):
        own = [d for d in result.deltas if isinstance(d, ToolCallDelta) and d.index == place]
        assert "".join(delta.arguments for delta in own) == call.raw_arguments
        assert {delta.name for delta in own} == {call.name}


@pytest.mark.parametrize("exchange", cases([e for e in STREAMS if e.wire == ANTHROPIC]))
def test_a_recorded_anthropic_stream_cut_off_before_its_end_is_interrupted(
    exchange: Exchange,
) -> None:
    end = exchange.body.index(b"event: message_stop")
    for length in (0, end // 2, end, end + len(b"event: message_stop\ndata: ")):
        decoder = codec_for(exchange).stream_decoder()
        decoder.feed(exchange.body[:length])
        with pytest.raises(ProviderInterrupted, match="before message_stop") as caught:
            decoder.finish()
        assert caught.value.usage == decoder.usage


@pytest.mark.parametrize("exchange", cases([e for e in STREAMS if e.wire == OPENAI_CHAT]))
def test_a_recorded_chat_stream_cut_off_before_its_finish_reason_is_interrupted(
    exchange: Exchange,
) -> None:
    decoder = codec_for(exchange).stream_decoder()
    events = exchange.body.split(b"\n\n")
    for event in itertools.takewhile(lambda e: b'"finish_reason":"' not in e, events[:-2]):
        if b"event: error" not in event:
            decoder.feed(event + b"\n\n")
    with pytest.raises(ProviderInterrupted, match="before a finish reason"):
        decoder.finish()


@pytest.mark.parametrize("exchange", cases([e for e in WHOLE_STREAMS if e.wire == OPENAI_CHAT]))
def test_a_recorded_chat_stream_needs_no_done_after_its_finish_reason(exchange: Exchange) -> None:
    assert exchange.body.endswith(b"data: [DONE]\n\n")
    decoder = codec_for(exchange).stream_decoder()
    decoder.feed(exchange.body.removesuffix(b"data: [DONE]\n\n"))
    assert decoder.finish() == reply_to(exchange)


@pytest.mark.parametrize("exchange", cases(ERRORS))
def test_a_recorded_error_keeps_its_status_its_kind_and_its_text(exchange: Exchange) -> None:
    error = codec_for(exchange).decode_error(
        exchange.status, exchange.headers, exchange.body, provider=exchange.provider
    )
    said = json.loads(exchange.body)["error"]
    assert error.status == exchange.status
    assert error.message.startswith(said["message"])
    assert error.kind in (said.get("code"), said.get("type"))
    assert error.usage is None


@pytest.mark.parametrize("exchange", cases([e for e in ANSWERS if "thinking" in e.file]))
def test_the_thoughts_of_a_recorded_answer_are_kept(exchange: Exchange) -> None:
    thoughts = [p for p in reply_to(exchange).message.parts if isinstance(p, Thinking)]
    assert thoughts
    if exchange.wire == ANTHROPIC:
        assert all(t.signature or t.redacted for t in thoughts)


@pytest.mark.skipif(not TRAFFIC.is_dir(), reason="no recorded traffic")
def test_no_recorded_file_in_these_wire_formats_is_left_out() -> None:
    used = {e.file for e in (*ANSWERS, *ERRORS)}
    folders = {file.split("/")[0] for file in used}
    there = {
        str(path.relative_to(TRAFFIC))
        for folder in folders
        for path in (TRAFFIC / folder).glob("*.json")
    }
    # DeepSeek was also recorded in OpenAI's other format.
    assert there - used == {"deepseek/responses-tool-stream.json"}
