"""Blocking tools run in daemon threads of our own.

A thread cannot be killed. One that goes on after its call was cancelled is *abandoned*: it holds
no slot and no money, its late result is dropped, and being a daemon it does not keep the process
alive. anyio's worker threads are not used because the interpreter waits for those.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
from anyio import from_thread


class _Slot:
    """Where a thread leaves what it made."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.is_done = False


async def run_in_daemon_thread(
    function: Callable[[], Any], *, name: str, on_abandon: Callable[[], None]
) -> Any:
    """Call ``function`` in a thread and return its value or raise its error.

    ``on_abandon`` is called when the wait is cancelled while the thread still runs.
    """
    slot, done = _Slot(), anyio.Event()
    token = anyio.lowlevel.current_token()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            slot.value = context.run(function)
        except BaseException as error:
            slot.error = error
        slot.is_done = True
        try:
            from_thread.run_sync(done.set, token=token)
        except RuntimeError:
            pass  # the loop is gone, and with it everybody who waited

    threading.Thread(target=work, name=name, daemon=True).start()
    try:
        await done.wait()
    finally:
        if not slot.is_done:
            on_abandon()
    if slot.error is not None:
        raise slot.error
    return slot.value
