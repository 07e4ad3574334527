"""A provider made of recordings: a real HTTP server that answers with what it was given.

Everything between a client and this server is real: a socket, HTTP/1.1, connections that are kept
open, chunks, a peer that hangs up. Only the provider is not, so a test can say what it answers, how
slowly, and where it breaks off.

One rule keeps this file simple: one request takes one exchange. The server runs in threads of its
own, so it does not care which event loop its client has.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from typing import Any, Literal

import attrs

# These say how a recorded body travelled. It is kept in plain and travels here in our own way.
_FRAMING = frozenset({"connection", "content-encoding", "content-length", "transfer-encoding"})

# How soon the accepting thread notices that it is to end.
_POLL_SECONDS = 0.01

# A thread that is still there so long after its connection was shut down is a bug of ours.
_JOIN_SECONDS = 5.0


@attrs.frozen
class Exchange:
    """One answer, and which request it is the answer to.

    ``ReplayServer`` sends ``body`` in pieces of ``chunk_bytes`` (None: in one) with
    ``pause_seconds`` before each piece but the first. After ``break_after_bytes`` of it the
    connection breaks, whatever is left, and the end of the body never comes. After
    ``stall_after_bytes`` nothing more comes until the client hangs up.
    """

    # None: no answer at all. The connection breaks, or stalls if stall_after_bytes is given.
    status: int | None = 200
    headers: Mapping[str, str] = attrs.field(factory=dict[str, str])
    body: bytes = b""
    chunk_bytes: int | None = attrs.field(default=None, kw_only=True)
    pause_seconds: float = attrs.field(default=0, kw_only=True)
    break_after_bytes: int | None = attrs.field(default=None, kw_only=True)
    stall_after_bytes: int | None = attrs.field(default=None, kw_only=True)
    # For match="body": fields that the request's JSON has with these values, beside any others.
    # None: any request.
    request: Mapping[str, Any] | None = attrs.field(default=None, kw_only=True)

    def pieces(self) -> Iterator[bytes]:
        """The body as it is sent, up to where it breaks off or stalls."""
        ends = [e for e in (self.break_after_bytes, self.stall_after_bytes) if e is not None]
        sent = self.body[: min(ends, default=len(self.body))]
        step = self.chunk_bytes or len(sent) or 1
        return (sent[at : at + step] for at in range(0, len(sent), step))

    def fits(self, received: ReceivedRequest) -> bool:
        """Say whether this is the answer to ``received``."""
        if self.request is None:
            return True
        try:
            body = received.json()
        except ValueError:
            return False
        return isinstance(body, dict) and body == {**body, **self.request}


@attrs.frozen(eq=False)
class ReceivedRequest:
    """A request that a ``ReplayServer`` got, and what became of it."""

    method: str
    path: str
    # By lower-case name.
    headers: Mapping[str, str]
    body: bytes
    # Which of the server's connections it came on, counted from 1.
    connection: int
    # Set as soon as it is noticed that the client hung up before it had the whole answer.
    disconnected: threading.Event = attrs.field(factory=threading.Event, repr=False)

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            ValueError: It is not JSON.
        """
        return json.loads(self.body)


class ReplayServer:
    """A server on 127.0.0.1 that answers requests with ``exchanges``: ``with ReplayServer(...)``.

    A request for which no exchange is left gets a 404 that says so.

    Args:
        match: "order": the next request gets the next exchange. "body": it gets the first one left
            whose ``request`` fits it.
    """

    def __init__(
        self, exchanges: Sequence[Exchange], *, match: Literal["order", "body"] = "order"
    ) -> None:
        self._left = list(exchanges)
        self._match = match
        # Held while an exchange is taken: every connection has a thread.
        self._taking = threading.Lock()
        self._requests: list[ReceivedRequest] = []
        self._listener: _Listener | None = None

    @property
    def base_url(self) -> str:
        """Where it is, without a slash at the end."""
        assert self._listener is not None, "the server is not running: write `with server:`"
        host, port = self._listener.server_address[:2]
        return f"http://{host!s}:{port}"

    @property
    def requests(self) -> tuple[ReceivedRequest, ...]:
        """What it got so far, in the order in which it came."""
        return tuple(self._requests)

    @property
    def left(self) -> tuple[Exchange, ...]:
        """The exchanges that nobody asked for yet."""
        return tuple(self._left)

    def take(self, received: ReceivedRequest) -> Exchange | None:
        """Record a request and take the exchange that answers it, None if none is left for it."""
        with self._taking:
            self._requests.append(received)
            for at, exchange in enumerate(self._left):
                if self._match == "order" or exchange.fits(received):
                    return self._left.pop(at)
            return None

    def __enter__(self) -> ReplayServer:
        assert self._listener is None, "this server was started before"
        self._listener = _Listener(self)
        self._listener.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._listener is not None, self
        self._listener.stop()


class _Listener(HTTPServer):
    """Accepts connections and gives each a thread, whose end it waits for."""

    # As many as may knock at the same time: a tree starts dozens of calls at once.
    request_queue_size = 128

    def __init__(self, replay: ReplayServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replay = replay
        # Set first of all when the server stops: from then on nobody hangs up but we.
        self.is_stopping = threading.Event()
        # Only the accepting thread adds to it.
        self._connections: list[tuple[socket.socket, threading.Thread]] = []
        self._accepting = threading.Thread(
            target=self.serve_forever, args=(_POLL_SECONDS,), name="replay", daemon=True
        )

    def start(self) -> None:
        self._accepting.start()

    def stop(self) -> None:
        """End every connection and wait until all threads are gone."""
        self.is_stopping.set()
        self.shutdown()
        self._accepting.join(_JOIN_SECONDS)
        self.server_close()
        for connection, thread in self._connections:
            _hang_up(connection)
            thread.join(_JOIN_SECONDS)
            assert not thread.is_alive(), f"{thread.name} does not end"

    def number_of(self, connection: socket.socket) -> int:
        """Which connection this is, counted from 1."""
        return 1 + [there for there, _ in self._connections].index(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self._serve, args=(request, client_address), name="replay-peer", daemon=True
        )
        self._connections.append((request, thread))
        thread.start()

    def _serve(self, connection: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(connection, client_address)
        except ConnectionError:
            pass  # the client is gone; what that means was noted where the answer was sent
        finally:
            self.shutdown_request(connection)


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, one after the other."""

    protocol_version = "HTTP/1.1"
    # A small piece of a stream leaves at once.
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        received = ReceivedRequest(
            self.command,
            self.path,
            {name.lower(): value for name, value in self.headers.items()},
            self.rfile.read(int(self.headers.get("content-length", 0))),
            self._listener.number_of(self.connection),
        )
        exchange = self._listener.replay.take(received) or _no_exchange(received)
        try:
            self._answer(exchange, received)
        except ConnectionError:
            self._note_hang_up(received)

    do_GET = do_POST

    def _answer(self, exchange: Exchange, received: ReceivedRequest) -> None:
        if exchange.status is not None:
            self._send_head(exchange.status, exchange.headers)
            for at, piece in enumerate(exchange.pieces()):
                if at and self._client_leaves_within(exchange.pause_seconds):
                    return self._note_hang_up(received)
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        if exchange.stall_after_bytes is not None:
            self._client_leaves_within(None)
            return self._note_hang_up(received)
        if exchange.status is None or exchange.break_after_bytes is not None:
            self.close_connection = True
            return None
        self.wfile.write(b"0\r\n\r\n")
        return None

    def _send_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in _FRAMING:
                self.send_header(name, value)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def _client_leaves_within(self, seconds: float | None) -> bool:
        """Wait so long (None: for ever), and say whether the client hung up meanwhile."""
        if seconds == 0:
            return False
        self.connection.settimeout(seconds)
        try:
            # A client that waits for an answer says nothing; what can be read is its end.
            return not self.connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        finally:
            self.connection.settimeout(None)

    def _note_hang_up(self, received: ReceivedRequest) -> None:
        self.close_connection = True
        if not self._listener.is_stopping.is_set():
            received.disconnected.set()

    @property
    def _listener(self) -> _Listener:
        assert isinstance(self.server, _Listener), self.server
        return self.server

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: who wants to know looks at ``requests``."""


def _no_exchange(received: ReceivedRequest) -> Exchange:
    told = f"the replay server has no exchange left for {received.method} {received.path}"
    body = json.dumps({"error": {"type": "no_exchange", "message": told}}).encode()
    return Exchange(404, {"content-type": "application/json"}, body)


def _hang_up(connection: socket.socket) -> None:
    """Wake the thread that reads from a connection or waits for its end."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is closed already
