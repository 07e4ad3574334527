"""Ctrl-C: the first one ends the run in order, the second one ends the process.

The handler does no more than is safe wherever the program happens to be: it puts a call into the
event loop's queue. So it works on both backends alike, and while a tool blocks the loop the second
Ctrl-C still gets through.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import anyio.lowlevel

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While open, a signal calls ``cancel(reason)`` in the event loop that opened this."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        # The first signal that came, or None.
        self.caught: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        token = anyio.lowlevel.current_token()
        self._backend, self._loop = token.backend_class, token.native_token
        # Only the main thread may set handlers; elsewhere signals are whoever's that thread is.
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._on_signal) for s in _SIGNALS}
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for which, handler in self._previous.items():
            signal.signal(which, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.caught is not None:
            _die_of(number)
        self.caught = signal.Signals(number)
        reason = f"interrupted by {self.caught.name}"
        self._backend.run_sync_soon(self._cancel, (reason,), self._loop)


def _die_of(number: int) -> None:
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # the live view had hidden the cursor
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
