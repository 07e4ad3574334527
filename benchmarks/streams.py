"""What a slow reader costs a run: 10,000 deltas, and a reader who sleeps until the run is over.

Beside it the same run without a reader. Both run in virtual time, a delta each 10 ms, so whether
the run waited for its reader shows in the instant at which it ended. What the reader finds when it
wakes is what was kept for it: it has to be within what the call may write at most.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import anyio
import attrs
from _measure import Row, arguments, backends, finish, interleaved, ratio_row

import treewarden as tw
from treewarden.protocols import TextWritten
from treewarden.testing import Reply, ScriptedModel, VirtualClock

SECONDS_PER_DELTA = 0.01
DELTA = "word"  # four bytes: a token
LONG = 1_000_000.0


@attrs.define
class Told:
    """What one run came to."""

    # When its lease ended, in virtual seconds.
    ended_at: float = 0.0
    output_limit: int = 1
    # Events and bytes of text that had been kept when the reader woke.
    kept_events: int = 0
    kept_bytes: int = 0


def talker(deltas: int, seconds_per_delta: float) -> tuple[tw.Agent, ScriptedModel]:
    reply = Reply(
        chunks=(DELTA,) * deltas,
        chunk_delay=seconds_per_delta,
        usage=tw.Usage(input=100, output=deltas),
    )
    model = ScriptedModel(lambda _: reply, max_output=deltas)
    output = tw.output(max_tokens=deltas)
    return tw.agent(id="talker", instructions="Talk.", model=model, output=output), model


async def without_reader(deltas: int, seconds_per_delta: float, told: Told) -> float:
    agent, _ = talker(deltas, seconds_per_delta)
    began = time.process_time()
    await tw.run(agent, "go", clock=VirtualClock.running())
    took = time.process_time() - began
    told.ended_at = anyio.current_time()
    return took


async def with_sleeping_reader(deltas: int, seconds_per_delta: float, told: Told) -> float:
    agent, model = talker(deltas, seconds_per_delta)
    clock = VirtualClock.running()

    def note(event: Any) -> None:
        if type(event).__name__ == "Ended" and event.node == 0:
            told.ended_at = event.at

    began = time.process_time()
    async with tw.stream(agent, "go", clock=clock, journal=note) as run:
        text = ""
        async for event in run:
            if isinstance(event, TextWritten):
                if not text:
                    await anyio.sleep(LONG)
                    told.kept_bytes -= len(event.text)
                text += event.text
                told.kept_bytes += len(event.text)
            told.kept_events += bool(text)
    took = time.process_time() - began
    assert text == DELTA * deltas, "a text was lost"
    told.output_limit = model.requests[0].output_limit
    return took


def main() -> int:
    options = arguments(__doc__ or "")
    deltas, rounds = (500, 3) if options.quick else (10_000, 11)
    rows: list[Row] = []
    extra: dict[str, dict[str, float]] = {}
    for backend in backends(options):
        alone, read = Told(), Told()

        def once(
            scenario: Any, told: Told, seconds: float, backend: Any = backend
        ) -> Callable[[], float]:
            def run() -> float:
                told.kept_events = told.kept_bytes = 0
                clock = VirtualClock()
                took: float = clock.run(scenario, deltas, seconds, told, backend=backend)
                return took

            return run

        found = interleaved(
            {
                "alone": once(without_reader, alone, SECONDS_PER_DELTA),
                "read": once(with_sleeping_reader, read, SECONDS_PER_DELTA),
            },
            rounds=rounds,
        )
        rows.append(
            ratio_row(f"{backend}: CPU with a sleeping reader / none", found, "read", "alone", 1.5)
        )
        rows.append(
            Row(
                what=f"{backend}: tokens kept for it / the output limit",
                value=read.kept_bytes / len(DELTA) / read.output_limit,
                target=1.0,
            )
        )
        rows.append(
            Row(
                what=f"{backend}: virtual seconds that the run ends later",
                value=abs(read.ended_at - alone.ended_at),
                target=0.0,
            )
        )
        # The same with nothing between two deltas, where what is told is all there is to do.
        bare = interleaved(
            {
                "alone": once(without_reader, Told(), 0.0),
                "read": once(with_sleeping_reader, Told(), 0.0),
            },
            rounds=rounds,
        )
        extra[backend] = {
            "events_kept": read.kept_events,
            "cpu_us_per_delta": _median_us(found["read"], deltas),
            "cpu_us_per_delta_alone": _median_us(found["alone"], deltas),
            "cpu_us_per_delta_at_once": _median_us(bare["read"], deltas),
            "cpu_us_per_delta_at_once_alone": _median_us(bare["alone"], deltas),
        }
    return finish("streams", rows, {"details": extra})


def _median_us(times: list[float], deltas: int) -> float:
    return round(1e6 * sorted(times)[len(times) // 2] / deltas, 3)


if __name__ == "__main__":
    sys.exit(main())
