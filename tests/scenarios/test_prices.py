"""Public reports about prices: tokens billed twice, and models that nobody knows the price of."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Literal

import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from ..wire._streams import DONE, chunk, ended, fragment, sse, started, text_block, tool_block
from ..wire._streams import usage_only as usage
from .kit import Backend, P, Witness, both_backends, check_books, check_closed
from .loopback import Answer, Loopback, serve

DOLLAR = tw.Budget(max_usd="1.00")


@both_backends
def test_E25_tokens_written_to_the_cache_are_billed_once(backend: Backend) -> None:
    async def scenario() -> None:
        counted = tw.Usage(input=3, cache_write=12_304, output=550)
        model = ScriptedModel([Reply("done", usage=counted)], price=P)
        agent = tw.agent(id="one", instructions="Answer.", model=model)
        witness = Witness()
        # A prompt that may be so many tokens, so that the hold covers them.
        result = await tw.run(agent, "word " * 2_500, budget=DOLLAR, **witness.options)
        assert result.cost_usd == Decimal("0.054399")
        assert witness.holds()[0] >= Decimal("0.054399")
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E26_cached_tokens_inside_the_prompt_are_billed_once(backend: Backend) -> None:
    price = tw.Price(input="0.50", cache_read="0.05", output="3.00")
    details = {"prompt_tokens_details": {"cached_tokens": 16_298}}
    reported = {"prompt_tokens": 20_212, "completion_tokens": 931, **details}
    result = ask(backend, "local/gpt", price, openai(reported))
    assert result.cost_usd == Decimal("0.0055649")
    (line,) = result.receipt.lines
    assert (line.input_tokens, line.cache_read_tokens) == (20_212 - 16_298, 16_298)


@both_backends
def test_E27_cache_reads_and_writes_inside_the_prompt_are_billed_once(backend: Backend) -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 500, "cache_write_tokens": 300}}
    reported = {"prompt_tokens": 2_000, "completion_tokens": 0, **details}
    result = ask(backend, "local/gpt", P, openai(reported))
    assert result.cost_usd == Decimal("0.004875")


@both_backends
@pytest.mark.parametrize("convention", ["inside the prompt", "beside the input"])
def test_E28_both_conventions_of_cached_tokens_make_the_same_line(
    convention: Literal["inside the prompt", "beside the input"], backend: Backend
) -> None:
    """1,000 fresh and 9,000 cached tokens, as OpenAI and as Anthropic report them."""
    witness = Witness()
    if convention == "inside the prompt":
        reported: dict[str, Any] = {"prompt_tokens": 10_000, "completion_tokens": 0}
        reported["prompt_tokens_details"] = {"cached_tokens": 9_000}
        answers = [openai(reported, calls=True), openai(reported)]
        result = ask(backend, "local/gpt", P, *answers, witness=witness)
    else:
        counted = {"input_tokens": 1_000, "cache_read_input_tokens": 9_000, "output_tokens": 0}
        answers = [anthropic(counted, calls=True), anthropic(counted)]
        result = ask(backend, "anthropic/claude", P, *answers, witness=witness)
    for line in result.receipt.lines:
        assert (line.input_tokens, line.cache_read_tokens) == (1_000, 9_000)
        assert line.cache_write_tokens == line.output_tokens == 0
        assert line.usd == Decimal("0.0057")
    # The context was 10,000 tokens in both: the second hold is for that many and the few bytes
    # after it, which may all be fresh.
    (_, second), output = witness.holds(), 8_192 * Decimal("0.000015")
    most_input = (second - output) / Decimal("0.000003")
    assert 10_000 < most_input < 10_300


# --- what is not known ---------------------------------------------------------------------------


@both_backends
def test_E29_a_misspelt_model_is_refused_by_name_and_a_known_one_by_its_floor(
    backend: Backend,
) -> None:
    # The least this call can cost is 768 output tokens at $75 per million.
    floor = tw.Budget(max_usd="0.02", output_floor_tokens=768)

    async def scenario(server: Loopback) -> None:
        def agent(id: str) -> tw.Agent:
            model = tw.model(id, base_url=server.url)
            return tw.agent(id="one", instructions="Answer.", model=model)

        with pytest.raises(tw.UsageError) as caught:
            await tw.run(agent("anthropic/claude-opus-4.1"), "hi", budget=floor)
        assert "'anthropic/claude-opus-4-1'" in str(caught.value)
        assert 'tw.model("anthropic/claude-opus-4.1", price=tw.Price(' in str(caught.value)
        witness = Witness()
        known = agent("anthropic/claude-opus-4-1")
        result = await tw.run(known, "hi", budget=floor, journal=witness.write)
        assert result.stop_reason == "budget_exhausted"
        asked = Decimal(result.stop_detail.partition("at least ")[2].partition(" ")[0])
        assert Decimal("0.0576") < asked < Decimal("0.0650")
        assert result.receipt.lines == ()
        assert server.requests == []
        check_closed(witness)

    serve(backend, scenario)


@both_backends
def test_E29_a_model_that_is_listed_as_free_runs_under_the_same_cap(backend: Backend) -> None:
    reported = {"prompt_tokens": 12, "completion_tokens": 7}

    async def scenario(server: Loopback) -> None:
        model = tw.model("mistral/mistral-nemo:free", base_url=server.url)
        agent = tw.agent(id="one", instructions="Answer.", model=model)
        result = await tw.run(agent, "hi", budget=tw.Budget(max_usd="0.02"))
        assert result.complete
        assert result.cost_usd == 0
        assert result.receipt.total.tokens == 19
        assert not result.receipt.total.is_unpriced

    serve(backend, scenario, openai(reported, model="mistral-nemo:free"))


@both_backends
def test_E30_not_even_the_first_unpriced_turn_runs_under_a_budget(backend: Backend) -> None:
    async def scenario() -> None:
        unpriced = ScriptedModel([Reply("never")], price=None)
        priced = ScriptedModel([Reply("never")], id="scripted/priced")
        child = tw.agent(id="child", instructions="Work.", model=unpriced)
        work = tw.subagent(name="work", description="Works.", agent=child)
        alone = tw.agent(id="alone", instructions="Answer.", model=unpriced)
        above = tw.agent(id="above", instructions="Plan.", model=priced, tools=[work])
        for agent in (alone, above):
            with pytest.raises(tw.UsageError, match=r"has no price.* Pin one") as caught:
                await tw.run(agent, "hi", budget=DOLLAR)
            assert caught.value.code == "cave_budget_denomination_unavailable"
        async with tw.open_tree(budget=DOLLAR) as tree:
            with pytest.raises(tw.UsageError, match="has no price"):
                await tree.run(alone, "hi")
            tree.check()
        assert unpriced.requests == priced.requests == []

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E30_a_receipt_with_an_unpriced_turn_says_that_its_sum_is_a_least(
    backend: Backend,
) -> None:
    async def scenario() -> None:
        counted = tw.Usage(input=1_000, output=100)
        unpriced = ScriptedModel([Reply("cheap?", usage=counted)], price=None)
        priced = ScriptedModel(
            [Reply(tool_calls=[("work", {"task": "part"})], usage=counted), Reply("done")],
            id="scripted/priced",
        )
        child = tw.agent(id="child", instructions="Work.", model=unpriced)
        work = tw.subagent(name="work", description="Works.", agent=child)
        agent = tw.agent(id="boss", instructions="Plan.", model=priced, tools=[work])
        witness = Witness()
        result = await tw.run(agent, "hi", **witness.options)
        assert result.complete
        assert result.cost_usd == priced.billed
        assert result.receipt.total.is_unpriced
        assert not result.receipt.own.is_unpriced
        assert result.receipt.to_contract_json()["unpriced"] is True
        assert result.receipt.total.tokens == priced.billed_tokens + unpriced.billed_tokens
        check_books(witness, result.receipt, priced, unpriced)

    VirtualClock().run(scenario, backend=backend)


def reads_much(request: ScriptedRequest) -> Reply:
    """Eight turns of 119,500 input tokens: 956,000 in all, and a true bill of $0.59."""
    counted = tw.Usage(input=119_500, output=2_050)
    if request.turn < 7:
        return Reply(tool_calls=[("read", {})], usage=counted)
    return Reply("done", usage=counted)


@tw.tool(effect="read", runs="host")
async def read() -> str:
    """Read on."""
    return "…"


@both_backends
def test_E32_a_cap_is_held_against_a_true_price_or_the_run_is_refused(backend: Backend) -> None:
    true_price = tw.Price(input="0.60", output="1.00")

    async def scenario() -> None:
        def agent(model: ScriptedModel) -> tw.Agent:
            return tw.agent(id="one", instructions="Read it all.", model=model, tools=[read])

        cap = tw.Budget(max_usd="5.00")
        unknown = ScriptedModel(reads_much, price=None)
        with pytest.raises(tw.UsageError, match="has no price"):
            await tw.run(agent(unknown), "go", budget=cap)
        assert unknown.requests == []
        pinned = ScriptedModel(reads_much, price=true_price)
        witness = Witness()
        result = await tw.run(agent(pinned), "go", budget=cap, **witness.options)
        assert result.complete
        assert result.cost_usd == Decimal("0.59")
        assert sum(line.input_tokens for line in result.receipt.lines) == 956_000
        check_books(witness, result.receipt, pinned)

    VirtualClock().run(scenario, backend=backend)


# --- over HTTP -----------------------------------------------------------------------------------


def openai(reported: dict[str, Any], *, calls: bool = False, model: str = "gpt") -> Answer:
    """An answer of Chat Completions that reports this usage."""
    call = [fragment(0, "call-1", "read", "{}")]
    said = chunk(calls=call) if calls else chunk("done")
    events = [said, chunk(finish="tool_calls" if calls else "stop"), usage(reported)]
    return [sse(*({**event, "model": model} for event in events), DONE)]


def anthropic(counted: dict[str, Any], *, calls: bool = False) -> Answer:
    """An answer of Anthropic Messages that reports this usage."""
    said = tool_block(0, "{}", name="read") if calls else text_block(0, "done")
    last = ended("tool_use" if calls else "end_turn", output_tokens=counted["output_tokens"])
    return [sse(started(**counted), *said, *last)]


def ask(
    backend: Backend,
    id: str,
    price: tw.Price,
    *answers: Answer,
    witness: Witness | None = None,
) -> tw.Result:
    """Run an agent once against a server that gives these answers."""
    results: list[tw.Result] = []
    seen = witness or Witness()

    async def scenario(server: Loopback) -> None:
        model = tw.model(id, base_url=server.url, price=price)
        agent = tw.agent(id="one", instructions="Answer.", model=model, tools=[read])
        result = await tw.run(agent, "hi", budget=DOLLAR, journal=seen.write)
        assert result.complete
        check_closed(seen)
        results.append(result)

    serve(backend, scenario, *answers)
    return results[0]
