"""A tiny HTTP server on this machine that plays a provider: it gives the answers it was told.

It runs in threads of its own and in real time, so it serves either backend. What it was asked is
kept, as parsed JSON, so that a test can see what was really on the wire.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import attrs

from .kit import Backend

# An answer is the pieces in which its bytes are sent.
Answer = Sequence[bytes]


@attrs.define
class Loopback:
    """A provider at ``url``: the answers it has left, and the requests it got."""

    answers: list[Answer]
    url: str = ""
    requests: list[dict[str, Any]] = attrs.field(factory=list[dict[str, Any]])


@contextmanager
def provider(*answers: Answer) -> Generator[Loopback, None, None]:
    """Serve ``answers``, one for each request, as event streams."""
    played = Loopback(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            played.requests.append(json.loads(body))
            answer = played.answers.pop(0)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            for piece in answer:
                self.wfile.write(piece)
                self.wfile.flush()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: a test's output is not a server's log."""

    # Port 0: any that is free.
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # closing the server then waits for the last answer
    played.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield played
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def serve(
    backend: Backend, scenario: Callable[[Loopback], Awaitable[None]], *answers: Answer
) -> None:
    """Run a scenario in real time beside a provider that gives these answers, each once."""
    with provider(*answers) as server:
        anyio.run(scenario, server, backend=backend)
        assert server.answers == []
