"""Server-sent events come out the same, whatever way the bytes were cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewarden.protocols import ProtocolError, ServerSentEvent, SSEDecoder


def events(pieces: Iterable[bytes]) -> list[ServerSentEvent]:
    decoder = SSEDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


def byte_by_byte(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("before", ["", ": a comment\n", "\ufeff", "id: 7\nretry: 10\n\n"])
def test_E99_text_is_the_same_in_whatever_pieces_its_bytes_come(before: str, end: str) -> None:
    one = 'data: {"t":"日本🎉"}\n\n'
    stream = (before + one + one).replace("\n", end).encode()
    for pieces in (
        [stream],
        byte_by_byte(stream),
        *([stream[:i], stream[i:]] for i in range(len(stream))),
    ):
        assert [json.loads(event.data)["t"] for event in events(pieces)] == ["日本🎉", "日本🎉"]


@given(
    st.lists(st.tuples(st.text(max_size=8), st.sampled_from(["\n", "\r\n", "\r"]))),
    st.lists(st.integers(0, 200)),
)
def test_no_cut_changes_the_events(lines: list[tuple[str, str]], places: list[int]) -> None:
    stream = "".join(f"data:{text}{end}" for text, end in lines).encode() + b"\n\n"
    edges = [0, *sorted(place for place in places if place < len(stream)), len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    assert events(pieces) == events([stream]) == events(byte_by_byte(stream))


def test_data_of_several_lines_is_joined() -> None:
    assert events([b"data: a\ndata:b\ndata\ndata:  c\n\n"]) == [ServerSentEvent("a\nb\n\n c")]


def test_an_event_has_the_type_that_it_names_and_no_later_one_has() -> None:
    stream = b"event: error\ndata: 1\n\ndata: 2\n\nevent: ping\n\ndata: 3\n\n"
    assert events([stream]) == [
        ServerSentEvent("1", "error"),
        ServerSentEvent("2"),
        ServerSentEvent("3"),
    ]


def test_an_event_without_its_empty_line_is_not_one() -> None:
    assert events([b"data: 1\n\ndata: 2\n"]) == [ServerSentEvent("1")]


def test_a_line_feed_after_a_cut_carriage_return_ends_no_second_line() -> None:
    assert events([b"data: 1\r", b"\ndata: 2\r", b"", b"\n\r", b"\n"]) == [ServerSentEvent("1\n2")]


def test_bytes_that_are_no_utf_8_become_replacement_characters() -> None:
    assert events([b"data: a\xff\xf0\x9f\n\n"]) == [ServerSentEvent("a\ufffd\ufffd")]


def test_a_byte_order_mark_is_skipped_at_the_start_only() -> None:
    stream = "\ufeffdata: 1\n\n\ufeffdata: 2\n\ndata: \ufeff3\n\n".encode()
    assert events(byte_by_byte(stream)) == [ServerSentEvent("1"), ServerSentEvent("\ufeff3")]


@pytest.mark.parametrize("endless", [b"data: aaaaaaaaaaaaaaa", b"data: a\n", b"data:\n", b"x"])
def test_an_event_that_never_ends_is_refused(endless: bytes) -> None:
    decoder = SSEDecoder(max_event_bytes=64)
    with pytest.raises(ProtocolError, match="over 64 bytes and still not finished"):
        for _ in range(65):
            decoder.feed(endless)


def test_the_limit_is_for_one_event_and_not_for_the_stream() -> None:
    decoder = SSEDecoder(max_event_bytes=64)
    for _ in range(100):
        assert decoder.feed(b": keep-alive\n" * 10 + b"data: 40 bytes or so of some text\n\n")


@given(st.lists(st.binary()))
def test_arbitrary_bytes_are_events_or_nothing(pieces: list[bytes]) -> None:
    for event in events(pieces):
        event.data.encode()
