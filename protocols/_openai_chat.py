"""OpenAI Chat Completions and all that speaks it: requests into bytes, answers out of bytes.

One rule keeps this file simple: a whole answer is a stream of one chunk. So there is one way to
read content, calls, usage and errors, and every server's peculiarity is met in one place:

    thoughts       ``reasoning_content``, ``reasoning`` or parts of a content list
    tool calls     told apart by index, by id, by both or by neither: see ``_Calls``
    usage          on the last chunk, after it, on every chunk, inside a choice, in ``x_groq``
    errors         inside an answer with HTTP 200: see ``_check_error``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

import attrs

from ._codec import (
    NO_CONTENT,
    ErrorReport,
    GrowingCall,
    OutputCount,
    distinct_ids,
    encode_open_body,
    exact_usd,
    http_error,
    join_body,
    provider_error,
    read_arguments,
    read_error,
    readable_usage,
    request_counts,
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

_NAME = "openai_chat"

_FINISH = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "model_length": FinishReason.LENGTH,
    "content_filter": FinishReason.REFUSAL,
    "sensitive": FinishReason.REFUSAL,
}

# "Finish reasons" of an answer that broke off.
_BROKEN = {"error", "network_error", "insufficient_system_resource"}


@attrs.frozen(kw_only=True)
class OpenAIChatCodec:
    """Speaks Chat Completions, by default as openai.com does.

    ``limit_field`` is what a server calls the output limit: ``max_tokens`` nearly everywhere else.
    ``thinking_field`` is where a server wants its thoughts back: ``reasoning_content`` (DeepSeek,
    Z.ai, llama.cpp) or ``reasoning`` (OpenRouter, Groq, Cerebras, Ollama); None sends none.
    ``asks_for_usage`` is for servers that refuse ``stream_options`` and report usage anyway.
    """

    limit_field: str = "max_completion_tokens"
    thinking_field: str | None = None
    asks_for_usage: bool = True
    name: str = attrs.field(default=_NAME, init=False)

    def path(self) -> str:
        return "/chat/completions"

    def headers(self, api_key: str) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if api_key:  # a server of one's own has none
            headers["authorization"] = f"Bearer {api_key}"
        return headers

    def encode_message(self, message: Message) -> bytes:
        if message.role == "assistant":
            return encode_json(self._encode_assistant(message))
        results = [_encode_result(p) for p in message.parts if isinstance(p, ToolResult)]
        rest = [part for part in message.parts if not isinstance(part, ToolResult)]
        if rest or not results:
            results.append(_encode_user(rest))
        return b",".join(encode_json(result) for result in results)

    def encode_head(self, request: ModelRequest) -> bytes:
        body: dict[str, JSON] = {"model": request.model, self.limit_field: request.output_limit}
        if request.tools:
            body["tools"] = [_encode_tool(tool) for tool in request.tools]
        if request.stream:
            body["stream"] = True
        if request.stream and self.asks_for_usage:
            body["stream_options"] = {"include_usage": True}
        body = with_settings(body, request, limit_fields=self._limit_fields)
        system: JSON = {"role": "system", "content": request.system}
        return encode_open_body(body, [system] if request.system else [])

    def join(self, head: bytes, messages: Sequence[bytes]) -> bytes:
        return join_body(head, messages)

    def output_limit_on_the_wire(self, head: bytes) -> int | None:
        body = read_object(head.decode())
        limits = [v for f in self._limit_fields if type(v := body.get(f)) is int and v > 0]
        if not limits:
            return None
        # The limit is for each of the answers that a request may ask for.
        answers = body.get("n")
        return max(limits) * (answers if type(answers) is int and answers > 1 else 1)

    def can_write_cache(self, head: bytes) -> bool:
        # Here models cache by themselves or not at all; no request asks for it.
        return False

    def can_write_1h(self, head: bytes) -> bool:
        return False  # no server of this kind sells time in its cache

    def stream_decoder(self, *, provider: str | None = None) -> OpenAIChatStreamDecoder:
        return OpenAIChatStreamDecoder(provider=provider or self.name)

    def decode_response(self, body: bytes, *, provider: str) -> Reply:
        text = body.decode("utf-8", "replace")
        decoder = OpenAIChatStreamDecoder(provider=provider)
        answer = read_object(text)
        decoder.take_chunk(answer, text, content="message")
        if not objects_of(answer, "choices"):
            raise ProtocolError(f"not an answer of Chat Completions: {cut_text(text, 200)!r}")
        return decoder.reply()

    def decode_error(
        self, status: int, headers: Mapping[str, str], body: bytes, *, provider: str
    ) -> ProviderError:
        return http_error(
            status,
            headers,
            body,
            provider=provider,
            read_usage=lambda answer: readable_usage(_read_usage, object_of(answer, "usage")),
        )

    @property
    def _limit_fields(self) -> frozenset[str]:
        return frozenset({self.limit_field, "max_tokens", "max_completion_tokens"})

    def _encode_assistant(self, message: Message) -> JSONObject:
        calls: list[JSON] = [_encode_call(call) for call in message.tool_calls]
        thoughts = "".join(_open_thoughts(message))
        text = message.text or (None if calls else NO_CONTENT)
        body: dict[str, JSON] = {"role": "assistant", "content": text}
        own = [p.value for p in message.parts if isinstance(p, Opaque) and p.provider == _NAME]
        if own:
            # Thoughts in the server's own form hold more than their text.
            for fields in own:
                body |= fields
        elif thoughts and self.thinking_field:
            body[self.thinking_field] = thoughts
        if calls:
            body["tool_calls"] = calls
        return body


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def _encode_tool(tool: ToolSpec) -> JSONObject:
    function: JSON = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return {"type": "function", "function": function}


def _encode_call(call: ToolCall) -> JSONObject:
    _, problem = read_arguments(call.raw_arguments)
    # As the model wrote it, where that is an object: some servers read it and refuse anything else.
    as_written = call.raw_arguments if problem is None and call.raw_arguments.strip() else None
    arguments = as_written or encode_json(call.arguments).decode()
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _encode_result(result: ToolResult) -> JSONObject:
    # There is no field that says so, and a model should not have to guess.
    content = f"Error: {result.content}" if result.is_error else result.content
    return {"role": "tool", "tool_call_id": result.call_id, "content": content}


def _encode_user(parts: Sequence[Part]) -> JSONObject:
    content: list[JSON] = [block for part in parts if (block := _encode_content(part))]
    if all(isinstance(part, Text) for part in parts):
        # Plain text rather than a list of one: some servers know nothing else.
        return {"role": "user", "content": Message("user", tuple(parts)).text or NO_CONTENT}
    return {"role": "user", "content": content or NO_CONTENT}


def _encode_content(part: Part) -> JSONObject | None:
    match part:
        case Text():
            return {"type": "text", "text": part.text} if part.text else None
        case Opaque():
            return part.value if part.provider == _NAME else None
        case _:
            return None


def _open_thoughts(message: Message) -> list[str]:
    """Return the thoughts that any server may see: not those that another provider has sealed."""
    thoughts = [part for part in message.parts if isinstance(part, Thinking)]
    return [t.text for t in thoughts if t.signature is None and t.redacted is None]


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


class _Calls:
    """The tool calls of one answer, and which of them a fragment belongs to."""

    def __init__(self) -> None:
        self.all: list[GrowingCall] = []
        # The latest call with this index, and with this id.
        self._by_index: dict[int, GrowingCall] = {}
        self._by_id: dict[str, GrowingCall] = {}

    def owner(self, *, index: int | None, id: str, name: str, arguments: str) -> GrowingCall:
        """Return the call that a fragment belongs to, a new one if it begins one."""
        found = self._find(index=index, id=id, name=name, arguments=arguments)
        call = found or GrowingCall(id, name, len(self.all), index)
        if found is None:
            self.all.append(call)
        call.id = call.id or id
        call.name = call.name or name
        if index is not None:
            self._by_index[index] = call
        if call.id:
            self._by_id[call.id] = call
        return call

    def _find(self, *, index: int | None, id: str, name: str, arguments: str) -> GrowingCall | None:
        if known := self._by_id.get(id):
            return (
                known if self._goes_on(known, index=index, name=name, arguments=arguments) else None
            )
        here = (self.all[-1] if self.all else None) if index is None else self._by_index.get(index)
        if here is None or (id and here.id):
            # An id that is new begins a call, whatever its index: some servers number all with 0.
            return None
        begins = name and here.name and (name != here.name or (arguments and here.is_whole))
        return None if begins else here

    def _goes_on(self, call: GrowingCall, *, index: int | None, name: str, arguments: str) -> bool:
        """Say whether a fragment with the id of ``call`` belongs to it.

        It does, unless it names a tool again and cannot be more of the same: then the server gave
        two calls one id.
        """
        if index is None or call.index is None:
            return not (name and arguments and call.is_whole)
        return index == call.index or not name


class OpenAIChatStreamDecoder(OutputCount):
    """One streamed answer of Chat Completions."""

    def __init__(self, *, provider: str) -> None:
        super().__init__()
        self.usage: Usage | None = None
        self._provider = provider
        self._events = SSEDecoder()
        self._thoughts: list[str] = []
        # OpenRouter's form of thoughts, which may be signed or sealed and must go back as it came.
        self._details: list[dict[str, JSON]] = []
        self._texts: list[str] = []
        self._calls = _Calls()
        self._is_refusal = False
        self._model = ""
        self._response_id = ""
        self._finish_reason = ""
        # True iff no output came after the last usage report: an earlier one is not the final one.
        self._has_final_usage = False
        self.is_done = False

    def feed(self, data: bytes) -> list[Delta]:
        deltas: list[Delta] = []
        for event in self._events.feed(data):
            # What follows [DONE] is not part of the answer.
            if event.data.strip() and not self.is_done:
                deltas += self._take(event)
        return deltas

    def finish(self) -> Reply:
        # Several servers never send [DONE]; the finish reason is what shows that all has come.
        if not self._finish_reason:
            raise self._interrupted("the stream ended before a finish reason")
        return self.reply()

    def partial(self) -> Message:
        return Message("assistant", self._parts(is_cut_off=True))

    def reply(self) -> Reply:
        if self._finish_reason in _BROKEN:
            raise self._interrupted(f"the answer ended with {self._finish_reason!r}")
        finish_reason = self._finished()
        parts = self._parts(is_cut_off=finish_reason is FinishReason.LENGTH)
        return Reply(
            message=Message("assistant", parts),
            finish_reason=finish_reason,
            usage=self.usage if self._has_final_usage else None,
            model=self._model,
            response_id=self._response_id or None,
            raw_finish_reason=self._finish_reason or None,
        )

    def take_chunk(self, chunk: JSONObject, text: str, *, content: str = "delta") -> list[Delta]:
        """Take one chunk, or a whole answer, whose choices call their content "message".

        ``text`` is how the chunk was written: money is read from its digits.
        """
        self._model = text_of(chunk, "model") or self._model
        self._response_id = text_of(chunk, "id") or self._response_id
        deltas: list[Delta] = []
        for choice in objects_of(chunk, "choices"):
            if index_of(choice):
                # A further answer to the same request: nobody reads it, but it is paid for.
                self._count_only(object_of(choice, content))
            else:
                self._finish_reason = text_of(choice, "finish_reason") or self._finish_reason
                deltas += self._take_content(object_of(choice, content))
        deltas += self._take_usage(chunk, text)
        self._check_error(chunk)
        return deltas

    def _take(self, event: ServerSentEvent) -> list[Delta]:
        if event.data.strip() == "[DONE]":
            self.is_done = True
            return []
        if event.event == "error":
            raise self._error(self._read_error_event(event.data))
        return self.take_chunk(read_object(event.data), event.data)

    def _take_content(self, content: JSONObject) -> list[Delta]:
        deltas: list[Delta] = []
        thought, text = _split_content(content)
        if thought:
            self._thoughts.append(thought)
            deltas.append(ThinkingDelta(thought))
        if text:
            self._texts.append(text)
            deltas.append(TextDelta(text))
        self._arrived(thought)
        self._arrived(text)
        self._is_refusal |= bool(text_of(content, "refusal"))
        for detail in objects_of(content, "reasoning_details"):
            _append_detail(self._details, detail)
        deltas += (self._take_call(call) for call in objects_of(content, "tool_calls"))
        return deltas

    def _take_call(self, fragment: JSONObject) -> ToolCallDelta:
        function = object_of(fragment, "function")
        given = function.get("arguments")
        # Some servers give an object instead of its text.
        arguments = encode_json(given).decode() if isinstance(given, Mapping) else given
        arguments = arguments if isinstance(arguments, str) else ""
        call = self._calls.owner(
            index=index_of(fragment),
            id=text_of(fragment, "id"),
            name=text_of(function, "name"),
            arguments=arguments,
        )
        call.fragments.append(arguments)
        self._arrived(arguments)
        return ToolCallDelta(call.place, call.name, arguments)

    def _arrived(self, text: str) -> None:
        self.count(text)
        if text:
            self._has_final_usage = False

    def _count_only(self, content: JSONObject) -> None:
        for text in _split_content(content):
            self._arrived(text)
        for fragment in objects_of(content, "tool_calls"):
            self._arrived(text_of(object_of(fragment, "function"), "arguments"))

    def _take_usage(self, chunk: JSONObject, text: str) -> list[Delta]:
        reported = _find_usage(chunk)
        if not any(reported.get(field) for field in ("prompt_tokens", "completion_tokens")):
            return []  # absent, null or zeros: nothing is reported yet
        if "cost" in reported:
            reported = _find_usage(read_object(text, parse_float=Decimal))
        self.usage = readable_usage(_read_usage, reported)
        self._has_final_usage = True
        return [UsageDelta(self.usage)] if self.usage else []

    def _read_error_event(self, data: str) -> ErrorReport:
        try:
            value = read_object(data)
        except ProtocolError:
            return ErrorReport(data)
        self._take_usage(value, data)
        return read_error(value)

    def _check_error(self, chunk: JSONObject) -> None:
        if chunk.get("error") or text_of(chunk, "object") == "error":
            raise self._error(read_error(chunk))
        for choice in objects_of(chunk, "choices"):
            if choice.get("error"):
                raise self._error(read_error(choice))

    def _finished(self) -> FinishReason:
        reason = _FINISH.get(self._finish_reason, FinishReason.OTHER)
        if reason is FinishReason.STOP and self._is_refusal:
            return FinishReason.REFUSAL
        if reason is FinishReason.STOP and self._calls.all:
            return FinishReason.TOOL_CALLS
        return reason

    def _parts(self, *, is_cut_off: bool) -> tuple[Part, ...]:
        thoughts, text = "".join(self._thoughts), "".join(self._texts)
        parts: list[Part] = []
        if thoughts:
            parts.append(Thinking(thoughts))
        if self._details:
            parts.append(Opaque(_NAME, {"reasoning_details": [*self._details]}))
        if text:
            parts.append(Text(text))
        calls = self._calls.all
        ids = distinct_ids(calls, self._response_id)
        parts += (c.finished(i, is_cut_off=is_cut_off) for c, i in zip(calls, ids, strict=True))
        return tuple(parts)

    def _error(self, report: ErrorReport) -> ProviderError:
        return provider_error(
            report,
            provider=self._provider,
            status=report.status or 200,
            usage=self.usage,
            has_begun=bool(self.output_deltas or self._calls.all or self._details),
        )

    def _interrupted(self, message: str) -> ProviderError:
        return ProviderInterrupted(message, provider=self._provider, status=200, usage=self.usage)


def _split_content(content: JSONObject) -> tuple[str, str]:
    """Return what a message or a piece of one thinks, and what it says."""
    # Some servers send both names with the same text.
    thoughts = [text_of(content, "reasoning_content") or text_of(content, "reasoning")]
    texts = [text_of(content, "content")]
    # Mistral's form: a list, whose thoughts are lists again.
    for part in objects_of(content, "content"):
        texts.append(text_of(part, "text"))
        thoughts += (text_of(thought, "text") for thought in objects_of(part, "thinking"))
    texts.append(text_of(content, "refusal"))
    return "".join(thoughts), "".join(texts)


def _append_detail(details: list[dict[str, JSON]], detail: JSONObject) -> None:
    """Add ``detail``, to the last one where it is more of the same."""
    last = details[-1] if details else {}
    same = all(last.get(key) == detail.get(key) for key in ("type", "index"))
    field = {"reasoning.text": "text", "reasoning.summary": "summary"}.get(text_of(detail, "type"))
    if not (same and field):
        details.append(dict(detail))
        return
    text = text_of(last, field) + text_of(detail, field)
    last |= {key: value for key, value in detail.items() if value is not None}
    last[field] = text


# ── usage ────────────────────────────────────────────────────────────────────────────────────────


def _find_usage(chunk: JSONObject) -> JSONObject:
    """Return the usage report in a chunk, wherever it stands; empty if there is none."""
    places = [chunk, object_of(chunk, "x_groq"), *objects_of(chunk, "choices")]
    reports = (object_of(place, "usage") for place in places)
    return next(filter(None, reports), object_of(chunk, "usage"))


def _read_usage(reported: JSONObject) -> Usage:
    prompt = token_count(reported, "prompt_tokens")
    prompt_details = object_of(reported, "prompt_tokens_details")
    # Here the prompt is all of the input: what was read from a cache or written to it lies inside.
    cache_read = _read_cached(reported, prompt_details)
    cache_write = token_count(prompt_details, "cache_write_tokens", missing=0)
    output, reasoning = _read_output(reported, prompt=prompt)
    return Usage(
        # Below zero it is refused as every number that cannot be true.
        input=prompt - cache_read - cache_write,
        output=output,
        cache_read=cache_read,
        cache_write=cache_write,
        # The parts are counted in other ways than the sum; OpenRouter was seen with 11 of 10.
        reasoning=min(reasoning, output),
        reported_cost_usd=_read_cost(reported),
        server_tool_requests=request_counts(object_of(reported, "server_tool_use_details")),
    )


def _read_cached(reported: JSONObject, details: JSONObject) -> int:
    # OpenAI, then DeepSeek, then Together and Moonshot.
    deepseek = token_count(reported, "prompt_cache_hit_tokens", missing=0)
    others = token_count(reported, "cached_tokens", missing=deepseek)
    return token_count(details, "cached_tokens", missing=others)


def _read_output(reported: JSONObject, *, prompt: int) -> tuple[int, int]:
    """Return all output tokens, and the reasoning among them.

    Raises:
        ValueError: The total says something else than its parts.
    """
    completion = token_count(reported, "completion_tokens")
    details = object_of(reported, "completion_tokens_details")
    reasoning = token_count(details, "reasoning_tokens", missing=0)
    total = token_count(reported, "total_tokens", missing=prompt + completion)
    if total == prompt + completion:
        return completion, reasoning
    if total == prompt + completion + reasoning:
        # xAI counts the reasoning beside the completion, and the total shows it.
        return completion + reasoning, reasoning
    raise ValueError(f"total_tokens is {total}, but {prompt} and {completion} were reported")


def _read_cost(reported: JSONObject) -> Decimal | None:
    cost = exact_usd(reported.get("cost"))
    if cost is None or reported.get("is_byok") is not True:
        return cost
    # With the customer's own key the cost is the router's fee; the model is paid upstream.
    upstream = exact_usd(object_of(reported, "cost_details").get("upstream_inference_cost"))
    return None if upstream is None else cost + upstream
