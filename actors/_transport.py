"""HTTP: the only module that knows httpx.

It sends a request, feeds the answer's bytes to a codec's decoder, and reports progress while they
come. The call's own task drains the answer, whoever reads along or does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx

from treewarden.protocols import (
    Delta,
    ProtocolError,
    ProviderError,
    ProviderInterrupted,
    Reply,
    TextDelta,
    ThinkingDelta,
)

if TYPE_CHECKING:
    from treewarden.protocols import Codec, StreamDecoder

    from ._models import Sink

# Connecting is quick or broken. How long an answer may take is the business of deadlines.
_TIMEOUT = httpx.Timeout(600.0, connect=15.0)

_OK = 200

# An error page is read to be quoted, not to be stored.
_MAX_ERROR_BYTES = 65_536


class Transport:
    """One tree's connections."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
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
        headers = {**codec.headers(api_key), "accept": "text/event-stream, application/json"}
        try:
            async with self._client.stream(
                "POST",
                url,
                content=body,
                headers=headers,
                extensions={"trace": _notice_when_sent(sink)},
            ) as response:
                return await _read(response, codec, provider, sink)
        except httpx.HTTPError as error:
            raise _no_answer(error, provider, sink) from error


def _notice_when_sent(sink: Sink) -> Any:
    async def trace(event: str, _: Any) -> None:
        if event.endswith("send_request_headers.started"):
            sink.sent()

    return trace


async def _read(response: httpx.Response, codec: Codec, provider: str, sink: Sink) -> Reply:
    if response.status_code != _OK:
        content = await _read_some(response)
        raise codec.decode_error(
            response.status_code, dict(response.headers), content, provider=provider
        )
    if "text/event-stream" not in response.headers.get("content-type", ""):
        return _whole(await response.aread(), codec, provider, sink)
    decoder = codec.stream_decoder(provider=provider)
    try:
        async for chunk in response.aiter_bytes():
            for delta in decoder.feed(chunk):
                _tell(delta, sink)
            _count(decoder, sink)
        reply = decoder.finish()
    except ProtocolError as error:
        _count(decoder, sink)
        raise ProviderInterrupted(str(error), provider=provider, usage=decoder.usage) from error
    except ProviderError:
        _count(decoder, sink)
        raise
    _count(decoder, sink)
    sink.progress.usage, sink.progress.model = reply.usage, reply.model
    return reply


def _whole(body: bytes, codec: Codec, provider: str, sink: Sink) -> Reply:
    """An answer that came in one piece although a stream was asked for."""
    try:
        reply = codec.decode_response(body, provider=provider)
    except ProtocolError as error:
        raise ProviderInterrupted(str(error), provider=provider) from error
    sink.progress.usage, sink.progress.model = reply.usage, reply.model
    sink.progress.bytes = len(reply.message.text.encode())
    sink.text(reply.message.text)
    return reply


def _count(decoder: StreamDecoder, sink: Sink) -> None:
    progress = sink.progress
    progress.usage = decoder.usage
    progress.deltas, progress.bytes = decoder.output_deltas, decoder.output_bytes


def _tell(delta: Delta, sink: Sink) -> None:
    if isinstance(delta, TextDelta):
        sink.text(delta.text)
    elif isinstance(delta, ThinkingDelta):
        sink.thought(delta.text)


async def _read_some(response: httpx.Response) -> bytes:
    content = b""
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) >= _MAX_ERROR_BYTES:
            break
    return content[:_MAX_ERROR_BYTES]


def _no_answer(error: httpx.HTTPError, provider: str, sink: Sink) -> ProviderError:
    what = f"{type(error).__name__}: {error}"
    if sink.progress.deltas or sink.progress.usage is not None:
        return ProviderInterrupted(what, provider=provider, usage=sink.progress.usage)
    never_left = isinstance(
        error,
        (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol),
    )
    return ProviderError(what, provider=provider, kind="transport", was_sent=not never_left)
