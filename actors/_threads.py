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
from anyio.lowlevel import EventLoopToken


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
        # Sent, not awaited: a loop that ends meanwhile never answers, and the thread would stay.
        send_to_loop(token, done.set)

    threading.Thread(target=work, name=name, daemon=True).start()
    try:
        await done.wait()
    finally:
        if not slot.is_done:
            on_abandon()
    if slot.error is not None:
        raise slot.error
    return slot.value


def send_to_loop(token: EventLoopToken, message: Callable[[], object]) -> None:
    """Have ``message`` called in a loop, from any thread and from a finaliser.

    Nothing happens when that loop is gone.
    """
    loop: Any = token.native_token
    send = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon
    try:
        send(message)
    except RuntimeError:
        pass  # asyncio's and trio's word for a loop that has ended
