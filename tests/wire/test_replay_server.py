"""The replay server itself, asked by the plainest client there is."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from treewarden.testing import Exchange, ReplayServer

pytestmark = pytest.mark.timeout(20)

TEXT = {"content-type": "text/plain"}


def connection(server: ReplayServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(server.base_url).netloc, timeout=5)


def ask(server: ReplayServer, body: bytes = b"", path: str = "/") -> tuple[int, bytes]:
    there = connection(server)
    try:
        there.request("POST", path, body)
        response = there.getresponse()
        return response.status, response.read()
    finally:
        there.close()


def test_exchanges_are_served_in_order() -> None:
    with ReplayServer([Exchange(200, TEXT, b"one"), Exchange(429, TEXT, b"two")]) as server:
        assert ask(server) == (200, b"one")
        assert len(server.left) == 1
        assert ask(server) == (429, b"two")
        assert not server.left


def test_a_request_is_recorded_as_it_came() -> None:
    with ReplayServer([Exchange()]) as server:
        there = connection(server)
        there.request("POST", "/v1/messages?beta=true", b'{"a": [1]}', {"X-Key": "k"})
        there.getresponse().read()
        there.close()
        (received,) = server.requests
    assert (received.method, received.path) == ("POST", "/v1/messages?beta=true")
    assert received.headers["x-key"] == "k"
    assert received.json() == {"a": [1]}
    assert not received.disconnected.is_set()


def test_an_exchange_can_be_found_by_what_the_body_holds() -> None:
    exchanges = [
        Exchange(200, TEXT, b"two", request={"n": 2}),
        Exchange(200, TEXT, b"one", request={"n": 1, "of": ["a"]}),
        Exchange(200, TEXT, b"any"),
    ]
    with ReplayServer(exchanges, match="body") as server:
        assert ask(server, b'{"n": 1, "of": ["a"], "more": true}') == (200, b"one")
        assert ask(server, b'{"n": 1}') == (200, b"any")
        assert ask(server, b'{"n": 2}') == (200, b"two")


@pytest.mark.parametrize("body", [b"", b"not json", b"[1]", b'{"n": 2}'])
def test_a_body_that_does_not_hold_it_is_no_match(body: bytes) -> None:
    with ReplayServer([Exchange(request={"n": 1})], match="body") as server:
        status, told = ask(server, body, "/v1")
        assert (status, len(server.left), len(server.requests)) == (404, 1, 1)
    assert b"no exchange left for POST /v1" in told


def test_a_connection_is_kept_between_requests() -> None:
    with ReplayServer([Exchange(200, TEXT, b"one"), Exchange(200, TEXT, b"two")]) as server:
        there = connection(server)
        for answer in (b"one", b"two"):
            there.request("POST", "/")
            assert there.getresponse().read() == answer
        there.close()


def test_headers_that_say_how_a_recorded_body_travelled_are_not_repeated() -> None:
    recorded = {"Content-Encoding": "gzip", "Content-Length": "3", "X-Request-Id": "r1"}
    with ReplayServer([Exchange(200, recorded, b"plain")]) as server:
        there = connection(server)
        there.request("POST", "/")
        response = there.getresponse()
        assert response.read() == b"plain"
        there.close()
    assert response.getheader("content-encoding") is None
    assert response.getheader("content-length") is None
    assert response.getheader("x-request-id") == "r1"


def test_a_body_comes_in_pieces_with_pauses() -> None:
    slow = Exchange(200, TEXT, b"abcdef", chunk_bytes=2, pause_seconds=0.03)
    with ReplayServer([slow]) as server:
        there = connection(server)
        begun = time.monotonic()
        there.request("POST", "/")
        response = there.getresponse()
        assert response.read1() == b"ab"
        assert response.read() == b"cdef"
        assert time.monotonic() - begun >= 0.06
        there.close()


@pytest.mark.parametrize("after", [0, 3, 6, 99])
def test_a_connection_that_breaks_never_ends_the_body(after: int) -> None:
    with ReplayServer([Exchange(200, TEXT, b"abcdef", break_after_bytes=after)]) as server:
        with pytest.raises(http.client.IncompleteRead) as caught:
            ask(server)
    assert caught.value.partial == b"abcdef"[:after]


def test_without_a_status_the_connection_breaks_before_any_answer() -> None:
    with ReplayServer([Exchange(None)]) as server:
        with pytest.raises(http.client.RemoteDisconnected):
            ask(server)


@pytest.mark.parametrize(
    "exchange",
    [
        Exchange(None, stall_after_bytes=0),
        Exchange(200, TEXT, b"abc", stall_after_bytes=2),
        Exchange(200, TEXT, b"abc", chunk_bytes=1, pause_seconds=60),
        Exchange(200, TEXT, b"x" * 50_000_000, chunk_bytes=1_000_000),
    ],
    ids=["no_answer", "stalled", "paused", "unread"],
)
def test_a_client_that_hangs_up_is_noticed_within_a_second(exchange: Exchange) -> None:
    with ReplayServer([exchange]) as server:
        there = connection(server)
        there.request("POST", "/")
        wait_until(lambda: server.requests)
        (received,) = server.requests
        assert not received.disconnected.wait(0.05)
        there.close()
        assert received.disconnected.wait(1.0)


def test_a_client_that_read_everything_did_not_hang_up() -> None:
    with ReplayServer([Exchange(200, TEXT, b"abc")]) as server:
        ask(server)
        assert not server.requests[0].disconnected.wait(0.05)


def test_leaving_the_block_ends_what_still_stalls_and_is_not_taken_for_a_hang_up() -> None:
    threads = threading.active_count()
    with ReplayServer([Exchange(None, stall_after_bytes=0)]) as server:
        there = connection(server)
        there.request("POST", "/")
        wait_until(lambda: server.requests)
        (received,) = server.requests
    assert threading.active_count() == threads
    assert not received.disconnected.is_set()
    there.close()


def test_it_listens_on_this_machine_only_and_nowhere_when_it_has_ended() -> None:
    with ReplayServer([]) as server:
        address = urlsplit(server.base_url)
        assert address.hostname == "127.0.0.1"
        socket.create_connection(("127.0.0.1", address.port or 0), 1).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", address.port or 0), 1)


def test_many_connections_at_once_get_one_exchange_each() -> None:
    exchanges = [Exchange(200, TEXT, b"%d" % at) for at in range(50)]
    answers: list[tuple[int, bytes]] = []
    with ReplayServer(exchanges) as server:
        threads = [threading.Thread(target=lambda: answers.append(ask(server))) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(answers) == sorted((200, b"%d" % at) for at in range(50))


def wait_until(is_so: Callable[[], Any]) -> None:
    """Wait for a thread of the server's: there is no event loop here whose clock could be used."""
    ends = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.001)
