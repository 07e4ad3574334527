"""A model that answers from a script, and keeps the account a provider would keep.

It is as rude as it is told to be: it may ignore the output limit, leave out the usage, repeat it,
answer as another model, stall, break off, or answer with an error. What it bills is written down in
``requests``, independently of what the runtime charges, so tests can compare the two.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel
import attrs
import msgspec

from treewarden.actors import DEFAULT_OUTPUT_TOKENS, Brief, Sink
from treewarden.ledgers import ModelCard, Price, measured_cost, to_decimal
from treewarden.protocols import (
    BadArguments,
    FinishReason,
    Message,
    Opaque,
    Part,
    ProviderError,
    ProviderInterrupted,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    ToolSpec,
    Usage,
    UsageError,
    cut_text,
)
from treewarden.protocols import Reply as ModelReply


class _Auto(Enum):
    AUTO = "auto"

    def __repr__(self) -> str:
        return "AUTO"


AUTO = _Auto.AUTO
"""Usage counted from the bytes of the request and the reply: four bytes a token."""

_DEFAULT_PRICE = Price(input="3", cache_read="0.30", cache_write="3.75", output="15")
_BYTES_PER_TOKEN = 4


@attrs.frozen
class Reply:
    """One scripted answer.

    Args:
        text: What the model writes.
        tool_calls: Calls it asks for, as ``(name, arguments)``.
        usage: What the provider bills and reports. AUTO: counted from the bytes. None: billed as
            AUTO but not reported. A list: cumulative reports, one after each chunk; the last one is
            what is billed.
        delay: Seconds before the first chunk.
        chunks: How the text arrives: a number of pieces, or the pieces themselves (then ``text``
            is left out). None: in one piece.
        chunk_delay: Seconds before each further chunk.
        error: Instead of an answer: an exception, an HTTP status, or a message. With
            ``break_after`` it comes after that many chunks. A ``ProviderError`` with ``usage`` is
            billed for it.
        model: Id of the model that answers, where it is another one than asked.
        break_after: The connection breaks after so many chunks.
        stall_after: Nothing comes any more after so many chunks.
    """

    text: str = ""
    tool_calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    usage: Usage | Sequence[Usage] | _Auto | None = AUTO
    delay: float = 0.0
    chunks: int | Sequence[str] | None = None
    error: BaseException | int | str | None = None
    model: str | None = None
    break_after: int | None = None
    stall_after: int | None = None
    chunk_delay: float = 0.0

    @property
    def goes_wrong(self) -> bool:
        """Whether this is not, or may not become, a whole answer."""
        return not (self.error is self.break_after is self.stall_after is None)


@attrs.define(eq=False)
class ScriptedRequest:
    """One request as the provider saw it, and its own account of it.

    ``billed`` is what the provider charges in USD, ``usage`` the tokens that is for. ``ended`` is
    how the request ended: "complete", "error", "broken", "cancelled", or None while it is open.
    """

    agent_path: str
    model: str
    system: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    output_limit: int
    # How many answers the conversation holds already.
    turn: int
    usage: Usage | None = None
    ended: str | None = None
    # What the provider charges by; None: it charges no money.
    _price: Price | None = attrs.field(default=None, alias="price")

    @property
    def billed(self) -> Decimal:
        if self._price is None or self.usage is None:
            return Decimal(0)
        return to_decimal(measured_cost(self._price, self.usage).usd)

    @property
    def last_text(self) -> str:
        """Text of the last message: the task, or what the tools returned."""
        last = self.messages[-1]
        results = [part.content for part in last.parts if isinstance(part, ToolResult)]
        return "\n".join(results) if results else last.text

    @property
    def tool_results(self) -> tuple[ToolResult, ...]:
        """Every tool result in the conversation so far."""
        parts = (part for message in self.messages for part in message.parts)
        return tuple(part for part in parts if isinstance(part, ToolResult))


Script: TypeAlias = "Sequence[Reply] | Callable[[ScriptedRequest], Reply | Awaitable[Reply]]"


class ScriptedModel:
    """A model for tests, demos and simulations: pass it as an agent's ``model=``.

    Args:
        script: Replies in the order of the requests, or a function that gives the reply to one.
        price: USD per million tokens, as ``tw.Price``. None: an unpriced model.
        honours_max_output: A reply longer than the output limit is cut off there. False: the
            provider writes and bills it all.
        caches: Whether the provider writes to a cache unasked; None: where that has a price of
            its own. Input is then held at that price.
        reasons_invisibly: The model may think where nobody can count it.
    """

    def __init__(
        self,
        script: Script,
        *,
        id: str = "scripted/model",
        price: Price | None = _DEFAULT_PRICE,
        context_window: int | None = 200_000,
        max_output: int | None = 16_384,
        honours_max_output: bool = True,
        caches: bool | None = None,
        reasons_invisibly: bool = False,
    ) -> None:
        self.id = id
        self.provider, _, self.name = id.partition("/")
        self.script = script
        self.requests: list[ScriptedRequest] = []
        self.honours_max_output = honours_max_output
        if caches is None:
            caches = price is not None and price.rates.cache_write > price.rates.input
        self.card = ModelCard(
            id=id,
            price=price,
            context_window=context_window,
            max_output=max_output,
            caches_automatically=caches,
            reasons_invisibly=reasons_invisibly,
            source="script",
        )

    @property
    def billed(self) -> Decimal:
        """What the provider charges for all requests so far, in USD."""
        return sum((request.billed for request in self.requests), Decimal(0))

    @property
    def billed_tokens(self) -> int:
        return sum(request.usage.total for request in self.requests if request.usage)

    @property
    def open_requests(self) -> int:
        """Requests that are still being answered."""
        return sum(request.ended is None for request in self.requests)

    def price_of(self, answered: str) -> Price | None:
        return self.card.price if answered == self.name else None

    def require_ready(self) -> None:
        """A script needs no key."""

    def open(self, brief: Brief) -> ScriptedSession:
        return ScriptedSession(self, brief)

    def reply_to(self, request: ScriptedRequest) -> Reply | Awaitable[Reply]:
        """The script's next reply."""
        if callable(self.script):
            return self.script(request)
        at = len(self.requests) - 1
        if at >= len(self.script):
            raise UsageError(
                f"the script of {self.id} has {len(self.script)} replies and got request "
                f"{at + 1} (from {request.agent_path}). Add a reply, or use a function.",
                code="cave_script_exhausted",
            )
        return self.script[at]


class ScriptedSession:
    """One agent invocation's use of a scripted model."""

    def __init__(self, model: ScriptedModel, brief: Brief) -> None:
        self._model, self._brief = model, brief
        card = model.card
        limit = brief.output_limit or DEFAULT_OUTPUT_TOKENS
        self.output_limit = limit if card.max_output is None else min(limit, card.max_output)
        self.is_limit_pinned = False
        self.head_bytes = len(_head_json(brief))
        self.can_write_cache = card.caches_automatically
        self.can_write_1h = False
        self.reasons_invisibly = card.reasons_invisibly
        # Of what was measured so far: bytes, and answers of the model.
        self._bytes = self.head_bytes
        self._turns = 0

    def measure(self, message: Message) -> int:
        size = len(_message_json(message))
        self._turns += message.role == "assistant"
        self._bytes += size
        return size

    async def call(self, messages: Sequence[Message], output_limit: int, sink: Sink) -> ModelReply:
        """Answer as the script says, and write down what that costs."""
        model = self._model
        request = ScriptedRequest(
            agent_path=self._brief.agent_path,
            model=model.id,
            system=self._brief.system,
            messages=tuple(messages),
            tools=self._brief.tools,
            output_limit=output_limit,
            turn=self._turns,
            price=model.card.price,
        )
        model.requests.append(request)
        sink.sent()
        reply = model.reply_to(request)
        if not isinstance(reply, Reply):
            reply = await reply
        answer = _Answer(model, request, reply, self._bytes)
        try:
            return await answer.deliver(sink)
        finally:
            answer.bill()


class _Answer:
    """One reply being delivered, and what the provider bills for as much of it as was made."""

    def __init__(
        self, model: ScriptedModel, request: ScriptedRequest, reply: Reply, request_bytes: int
    ) -> None:
        self._model, self._request, self._reply = model, request, reply
        self._chunks = _chunks_of(reply)
        self._frames = _frames_of(reply, request_bytes, "".join(self._chunks))
        self._is_cut = model.honours_max_output and self._truth.output > request.output_limit
        self._sent = 0

    @property
    def _truth(self) -> Usage:
        return self._frames[-1]

    async def deliver(self, sink: Sink) -> ModelReply:
        request, reply = self._request, self._reply
        if reply.delay > 0:
            await anyio.sleep(reply.delay)
        else:
            await anyio.lowlevel.checkpoint()
        sink.progress.model = reply.model
        await self._deliver_chunks(sink)
        if reply.goes_wrong:
            await self._go_wrong_after(len(self._chunks), sink)
        request.ended = "complete"
        usage = None if reply.usage is None else self._cut(self._truth)
        sink.progress.usage = usage
        return ModelReply(
            message=Message("assistant", self._parts()),
            finish_reason=self._finish_reason(),
            usage=usage,
            model=reply.model or self._model.name,
            raw_finish_reason="scripted",
        )

    async def _deliver_chunks(self, sink: Sink) -> None:
        room = self._request.output_limit * _BYTES_PER_TOKEN if self._is_cut else None
        for at, chunk in enumerate(self._chunks):
            if self._reply.goes_wrong:
                await self._go_wrong_after(at, sink)
            if at and self._reply.chunk_delay > 0:
                await anyio.sleep(self._reply.chunk_delay)
            if room is not None:
                chunk = cut_text(chunk, room, unit="bytes")
                room -= len(chunk.encode())
            if chunk:
                sink.progress.deltas += 1
                sink.progress.bytes += len(chunk.encode())
                sink.text(chunk)
            self._sent = at + 1
            if isinstance(self._reply.usage, Sequence) and at < len(self._frames):
                sink.progress.usage = self._frames[at]

    async def _go_wrong_after(self, chunks: int, sink: Sink) -> None:
        reply, request = self._reply, self._request
        if reply.stall_after is not None and chunks >= reply.stall_after:
            await anyio.sleep_forever()
        error_comes = reply.error is not None and chunks >= (reply.break_after or 0)
        breaks = reply.break_after is not None and chunks >= reply.break_after
        if error_comes:
            request.ended = "error"
            raise _error(reply.error, self._model.provider, had_begun=chunks > 0)
        if breaks:
            request.ended = "broken"
            raise ProviderInterrupted(
                "the connection broke", provider=self._model.provider, usage=sink.progress.usage
            )

    def _finish_reason(self) -> FinishReason:
        if self._is_cut:
            return FinishReason.LENGTH
        return FinishReason.TOOL_CALLS if self._reply.tool_calls else FinishReason.STOP

    def _parts(self) -> tuple[Part, ...]:
        text = "".join(self._chunks)
        if self._is_cut:
            room = self._request.output_limit * _BYTES_PER_TOKEN
            text = cut_text(text, room, unit="bytes")
        parts: list[Part] = [Text(text)] if text else []
        turn = self._request.turn + 1
        for at, (name, arguments) in enumerate(self._reply.tool_calls, 1):
            parts.append(
                ToolCall(
                    id=f"call-{turn}-{at}",
                    name=name,
                    arguments=dict(arguments),
                    raw_arguments=_dump(arguments).decode(),
                    bad_arguments=BadArguments.CUT_OFF if self._is_cut else None,
                )
            )
        return tuple(parts)

    def _cut(self, usage: Usage) -> Usage:
        if not self._is_cut:
            return usage
        limit = self._request.output_limit
        reasoning = min(usage.reasoning, limit)
        return attrs.evolve(usage, output=limit, reasoning=reasoning)

    def bill(self) -> None:
        """Write down what the provider charges for what it had made when the request ended."""
        request = self._request
        if request.ended is None:
            request.ended = "cancelled"
        if request.ended == "complete":
            usage = self._cut(self._truth)
        elif request.ended == "error" and self._sent == 0:
            # Only what the error itself reports is billed.
            reported = self._reply.error
            usage = (reported.usage if isinstance(reported, ProviderError) else None) or Usage()
        else:
            usage = self._made_so_far()
        request.usage = usage

    def _made_so_far(self) -> Usage:
        if isinstance(self._reply.usage, Sequence):
            at = min(self._sent, len(self._frames)) - 1
            return self._frames[at] if at >= 0 else attrs.evolve(self._truth, output=0)
        total = len(self._chunks)
        output = self._cut(self._truth).output * self._sent // total if total else 0
        reasoning = min(self._truth.reasoning, output)
        return attrs.evolve(self._truth, output=output, reasoning=reasoning)


def _chunks_of(reply: Reply) -> list[str]:
    if reply.chunks is None:
        return [reply.text] if reply.text else []
    if isinstance(reply.chunks, int):
        size = max(1, -(-len(reply.text) // reply.chunks))
        return [reply.text[at : at + size] for at in range(0, len(reply.text), size)]
    return list(reply.chunks)


def _frames_of(reply: Reply, request_bytes: int, text: str) -> list[Usage]:
    if isinstance(reply.usage, Usage):
        return [reply.usage]
    if isinstance(reply.usage, Sequence):
        return list(reply.usage)
    written = len(text.encode())
    written += sum(len(name) + len(_dump(a)) for name, a in reply.tool_calls)
    return [
        Usage(
            input=-(-request_bytes // _BYTES_PER_TOKEN),
            output=max(1, -(-written // _BYTES_PER_TOKEN)),
        )
    ]


def _error(error: Any, provider: str, *, had_begun: bool) -> BaseException:
    if isinstance(error, BaseException):
        return error
    kind = ProviderInterrupted if had_begun else ProviderError
    if isinstance(error, int):
        return kind(f"scripted status {error}", provider=provider, status=error)
    return kind(str(error), provider=provider, status=500)


def _head_json(brief: Brief) -> bytes:
    tools = [
        {"name": t.name, "description": t.description, "parameters": t.parameters}
        for t in brief.tools
    ]
    return _dump({"systemPrompt": brief.system, "tools": tools})


def _message_json(message: Message) -> bytes:
    return _dump({"role": message.role, "content": [_part_json(p) for p in message.parts]})


def _part_json(part: Part) -> dict[str, Any]:
    match part:
        case Text():
            return {"type": "text", "text": part.text}
        case Thinking():
            return {"type": "thinking", "thinking": part.text, "signature": part.signature}
        case ToolCall():
            return {"type": "toolCall", "id": part.id, "name": part.name, "args": part.arguments}
        case ToolResult():
            return {"type": "toolResult", "id": part.call_id, "content": part.content}
        case Opaque():
            return dict(part.value)


def _dump(value: Any) -> bytes:
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:  # lone surrogates; a request with them is as long with "?"
        return json.dumps(value, ensure_ascii=False).encode(errors="replace")


_ENCODER = msgspec.json.Encoder()
