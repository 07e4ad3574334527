"""What every codec of a model provider is, and the pieces they share.

A codec turns a request into bytes and bytes into an answer. It opens no socket, reads no clock and
keeps no state; a stream's state lives in its ``StreamDecoder``. One rule keeps the shared pieces
simple: nothing is guessed. Arguments that cannot be read are marked, and one number that cannot be
true makes a whole usage report unreadable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Protocol

import attrs

from ._errors import (
    CredentialsError,
    ProtocolError,
    ProviderError,
    ProviderInterrupted,
    UsageError,
)
from ._foreign_json import encode_json, object_of, read_json, read_object, text_of
from ._messages import (
    JSON,
    BadArguments,
    Delta,
    JSONObject,
    Message,
    ModelRequest,
    Reply,
    ToolCall,
    Usage,
)
from ._text import cut_text


class Codec(Protocol):
    """How one kind of provider is spoken to. Pure: the same values give the same bytes."""

    @property
    def name(self) -> str:
        """The codec's own name, also on the ``Opaque`` parts that it made."""
        ...

    def path(self) -> str:
        """Where requests go, below the provider's base URL."""
        ...

    def headers(self, api_key: str) -> dict[str, str]: ...

    def encode_message(self, message: Message) -> bytes:
        """Return one or several JSON objects joined by ","; worth keeping with the message."""
        ...

    def encode_head(self, request: ModelRequest) -> bytes:
        """Return the body without its conversation, as a JSON object that ``join`` completes.

        Raises:
            UsageError: Settings that are no JSON, or that name what the conversation decides.
        """
        ...

    def join(self, head: bytes, messages: Sequence[bytes]) -> bytes:
        """Return the whole body. Only copies bytes."""
        ...

    def output_limit_on_the_wire(self, head: bytes) -> int | None:
        """Return the most output tokens that this head allows, None if it sets no limit."""
        ...

    def can_write_cache(self, head: bytes) -> bool:
        """Say whether this head, or any other piece of a body, asks for cache writes.

        They cost more than input. A model that caches by itself is not asked and not known here.
        """
        ...

    def can_write_1h(self, head: bytes) -> bool:
        """Say whether this head asks for cache writes that last an hour: they cost more still."""
        ...

    def stream_decoder(self, *, provider: str | None = None) -> StreamDecoder:
        """Return a decoder for one streamed answer; ``provider`` is who its errors name."""
        ...

    def decode_response(self, body: bytes, *, provider: str) -> Reply:
        """Read a whole answer that came with HTTP 200.

        Raises:
            ProviderError: The answer is an error after all; carries the usage in it.
            ProtocolError: The answer is not one of this protocol.
        """
        ...

    def decode_error(
        self, status: int, headers: Mapping[str, str], body: bytes, *, provider: str
    ) -> ProviderError:
        """Return the error that an answer with another status than 200 means."""
        ...


class StreamDecoder(Protocol):
    """One streamed answer as it arrives."""

    # What the provider has reported so far: the last frame, not a sum. None while there is none
    # and when the last one cannot be read.
    usage: Usage | None

    # How many pieces of text, thinking and arguments have come, and their UTF-8 bytes. What a
    # broken call is charged for output is estimated from these.
    output_deltas: int
    output_bytes: int

    # The event that ends an answer has come; what may follow is no part of it. A server that never
    # sends one ends its answer by ending the body.
    is_done: bool

    def feed(self, data: bytes) -> list[Delta]:
        """Return what ``data`` adds to the answer.

        Raises:
            ProviderInterrupted: The stream says that the answer broke off after it had begun.
            ProviderError: The stream says that there will be no answer.
            ProtocolError: The bytes are not of this protocol.
                After each of them ``partial()``, ``usage`` and the counts hold what had come.
        """
        ...

    def finish(self) -> Reply:
        """Return the answer; the body has ended.

        Raises:
            ProviderInterrupted: The event that ends an answer never came.
        """
        ...

    def partial(self) -> Message:
        """Return what has come until now. Its tool calls are marked cut off."""
        ...


class OutputCount:
    """Counts output that has arrived, for a call whose usage will never be reported."""

    def __init__(self) -> None:
        self.output_deltas = 0
        self.output_bytes = 0

    def count(self, text: str) -> None:
        # Servers open a block with an empty piece: no token was spent on that.
        if text:
            self.output_deltas += 1
            self.output_bytes += len(text.encode())


# What a provider that forbids empty messages gets instead of one.
NO_CONTENT = "(no content)"

# What the conversation and the call decide, so that no setting may.
_CONVERSATION = "messages"
_STREAM = "stream"


def with_settings(
    body: dict[str, JSON], request: ModelRequest, *, limit_fields: frozenset[str]
) -> dict[str, JSON]:
    """Return ``body`` with the request's settings and then its extra body merged in.

    Tools among the settings stand beside the request's own; tools in the extra body replace them.
    A setting that names an output limit takes the place of ours, however it spells it.

    Raises:
        UsageError: One of them holds the conversation, or asks for another kind of answer.
    """
    tools = body.get("tools")
    for extra in (request.settings, request.extra_body):
        _check_extra(extra, request)
        if limit_fields & extra.keys():
            for name in limit_fields:
                body.pop(name, None)
        body.update(extra)
    theirs = request.settings.get("tools")
    if tools and theirs and "tools" not in request.extra_body:
        assert isinstance(tools, list), tools
        body["tools"] = [*tools, *theirs] if isinstance(theirs, list | tuple) else theirs
    return body


def _check_extra(extra: JSONObject, request: ModelRequest) -> None:
    if _CONVERSATION in extra:
        raise UsageError(
            "settings and extra_body cannot hold 'messages': they are the conversation. "
            "Give them to the run instead."
        )
    if extra.get(_STREAM, request.stream) != request.stream:
        raise UsageError(
            f"settings and extra_body cannot turn 'stream' to {extra[_STREAM]!r}: the answer "
            f"will be read as stream={request.stream}. Leave it out."
        )


def encode_open_body(body: dict[str, JSON], opening: Sequence[JSON] = ()) -> bytes:
    """Return ``body`` as JSON whose last key is a list of messages that can still grow."""
    return encode_json({**body, _CONVERSATION: list(opening)})


def join_body(head: bytes, messages: Sequence[bytes]) -> bytes:
    """Return the body that ``encode_open_body`` left open, with ``messages`` in it."""
    assert head.endswith(b"]}"), head[-20:]
    opening = head[:-2]
    is_first = not messages or opening.endswith(b"[")
    return b"".join((opening, b"" if is_first else b",", b",".join(messages), b"]}"))


# ── tool calls ───────────────────────────────────────────────────────────────────────────────────


def read_arguments(raw: str) -> tuple[JSONObject, BadArguments | None]:
    """Return the value of a call's arguments, or what is wrong with them; no text is ``{}``."""
    if not raw.strip():
        return {}, None
    try:
        value = read_json(raw)
    except ProtocolError:
        return {}, BadArguments.NOT_JSON
    return (value, None) if isinstance(value, Mapping) else ({}, BadArguments.NOT_AN_OBJECT)


def sent_arguments(call: ToolCall) -> JSONObject:
    """Return the arguments as they go back to a provider, which refuses anything but an object."""
    if call.bad_arguments is None:
        return call.arguments
    # A call that was cut off can still have whole arguments: the model should see what it wrote.
    return read_arguments(call.raw_arguments)[0]


@attrs.define(eq=False)
class GrowingCall:
    """A tool call while its arguments arrive."""

    # As the provider gave them; empty until (and unless) it does.
    id: str
    name: str
    # Its place among the calls of the answer.
    place: int
    index: int | None = None
    fragments: list[str] = attrs.field(factory=list[str])

    @property
    def text(self) -> str:
        return "".join(self.fragments)

    @property
    def is_whole(self) -> bool:
        """True iff the arguments so far are a JSON object, so that more could only spoil them."""
        return self.text.endswith("}") and read_arguments(self.text)[1] is None

    def finished(self, id: str, *, is_cut_off: bool) -> ToolCall:
        raw = self.text
        if is_cut_off:
            # Even arguments that can be read: nobody knows what else they were to hold.
            return ToolCall(id, self.name, {}, raw, BadArguments.CUT_OFF)
        arguments, problem = read_arguments(raw)
        return ToolCall(id, self.name, arguments, raw, problem)


def distinct_ids(calls: Sequence[GrowingCall], response_id: str) -> list[str]:
    """Return an id for each call: its own, unless it has none or an earlier call has the same."""
    taken = {call.id for call in calls}
    seen: set[str] = set()
    ids: list[str] = []
    for call in calls:
        id = call.id
        if not id or id in seen:
            # Ids need to be unique among the calls of one answer; some servers allow 40 characters.
            id = f"{id or f'call_{response_id[-16:]}'}_{call.place}"
            while id in taken:
                id += "_"
            taken.add(id)
        seen.add(id)
        ids.append(id)
    return ids


# ── usage ────────────────────────────────────────────────────────────────────────────────────────


def token_count(reported: JSONObject, key: str, *, missing: int | None = None) -> int:
    """Return a reported number of tokens.

    Raises:
        ValueError: It is not a count, or is not there and ``missing`` names no value for that.
    """
    value = reported.get(key)
    if value is None:
        value = missing
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} is {value!r}, not a token count")
    return value


def readable_usage(read: Callable[[JSONObject], Usage], reported: JSONObject) -> Usage | None:
    """Return what ``read`` makes of a usage report, None if that cannot be true.

    No call reads nothing: servers that do not count, or not yet, report zeros.
    """
    try:
        usage = read(reported)
    except ValueError:
        return None
    return usage if usage.context_tokens and usage.problem() is None else None


def request_counts(reported: JSONObject) -> tuple[tuple[str, int], ...]:
    """Return the server-side tool requests that are billed beside the tokens."""
    return tuple(
        (name, count)
        for name, count in reported.items()
        if name.endswith("_requests") and type(count) is int and count > 0
    )


def exact_usd(amount: object) -> Decimal | None:
    """Return a reported amount of money, None if it is not one."""
    if isinstance(amount, bool) or not isinstance(amount, int | Decimal) or amount < 0:
        return None
    return Decimal(amount)


# ── errors ───────────────────────────────────────────────────────────────────────────────────────

# Which HTTP status an error inside an answer with HTTP 200 would have had.
_STATUS_OF_KIND = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "invalid_api_key": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "api_error": 500,
    "server_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}

_MAX_ERROR_TEXT = 2000


@attrs.frozen
class ErrorReport:
    """What a provider says about an error. ``status`` is the one inside the text, if any."""

    message: str
    kind: str | None = None
    status: int | None = None


def read_error(answer: JSONObject) -> ErrorReport:
    """Return the error in ``answer``, in whichever of the usual shapes."""
    error = answer.get("error") or answer
    if not isinstance(error, Mapping):
        return ErrorReport(cut_text(str(error), _MAX_ERROR_TEXT))
    code = text_of(error, "code")
    kind = code if code and not code.isdigit() else text_of(error, "type")
    message = text_of(error, "message") or text_of(error, "detail") or encode_json(error).decode()
    # Routers say "Provider returned error" and what it was one level down.
    upstream = text_of(object_of(error, "metadata"), "raw")
    if upstream:
        message = f"{message}: {upstream}"
    return ErrorReport(cut_text(message, _MAX_ERROR_TEXT), kind or None, _status_in(error, kind))


def _status_in(error: JSONObject, kind: str) -> int | None:
    for key in ("status_code", "status", "code"):
        value = error.get(key)
        # A status, but also "RESOURCE_EXHAUSTED" or 1113.
        if re.fullmatch("[45][0-9]{2}", str(value)):
            return int(str(value))
    return _STATUS_OF_KIND.get(kind)


def provider_error(
    report: ErrorReport,
    *,
    provider: str,
    status: int | None,
    usage: Usage | None = None,
    retry_after_seconds: float | None = None,
    has_begun: bool = False,
) -> ProviderError:
    """Return the error of the class that a caller reacts to."""
    refused_key = status in (401, 403)
    kind_of_error = (
        ProviderInterrupted if has_begun else CredentialsError if refused_key else ProviderError
    )
    return kind_of_error(
        report.message,
        provider=provider,
        status=status,
        kind=report.kind,
        usage=usage,
        retry_after_seconds=retry_after_seconds,
    )


def http_error(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    provider: str,
    read_usage: Callable[[JSONObject], Usage | None],
) -> ProviderError:
    """Return the error of an answer with another status than 200, whatever its body holds."""
    text = body.decode("utf-8", "replace")
    try:
        answer = read_object(text)
    except ProtocolError:
        # A proxy's page, or nothing at all.
        answer = {"error": text.strip() or "no explanation"}
    return provider_error(
        read_error(answer),
        provider=provider,
        status=status,
        usage=read_usage(answer),
        retry_after_seconds=retry_after_seconds(headers),
    )


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Return how long the provider asks to wait, None if it does not say so in seconds.

    A date would need a clock to be understood; nobody here has one.
    """
    by_name = {name.lower(): value.strip() for name, value in headers.items()}
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = by_name.get(name, "")
        if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
            return float(value) * unit
    return None
