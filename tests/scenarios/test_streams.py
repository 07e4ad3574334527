"""Public reports about answers as they come in: usage, cut bytes, mixed-up and cut-off calls."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from ..wire._streams import DONE, USAGE, chunk, fragment, sse, usage_only
from .kit import Backend, P, Witness, both_backends, check_books, check_closed
from .loopback import Answer, Loopback, serve

# --- E98: usage comes when and how often the provider likes --------------------------------------

ZERO = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}

KINDS_OF_USAGE: dict[str, list[Any]] = {
    "after the finish reason": [chunk("Hi"), chunk(finish="stop"), usage_only(USAGE)],
    "zero until the last chunk": [
        chunk("H", usage=ZERO),
        chunk("i", usage=ZERO),
        chunk(finish="stop", usage=USAGE),
    ],
    "with the finish reason and again": [
        chunk("Hi"),
        chunk(finish="stop", usage=USAGE),
        usage_only(USAGE),
    ],
    "null until the end": [
        chunk("Hi", usage=None),
        chunk(finish="stop", usage=None),
        usage_only(USAGE),
    ],
}


@both_backends
@pytest.mark.parametrize("kind", KINDS_OF_USAGE)
def test_E98_twelve_tokens_in_and_seven_out_are_charged_once(kind: str, backend: Backend) -> None:
    result = ask(backend, [sse(*KINDS_OF_USAGE[kind], DONE)])
    (line,) = result.receipt.lines
    assert (line.input_tokens, line.output_tokens) == (12, 7)
    assert line.basis == "provider_reported"
    assert result.cost_usd == Decimal("0.000141")
    assert result.text == "Hi"


@both_backends
def test_E98_no_usage_at_all_is_an_estimate_that_says_so_and_never_nothing(
    backend: Backend,
) -> None:
    result = ask(backend, [sse(chunk("Hi "), chunk("there"), chunk(finish="stop"), DONE)])
    (line,) = result.receipt.lines
    assert line.basis == "estimated"
    assert line.input_tokens >= len("Answer.hi")  # in bytes, each of which may be a token
    assert line.output_tokens == 2
    assert 0 == line.low_usd < line.usd < line.high_usd
    assert result.cost_usd == line.usd


TRUTH = tw.Usage(input=12, output=7)


@both_backends
@pytest.mark.parametrize(
    "reported",
    [
        TRUTH,
        [TRUTH],
        [tw.Usage(), tw.Usage(), TRUTH],
        [tw.Usage(input=12, output=3), TRUTH, TRUTH],
    ],
)
def test_E98_of_usage_that_is_reported_again_and_again_the_last_counts_once(
    reported: tw.Usage | Sequence[tw.Usage], backend: Backend
) -> None:
    async def scenario() -> None:
        model = ScriptedModel([Reply(chunks=("H", "i", "!"), usage=reported)], price=P)
        agent = tw.agent(id="one", instructions="Answer.", model=model)
        witness = Witness()
        result = await tw.run(agent, "hi", budget=tw.Budget(max_usd="1.00"), **witness.options)
        assert result.cost_usd == Decimal("0.000141")
        assert result.receipt.total.tokens == 19
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E98_a_scripted_provider_that_reports_nothing_bills_within_the_estimate(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        model = ScriptedModel([Reply("an answer of some words", usage=None)], price=P)
        agent = tw.agent(id="one", instructions="Answer.", model=model)
        witness = Witness()
        result = await tw.run(agent, "hi", budget=tw.Budget(max_usd="1.00"), **witness.options)
        (line,) = result.receipt.lines
        assert line.basis == "estimated"
        assert 0 < model.billed <= line.high_usd
        assert result.cost_usd > 0
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


# --- E99: the bytes of a stream come in any pieces -----------------------------------------------

SPOKEN = sse(chunk("日本🎉"), chunk(" ÿ\u2028é"), chunk(finish="stop"), usage_only(USAGE), DONE)


def in_pieces(stream: bytes, size: int) -> list[bytes]:
    return [stream[at : at + size] for at in range(0, len(stream), size)]


@both_backends
@pytest.mark.parametrize(
    ("stream", "size"),
    [
        (SPOKEN, 1),
        (SPOKEN.replace(b"\n", b"\r\n"), 1),
        (SPOKEN.replace(b"data: ", b": a comment \xe6\x97\xa5\ndata: "), 1),
        (SPOKEN, 7),
        (SPOKEN, len(SPOKEN)),
    ],
    ids=["byte by byte", "with CRLF", "with comments", "seven bytes", "all in one read"],
)
def test_E99_the_text_is_the_same_in_whatever_pieces_its_bytes_come(
    stream: bytes, size: int, backend: Backend
) -> None:
    result = ask(backend, in_pieces(stream, size))
    assert result.text == "日本🎉 ÿ\u2028é"
    assert result.cost_usd == Decimal("0.000141")


# --- E101, E102: which calls are run -------------------------------------------------------------


@both_backends
def test_E101_fragments_of_two_calls_reach_the_call_they_belong_to(backend: Backend) -> None:
    aimed: list[str] = []

    @tw.tool(effect="write", runs="host")
    async def aim(target: str) -> str:
        """Aim.

        Args:
            target: At what.
        """
        aimed.append(target)
        return f"hit {target}"

    calls = sse(
        chunk(calls=[fragment(0, "A", "aim", "")]),
        chunk(calls=[fragment(1, "B", "aim", "")]),
        chunk(calls=[fragment(0, arguments='{"target":"A_ONLY"}')]),
        chunk(calls=[fragment(1, arguments='{"target":"B_ONLY"}')]),
        chunk(finish="tool_calls"),
        usage_only(USAGE),
        DONE,
    )
    seen: list[dict[str, Any]] = []
    ask(backend, [calls], answer("done"), tools=[aim], seen=seen)
    assert aimed == ["A_ONLY", "B_ONLY"]
    results = {m["tool_call_id"]: m["content"] for m in seen[1]["messages"] if m["role"] == "tool"}
    assert results == {"A": "hit A_ONLY", "B": "hit B_ONLY"}


def remover(removed: list[str]) -> tw.Tool:
    @tw.tool(effect="write", runs="host")
    async def remove(path: str, mode: str = "ask") -> str:
        """Remove a file.

        Args:
            path: Which.
            mode: How.
        """
        removed.append(path)
        return "removed"

    return remove


@both_backends
@pytest.mark.parametrize("arguments", ['{"path":"/tmp/x","mode":"del', '{"path":"/"}'])
def test_E102_a_call_cut_off_by_the_length_limit_is_not_run(
    arguments: str, backend: Backend
) -> None:
    removed: list[str] = []
    cut = sse(
        chunk(calls=[fragment(0, "A", "remove", arguments)]),
        chunk(finish="length"),
        usage_only(USAGE),
        DONE,
    )
    seen: list[dict[str, Any]] = []
    result = ask(backend, [cut], answer("I see"), tools=[remover(removed)], seen=seen)
    assert removed == []
    (told,) = [m["content"] for m in seen[1]["messages"] if m["role"] == "tool"]
    assert "cave_tool_arguments_invalid: the reply was cut off by the output limit," in told
    assert "still pays for" not in told
    assert result.text == "I see"
    assert [(row.calls, row.errors) for row in result.receipt.tools] == [(1, 1)]


def too_long(request: ScriptedRequest) -> Reply:
    """One reply that needs 1,500 tokens, with a call in it, and then a short answer."""
    if request.turn == 0:
        calls = [("remove", {"path": "/"})]
        return Reply("let me see", tool_calls=calls, usage=tw.Usage(output=1_500))
    return Reply("I see", usage=tw.Usage(output=10))


@both_backends
@pytest.mark.parametrize(
    ("max_usd", "limit", "is_clamped"),
    [
        ("1.00", 1_200, False),
        # That pays for 1,250 tokens, and the cut-off reply uses them up.
        ("0.0250", 1_250, True),
    ],
)
def test_E102_the_model_is_told_what_cut_it_off(
    max_usd: str, limit: int, is_clamped: bool, backend: Backend
) -> None:
    removed: list[str] = []
    price = tw.Price(input="0", cache_read="0", cache_write="0", output="20")

    async def scenario() -> None:
        model = ScriptedModel(too_long, price=price, max_output=1_400 if is_clamped else 1_200)
        agent = tw.agent(id="one", instructions="Tidy.", model=model, tools=[remover(removed)])
        witness = Witness()
        budget = tw.Budget(max_usd=max_usd)
        result = await tw.run(agent, "hi", budget=budget, **witness.options)
        assert removed == []
        assert model.requests[0].output_limit == limit
        first = result.receipt.lines[0]
        assert (first.clamped_from is not None) is is_clamped
        (told,) = [m for m in result.messages if m.role == "tool"]
        (told_of,) = told.parts
        content = getattr(told_of, "content", "")
        assert content.startswith("cave_tool_arguments_invalid: the reply was cut off by")
        assert ("lowered to what the budget still pays for" in content) is is_clamped
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


# --- over HTTP -----------------------------------------------------------------------------------


def answer(text: str) -> Answer:
    return [sse(chunk(text), chunk(finish="stop"), usage_only(USAGE), DONE)]


def ask(
    backend: Backend,
    *answers: Answer,
    tools: Sequence[tw.Tool] = (),
    seen: list[dict[str, Any]] | None = None,
) -> tw.Result:
    """Run an agent once against a server that gives these answers; ``seen`` gets the requests."""
    results: list[tw.Result] = []

    async def scenario(server: Loopback) -> None:
        model = tw.model("local/gpt", base_url=server.url, price=P)
        agent = tw.agent(id="one", instructions="Answer.", model=model, tools=tools)
        witness = Witness()
        budget = tw.Budget(max_usd="1.00")
        result = await tw.run(agent, "hi", budget=budget, journal=witness.write)
        assert result.complete
        result.receipt.check()
        check_closed(witness)
        results.append(result)
        if seen is not None:
            seen.extend(server.requests)

    serve(backend, scenario, *answers)
    return results[0]
