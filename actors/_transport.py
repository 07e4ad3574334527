"""HTTP: the only module that knows httpx.

It sends a request, feeds the answer's bytes to a codec's decoder, and reports progress while they
come. The call's own task drains the answer, whoever reads along or does not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import attrs
import httpx

from treewarden.protocols import (
    Delta,
    Message,
    ProtocolError,
    ProviderError,
    ProviderInterrupted,
    Reply,
    Text,
    TextDelta,
    Thinking,
    ThinkingDelta,
    ToolCall,
    cut_text,
)

if TYPE_CHECKING:
    from treewarden.protocols import Codec, StreamDecoder

    from ._models import Sink

# Connecting is quick or broken. How long an answer may take is the business of deadlines.
_TIMEOUT = httpx.Timeout(600.0, connect=15.0)

# Many servers (uvicorn, cpp-httplib) close a connection that was idle for five seconds. A request
# that is sent right then gets no answer and may not be sent again: who knows what became of it.
_KEEP_ALIVE_SECONDS = 2.0

_OK = 200

# How long the end of a body may take after the end of the answer in it.
_LINGER_SECONDS = 0.5
_EVENT_STREAM = "text/event-stream"

# An error page is read to be quoted, not to be stored.
_MAX_ERROR_BYTES = 65_536

# A shorter key is a word that an error page may well use, such as "test".
_SHORTEST_SECRET = 8


class Transport:
    """One tree's connections."""

    def __init__(self) -> None:
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=64,
            keepalive_expiry=_KEEP_ALIVE_SECONDS,
        )
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, limits=limits)

    async def close(self) -> None:
        await self._client.aclose()

    async def call(
        self,
        codec: Codec,
        *,
        url: str,
        api_key: str,
        body: bytes,
        provider: str,
        sink: Sink,
    ) -> Reply:
        """Send one request and return its whole answer.

        Raises:
            ProviderError: An error answer, no answer, or an answer that broke off. What had
                arrived is in ``sink.progress``.
        """
        headers = {**codec.headers(api_key), "accept": f"{_EVENT_STREAM}, application/json"}
        try:
            async with self._client.stream(
                "POST",
                url,
                content=body,
                headers=headers,
                extensions={"trace": _notice_when_sent(sink)},
            ) as response:
                if response.status_code != _OK:
                    raise codec.decode_error(
                        response.status_code,
                        dict(response.headers),
                        _without(api_key, await _read_some(response)),
                        provider=provider,
                    )
                sink.alive()
                return await _read(response, codec, provider, sink)
        except httpx.HTTPError as error:
            raise _no_answer(error, provider, sink) from error


def _notice_when_sent(sink: Sink) -> Any:
    async def trace(event: str, _: Any) -> None:
        if event.endswith("send_request_headers.started"):
            sink.sent()

    return trace


async def _read(response: httpx.Response, codec: Codec, provider: str, sink: Sink) -> Reply:
    # Where nothing is said it is what was asked for.
    content_type = response.headers.get("content-type", _EVENT_STREAM).lower()
    if _EVENT_STREAM not in content_type:
        return _whole(await _read_all(response, sink), codec, provider, sink)
    stream = _Stream(codec.stream_decoder(provider=provider), provider, sink)
    chunks = response.aiter_bytes()
    try:
        async for chunk in chunks:
            sink.alive()
            stream.feed(chunk)
            if stream.decoder.is_done:
                # The connection is used again if the server ends the body, too; if it does not,
                # nobody waits for it.
                await _leave(chunks, linger_seconds=_LINGER_SECONDS)
                break
    except ProviderError:
        await _leave(chunks)
        raise
    except httpx.HTTPError:
        # The connection may break between the end of the answer and its own. Then nothing is
        # missing, and an answer that was paid for is not thrown away.
        if (reply := stream.reply_if_whole()) is None:
            raise
        return reply
    return stream.finish()


async def _read_all(response: httpx.Response, sink: Sink) -> bytes:
    parts: list[bytes] = []
    async for chunk in response.aiter_bytes():
        sink.alive()
        parts.append(chunk)
    return b"".join(parts)


async def _leave(chunks: AsyncIterator[bytes], *, linger_seconds: float = 0.0) -> None:
    """End the reading of an answer before its end, or at it if that comes soon.

    A body is a pile of async generators; one that is dropped half way would be finished by nobody
    knows whom. A cancellation goes through all of them, as it does when a run is cancelled.
    """
    with anyio.move_on_after(linger_seconds), suppress(httpx.HTTPError):
        async for _ in chunks:
            pass  # what had arrived already


@attrs.define(eq=False)
class _Stream:
    """One streamed answer: its bytes go to the decoder, what comes of them to the sink."""

    decoder: StreamDecoder
    provider: str
    sink: Sink
    # Characters of text that the sink was told.
    told: int = 0

    def feed(self, data: bytes) -> None:
        try:
            for delta in self.decoder.feed(data):
                self._tell(delta)
        except ProviderError:
            self._tell_rest()
            raise
        except ProtocolError as error:
            self._tell_rest()
            raise self._interrupted(error) from error
        finally:
            self._count()

    def finish(self) -> Reply:
        try:
            reply = self.decoder.finish()
        except ProtocolError as error:
            raise self._interrupted(error) from error
        self.sink.progress.usage, self.sink.progress.model = reply.usage, reply.model
        return reply

    def reply_if_whole(self) -> Reply | None:
        try:
            return self.finish()
        except ProviderError:
            return None

    def _tell(self, delta: Delta) -> None:
        if isinstance(delta, TextDelta):
            self.told += len(delta.text)
            self.sink.text(delta.text)
        elif isinstance(delta, ThinkingDelta):
            self.sink.thought(delta.text)

    def _tell_rest(self) -> None:
        """Tell the text that came in one piece with the error: it is part of the answer too."""
        rest = self.decoder.partial().text[self.told :]
        if rest:
            self._tell(TextDelta(rest))

    def _count(self) -> None:
        progress, decoder = self.sink.progress, self.decoder
        progress.usage = decoder.usage
        progress.deltas, progress.bytes = decoder.output_deltas, decoder.output_bytes

    def _interrupted(self, error: ProtocolError) -> ProviderInterrupted:
        return ProviderInterrupted(
            str(error), provider=self.provider, status=_OK, usage=self.decoder.usage
        )


def _whole(body: bytes, codec: Codec, provider: str, sink: Sink) -> Reply:
    """An answer that came in one piece although a stream was asked for."""
    try:
        reply = codec.decode_response(body, provider=provider)
    except ProtocolError as error:
        raise ProviderInterrupted(str(error), provider=provider, status=_OK) from error
    sink.progress.usage, sink.progress.model = reply.usage, reply.model
    sink.progress.bytes = _written_bytes(reply.message)
    if reply.message.text:
        sink.text(reply.message.text)
    return reply


def _written_bytes(message: Message) -> int:
    """The bytes that the model wrote, as a stream would have counted them."""
    written = 0
    for part in message.parts:
        match part:
            case Text(text) | Thinking(text):
                written += len(text.encode())
            case ToolCall():
                written += len(part.raw_arguments.encode())
            case _:
                pass
    return written


def _without(secret: str, page: bytes) -> bytes:
    """An error page that does not show the key: some servers quote the one they refuse."""
    if len(secret) < _SHORTEST_SECRET:
        return page
    return page.replace(secret.encode(), "\u2026".encode())


async def _read_some(response: httpx.Response) -> bytes:
    content, chunks = b"", response.aiter_bytes()
    try:
        async for chunk in chunks:
            content += chunk
            if len(content) >= _MAX_ERROR_BYTES:
                await _leave(chunks)
                break
    except httpx.HTTPError:
        pass  # the status has said what matters; half an explanation is better than none
    return cut_text(content.decode(errors="replace"), _MAX_ERROR_BYTES, unit="bytes").encode()


def _no_answer(error: httpx.HTTPError, provider: str, sink: Sink) -> ProviderError:
    what = f"{type(error).__name__}: {error}"
    if sink.progress.deltas or sink.progress.usage is not None:
        return ProviderInterrupted(what, provider=provider, usage=sink.progress.usage)
    never_left = isinstance(
        error,
        (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol),
    )
    return ProviderError(what, provider=provider, kind="transport", was_sent=not never_left)
