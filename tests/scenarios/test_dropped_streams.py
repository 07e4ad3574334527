"""Public reports about streams that nobody reads to their end.

However a stream is let go of, its run settles by itself: the provider sees the connection close,
what came is charged, pending tools are cancelled, and no loop complains or spins.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

import anyio
import pytest

import treewarden as tw
from treewarden.ledgers import Admitted, Ended, Event, Outcome, Settled
from treewarden.protocols import TextWritten
from treewarden.testing import Exchange, ReplayServer, Reply, ScriptedModel, VirtualClock

from ..wire._streams import DONE, USAGE, chunk, sse, usage_only
from .kit import Backend, Measured, P, Witness, both_backends, check_books, check_closed, explore

OpenStream: TypeAlias = Callable[[], tw.RunStream]
LetGo: TypeAlias = Callable[[OpenStream], Coroutine[Any, Any, None]]

# --- the three ways of letting go of a stream ----------------------------------------------------


async def opened(stream: tw.RunStream) -> tw.RunStream:
    """A stream that is open, and has been read as far as the first text: three events."""
    run = await stream.__aenter__()
    while not isinstance(await anext(run), TextWritten):
        pass
    return run


async def in_a_task_of_its_own(function: Callable[[], Awaitable[None]]) -> None:
    async def task() -> None:
        await function()

    async with anyio.create_task_group() as group:
        group.start_soon(task)


async def dropped_and_collected_in_another_task(stream: OpenStream) -> None:
    held: list[tw.RunStream] = []

    async def open_it() -> None:
        held.append(await opened(stream()))

    async def collect_it() -> None:
        held.clear()
        gc.collect(0)

    await in_a_task_of_its_own(open_it)
    await in_a_task_of_its_own(collect_it)


async def closed_from_another_task(stream: OpenStream) -> None:
    held: list[tw.RunStream] = []

    async def open_it() -> None:
        held.append(await opened(stream()))

    async def close_it() -> None:
        await held[0].aclose()

    await in_a_task_of_its_own(open_it)
    await in_a_task_of_its_own(close_it)


async def given_up_after_50_ms(stream: OpenStream) -> None:
    # From the first text on, so that it does not depend on how long connecting takes.
    run = await opened(stream())

    async def read() -> None:
        try:
            async for _ in run:
                pass
        finally:
            await run.aclose()

    if is_on_asyncio():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(), 0.05)
    else:
        import trio

        with trio.move_on_after(0.05) as scope:
            await read()
        assert scope.cancelled_caught


def is_on_asyncio() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


WAYS: list[LetGo] = [
    dropped_and_collected_in_another_task,
    closed_from_another_task,
    given_up_after_50_ms,
]
each_way = pytest.mark.parametrize("way", WAYS)


def talker(model: Any) -> tw.Agent:
    return tw.agent(id="talker", instructions="Talk.", model=model)


def check_cancelled(journal: list[Event]) -> None:
    """Assert that every span of one tree ended, each as cancelled and below the same root."""
    below = {e.node: e for e in journal if isinstance(e, Admitted)}
    ended = {e.node: e.outcome for e in journal if isinstance(e, Ended)}
    assert below
    assert ended == {0: Outcome.OK, **dict.fromkeys(below, Outcome.CANCELLED)}
    assert len({e.span_id for e in below.values()}) == len(below)
    for admitted in below.values():
        # Its parents lead to the root: one trace.
        while admitted.parent != 0:
            admitted = below[admitted.parent]


# --- E44, E79: in virtual time -------------------------------------------------------------------


def test_E44_streams_let_go_of_in_three_ways_settle_and_their_siblings_finish(
    record_property: Measured, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> Witness:
        # Two events are there at once, and then nothing comes for an hour.
        model = ScriptedModel(
            lambda _: Reply(chunks=("one ", "two ", "three"), chunk_delay=3_600), price=P
        )
        quick = ScriptedModel(lambda _: Reply(chunks=("a", "b", "c"), chunk_delay=0.5), price=P)
        witness = Witness()
        budget = tw.Budget(max_usd="5.00")
        async with tw.open_tree(budget=budget, **witness.tree_options) as tree:
            async with anyio.create_task_group() as group:
                for way in WAYS:
                    group.start_soon(way, lambda: tree.stream(talker(model), "go"))
                for _ in range(3):
                    group.start_soon(tree.run, talker(quick), "go")
            # Virtual time moves on only where nothing is left to do: nothing spins.
            await anyio.sleep(2)
            assert [request.ended for request in model.requests] == ["cancelled"] * 3
            assert [request.ended for request in quick.requests] == ["complete"] * 3
            assert tree.snapshot()["counters"]["active"] == 0
            assert list(tree.snapshot()["nodes"]) == ["root"]
            tree.check()
        settled = [e for e in witness.journal if isinstance(e, Settled)]
        assert sorted(e.basis for e in settled) == ["estimated"] * 3 + ["provider_reported"] * 3
        assert all(e.usd > 0 for e in settled)
        check_closed(witness)
        return witness

    explore(scenario, record_property, "E44")
    assert warnings_in(caplog) == []


@both_backends
@each_way
def test_E79_the_spans_of_a_stream_that_was_let_go_of_end_as_cancelled_in_one_trace(
    way: LetGo, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    @tw.tool(effect="read", runs="host")
    async def wait() -> str:
        """Wait."""
        await anyio.sleep(3_600)
        return "waited"

    async def scenario() -> None:
        def script(request: Any) -> Reply:
            if request.agent_path.count("/") == 1:
                return Reply("see", tool_calls=[("work", {"task": "it"}), ("wait", {})])
            return Reply(chunks=("one ", "two"), chunk_delay=3_600)

        model = ScriptedModel(script)
        work = tw.subagent(name="work", description="Works.", agent=talker(model))
        boss = tw.agent(id="boss", instructions="Plan.", model=model, tools=[work, wait])
        witness = Witness()
        await way(lambda: tw.stream(boss, "go", **witness.tree_options))
        await anyio.sleep(2)
        assert model.open_requests == 0
        check_closed(witness)
        assert witness.state.counters.open_spans == 0
        check_cancelled(witness.journal)

    VirtualClock().run(scenario, backend=backend)
    assert warnings_in(caplog) == []


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# --- E44: over HTTP, in real time ----------------------------------------------------------------

WRITTEN = sse(chunk("one "), chunk("two "))


@pytest.mark.slow
@both_backends
@each_way
def test_E44_over_http_the_connection_closes_the_call_is_charged_and_nothing_spins(
    way: LetGo, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    answer = Exchange(
        200,
        {"content-type": "text/event-stream"},
        WRITTEN + b"data: never\n\n",
        stall_after_bytes=len(WRITTEN),
    )

    whole = sse(chunk("hi"), chunk(finish="stop"), usage_only(USAGE), DONE)
    first = Exchange(200, {"content-type": "text/event-stream"}, whole)

    async def scenario(server: ReplayServer) -> None:
        model = tw.model("local/gpt", base_url=server.base_url, price=P)
        journal: list[Event] = []
        async with tw.open_tree(budget=tw.Budget(max_usd="1.00"), journal=journal.append) as tree:
            # What is done once, such as reading certificates, is not to be measured.
            await tree.run(talker(model), "go")
            journal.clear()
            await way(lambda: tree.stream(talker(model), "go"))
            received = server.requests[1]
            assert await anyio.to_thread.run_sync(received.disconnected.wait, 1)
            began = time.process_time()
            await anyio.sleep(2)
            assert time.process_time() - began < 0.05 * 2
            tree.check()
            assert tree.snapshot()["counters"]["open_spans"] == 1
        (settled,) = [e for e in journal if isinstance(e, Settled)]
        assert settled.basis == "estimated"
        assert settled.usd > 0
        check_cancelled(journal)

    with ReplayServer([first, answer]) as server:
        anyio.run(scenario, server, backend=backend)
    assert warnings_in(caplog) == []


# --- E45: leaving early does not drain the stream ------------------------------------------------

TOKENS = 10_000


def test_E45_leaving_after_the_first_token_cancels_the_tool_and_pays_for_what_came(
    record_property: Measured,
) -> None:
    async def scenario() -> Witness:
        cancelled: list[float] = []

        @tw.tool(effect="read", runs="host")
        async def wait() -> str:
            """Wait."""
            try:
                await anyio.sleep(3_600)
            except anyio.get_cancelled_exc_class():
                cancelled.append(anyio.current_time())
                raise
            return "waited"

        def script(request: Any) -> Reply:
            if request.agent_path.count("/") == 1:
                calls: list[tuple[str, dict[str, Any]]] = [("work", {"task": "it"})]
                calls += [("wait", {})] * 3
                return Reply(tool_calls=calls, usage=tw.Usage(input=100, output=10))
            # A token each 10 ms, four bytes long.
            usage = tw.Usage(input=100, output=TOKENS)
            return Reply(chunks=("word",) * TOKENS, delay=1, chunk_delay=0.01, usage=usage)

        model = ScriptedModel(script, price=P)
        work = tw.subagent(name="work", description="Works.", agent=talker(model))
        boss = tw.agent(id="boss", instructions="Plan.", model=model, tools=[work, wait])
        witness = Witness()

        async def read_one_token(tree: tw.Tree) -> None:
            stream = tree.stream(boss, "go")
            async with stream as run:
                async for event in run:
                    witness.hear(event)
                    if isinstance(event, TextWritten):
                        break
                left = anyio.current_time()
            # The block is left when everything is back: at once.
            assert anyio.current_time() == left == 1
            with pytest.raises(tw.RunCancelled) as caught:
                await stream.result()
            receipt = caught.value.receipt
            receipt.check()
            receipts.append(receipt)
            (line,) = receipt.subagents[0].lines
            assert line.basis == "estimated"
            assert 1 <= line.output_tokens < 5

        receipts: list[tw.Receipt] = []
        async with tw.open_tree(**witness.tree_options) as tree:
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(read_one_token, tree)
            assert cancelled == [1] * 9
        check_books(witness, receipts, model)
        ended = {request.agent_path.count("/"): request.ended for request in model.requests}
        assert ended == {1: "complete", 2: "cancelled"}
        return witness

    explore(scenario, record_property, "E45")


@pytest.mark.slow
@both_backends
def test_E45_over_http_the_provider_sees_the_close_within_a_second(backend: Backend) -> None:
    tokens = [chunk("word") for _ in range(TOKENS)]
    body = sse(*tokens)
    answer = Exchange(
        200,
        {"content-type": "text/event-stream"},
        body,
        chunk_bytes=len(body) // TOKENS,
        pause_seconds=0.01,
    )

    async def scenario(server: ReplayServer) -> None:
        model = tw.model("local/gpt", base_url=server.base_url, price=P)
        async with tw.stream(talker(model), "go", budget=tw.Budget(max_usd="1.00")) as run:
            async for event in run:
                if isinstance(event, TextWritten):
                    break
        (received,) = server.requests
        assert await anyio.to_thread.run_sync(received.disconnected.wait, 1)
        with pytest.raises(tw.RunCancelled) as caught:
            await run.result()
        (line,) = caught.value.receipt.lines
        assert line.basis == "estimated"
        assert 1 <= line.output_tokens < TOKENS // 20

    with ReplayServer([answer]) as server:
        anyio.run(scenario, server, backend=backend)
