"""Anthropic Messages: requests into bytes, answers out of bytes.

One rule keeps this file simple: an answer is a list of blocks, and a whole answer is a stream whose
blocks come complete. So there is one way to read a block, and nothing depends on how it arrived.

Blocks of server-side tools, of compaction and of kinds not yet known are kept as they came and sent
back word for word; only text, thinking and calls of our own tools become values of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs

from ._codec import (
    NO_CONTENT,
    ErrorReport,
    GrowingCall,
    OutputCount,
    distinct_ids,
    encode_open_body,
    http_error,
    join_body,
    provider_error,
    read_arguments,
    read_error,
    readable_usage,
    request_counts,
    sent_arguments,
    token_count,
    with_settings,
)
from ._errors import ProtocolError, ProviderError, ProviderInterrupted
from ._foreign_json import encode_json, index_of, object_of, objects_of, read_object, text_of
from ._messages import (
    JSON,
    Delta,
    FinishReason,
    JSONObject,
    Message,
    ModelRequest,
    Opaque,
    Part,
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
    UsageDelta,
)
from ._sse import ServerSentEvent, SSEDecoder
from ._text import cut_text

_NAME = "anthropic"
_VERSION = "2023-06-01"
_LIMIT = "max_tokens"

_FINISH = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "tool_use": FinishReason.TOOL_CALLS,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "refusal": FinishReason.REFUSAL,
    "pause_turn": FinishReason.PAUSE,
    "compaction": FinishReason.PAUSE,
}


@attrs.frozen(kw_only=True)
class AnthropicCodec:
    """Speaks Anthropic Messages. ``betas`` are the beta features that every request asks for."""

    betas: tuple[str, ...] = ()
    name: str = attrs.field(default=_NAME, init=False)

    def path(self) -> str:
        return "/v1/messages"

    def headers(self, api_key: str) -> dict[str, str]:
        headers = {"anthropic-version": _VERSION, "content-type": "application/json"}
        if api_key:
            headers["x-api-key"] = api_key
        if self.betas:
            headers["anthropic-beta"] = ",".join(self.betas)
        return headers

    def encode_message(self, message: Message) -> bytes:
        # Results of tools are a user's blocks here.
        role = "assistant" if message.role == "assistant" else "user"
        blocks: list[JSON] = [b for part in message.parts if (b := _encode_part(part))]
        if not blocks:
            blocks.append({"type": "text", "text": NO_CONTENT})
        return encode_json({"role": role, "content": blocks})

    def encode_head(self, request: ModelRequest) -> bytes:
        body: dict[str, JSON] = {"model": request.model, _LIMIT: request.output_limit}
        if request.system:
            body["system"] = request.system
        if request.tools:
            body["tools"] = [_encode_tool(tool) for tool in request.tools]
        if request.stream:
            body["stream"] = True
        return encode_open_body(with_settings(body, request, limit_fields=frozenset({_LIMIT})))

    def join(self, head: bytes, messages: Sequence[bytes]) -> bytes:
        return join_body(head, messages)

    def output_limit_on_the_wire(self, head: bytes) -> int | None:
        limit = read_object(head.decode()).get(_LIMIT)
        return limit if type(limit) is int and limit > 0 else None

    def can_write_cache(self, head: bytes) -> bool:
        # Wherever it stands: at the top, on a block of the system prompt or on a tool. Inside a
        # text the quotes would be escaped.
        return b'"cache_control":{' in head

    def can_write_1h(self, head: bytes) -> bool:
        return self.can_write_cache(head) and b'"ttl":"1h"' in head

    def stream_decoder(self, *, provider: str | None = None) -> AnthropicStreamDecoder:
        return AnthropicStreamDecoder(provider=provider or self.name)

    def decode_response(self, body: bytes, *, provider: str) -> Reply:
        text = body.decode("utf-8", "replace")
        answer = read_object(text)
        if answer.get("error"):
            raise _error_in_answer(answer, provider=provider)
        if not isinstance(answer.get("content"), list):
            raise ProtocolError(f"not an answer of Anthropic Messages: {cut_text(text, 200)!r}")
        decoder = AnthropicStreamDecoder(provider=provider)
        decoder.take_whole(answer)
        return decoder.reply()

    def decode_error(
        self, status: int, headers: Mapping[str, str], body: bytes, *, provider: str
    ) -> ProviderError:
        return http_error(
            status,
            headers,
            body,
            provider=provider,
            read_usage=lambda answer: _read_reported(object_of(answer, "usage")),
        )


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def _encode_tool(tool: ToolSpec) -> JSONObject:
    return {
        "name": tool.name,
        "description": tool.description,
        "input_schema": tool.parameters,
    }


def _encode_part(part: Part) -> JSONObject | None:
    match part:
        case Text():
            # An empty block makes the whole request invalid.
            return {"type": "text", "text": part.text} if part.text else None
        case Thinking():
            return _encode_thinking(part)
        case ToolCall():
            return {
                "type": "tool_use",
                "id": _wire_id(part.id),
                "name": part.name,
                "input": sent_arguments(part),
            }
        case ToolResult():
            return _encode_result(part)
        case Opaque():
            return part.value if part.provider == _NAME else None


def _encode_thinking(part: Thinking) -> JSONObject | None:
    if part.redacted is not None:
        return {"type": "redacted_thinking", "data": part.redacted}
    # Without a signature it was cut off or thought by somebody else, and would be refused.
    if not part.signature:
        return None
    return {"type": "thinking", "thinking": part.text, "signature": part.signature}


def _encode_result(part: ToolResult) -> JSONObject:
    result: dict[str, JSON] = {
        "type": "tool_result",
        "tool_use_id": _wire_id(part.call_id),
        "content": part.content,
    }
    if part.is_error:
        result["is_error"] = True
    return result


def _wire_id(id: str) -> str:
    """Return ``id`` in the letters that Anthropic allows; other providers' ids have more."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", id)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


@attrs.define(eq=False)
class _Block:
    """One content block while it arrives."""

    # As the block began. Kept, because a block that is not ours goes back as it came.
    start: JSONObject

    # What deltas added, by the field that they add to.
    added: dict[str, list[str]] = attrs.field(factory=dict[str, list[str]])

    # Set iff this is a call of one of our own tools.
    call: GrowingCall | None = None

    # True once its end was seen. Before that a signature may be missing and an input be half.
    is_closed: bool = False

    @property
    def kind(self) -> str:
        return text_of(self.start, "type")

    def add(self, field: str, text: str) -> None:
        self.added.setdefault(field, []).append(text)

    def whole(self, field: str) -> str:
        return text_of(self.start, field) + "".join(self.added.get(field, ()))


class AnthropicStreamDecoder(OutputCount):
    """One streamed answer of Anthropic Messages."""

    def __init__(self, *, provider: str) -> None:
        super().__init__()
        self.usage: Usage | None = None
        self._provider = provider
        self._events = SSEDecoder()
        self._blocks: list[_Block] = []
        # The block that a delta with this index belongs to: the latest that began with it.
        self._by_index: dict[int, _Block] = {}
        self._calls: list[GrowingCall] = []
        self._model = ""
        self._response_id = ""
        self._stop_reason = ""
        # Usage fields as last reported: a later frame repeats only some of them.
        self._reported: dict[str, JSON] = {}
        # True iff the output was reported at the end. At the start it says 1 or so.
        self._has_final_usage = False
        self.is_done = False

    def feed(self, data: bytes) -> list[Delta]:
        deltas: list[Delta] = []
        for event in self._events.feed(data):
            # What follows the end of the answer is not part of it.
            if event.data and not self.is_done:
                deltas += self._take(event)
        return deltas

    def finish(self) -> Reply:
        if not self.is_done:
            raise ProviderInterrupted(
                "the stream ended before message_stop",
                provider=self._provider,
                status=200,
                usage=self.usage,
            )
        return self.reply()

    def partial(self) -> Message:
        return Message("assistant", self._parts(is_cut_off=True))

    def take_whole(self, answer: JSONObject) -> None:
        """Take an answer that came in one piece."""
        self._begin(answer)
        for start in objects_of(answer, "content"):
            self._open(start, index=None)
            self._close(self._blocks[-1])
        self._stop_reason = text_of(answer, "stop_reason")
        self._has_final_usage = True
        # Only now is it known whether server-side tools made inner requests.
        self._take_usage(answer)

    def reply(self) -> Reply:
        finish_reason = _FINISH.get(self._stop_reason, FinishReason.OTHER)
        parts = self._parts(is_cut_off=finish_reason is FinishReason.LENGTH)
        return Reply(
            message=Message("assistant", parts),
            finish_reason=finish_reason,
            usage=self.usage if self._has_final_usage else None,
            model=self._model,
            response_id=self._response_id or None,
            raw_finish_reason=self._stop_reason or None,
        )

    def _take(self, event: ServerSentEvent) -> Iterable[Delta]:
        value = read_object(event.data)
        match text_of(value, "type") or ("error" if "error" in value else event.event):
            case "message_start":
                message = object_of(value, "message")
                self._begin(message)
                return self._take_usage(message)
            case "content_block_start":
                return self._open(object_of(value, "content_block"), index=index_of(value))
            case "content_block_delta":
                return self._extend(self._block_of(value), object_of(value, "delta"))
            case "content_block_stop":
                return self._close(self._block_of(value))
            case "message_delta":
                delta = object_of(value, "delta")
                self._stop_reason = text_of(delta, "stop_reason") or self._stop_reason
                self._has_final_usage |= "output_tokens" in object_of(value, "usage")
                return self._take_usage(value)
            case "message_stop":
                self.is_done = True
            case "error":
                self._take_usage(value)
                raise self._error(read_error(value))
            case _:
                pass  # a ping, or an event not known yet
        return ()

    def _begin(self, message: JSONObject) -> None:
        self._model = text_of(message, "model")
        self._response_id = text_of(message, "id")

    def _block_of(self, value: JSONObject) -> _Block:
        index = index_of(value)
        if index in self._by_index:
            return self._by_index[index]
        if index is None and self._blocks:
            return self._blocks[-1]
        raise ProtocolError(f"the stream goes on with block {index}, which never began")

    def _open(self, start: JSONObject, *, index: int | None) -> Iterable[Delta]:
        block = _Block(start)
        self._blocks.append(block)
        if index is not None:
            self._by_index[index] = block
        match block.kind:
            case "text":
                return self._arrived(text_of(start, "text"), TextDelta)
            case "thinking":
                return self._arrived(text_of(start, "thinking"), ThinkingDelta)
            case "tool_use":
                place = len(self._calls)
                block.call = GrowingCall(text_of(start, "id"), text_of(start, "name"), place)
                self._calls.append(block.call)
                return (ToolCallDelta(place, block.call.name, ""),)
            case "fallback":
                # Another model took over: what follows is its answer, at its price.
                self._model = text_of(object_of(start, "to"), "model") or self._model
            case _:
                pass
        return ()

    def _extend(self, block: _Block, delta: JSONObject) -> Iterable[Delta]:
        match text_of(delta, "type"):
            case "text_delta":
                block.add("text", text := text_of(delta, "text"))
                return self._arrived(text, TextDelta)
            case "thinking_delta":
                block.add("thinking", text := text_of(delta, "thinking"))
                return self._arrived(text, ThinkingDelta)
            case "signature_delta":
                block.add("signature", text_of(delta, "signature"))
            case "input_json_delta":
                return self._extend_input(block, text_of(delta, "partial_json"))
            case _:
                # The summary of a compaction, for one, or what is not known yet.
                for field, added in delta.items():
                    if field != "type" and isinstance(added, str):
                        block.add(field, added)
                        self.count(added)
        return ()

    def _extend_input(self, block: _Block, text: str) -> Iterable[Delta]:
        self.count(text)
        if block.call is None:
            block.add("input", text)
            return ()
        block.call.fragments.append(text)
        return (ToolCallDelta(block.call.place, block.call.name, text),) if text else ()

    def _close(self, block: _Block) -> Iterable[Delta]:
        if block.is_closed:
            return ()
        block.is_closed = True
        given = object_of(block.start, "input")
        if block.call is None or block.call.text or not given:
            return ()
        # Whole answers and some servers give all the arguments with the start of the block.
        return self._extend_input(block, encode_json(given).decode())

    def _arrived(
        self, text: str, kind: type[TextDelta] | type[ThinkingDelta]
    ) -> tuple[TextDelta | ThinkingDelta, ...]:
        self.count(text)
        return (kind(text),) if text else ()

    def _take_usage(self, frame: JSONObject) -> Iterable[Delta]:
        usage = object_of(frame, "usage")
        if not usage:
            return ()
        self._reported |= {field: value for field, value in usage.items() if value is not None}
        uses_server_tools = any(block.kind == "server_tool_use" for block in self._blocks)
        self.usage = _read_reported(self._reported, uses_server_tools=uses_server_tools)
        return (UsageDelta(self.usage),) if self.usage else ()

    def _parts(self, *, is_cut_off: bool) -> tuple[Part, ...]:
        ids = distinct_ids(self._calls, self._response_id)
        parts = (self._part(block, ids, is_cut_off=is_cut_off) for block in self._blocks)
        return tuple(part for part in parts if part is not None)

    def _part(self, block: _Block, ids: list[str], *, is_cut_off: bool) -> Part | None:
        if block.call is not None:
            return block.call.finished(ids[block.call.place], is_cut_off=is_cut_off)
        match block.kind:
            case "text":
                text = block.whole("text")
                return Text(text) if text else None
            case "thinking":
                return _thinking(block)
            case "redacted_thinking":
                return Thinking(redacted=block.whole("data"))
            case _:
                return Opaque(_NAME, _as_it_came(block)) if block.is_closed else None

    def _error(self, report: ErrorReport) -> ProviderError:
        return provider_error(
            report,
            provider=self._provider,
            status=report.status or 200,
            usage=self.usage,
            has_begun=self._has_begun,
        )

    @property
    def _has_begun(self) -> bool:
        # Text and thinking begin with an empty block; any other block is output by itself.
        return self.output_deltas > 0 or any(
            block.kind not in ("text", "thinking") for block in self._blocks
        )


def _thinking(block: _Block) -> Thinking | None:
    text, signature = block.whole("thinking"), block.whole("signature")
    # A thought may be hidden and still have to be sent back: then only its signature comes.
    return Thinking(text, signature or None) if text or signature else None


def _as_it_came(block: _Block) -> JSONObject:
    value = dict(block.start)
    for field in block.added:
        value[field] = block.whole(field)
    if "input" in block.added:
        arguments, _ = read_arguments(block.whole("input"))
        value["input"] = arguments or object_of(block.start, "input")
    return value


# ── usage ────────────────────────────────────────────────────────────────────────────────────────


def _read_reported(reported: JSONObject, *, uses_server_tools: bool = False) -> Usage | None:
    """Return the usage in Anthropic's own words, None if it cannot be read."""
    return readable_usage(
        lambda value: _read_usage(value, uses_server_tools=uses_server_tools), reported
    )


def _read_usage(reported: JSONObject, *, uses_server_tools: bool) -> Usage:
    top = _read_counts(reported)
    iterations = objects_of(reported, "iterations")
    inner, beside = _split_iterations(iterations)
    extra = tuple(attrs.evolve(_read_counts(i), model=text_of(i, "model") or None) for i in beside)
    if top.total == sum(_read_counts(i).total for i in iterations):
        extra = ()  # The top-level numbers hold all of it already.
    return attrs.evolve(
        top,
        extra=extra,
        # A server-side tool sends the answer through the model again, and the numbers are the sum.
        is_aggregate=len(inner) > 1 if iterations else uses_server_tools,
        server_tool_requests=request_counts(object_of(reported, "server_tool_use")),
    )


def _split_iterations(
    iterations: Sequence[JSONObject],
) -> tuple[list[JSONObject], list[JSONObject]]:
    """Return the inner requests that the top-level numbers are the sum of, and those beside them.

    Beside them are advice by another model and compaction. Where another model had to take over,
    its own entries make the answer, and the attempts before it stand beside.
    """
    kinds = {text_of(iteration, "type") for iteration in iterations}
    ours = "fallback_message" if "fallback_message" in kinds else "message"
    inner = [i for i in iterations if text_of(i, "type") == ours]
    return inner, [i for i in iterations if text_of(i, "type") != ours]


def _read_counts(reported: JSONObject) -> Usage:
    output = token_count(reported, "output_tokens")
    details = object_of(reported, "output_tokens_details")
    cache_write, cache_write_1h = _read_cache_writes(reported)
    return Usage(
        input=token_count(reported, "input_tokens"),
        output=output,
        cache_read=token_count(reported, "cache_read_input_tokens", missing=0),
        cache_write=cache_write,
        cache_write_1h=cache_write_1h,
        # Counted again from the text, so it may be a few tokens off.
        reasoning=min(output, token_count(details, "thinking_tokens", missing=0)),
    )


def _read_cache_writes(reported: JSONObject) -> tuple[int, int]:
    """Return all written tokens, and those among them that are kept (and priced) for an hour."""
    written = object_of(reported, "cache_creation")
    for_minutes = token_count(written, "ephemeral_5m_input_tokens", missing=0)
    for_an_hour = token_count(written, "ephemeral_1h_input_tokens", missing=0)
    total = token_count(reported, "cache_creation_input_tokens", missing=for_minutes + for_an_hour)
    # A stream splits the sum only in its first frame. What a later frame adds was written as the
    # request asked: for an hour, if anything was.
    return total, max(0, total - for_minutes) if for_an_hour else 0


def _error_in_answer(answer: JSONObject, *, provider: str) -> ProviderError:
    report = read_error(answer)
    usage = _read_reported(object_of(answer, "usage"))
    return provider_error(report, provider=provider, status=report.status or 200, usage=usage)
