"""What tests with a replay server share: answers written by hand, a witness, the check of a run."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import anyio
import anyio.to_thread

import treewarden as tw
from treewarden.actors import HttpModel
from treewarden.ledgers import Event, TreeState, fold, to_decimal
from treewarden.protocols import Line, RunEvent, TextWritten
from treewarden.testing import Exchange, ReceivedRequest, ReplayServer

from ._streams import ended, sse, started, text_block

HAIKU = "anthropic/claude-haiku-4-5"
"""1 USD per million tokens in, 5 out: a call that read 12 tokens and wrote 7 cost 0.000047."""

KEY = "sk-ant-nobody-may-read-this-7c1e"

EVENT_STREAM = {"content-type": "text/event-stream"}
JSON = {"content-type": "application/json"}


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


def streamed(*events: Any, **how: Any) -> Exchange:
    """A streamed answer of these events; ``how`` says how it travels."""
    return Exchange(200, EVENT_STREAM, sse(*events), **how)


def says(text: str, *, request: Mapping[str, Any] | None = None) -> Exchange:
    """A whole Anthropic answer that read 12 tokens and wrote 7."""
    return streamed(started(), *text_block(0, text), *ended(), request=request)


def refuses(status: int, kind: str, message: str, **headers: str) -> Exchange:
    """An error answer as Anthropic gives it."""
    body = {"type": "error", "error": {"type": kind, "message": message}}
    return Exchange(status, {**JSON, **headers}, json.dumps(body).encode())


def forty_tokens() -> list[dict[str, Any]]:
    """The beginning of an answer: 40 pieces of text of four bytes each, and no end."""
    return [started(), *text_block(0, *["word"] * 40)[:-1]]


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────


def haiku(server: ReplayServer, **options: Any) -> HttpModel:
    return tw.model(HAIKU, base_url=server.base_url, api_key=KEY, **options)


def writer(model: Any, **options: Any) -> tw.Agent:
    """An agent without tools."""
    return tw.agent(id="writer", instructions="Write.", model=model, **options)


class Witness:
    """Sees everything that a run tells, and looks at what is left of it."""

    def __init__(self) -> None:
        self.events: list[RunEvent] = []
        self.journal: list[Event] = []

    async def run(self, agent: tw.Agent, prompt: Any, **options: Any) -> tw.Result:
        """``tw.run``, then the check that its books are closed and that nobody told the key."""
        try:
            result = await tw.run(
                agent,
                prompt,
                on_event=self.events.append,
                journal=self.journal.append,
                **options,
            )
        except tw.RunError as error:
            self.check(error.receipt)
            assert KEY not in "".join(traceback.format_exception(error))
            raise
        self.check(result.receipt)
        return result

    def check(self, receipt: tw.Receipt) -> None:
        receipt.check()
        check_closed(fold(self.journal))
        told = [json.dumps(receipt.to_json()), json.dumps(receipt.to_contract_json())]
        told += map(repr, [receipt, *self.events, *self.journal])
        assert not [text for text in told if KEY in text]

    @property
    def held(self) -> list[Decimal]:
        """What each call held, in USD."""
        held: list[Any] = [e for e in self.journal if type(e).__name__ == "Held"]
        return [to_decimal(event.amount) for event in held]

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, TextWritten))


def check_closed(state: TreeState) -> None:
    """Assert that a tree has nothing open: no lease but the root's, no money, nobody waiting."""
    state.check()
    assert set(state.nodes) <= {0}, state.nodes
    assert set(state.wallets) == {0}, state.wallets
    assert not state.holds, state.holds
    assert not state.waiting, state.waiting
    root, counters = state.wallets[0], state.counters
    assert (root.held, root.carved, root.set_aside, root.queued) == (0, 0, 0, 0)
    assert (counters.active, counters.calls_in_flight) == (0, 0)


def only_line(receipt: tw.Receipt) -> Line:
    (line,) = receipt.lines
    return line


async def hung_up(received: ReceivedRequest) -> bool:
    """Say whether the server notices within a second that its client is gone."""
    return await anyio.to_thread.run_sync(received.disconnected.wait, 1.0)
