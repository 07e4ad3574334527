"""Waiting for an event, at most until an instant."""

from __future__ import annotations

import math

import anyio


async def wait_until(ready: anyio.Event, instant: float) -> None:
    """Return when ``ready`` is set, or at ``instant`` of the event loop's clock."""
    if instant == math.inf:
        await ready.wait()
        return
    with anyio.CancelScope(deadline=instant):
        await ready.wait()
