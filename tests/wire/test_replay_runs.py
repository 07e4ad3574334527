"""Recorded conversations with real providers, held again by whole runs over real sockets.

The agent has the tools that were recorded, and they return what was recorded. So each request that
our client sends can be compared with the one that was recorded in its place, and each receipt with
the usage that the provider reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any, Literal

import attrs
import pytest

import treewarden as tw
from treewarden.protocols import Line, Message, ToolResult
from treewarden.testing import Exchange as Answer
from treewarden.testing import ReplayServer

from ._recordings import ABSENT, ANTHROPIC, OPENAI_CHAT, TRAFFIC, Exchange, cases, exchanges
from ._replays import Witness, only_line
from .test_recorded_requests import (
    LIMITS,
    THINKING_FIELD,
    anthropic_messages,
    chat_messages,
    plain_anthropic,
    plain_chat,
    plain_text,
    split_system,
)

pytestmark = pytest.mark.timeout(30)

# What says nothing about the conversation: we always stream.
NOT_COMPARED = ("stream", "stream_options")


@attrs.frozen
class Part:
    """One run of a conversation: some recorded exchanges in a row."""

    exchanges: int
    # Messages at the end of the first request that are new; what is before them must be what the
    # run before has left. None: all of them, the run begins a conversation.
    new: int | None = None
    stop_reason: str = "complete"
    # The run's own limit of model calls, where the recorded client stopped and ours would go on.
    calls: int | None = None


@attrs.frozen(kw_only=True)
class Conversation:
    """A recorded conversation and what must come of it."""

    file: str
    model: str
    parts: tuple[Part, ...]
    # How the last answer begins.
    text: str
    # By hand: the reported tokens times the prices of the snapshot.
    usd: str
    # Of the last run's tools, by name: calls and errors.
    tools: tuple[tuple[str, int], ...] = ()
    price: tw.Price | None = None
    effect: Literal["read", "write"] = "read"
    # Leading exchanges that are tested elsewhere.
    skipped: int = 0


CONVERSATIONS = [
    Conversation(
        file="anthropic/fable-5-tool-3-turns.json",
        model="anthropic/claude-fable-5",
        parts=(Part(3),),
        text="A-4417: refund allowed",
        # 920 + 1096 + 1169 = 3185 in at 10, 50 + 58 + 12 = 120 out at 50 USD per million.
        usd="0.03785",
        tools=(("load_capability", 1), ("lookup_refund_policy", 1)),
    ),
    Conversation(
        file="anthropic/parallel-tools.json",
        model="anthropic/claude-haiku-4-5",
        parts=(Part(2),),
        text="Based on the retrieved information, we can see the family relationships:",
        # 423 + 771 = 1194 in at 1, 202 + 77 = 279 out at 5.
        usd="0.002589",
        tools=(("retrieve_entity_info", 4),),
    ),
    Conversation(
        file="anthropic/stream-parallel-tools.json",
        model="anthropic/claude-haiku-4-5-20251001",
        parts=(Part(2),),
        text="Here are two great names for your pet pelican:\n\n1. **Charles**",
        # 542 + 678 = 1220 in at 1, 62 + 82 = 144 out at 5.
        usd="0.00194",
        tools=(("pelican_name_generator", 2),),
        # Two calls without arguments: only their order tells them apart.
        effect="write",
    ),
    Conversation(
        file="anthropic/cache-write-read.json",
        model="anthropic/claude-sonnet-4-5",
        parts=(Part(1), Part(1, new=1)),
        text="Python is a beginner-friendly, versatile programming language",
        # 6 in at 3, 2222 read at 0.30, 418 written at 3.75, 439 out at 15.
        usd="0.0088371",
    ),
    Conversation(
        file="anthropic/server-tool-search-stream.json",
        model="anthropic/claude-sonnet-4-6",
        parts=(Part(2),),
        text="The current exchange rate is **1 USD = 0.92 EUR**.",
        # 1591 + 1007 = 2598 in at 3, 175 + 59 = 234 out at 15.
        usd="0.011304",
        tools=(("get_exchange_rate", 1),),
    ),
    Conversation(
        file="anthropic/code-execution.json",
        model="anthropic/claude-sonnet-4-5",
        parts=(Part(1), Part(1, new=1)),
        text="4 * 12390 = **49,560**",
        # 4612 + 4840 = 9452 in at 3, 160 out at 15.
        usd="0.030756",
    ),
    Conversation(
        file="deepseek/cache-hit-tool-loop.json",
        model="deepseek/deepseek-reasoner",
        # The recorded client put a call and a result of its own between the first two.
        parts=(Part(1, stop_reason="call_budget_exhausted", calls=1), Part(2, new=2)),
        text="🎉 **Congratulations, Anne!** You're a winner! 🎉",
        # Answered by deepseek-v4-flash: 51 + 875 + 80 = 1006 in at 0.30, 512 + 896 = 1408 read at
        # 0.006, 116 + 79 + 61 = 256 out at 1.20.
        usd="0.000617448",
        tools=(("get_player_name", 1), ("roll_dice", 1)),
    ),
    Conversation(
        file="cerebras/multiturn-thinking.json",
        model="cerebras/gpt-oss-120b",
        parts=(Part(1), Part(1, new=1)),
        text="\\(4 + 3 = 7\\).",
        # 79 + 98 = 177 in at 0.35, 37 + 47 = 84 out at 0.75.
        usd="0.00012495",
    ),
    Conversation(
        file="ollama/tool-output.json",
        model="ollama/gpt-oss:20b",
        # The second answer is a call by which the recorded client ended; ours would go on.
        parts=(Part(1), Part(1, new=1, stop_reason="call_budget_exhausted", calls=1)),
        text="",
        # At the price below: 134 + 206 = 340 in, 122 + 194 = 316 out.
        usd="0.000192",
        tools=(("final_result", 1),),
        price=tw.Price(input="0.10", output="0.50"),
    ),
    Conversation(
        file="groq/tool-use-failed-400.json",
        model="groq/openai/gpt-oss-120b",
        # The first exchange is an error; the client wrote down itself what the model had tried.
        parts=(Part(2),),
        text="The first call failed due to missing and extra parameters, as expected.",
        # 301 + 80 = 381 in at 0.15, 256 read at 0.075, 52 + 96 = 148 out at 0.60.
        usd="0.00016515",
        tools=(("get_something_by_name", 1),),
        skipped=1,
    ),
]

IN_CONVERSATIONS = {c.file for c in CONVERSATIONS}


def recorded(file: str) -> list[Exchange]:
    there = [e for wire in (ANTHROPIC, OPENAI_CHAT) for e in exchanges(wire) if e.file == file]
    assert there, f"{file} is not among the recordings"
    return sorted(there, key=lambda e: e.place)


def conversations() -> list[Any]:
    marks = () if TRAFFIC.is_dir() else (ABSENT,)
    return [pytest.param(c, marks=marks, id=c.file.removesuffix(".json")) for c in CONVERSATIONS]


@pytest.mark.parametrize("conversation", conversations())
async def test_a_recorded_conversation_is_held_again(
    conversation: Conversation, record_property: Callable[[str, object], None]
) -> None:
    record_property("recording", conversation.file)
    there = recorded(conversation.file)[conversation.skipped :]
    results = await hold_again(conversation, there)
    last, lines = results[-1], [line for result in results for line in result.receipt.lines]
    assert [r.stop_reason for r in results] == [part.stop_reason for part in conversation.parts]
    assert last.text.startswith(conversation.text)
    assert [classes_of(line) for line in lines] == [reported(e) for e in there]
    assert {line.basis for line in lines} == {"provider_reported"}
    assert sum(result.cost_usd for result in results) == Decimal(conversation.usd)
    assert [(row.name, row.calls) for row in last.receipt.tools] == list(conversation.tools)
    assert [row.errors for row in last.receipt.tools] == [0] * len(conversation.tools)


async def hold_again(conversation: Conversation, there: Sequence[Exchange]) -> list[tw.Result]:
    """Hold the conversation, run by run, and compare each request on the way."""
    results: list[tw.Result] = []
    at = 0
    for part in conversation.parts:
        own = there[at : at + part.exchanges]
        at += part.exchanges
        prompt = messages_of(own[0])
        if part.new is not None:
            prompt = [*results[-1].messages, *prompt[-part.new :]]
        with ReplayServer([answer_of(e) for e in own]) as server:
            agent = agent_for(
                own[-1],
                server,
                model=conversation.model,
                price=conversation.price,
                effect=conversation.effect,
                results=results_in(there),
                max_model_calls=part.calls,
            )
            result = await Witness().run(agent, prompt, budget=tw.Budget(max_usd="5"))
            assert server.left == ()
        results.append(result)
        for sent, exchange in zip(server.requests, own, strict=True):
            check_same(sent.json(), exchange)
    assert at == len(there)
    return results


# ── exchanges that stand alone ───────────────────────────────────────────────────────────────────

# Errors that came with HTTP 200.
FAIL_ANYHOW = {
    "azure-openai/content-filter-prompt.json",
    "groq/stream-error-event.json",
    "openrouter/stream-error.json",
}


def alone(wire: str, *, fails: bool) -> list[Exchange]:
    return [
        e
        for e in exchanges(wire)
        if "count_tokens" not in e.uri
        and (e.file not in IN_CONVERSATIONS or e.status != 200)
        and fails is (e.status != 200 or e.file in FAIL_ANYHOW)
    ]


ALONE = [e for wire in (ANTHROPIC, OPENAI_CHAT) for e in alone(wire, fails=False)]
FAILING = [e for wire in (ANTHROPIC, OPENAI_CHAT) for e in alone(wire, fails=True)]


@pytest.mark.parametrize("exchange", cases(ALONE))
async def test_a_recorded_answer_is_the_answer_of_a_run(exchange: Exchange) -> None:
    witness = Witness()
    with ReplayServer([answer_of(exchange)]) as server:
        result = await witness.run(agent_alone(exchange, server), messages_of(exchange))
        (sent,) = server.requests
    check_same(sent.json(), exchange)
    assert result.text == witness.text == spoken(exchange)
    line = only_line(result.receipt)
    if exchange.usage is None:
        assert line.basis == "estimated"
    else:
        assert (line.basis, *classes_of(line)) == ("provider_reported", *reported(exchange))
        if "cost" in exchange.usage:
            # What a router says it took wins over any table.
            assert line.usd == Decimal(str(exchange.usage["cost"]))


@pytest.mark.parametrize("exchange", cases(FAILING))
async def test_a_recorded_failure_is_the_error_of_a_run(exchange: Exchange) -> None:
    with ReplayServer([answer_of(exchange)]) as server:
        with pytest.raises(tw.RunError) as caught:
            await Witness().run(agent_alone(exchange, server), messages_of(exchange))
        (sent,) = server.requests
    check_same(sent.json(), exchange)
    error = caught.value.__cause__
    assert isinstance(error, tw.ProviderError)
    line = only_line(caught.value.receipt)
    if exchange.status != 200:
        assert error.status == exchange.status
        assert (line.basis, line.usd, line.tokens) == ("pre_stream_no_usage", Decimal(0), 0)
    elif exchange.usage is not None:
        # What was reported when the answer broke off is the least that it cost.
        assert isinstance(error, tw.ProviderInterrupted)
        assert line.basis == "estimated"
        assert classes_of(line)[:3] == reported(exchange)[:3]
        assert line.low_tokens == sum(reported(exchange))


def test_every_recorded_exchange_is_driven_through_a_run(
    record_property: Callable[[str, object], None],
) -> None:
    if not TRAFFIC.is_dir():
        pytest.skip("no recorded traffic: set TREEWARDEN_SHARED to where it is")
    together = [e for c in CONVERSATIONS for e in recorded(c.file)[c.skipped :]]
    driven = {(e.file, e.place) for e in [*together, *ALONE, *FAILING]}
    both = [*exchanges(ANTHROPIC), *exchanges(OPENAI_CHAT)]
    assert driven == {(e.file, e.place) for e in both if "count_tokens" not in e.uri}
    record_property(
        "measured",
        f"{len(driven)} recorded exchanges driven through tw.run on both backends: {len(together)}"
        f" in {len(CONVERSATIONS)} conversations, {len(ALONE)} answers and {len(FAILING)} failures"
        " alone",
    )


def agent_alone(exchange: Exchange, server: ReplayServer) -> tw.Agent:
    provider = exchange.provider.removesuffix("-chat")
    return agent_for(
        exchange,
        server,
        model=f"{provider}/{exchange.request['model']}",
        results=lambda name, arguments: "never read",
        max_model_calls=1,
    )


# ── from recordings to agents ────────────────────────────────────────────────────────────────────

ToolResults = Callable[[str, dict[str, Any]], str]


def answer_of(exchange: Exchange) -> Answer:
    return Answer(exchange.status, exchange.headers, exchange.body, chunk_bytes=1000)


def messages_of(exchange: Exchange) -> list[Message]:
    messages = exchange.request["messages"]
    if exchange.wire == ANTHROPIC:
        return list(anthropic_messages(without_system(messages)))
    _, rest = split_system(messages)
    return list(chat_messages(rest, thinking_field=THINKING_FIELD.get(exchange.provider)))


def without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out what stands in the middle of a conversation and is no message of ours."""
    return [message for message in messages if message["role"] != "system"]


def agent_for(
    exchange: Exchange,
    server: ReplayServer,
    *,
    model: str,
    results: ToolResults,
    price: tw.Price | None = None,
    effect: Literal["read", "write"] = "read",
    max_model_calls: int | None = None,
) -> tw.Agent:
    """An agent that asks what was asked in ``exchange``, of a model at ``server``."""
    request = exchange.request
    known = {"model", "messages", "system", "tools", *NOT_COMPARED}
    tools = list(map(function_of, request.get("tools", [])))
    are_ours = all(tool is not None and tool.keys() == TOOL_FIELDS for tool in tools)
    if exchange.wire == ANTHROPIC:
        system = plain_text(request["system"]) if "system" in request else ""
    else:
        system, _ = split_system(request["messages"])
    return tw.agent(
        id="recorded",
        instructions=system,
        model=tw.model(
            model,
            base_url=server.base_url,
            api_key="test",
            price=price,
            settings={key: value for key, value in request.items() if key not in known},
            # Tools that run at the provider's, or with fields that only one provider knows.
            extra_body={} if are_ours else {"tools": request["tools"]},
        ),
        tools=[a_tool(tool, results, effect) for tool in tools if tool is not None],
        max_model_calls=max_model_calls,
    )


TOOL_FIELDS = {"name", "description", "parameters"}


def function_of(tool: dict[str, Any]) -> dict[str, Any] | None:
    """A recorded tool of the client's own in one form; None for one of the provider's."""
    if "function" in tool:
        return {"description": "", **tool["function"]}
    if "input_schema" not in tool:
        return None
    rest = {key: value for key, value in tool.items() if key != "input_schema"}
    return {**rest, "parameters": tool["input_schema"]}


def a_tool(tool: dict[str, Any], results: ToolResults, effect: Literal["read", "write"]) -> tw.Tool:
    name = tool["name"]

    def answer(**arguments: Any) -> str:
        return results(name, arguments)

    return tw.tool(
        answer,
        effect=effect,
        runs="host",
        name=name,
        description=tool["description"],
        parameters=tool["parameters"],
    )


def results_in(there: Iterable[Exchange]) -> ToolResults:
    """What each recorded call returned, by its name and arguments, in the order of the calls."""
    calls: dict[str, tuple[str, str]] = {}
    returned: dict[str, str] = {}
    for exchange in there:
        for message in messages_of(exchange):
            calls |= {c.id: (c.name, key(c.arguments)) for c in message.tool_calls}
            returned |= {p.call_id: p.content for p in message.parts if isinstance(p, ToolResult)}
    left: dict[tuple[str, str], list[str]] = {}
    for id, content in returned.items():
        left.setdefault(calls[id], []).append(content)

    def result(name: str, arguments: dict[str, Any]) -> str:
        # A call that the recorded client never answered ended its conversation.
        waiting = left.get((name, key(arguments)), [])
        return waiting.pop(0) if waiting else "nobody recorded what this returned"

    return result


def key(arguments: Any) -> str:
    return json.dumps(arguments, sort_keys=True)


# ── comparing ────────────────────────────────────────────────────────────────────────────────────


def check_same(ours: dict[str, Any], exchange: Exchange) -> None:
    """Assert that we sent what was recorded, as far as it means anything."""
    theirs = dict(exchange.request)
    if ours.get("tools") != theirs.get("tools") and exchange.file in GROWING_TOOLS:
        # The recorded client learnt of a tool in the middle; our agent has it from the beginning.
        ours.pop("tools")
        theirs.pop("tools")
    if exchange.wire == ANTHROPIC:
        theirs["messages"] = without_system(theirs["messages"])
        assert comparable(plain_anthropic(ours)) == comparable(plain_anthropic(theirs))
        return
    sent_limit = next(ours.pop(field) for field in LIMITS if field in ours)
    limits = [theirs.pop(field) for field in LIMITS if field in theirs]
    assert limits in ([], [sent_limit])
    if exchange.provider == "groq":
        theirs["messages"] = list(map(with_thoughts_apart, theirs["messages"]))
    assert comparable(plain_chat(ours)) == comparable(plain_chat(theirs))


GROWING_TOOLS = {"anthropic/fable-5-tool-3-turns.json", "deepseek/cache-hit-tool-loop.json"}


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in body.items() if name not in NOT_COMPARED}
    return {**plain, "messages": [without_blanks(m) for m in plain["messages"]]}


BLANK = {"type": "text", "text": " "}


def without_blanks(message: dict[str, Any]) -> dict[str, Any]:
    """Leave out texts of a space, which one recorded client puts before calls."""
    content: Any = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [block for block in content if block != BLANK]}  # pyright: ignore[reportUnknownVariableType]


def with_thoughts_apart(message: dict[str, Any]) -> dict[str, Any]:
    """The recorded client sent thoughts as a text in tags; Groq has a field for them."""
    content = message.get("content") or ""
    thoughts = content.removeprefix("<think>\n").removesuffix("\n</think>")
    if message["role"] != "assistant" or thoughts == content:
        return message
    return {**message, "content": None, "reasoning": thoughts}


Classes = tuple[int, int, int, int]


def classes_of(line: Line) -> Classes:
    return (
        line.input_tokens,
        line.cache_read_tokens,
        line.cache_write_tokens,
        line.output_tokens,
    )


def reported(exchange: Exchange) -> Classes:
    """Fresh input, cache read, cache write and output as the manifest has them."""
    usage = exchange.usage
    assert usage is not None, exchange.file
    if exchange.wire == ANTHROPIC:
        read, written = (
            usage.get(name, 0)
            for name in ("cache_read_input_tokens", "cache_creation_input_tokens")
        )
        return usage["input_tokens"], read, written, usage["output_tokens"]
    details = usage.get("prompt_tokens_details", {})
    read, written = details.get("cached_tokens", 0), details.get("cache_write_tokens", 0)
    return usage["prompt_tokens"] - read - written, read, written, usage["completion_tokens"]


def spoken(exchange: Exchange) -> str:
    """The text of a recorded answer, read without any of our decoders."""
    if not exchange.is_stream:
        return "".join(texts_in(json.loads(exchange.body)))
    lines = exchange.body.decode().splitlines()
    data = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
    return "".join(t for text in data if text != "[DONE]" for t in texts_in(json.loads(text)))


def texts_in(answer: dict[str, Any]) -> Iterable[str]:
    blocks = [*answer.get("content", []), answer.get("delta", {})]
    yield from (block["text"] for block in blocks if block.get("type") in ("text", "text_delta"))
    for choice in answer.get("choices", []):
        said: dict[str, Any] = choice.get("delta") or choice.get("message") or {}
        yield said.get("content") or said.get("refusal") or ""
