"""Server-sent events out of bytes, cut anywhere.

One rule keeps this file simple: the line is the only unit. Bytes wait in a buffer until the end of
their line is seen and are decoded after that, so a read that ends inside a UTF-8 character, inside
``\\r\\n`` or inside an event looks like any other. As the standard wants it, an event that the
stream ends before its empty line is dropped: what was cut off is never taken for whole.
"""

from __future__ import annotations

import attrs

from ._errors import ProtocolError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# Far above any event a provider sends (pictures and search results come whole); what is above it
# is not an answer but something that would fill the memory.
MAX_EVENT_BYTES = 16 * 2**20


@attrs.frozen
class ServerSentEvent:
    """One event. ``event`` is its type, "message" where the stream names none."""

    data: str
    event: str = "message"


class SSEDecoder:
    """Turn bytes into events. Reads no socket and waits for nothing."""

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        # The bytes of the line whose end has not come yet.
        self._line = bytearray()
        # The event whose empty line has not come yet, and how many bytes its data has.
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._event = ""
        # True iff the last byte was "\r": a "\n" right after it belongs to the same line end.
        self._after_return = False
        self._is_first_line = True

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """Return the events that ``data`` completes.

        Raises:
            ProtocolError: An unfinished event is larger than allowed. The stream is of no use
                any more.
        """
        if not data:
            return []
        if self._after_return and data.startswith(b"\n"):
            data = data[1:]
        self._after_return = data.endswith(b"\r")
        events: list[ServerSentEvent] = []
        for piece in data.splitlines(keepends=True):
            text = piece.rstrip(b"\r\n")
            self._line += text
            self._check_size()
            if len(text) < len(piece):
                self._end_line(events)
        return events

    def _check_size(self) -> None:
        if len(self._line) + self._data_bytes > self._max_event_bytes:
            raise ProtocolError(
                f"an event of a stream is over {self._max_event_bytes} bytes and still not "
                "finished. The other side does not speak server-sent events."
            )

    def _end_line(self, events: list[ServerSentEvent]) -> None:
        line = bytes(self._line)
        self._line.clear()
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if line:
            self._read_field(line)
        else:
            self._end_event(events)

    def _read_field(self, line: bytes) -> None:
        # A comment is a field without a name, so it is skipped with the fields nobody needs here.
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._data_bytes += len(value) + 1
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")

    def _end_event(self, events: list[ServerSentEvent]) -> None:
        if self._data:
            data = b"\n".join(self._data).decode("utf-8", "replace")
            events.append(ServerSentEvent(data, self._event or "message"))
        self._data.clear()
        self._data_bytes = 0
        self._event = ""
