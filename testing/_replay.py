"""A provider made of recordings: a real HTTP server that answers with what it was given.

Everything between a client and this server is real: a socket, HTTP/1.1, connections that are kept,
chunks, a peer that hangs up. Only the provider is not, so a test can say what it answers, how
slowly, and where it breaks off.

One rule keeps this file simple: one request takes one exchange. The server runs in threads of its
own, so it does not care which event loop its client has.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from typing import Any, Literal

import attrs

# These say how the recorded body travelled. It is kept in plain and sent in our own way.
_FRAMING = frozenset({"connection", "content-encoding", "content-length", "transfer-encoding"})

# How soon the accepting thread notices that it should end.
_POLL_SECONDS = 0.01

# A handler that is still there after its connection was shut down is a bug of ours.
_JOIN_SECONDS = 5.0


@attrs.frozen
class Exchange:
    """One answer, and which request it belongs to.

    ``ReplayServer`` sends ``body`` in pieces of ``chunk_bytes`` (None: in one) with
    ``pause_seconds`` before each piece but the first. After ``break_after_bytes`` of it the
    connection breaks, without the end of the body; after ``stall_after_bytes`` nothing more comes
    until the client hangs up.
    """

    # None: no answer at all; the connection breaks, or stalls if ``stall_after_bytes`` is given.
    status: int | None = 200
    headers: Mapping[str, str] = attrs.field(factory=dict[str, str])
    body: bytes = b""
    chunk_bytes: int | None = attrs.field(default=None, kw_only=True)
    pause_seconds: float = attrs.field(default=0, kw_only=True)
    break_after_bytes: int | None = attrs.field(default=None, kw_only=True)
    stall_after_bytes: int | None = attrs.field(default=None, kw_only=True)
    # With match="body": fields that the JSON of the request must have, with these values. The
    # request may have others. None: it fits every request.
    request: Mapping[str, Any] | None = attrs.field(default=None, kw_only=True)

    @property
    def is_whole(self) -> bool:
        """True iff the client gets the end of the answer."""
        return self.status is not None and (
            self.break_after_bytes is None and self.stall_after_bytes is None
        )

    def pieces(self) -> Iterator[bytes]:
        """The body as it is sent, up to where it breaks off or stalls."""
        ends = [e for e in (self.break_after_bytes, self.stall_after_bytes) if e is not None]
        sent = self.body[: min(ends, default=len(self.body))]
        step = self.chunk_bytes or len(sent) or 1
        return (sent[at : at + step] for at in range(0, len(sent), step))

    def fits(self, received: ReceivedRequest) -> bool:
        """Say whether this is the answer to a request."""
        if self.request is None:
            return True
        try:
            body = received.json()
        except ValueError:
            return False
        return isinstance(body, Mapping) and self.request.items() <= _Fields(body)


class _Fields:
    """The fields of a JSON object. Lists are not hashable, so no set of items can be made."""

    def __init__(self, body: Mapping[Any, Any]) -> None:
        self._body = body
