"""A run from outside: events, result, early exits."""

from __future__ import annotations

import anyio
import pytest

import treewarden as tw
from treewarden.protocols import CallEnded, RunEnded, RunFailed, RunStarted, TextWritten
from treewarden.testing import Reply, ScriptedModel


def talker(model: ScriptedModel) -> tw.Agent:
    return tw.agent(id="talker", instructions="Talk.", model=model)


async def test_events_come_in_order_and_the_last_one_says_how_it_ended(anyio_backend: str) -> None:
    agent = talker(ScriptedModel([Reply("one two three", chunks=3)]))
    async with tw.stream(agent, "go") as run:
        events = [event async for event in run]
    assert isinstance(events[0], RunStarted)
    assert "".join(e.text for e in events if isinstance(e, TextWritten)) == "one two three"
    assert isinstance(events[-2], CallEnded)
    assert isinstance(events[-1], RunEnded)
    assert events[-1].stop_reason == "complete"


async def test_the_result_needs_no_reader(anyio_backend: str) -> None:
    agent = talker(ScriptedModel([Reply("done")]))
    async with tw.stream(agent, "go") as run:
        assert (await run.result()).text == "done"
        assert (await run.result()).text == "done"


async def test_texts_that_were_not_read_are_merged_and_none_is_lost(anyio_backend: str) -> None:
    text = "0123456789" * 500
    agent = talker(ScriptedModel([Reply(text, chunks=1_000, usage=tw.Usage(output=1_000))]))
    async with tw.stream(agent, "go") as run:
        await run.result()
        events = [event async for event in run]
    assert len(events) < 10
    assert "".join(e.text for e in events if isinstance(e, TextWritten)) == text


async def test_leaving_early_cancels_the_run_and_waits_until_everything_is_back(
    anyio_backend: str,
) -> None:
    model = ScriptedModel([Reply("a b c", chunks=3, chunk_delay=3_600)])
    async with tw.open_tree() as tree:
        async with tree.stream(talker(model), "go") as run:
            async for event in run:
                if isinstance(event, TextWritten):
                    break
        assert model.requests[0].ended == "cancelled"
        assert tree.snapshot()["counters"]["calls_in_flight"] == 0
        with pytest.raises(tw.RunCancelled, match="its stream was closed") as caught:
            await run.result()
    (line,) = caught.value.receipt.lines
    assert line.basis == "estimated"
    assert line.low_usd <= model.billed <= line.high_usd


async def test_cancel_reaches_the_receipt_with_its_reason(anyio_backend: str) -> None:
    model = ScriptedModel([Reply("never", delay=3_600)])
    async with tw.stream(talker(model), "go") as run:
        async for _ in run:
            run.cancel("the customer hung up")
            break
        with pytest.raises(tw.RunCancelled, match="the customer hung up") as caught:
            await run.result()
        last = [event async for event in run][-1]
    assert caught.value.receipt.reason == "the customer hung up"
    assert isinstance(last, RunFailed)


async def test_closing_from_another_task_settles_the_run(anyio_backend: str) -> None:
    model = ScriptedModel([Reply("never", delay=3_600)])
    stream = tw.stream(talker(model), "go")
    async with stream as run, anyio.create_task_group() as group:
        async for _ in run:
            group.start_soon(run.aclose)
            break
    assert model.requests[0].ended in ("cancelled", None)
    with pytest.raises(tw.RunCancelled):
        await run.result()


async def test_a_failed_run_ends_its_events_with_the_code(anyio_backend: str) -> None:
    agent = talker(ScriptedModel([Reply(error=529)]))
    async with tw.stream(agent, "go") as run:
        last = [event async for event in run][-1]
    assert isinstance(last, RunFailed)
    assert last.code == "cave_provider_terminal_error"


async def test_a_stream_must_be_entered_and_only_once(anyio_backend: str) -> None:
    stream = tw.stream(talker(ScriptedModel([Reply("x")])), "go")
    with pytest.raises(tw.UsageError, match="not open"):
        await stream.result()
    async with stream as run:
        await run.result()
    with pytest.raises(tw.UsageError, match="entered before"):
        async with stream:
            pass
