"""What goes over the wire: addresses, headers, bodies, and answers in whatever form they come."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

import treewarden as tw
from treewarden.protocols import ProviderInterrupted, TextWritten, ThoughtWritten
from treewarden.testing import Exchange, ReplayServer

pytestmark = pytest.mark.timeout(20)

PRICE = tw.Price(input="1", output="10")
JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream"}
USAGE = {"prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19}


def chat(content: str | None = "hi", *, usage: Any = USAGE, **message: Any) -> dict[str, Any]:
    """A whole answer of Chat Completions."""
    said = {"role": "assistant", "content": content, **message}
    choice = {"index": 0, "message": said, "finish_reason": "stop"}
    return {"id": "c1", "model": "new", "choices": [choice], "usage": usage}


def chunks(*deltas: dict[str, Any]) -> bytes:
    """The same as a stream."""
    events: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "finish_reason": "stop"}], "usage": USAGE})
    return b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events)


def whole(answer: Any = None, **headers: str) -> Exchange:
    return Exchange(200, {**JSON, **headers}, json.dumps(answer or chat()).encode())


def model(server: ReplayServer, id: str = "acme/new", **options: Any) -> Any:
    options.setdefault("base_url", server.base_url)
    options.setdefault("price", PRICE)
    return tw.model(id, **options)


async def run(model: Any, *, events: list[Any] | None = None, **options: Any) -> tw.Result:
    agent = tw.agent(id="a", instructions="Be brief.", model=model, **options)
    listen = None if events is None else events.append
    result = await tw.run(agent, "hello", on_event=listen)
    result.receipt.check()
    return result


# ── requests ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_compatible_server_gets_what_every_server_understands() -> None:
    with ReplayServer([whole()]) as server:
        await run(model(server, base_url=server.base_url + "/v1/", api_key="k1"))
        (sent,) = server.requests
    assert (sent.method, sent.path) == ("POST", "/v1/chat/completions")
    assert sent.headers["authorization"] == "Bearer k1"
    assert sent.headers["accept"] == "text/event-stream, application/json"
    assert sent.json() == {
        "model": "new",
        "max_tokens": 8192,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
        ],
    }


async def test_an_anthropic_server_gets_its_own_form() -> None:
    answer = {
        "model": "claude-haiku-4-5",
        "content": [{"type": "text", "text": "hi"}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 12, "output_tokens": 7},
    }
    with ReplayServer([whole(answer)]) as server:
        result = await run(model(server, "anthropic/claude-haiku-4-5", api_key="k1"))
        (sent,) = server.requests
    assert result.text == "hi"
    assert sent.path == "/v1/messages"
    assert sent.headers["x-api-key"] == "k1"
    assert "authorization" not in sent.headers
    assert sent.json() == {
        "model": "claude-haiku-4-5",
        "max_tokens": 8192,
        "system": "Be brief.",
        "stream": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    }


async def test_without_a_key_no_key_is_sent() -> None:
    with ReplayServer([whole()]) as server:
        await run(model(server))
        (sent,) = server.requests
    assert {"authorization", "x-api-key"} & sent.headers.keys() == set()


async def test_a_key_is_never_part_of_a_body_or_an_address() -> None:
    with ReplayServer([whole()]) as server:
        await run(model(server, api_key="very-secret"))
        (sent,) = server.requests
    assert b"very-secret" not in sent.body
    assert "very-secret" not in sent.path


async def test_settings_and_extra_body_are_sent_and_the_extra_body_wins() -> None:
    with ReplayServer([whole()]) as server:
        settings, extra = {"temperature": 0.5, "top_p": 1}, {"temperature": 0.1}
        await run(model(server, settings=settings, extra_body=extra))
        sent = server.requests[0].json()
    assert (sent["temperature"], sent["top_p"]) == (0.1, 1)


@pytest.mark.parametrize(
    ("provider", "field"),
    [
        ("deepseek", "reasoning_content"),
        ("zai", "reasoning_content"),
        ("groq", "reasoning"),
        ("cerebras", "reasoning"),
        ("ollama", "reasoning"),
        ("openrouter", "reasoning"),
        ("acme", None),
    ],
)
async def test_thoughts_go_back_to_who_wants_them_under_the_right_name(
    provider: str, field: str | None
) -> None:
    # A model that thinks between its calls loses the thread where they do not.
    with ReplayServer([whole(chat("4", reasoning="two and two")), whole()]) as server:
        made = model(server, f"{provider}/new")
        first = await run(made)
        agent = tw.agent(id="a", instructions="", model=made)
        await tw.run(agent, first.messages)
        _, assistant = server.requests[1].json()["messages"]
    expected = {"role": "assistant", "content": "4"}
    assert assistant == (expected if field is None else {**expected, field: "two and two"})


async def test_the_calls_of_a_tree_share_its_connections() -> None:
    with ReplayServer([whole(), whole(), whole()]) as server:
        agent = tw.agent(id="a", instructions="", model=model(server))
        async with tw.open_tree() as tree:
            for _ in range(3):
                await tree.run(agent, "hello")
        assert [sent.connection for sent in server.requests] == [1, 1, 1]


# ── answers ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_whole_answer_is_accepted_where_a_stream_was_asked_for() -> None:
    events: list[Any] = []
    with ReplayServer([whole()]) as server:
        result = await run(model(server), events=events)
    assert (result.text, result.cost_usd) == ("hi", Decimal("0.000082"))
    assert [e.text for e in events if isinstance(e, TextWritten)] == ["hi"]


async def test_an_answer_without_text_tells_none() -> None:
    events: list[Any] = []
    with ReplayServer([whole(chat(""))]) as server:
        result = await run(model(server), events=events)
    assert result.text == ""
    assert not [e for e in events if isinstance(e, TextWritten)]


@pytest.mark.parametrize(
    "headers",
    [EVENTS, {"content-type": "Text/Event-Stream; charset=utf-8"}, {}],
    ids=["plain", "loud", "unsaid"],
)
async def test_a_stream_is_known_by_its_type_or_by_the_lack_of_one(
    headers: dict[str, str],
) -> None:
    with ReplayServer([Exchange(200, headers, chunks({"content": "hi"}))]) as server:
        result = await run(model(server))
    assert (result.text, result.cost_usd) == ("hi", Decimal("0.000082"))


async def test_text_and_thoughts_are_told_apart_as_they_come() -> None:
    events: list[Any] = []
    stream = chunks({"reasoning": "hm"}, {"content": "a"}, {"content": "b"})
    with ReplayServer([Exchange(200, EVENTS, stream)]) as server:
        result = await run(model(server), events=events)
    told = [e for e in events if isinstance(e, (TextWritten, ThoughtWritten))]
    assert [(type(e), e.text) for e in told] == [
        (ThoughtWritten, "hm"),
        (TextWritten, "a"),
        (TextWritten, "b"),
    ]
    assert result.text == "ab"


async def test_an_answer_cut_anywhere_is_the_same_answer() -> None:
    stream = chunks({"content": "日本🎉"})
    for size in (1, 7, 64):
        with ReplayServer([Exchange(200, EVENTS, stream, chunk_bytes=size)]) as server:
            assert (await run(model(server))).text == "日本🎉"


async def test_a_whole_answer_without_usage_is_estimated_from_all_that_was_written() -> None:
    # Twelve bytes of thought, eight of text and eight of arguments are seven tokens.
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    answer = chat("eight by", usage=None, reasoning="twelve bytes", tool_calls=[call])
    with ReplayServer([whole(answer)]) as server:
        result = await run(model(server), max_model_calls=1)
    (line,) = result.receipt.lines
    assert (line.basis, line.output_tokens) == ("estimated", 7)
    assert line.low_usd == 0


async def test_a_stream_without_usage_is_estimated_from_its_pieces() -> None:
    stream = chunks(*[{"content": "a"}] * 9).replace(json.dumps(USAGE).encode(), b"null")
    with ReplayServer([Exchange(200, EVENTS, stream)]) as server:
        result = await run(model(server))
    (line,) = result.receipt.lines
    assert (result.text, line.basis, line.output_tokens) == ("a" * 9, "estimated", 9)


async def test_an_answer_by_another_model_is_charged_at_that_models_price() -> None:
    answer = {**chat(), "model": "deepseek-v4-flash"}
    with ReplayServer([whole(answer)]) as server:
        result = await run(model(server, "deepseek/deepseek-reasoner", price=None))
    (line,) = result.receipt.lines
    # 12 tokens at 0.30 and 7 at 1.20 USD per million.
    assert (line.model, line.usd) == ("deepseek-v4-flash", Decimal("0.000012"))


async def test_a_cost_that_the_provider_reports_wins() -> None:
    answer = chat(usage={**USAGE, "cost": 0.25})
    with ReplayServer([whole(answer)]) as server:
        result = await run(model(server))
    assert result.cost_usd == Decimal("0.25")


async def test_an_answer_that_is_none_of_the_protocols_is_quoted() -> None:
    with ReplayServer([Exchange(200, JSON, b'{"hello": "world"}')]) as server:
        with pytest.raises(tw.RunError, match="hello") as caught:
            await run(model(server))
    cause = caught.value.__cause__
    assert isinstance(cause, ProviderInterrupted)
    assert cause.status == 200


async def test_a_long_error_page_is_quoted_and_not_stored() -> None:
    page = Exchange(500, {"content-type": "text/html"}, b"x" * 5_000_000, chunk_bytes=50_000)
    with ReplayServer([page]) as server:
        with pytest.raises(tw.RunError) as caught:
            await run(model(server))
    assert len(str(caught.value)) < 3_000
    assert len(json.dumps(caught.value.receipt.to_json())) < 10_000
