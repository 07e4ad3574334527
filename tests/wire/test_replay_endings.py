"""How a call can end on a real wire, what each ending is charged, and what is told about it."""

from __future__ import annotations

import gc
import socket
import threading
from decimal import Decimal
from typing import Any

import anyio
import attrs
import pytest

import treewarden as tw
from treewarden.protocols import TextWritten
from treewarden.testing import Exchange, ReplayServer

from ._replays import (
    EVENT_STREAM,
    HAIKU,
    JSON,
    KEY,
    Witness,
    forty_tokens,
    haiku,
    hung_up,
    only_line,
    refuses,
    says,
    streamed,
    writer,
)
from ._streams import DONE, USAGE, chunk, ended, sse, started, text_block, usage_only

pytestmark = pytest.mark.timeout(20)

ONE_DOLLAR = tw.Budget(max_usd="1.00")
ZERO = Decimal(0)

# In real seconds: enough for a request to leave and 40 tokens to arrive on a busy machine.
DEADLINE = 0.8
CHAT_HI = streamed(chunk("hi"), chunk(finish="stop"), usage_only(USAGE), DONE)
OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}


async def failure(witness: Witness, *exchanges: Exchange, **options: Any) -> tw.RunError:
    """Run an agent against these exchanges, and return the error that must come of it."""
    with ReplayServer(exchanges) as server:
        with pytest.raises(tw.RunError) as caught:
            await witness.run(writer(haiku(server)), "hello", budget=ONE_DOLLAR, **options)
        assert server.left == ()
    return caught.value


# ── error answers ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", "cave_provider_terminal_error"),
        (401, "authentication_error", "cave_provider_credentials"),
        (403, "permission_error", "cave_provider_credentials"),
        (429, "rate_limit_error", "cave_provider_terminal_error"),
        (500, "api_error", "cave_provider_terminal_error"),
        (529, "overloaded_error", "cave_provider_terminal_error"),
    ],
)
async def test_an_error_answer_ends_the_run_and_costs_nothing(
    status: int, kind: str, code: str
) -> None:
    witness = Witness()
    error = await failure(witness, refuses(status, kind, "no, because"))
    cause = error.__cause__
    assert isinstance(cause, tw.ProviderError)
    assert (error.code, cause.status, cause.kind) == (code, status, kind)
    assert "no, because" in str(error)
    line = only_line(error.receipt)
    assert (line.basis, line.usd, line.high_usd, line.tokens) == (
        "pre_stream_no_usage",
        ZERO,
        ZERO,
        0,
    )
    assert error.receipt.total.calls == 1
    assert (error.receipt.stop_reason, error.receipt.error_code) == ("failed", code)


async def test_a_refused_key_is_a_credentials_error() -> None:
    error = await failure(Witness(), refuses(401, "authentication_error", "invalid x-api-key"))
    assert isinstance(error.__cause__, tw.CredentialsError)


async def test_a_rate_limit_tells_how_long_the_provider_asks_to_wait() -> None:
    refused = refuses(429, "rate_limit_error", "slow down", **{"retry-after": "7"})
    error = await failure(Witness(), refused)
    assert isinstance(error.__cause__, tw.ProviderError)
    assert error.__cause__.retry_after_seconds == 7


async def test_usage_in_an_error_answer_is_charged() -> None:
    body = (
        b'{"error": {"type": "api_error", "message": "too late"},'
        b' "usage": {"input_tokens": 12, "output_tokens": 7}}'
    )
    error = await failure(Witness(), Exchange(500, JSON, body))
    line = only_line(error.receipt)
    assert (line.basis, line.usd) == ("provider_reported", Decimal("0.000047"))


async def test_an_error_page_that_breaks_off_still_tells_its_status() -> None:
    broken = Exchange(502, {"content-type": "text/html"}, b"<h1>Bad gate", break_after_bytes=12)
    error = await failure(Witness(), broken)
    assert isinstance(error.__cause__, tw.ProviderError)
    assert error.__cause__.status == 502
    assert only_line(error.receipt).basis == "pre_stream_no_usage"


async def test_an_error_page_that_quotes_the_key_is_not_passed_on() -> None:
    error = await failure(Witness(), refuses(401, "authentication_error", f"bad key {KEY}!"))
    assert "bad key …!" in str(error)


async def test_a_refused_redirect_is_not_followed_with_the_key() -> None:
    with ReplayServer([]) as elsewhere:
        moved = Exchange(307, {"location": elsewhere.base_url + "/v1/messages"})
        error = await failure(Witness(), moved)
        assert elsewhere.requests == ()
    assert isinstance(error.__cause__, tw.ProviderError)
    assert error.__cause__.status == 307


# ── no answer ────────────────────────────────────────────────────────────────────────────────────


async def test_where_nobody_listens_nothing_is_sent_and_nothing_charged() -> None:
    with ReplayServer([]) as server:
        model = haiku(server)
    witness = Witness()
    with pytest.raises(tw.RunError) as caught:
        await witness.run(writer(model), "hello", budget=ONE_DOLLAR)
    cause, receipt = caught.value.__cause__, caught.value.receipt
    assert isinstance(cause, tw.ProviderError)
    assert (cause.was_sent, cause.status, cause.kind) == (False, None, "transport")
    assert "ConnectError" in str(cause)
    line = only_line(receipt)
    assert (line.basis, line.usd, line.high_usd) == ("not_dispatched", ZERO, ZERO)
    assert receipt.total.calls == 0


# ── answers that break off ───────────────────────────────────────────────────────────────────────


async def test_a_stream_that_breaks_off_keeps_its_text_and_is_an_estimate() -> None:
    body = sse(*forty_tokens())
    witness = Witness()
    error = await failure(
        witness, Exchange(200, EVENT_STREAM, body, chunk_bytes=100, break_after_bytes=len(body))
    )
    assert isinstance(error.__cause__, tw.ProviderInterrupted)
    assert error.code == "provider-interrupted"
    assert error.text == witness.text == "word" * 40
    check_forty_tokens(error.receipt, witness)


async def test_a_stream_without_its_last_event_is_an_estimate() -> None:
    witness = Witness()
    error = await failure(witness, streamed(*forty_tokens()))
    assert isinstance(error.__cause__, tw.ProviderInterrupted)
    assert "message_stop" in str(error)
    assert error.text == "word" * 40
    check_forty_tokens(error.receipt, witness)


@pytest.mark.parametrize("chunk_bytes", [None, 50], ids=["one_piece", "pieces"])
async def test_an_error_inside_an_answer_keeps_the_text_before_it(chunk_bytes: int | None) -> None:
    # In one piece the text and the error arrive together: what came first still counts.
    witness = Witness()
    stream = streamed(*forty_tokens(), OVERLOADED, chunk_bytes=chunk_bytes)
    error = await failure(witness, stream)
    cause = error.__cause__
    assert isinstance(cause, tw.ProviderInterrupted)
    assert (cause.status, cause.kind) == (529, "overloaded_error")
    assert error.text == witness.text == "word" * 40
    check_forty_tokens(error.receipt, witness)


def stalled_after_forty_tokens() -> Exchange:
    body = sse(*forty_tokens())
    return Exchange(200, EVENT_STREAM, body, stall_after_bytes=len(body))


def check_forty_tokens(receipt: tw.Receipt, witness: Witness) -> None:
    """12 tokens were read and 40 written; of the writing 1 had been reported."""
    line = only_line(receipt)
    assert line.basis == "estimated"
    assert (line.input_tokens, line.output_tokens, line.tokens) == (12, 40, 52)
    assert line.usd == Decimal("0.000212")
    assert (line.low_usd, line.low_tokens) == (Decimal("0.000017"), 13)
    assert [line.high_usd] == witness.held
    assert line.low_usd < line.usd < line.high_usd
    assert receipt.total.high_usd == line.high_usd
    assert line.note


async def test_an_error_event_before_any_output_is_no_interruption() -> None:
    error = await failure(Witness(), streamed(OVERLOADED))
    cause = error.__cause__
    assert type(cause) is tw.ProviderError
    assert cause.status == 529
    assert only_line(error.receipt).basis == "pre_stream_no_usage"


async def test_an_answer_that_was_whole_survives_the_loss_of_its_connection() -> None:
    whole = sse(started(), *text_block(0, "Hi"), *ended())
    with ReplayServer([Exchange(200, EVENT_STREAM, whole, break_after_bytes=len(whole))]) as server:
        result = await Witness().run(writer(haiku(server)), "hello")
    assert (result.text, result.complete) == ("Hi", True)
    assert only_line(result.receipt).usd == Decimal("0.000047")


async def test_bytes_that_are_no_events_break_the_answer_off() -> None:
    witness = Witness()
    body = sse(*forty_tokens()) + b"data: {not json\n\n"
    error = await failure(witness, Exchange(200, EVENT_STREAM, body))
    assert isinstance(error.__cause__, tw.ProviderInterrupted)
    assert error.text == witness.text == "word" * 40
    check_forty_tokens(error.receipt, witness)


async def test_a_page_instead_of_an_answer_is_an_error_that_quotes_it() -> None:
    page = Exchange(200, {"content-type": "text/html"}, b"<h1>Welcome to the hotel wifi</h1>")
    error = await failure(Witness(), page)
    assert isinstance(error.__cause__, tw.ProviderInterrupted)
    assert "hotel wifi" in str(error)


async def test_money_of_an_open_call_is_back_for_the_next_run_of_a_tree() -> None:
    with ReplayServer([stalled_after_forty_tokens(), says("fine")]) as server:
        agent = writer(haiku(server, settings={"max_tokens": 1000}))
        # A call holds a little over 0.005: there is money for one at a time.
        async with tw.open_tree(budget=tw.Budget(max_usd="0.006", clamp=False)) as tree:
            async with tree.stream(agent, "hello") as run:
                async for event in run:
                    if isinstance(event, TextWritten):
                        break
            second = await tree.run(agent, "hello")
        tree.ledger.check_closed()
    assert second.text == "fine"


# ── the connection is lost before there was any text ─────────────────────────────────────────────


async def test_a_connection_lost_without_an_answer_is_an_estimate_of_what_was_sent() -> None:
    witness = Witness()
    error = await failure(witness, Exchange(None))
    cause = error.__cause__
    assert isinstance(cause, tw.ProviderError)
    assert (cause.status, cause.kind, cause.was_sent) == (None, "transport", True)
    line = only_line(error.receipt)
    # The request had left. Whether anybody worked on it, nobody knows.
    assert (line.basis, line.low_usd, line.output_tokens) == ("estimated", ZERO, 0)
    assert line.input_tokens > 100
    assert [line.high_usd] == witness.held


async def test_a_stream_lost_before_its_first_word_is_an_estimate_as_well() -> None:
    witness = Witness()
    error = await failure(witness, streamed(started()))
    assert isinstance(error.__cause__, tw.ProviderInterrupted)
    line = only_line(error.receipt)
    # The usage of the first event is a beginning, and no account of the call.
    assert (line.basis, line.usd, line.low_usd) == ("estimated", *[Decimal("0.000017")] * 2)
    assert [line.high_usd] == witness.held


# ── answers that somebody ends ───────────────────────────────────────────────────────────────────


async def test_a_cancelled_run_hangs_up_at_once_and_is_an_estimate() -> None:
    with ReplayServer([stalled_after_forty_tokens()]) as server:
        agent = writer(haiku(server))
        async with tw.stream(agent, "hello", budget=ONE_DOLLAR) as run:
            read = ""
            async for event in run:
                if isinstance(event, TextWritten):
                    read += event.text
                if len(read) == 160:
                    break
            run.cancel("changed my mind")
            with pytest.raises(tw.RunCancelled) as caught:
                await run.result()
        assert await hung_up(server.requests[0])
    error = caught.value
    assert (error.reason, error.text) == ("changed my mind", "word" * 40)
    error.receipt.check()
    line = only_line(error.receipt)
    assert (line.basis, line.usd) == ("estimated", Decimal("0.000212"))
    assert line.low_usd == Decimal("0.000017")


async def test_cancelling_around_a_run_hangs_up_as_well() -> None:
    with ReplayServer([stalled_after_forty_tokens()]) as server:
        seen = anyio.Event()

        def on_event(event: Any) -> None:
            if isinstance(event, TextWritten):
                seen.set()

        async with anyio.create_task_group() as group:

            async def work() -> None:
                await tw.run(writer(haiku(server)), "hello", on_event=on_event)

            group.start_soon(work)
            await seen.wait()
            group.cancel_scope.cancel()
        assert await hung_up(server.requests[0])


async def test_a_deadline_ends_a_call_that_stalls() -> None:
    witness = Witness()
    with ReplayServer([stalled_after_forty_tokens()]) as server:
        with anyio.fail_after(5):
            result = await witness.run(
                writer(haiku(server)),
                "hello",
                budget=ONE_DOLLAR,
                limits=tw.Limits(deadline=DEADLINE, min_call_seconds=0),
            )
        assert await hung_up(server.requests[0])
    assert (result.stop_reason, result.complete) == ("deadline", False)
    assert result.text == "word" * 40
    line = only_line(result.receipt)
    assert (line.basis, line.usd) == ("estimated", Decimal("0.000212"))
    assert [line.high_usd] == witness.held


async def test_a_deadline_ends_a_call_that_gets_no_answer_at_all() -> None:
    witness = Witness()
    with ReplayServer([Exchange(None, stall_after_bytes=0)]) as server:
        result = await witness.run(
            writer(haiku(server)),
            "hello",
            budget=ONE_DOLLAR,
            limits=tw.Limits(deadline=DEADLINE, min_call_seconds=0),
        )
        assert await hung_up(server.requests[0])
    assert result.stop_reason == "deadline"
    line = only_line(result.receipt)
    # The request had left, so the provider may have read all of it.
    assert (line.basis, line.output_tokens, line.low_usd) == ("estimated", 0, ZERO)
    assert line.input_tokens > 0
    assert [line.high_usd] == witness.held


async def test_a_stream_that_falls_silent_ends_as_stalled_and_is_hung_up_on() -> None:
    witness = Witness()
    with ReplayServer([stalled_after_forty_tokens()]) as server:
        with anyio.fail_after(5):
            result = await witness.run(
                writer(haiku(server)),
                "hello",
                budget=ONE_DOLLAR,
                limits=tw.Limits(idle_timeout=DEADLINE),
            )
        assert await hung_up(server.requests[0])
    assert (result.stop_reason, result.complete) == ("stalled", False)
    assert result.text == "word" * 40
    line = only_line(result.receipt)
    assert (line.basis, line.usd) == ("estimated", Decimal("0.000212"))
    assert "idle_timeout" in (line.note or "")


async def test_any_byte_of_an_answer_is_a_sign_of_life() -> None:
    """A provider that thinks sends pings and comments, which say only that it is there."""
    comments = b": still here\n\n" * 12
    whole = streamed(started(), *text_block(0, "a"), *ended())
    slow = attrs.evolve(whole, body=comments + whole.body, chunk_bytes=14, pause_seconds=0.05)
    witness = Witness()
    with ReplayServer([slow]) as server:
        result = await witness.run(
            writer(haiku(server)), "hello", limits=tw.Limits(idle_timeout=0.5)
        )
    assert (result.stop_reason, result.text) == ("complete", "a")


async def test_a_slow_stream_is_told_while_it_comes() -> None:
    slow = streamed(
        started(), *text_block(0, "a", "b", "c"), *ended(), chunk_bytes=120, pause_seconds=0.01
    )
    witness = Witness()
    with ReplayServer([slow]) as server:
        result = await witness.run(writer(haiku(server)), "hello")
    assert result.text == "abc"
    assert [e.text for e in witness.events if isinstance(e, TextWritten)] == ["a", "b", "c"]


# ── before anything is spent ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("model", "variable"),
    [(HAIKU, "ANTHROPIC_API_KEY"), ("openai/gpt-5.4-mini", "OPENAI_API_KEY")],
)
async def test_a_missing_key_is_named_before_anything_starts(
    model: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    journal: list[Any] = []
    with pytest.raises(tw.CredentialsError, match=f"set {variable} or pass api_key="):
        await tw.run(writer(model), "hello", journal=journal.append)
    assert journal == []


async def test_a_missing_key_of_a_subagent_is_named_before_its_parent_is_paid_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    child = tw.subagent(name="child", description="Helps.", agent=writer(HAIKU))
    with ReplayServer([says("hi")]) as server:
        agent = tw.agent(id="boss", instructions="", model=haiku(server), tools=[child])
        with pytest.raises(tw.CredentialsError, match="ANTHROPIC_API_KEY"):
            await tw.run(agent, "hello")
        assert server.requests == ()


@pytest.mark.parametrize("ending", ["\n", "\r\n", " ", "…"])
async def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(ending: str) -> None:
    # The HTTP library refuses such a key too, and quotes it.
    with ReplayServer([says("hi")]) as server:
        model = tw.model(HAIKU, base_url=server.base_url, api_key=KEY + ending)
        with pytest.raises(tw.CredentialsError, match="line end") as caught:
            await tw.run(writer(model), "hello")
        assert server.requests == ()
    assert KEY not in str(caught.value)


async def test_the_key_is_sent_and_never_shown() -> None:
    witness = Witness()
    with ReplayServer([says("hi")]) as server:
        model = haiku(server)
        agent = writer(model)
        result = await witness.run(agent, "hello")
        assert server.requests[0].headers["x-api-key"] == KEY
    for shown in (model, agent, result, result.messages):
        assert KEY not in repr(shown)
    assert KEY not in str(result)


async def test_an_unknown_model_is_refused_under_a_budget_in_usd_before_any_request() -> None:
    with ReplayServer([says("hi")]) as server:
        model = tw.model("anthropic/claude-haiku-4-6", base_url=server.base_url, api_key=KEY)
        with pytest.raises(tw.UsageError, match="'anthropic/claude-haiku-4-5'") as caught:
            await tw.run(writer(model), "hello", budget=ONE_DOLLAR)
        assert server.requests == ()
    assert caught.value.code == "cave_budget_denomination_unavailable"
    assert "price=tw.Price(" in str(caught.value)


@pytest.mark.parametrize("budget", [tw.Budget(max_tokens=50_000), None], ids=["tokens", "none"])
async def test_an_unknown_model_runs_where_money_is_not_the_limit(budget: Any) -> None:
    with ReplayServer([says("hi")]) as server:
        model = tw.model("anthropic/claude-haiku-4-6", base_url=server.base_url, api_key=KEY)
        result = await Witness().run(writer(model), "hello", budget=budget)
    line = only_line(result.receipt)
    assert (result.text, line.tokens, line.usd) == ("hi", 19, ZERO)
    assert line.is_unpriced
    assert result.receipt.total.is_unpriced


async def test_a_pinned_price_lets_an_unknown_model_run_under_a_budget_in_usd() -> None:
    price = tw.Price(input="10", output="100")
    with ReplayServer([CHAT_HI]) as server:
        model = tw.model("acme/new", base_url=server.base_url, price=price)
        result = await Witness().run(writer(model), "hello", budget=ONE_DOLLAR)
    # 12 tokens at 10 and 7 at 100 USD per million.
    assert only_line(result.receipt).usd == Decimal("0.00082")


# ── what is held is what is on the wire ──────────────────────────────────────────────────────────


async def held_and_sent(limit: dict[str, Any], **options: Any) -> tuple[Decimal, dict[str, Any]]:
    """Run a call; return what its output held, in USD, and the body that was sent."""
    witness = Witness()
    with ReplayServer([says("hi")]) as server:
        model = haiku(server, **limit)
        await witness.run(writer(model), "hello", **{"budget": ONE_DOLLAR, **options})
        (held,) = witness.held
        (request,) = server.requests
    # Without a count of the provider's each byte may be a token, and 16 may come with a message.
    for_input = Decimal(len(request.body) + 16) * Decimal("0.000001")
    for_output = (held - for_input) / Decimal("0.000005")
    # A smaller limit has fewer digits than the one whose bytes were counted.
    return for_output.quantize(Decimal(1)), request.json()


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
async def test_E09_an_output_limit_is_sent_and_held_whatever_it_is_called(name: str) -> None:
    held, sent = await held_and_sent({"settings": {name: 10}})
    assert held == sent["max_tokens"] == 10
    assert sent.keys() & {"max_completion_tokens", "max_output_tokens"} == set()


async def test_E09_without_a_limit_the_default_is_sent_and_held() -> None:
    held, sent = await held_and_sent({})
    assert held == sent["max_tokens"] == 8192


async def test_E09_an_extra_body_pins_the_limit_and_the_hold_follows_it() -> None:
    held, sent = await held_and_sent({"extra_body": {"max_tokens": 700}})
    assert held == sent["max_tokens"] == 700


@pytest.mark.parametrize("limit", [700, 8192])
async def test_a_pinned_limit_is_never_said_to_be_smaller_than_it_is(limit: int) -> None:
    # 8192 is also the default: the wire does not follow us there either.
    with ReplayServer([says("hi")]) as server:
        model = haiku(server, extra_body={"max_tokens": limit})
        # Enough for 500 tokens of output, but the request would allow more.
        result = await Witness().run(
            writer(model), "hello", budget=tw.Budget(max_usd="0.003", output_floor_tokens=1)
        )
        assert server.requests == ()
    assert result.stop_reason == "budget_exhausted"


async def test_a_limit_that_may_shrink_is_sent_as_small_as_it_is_held() -> None:
    budget = tw.Budget(max_usd="0.003", output_floor_tokens=1)
    held, sent = await held_and_sent({}, budget=budget)
    assert held == sent["max_tokens"]
    assert 300 < sent["max_tokens"] < 600


async def test_a_model_gets_no_more_output_than_it_has() -> None:
    held, sent = await held_and_sent({"settings": {"max_tokens": 1_000_000}})
    assert held == sent["max_tokens"] == 64_000


async def test_an_agents_own_output_limit_is_sent_and_held() -> None:
    witness = Witness()
    with ReplayServer([says("hi")]) as server:
        agent = writer(haiku(server), output=tw.output(max_tokens=77))
        result = await witness.run(agent, "hello")
        assert server.requests[0].json()["max_tokens"] == 77
    assert only_line(result.receipt).output_limit == 77


async def test_several_answers_to_one_request_are_all_held_for() -> None:
    witness = Witness()
    with ReplayServer([CHAT_HI]) as server:
        model = tw.model(
            "acme/new",
            base_url=server.base_url,
            price=tw.Price(input="0", output="1"),
            settings={"n": 3, "max_tokens": 100},
        )
        await witness.run(writer(model), "hello", budget=ONE_DOLLAR)
        sent = server.requests[0].json()
    assert (sent["n"], sent["max_tokens"]) == (3, 100)
    assert witness.held == [Decimal("0.0003")]


async def test_input_is_held_at_the_price_of_writing_only_where_a_cache_is_asked_for() -> None:
    plain, cached = Witness(), Witness()
    for witness, settings in ((plain, {}), (cached, {"cache_control": {"type": "ephemeral"}})):
        with ReplayServer([says("hi")]) as server:
            model = haiku(server, settings={"max_tokens": 10, **settings})
            await witness.run(writer(model), "hello" * 1000, budget=ONE_DOLLAR)
    ratio = cached.held[0] / plain.held[0]
    assert Decimal("1.23") < ratio < Decimal("1.30")


async def test_the_count_of_a_provider_makes_the_next_hold_small() -> None:
    witness = Witness()
    counted = [started(input_tokens=50), *text_block(0, "Hi"), *ended(input_tokens=50)]
    asks: list[dict[str, Any]] = [
        started(input_tokens=40),
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "tool_use", "id": "t1", "name": "look", "input": {}},
        },
        {"type": "content_block_stop", "index": 0},
        *ended("tool_use", input_tokens=40),
    ]

    @tw.tool(effect="read", runs="host")
    def look() -> str:
        """Look."""
        return "seen"

    with ReplayServer([streamed(*asks), streamed(*counted)]) as server:
        agent = tw.agent(
            id="looker",
            instructions="x" * 4000,
            model=haiku(server, settings={"max_tokens": 10}),
            tools=[look],
        )
        result = await witness.run(agent, "hello", budget=ONE_DOLLAR)
    first, second = witness.held
    # Bytes for the first call: over 4,000. For the second: the 40 that were counted, and what
    # came after them.
    assert first > Decimal("0.004")
    assert second < Decimal("0.0006")
    assert result.receipt.total.usd == Decimal("0.00016")


# ── many at once ─────────────────────────────────────────────────────────────────────────────────


def delegates(count: int) -> Exchange:
    calls = [
        block
        for at in range(count)
        for block in (
            {
                "type": "content_block_start",
                "index": at,
                "content_block": {
                    "type": "tool_use",
                    "id": f"t{at}",
                    "name": "helper",
                    "input": {"task": f"task {at}"},
                },
            },
            {"type": "content_block_stop", "index": at},
        )
    ]
    request = {"messages": [{"role": "user", "content": [{"type": "text", "text": "go"}]}]}
    return streamed(started(), *calls, *ended("tool_use"), request=request)


async def test_twenty_subagents_share_one_server_and_each_gets_its_own_answer() -> None:
    tasks = [
        says(
            f"answer {at}",
            request={
                "messages": [{"role": "user", "content": [{"type": "text", "text": f"task {at}"}]}]
            },
        )
        for at in range(20)
    ]
    witness = Witness()
    with ReplayServer([delegates(20), *reversed(tasks), says("all done")], match="body") as server:
        helper = writer(tw.auto())
        agent = tw.agent(
            id="boss",
            instructions="Delegate.",
            model=haiku(server),
            tools=[tw.subagent(name="helper", description="Helps.", agent=helper)],
        )
        result = await witness.run(
            agent,
            "go",
            budget=tw.Budget(max_usd="10"),
            limits=tw.Limits(max_concurrent_subagents=20),
        )
        assert server.left == ()
        results = server.requests[-1].json()["messages"][-1]["content"]
    assert result.text == "all done"
    assert [r["tool_use_id"] for r in results] == [f"t{at}" for at in range(20)]
    assert [f'"answer {at}"' in r["content"] for at, r in enumerate(results)] == [True] * 20
    # 22 calls of 12 tokens in and 7 out.
    assert result.cost_usd == Decimal("0.001034")
    assert len(result.receipt.subagents) == 20


async def test_no_socket_and_no_thread_is_left() -> None:
    # Warnings are errors: a socket that nobody closed fails the test when it is collected.
    threads, sockets = threading.active_count(), open_tcp_sockets()
    with ReplayServer([says("hi"), streamed(*forty_tokens())]) as server:
        await Witness().run(writer(haiku(server)), "hello")
        with pytest.raises(tw.RunError):
            await Witness().run(writer(haiku(server)), "hello")
    gc.collect()
    assert open_tcp_sockets() == sockets
    assert threading.active_count() <= threads


def open_tcp_sockets() -> list[socket.socket]:
    there = [o for o in gc.get_objects() if type(o) is socket.socket]
    return [s for s in there if s.fileno() >= 0 and s.family == socket.AF_INET]
