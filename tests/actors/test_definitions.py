"""Definitions say what is wrong with them at the line that makes them, and how to write it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

import treewarden as tw
from treewarden.testing import Reply, ScriptedModel

TOOL_CODE = "cave_tool_definition_invalid"
AGENT_CODE = "cave_agent_definition_invalid"


def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


def tool(name: str = "add", **options: Any) -> tw.Tool:
    options.setdefault("effect", "read")
    options.setdefault("runs", "host")
    return tw.tool(add, name=name, **options)


def agent(id: str = "a", **options: Any) -> tw.Agent:
    return tw.agent(id=id, instructions="", **options)


def subagent(name: str = "helper", **options: Any) -> Any:
    options.setdefault("agent", agent())
    return tw.subagent(name=name, description="", **options)


def refusal(make: Callable[[], Any], advice: str) -> str:
    """The code of the error that ``make`` must raise with this advice."""
    with pytest.raises(tw.UsageError, match=advice) as caught:
        make()
    # Who catches ValueError, as for any wrong argument, catches these.
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith(f"{caught.value.code}: ")
    return caught.value.code


# ── tools ────────────────────────────────────────────────────────────────────────────────────────


def test_a_tool_is_still_its_function() -> None:
    assert tool()(2, b=3) == 5


def test_the_decorator_is_written_with_and_without_brackets_around_a_function() -> None:
    @tw.tool(effect="write", runs="host", name="put")
    def store(key: str) -> None:
        """Store."""

    assert (store.name, store.effect, store.description) == ("put", "write", "Store.")


def test_a_tool_without_an_effect_says_which_there_are() -> None:
    def make() -> Any:
        return tw.tool(add, runs="host")

    advice = 'tool \'add\' has no effect=.*effect="read", "write", "idempotent" or "external"'
    assert refusal(make, advice) == TOOL_CODE


def test_a_tool_with_an_unknown_effect_quotes_it() -> None:
    assert refusal(lambda: tool(effect="readonly"), "has effect='readonly'") == TOOL_CODE


@pytest.mark.parametrize("effect", ["read", "write", "idempotent", "external"])
def test_every_effect_is_accepted(effect: str) -> None:
    assert tool(effect=effect).effect == effect


def test_a_tool_without_runs_is_told_to_say_host() -> None:
    def make() -> Any:
        return tw.tool(add, effect="read")

    assert refusal(make, 'has no runs=. Write runs="host"') == TOOL_CODE


def test_a_confined_tool_is_not_there_yet() -> None:
    advice = "has runs='worker'.*confined workers do not exist yet"
    assert refusal(lambda: tool(runs="worker"), advice) == TOOL_CODE


@pytest.mark.parametrize("name", ["1st", "two words", "ü", "a" * 129, "a.b", "-a"])
def test_a_tool_name_is_what_every_provider_takes(name: str) -> None:
    advice = "at most 128 letters, digits, _ and -.*Pass name="
    assert refusal(lambda: tool(name), advice) == TOOL_CODE
    assert refusal(lambda: subagent(name), advice) == TOOL_CODE


def test_a_lambda_needs_a_name() -> None:
    def make() -> Any:
        return tw.tool(lambda: 1, effect="read", runs="host")

    assert refusal(make, "'<lambda>'.*Pass name=") == TOOL_CODE


def test_names_of_the_runtimes_own_are_reserved() -> None:
    code = "cave_reserved_tool_name:cave_search"
    assert refusal(lambda: tool("cave_search"), "the runtime's own") == code
    assert refusal(lambda: subagent("cave_search"), "the runtime's own") == code


@pytest.mark.parametrize("seconds", [0, -1, "30", True, float("inf"), float("nan")])
def test_a_timeout_is_a_positive_time(seconds: Any) -> None:
    advice = "timeout_seconds is .* Give a positive number of seconds or a timedelta"
    assert refusal(lambda: tool(timeout_seconds=seconds), advice) == "cave_run_deadline_invalid"
    assert refusal(lambda: subagent(timeout_seconds=seconds), advice) == "cave_run_deadline_invalid"


def test_a_timeout_is_a_number_a_timedelta_or_none() -> None:
    assert tool(timeout_seconds=timedelta(minutes=1)).timeout_seconds == 60
    assert tool(timeout_seconds=2).timeout_seconds == 2.0
    assert tool(timeout_seconds=None).timeout_seconds is None
    assert tool().timeout_seconds == 30
    assert subagent().timeout_seconds is None


@pytest.mark.parametrize("size", [0, -1, 1.5, "9", True])
def test_a_result_limit_is_a_positive_whole_number(size: Any) -> None:
    advice = "max_result_bytes is .*, not a positive whole number"
    assert refusal(lambda: tool(max_result_bytes=size), advice) == AGENT_CODE


# ── subagents ────────────────────────────────────────────────────────────────────────────────────


def test_a_cap_in_usd_is_exact() -> None:
    made = subagent(max_usd="0.20", min_usd=Decimal("0.05"))
    assert (made.max_usd, made.min_usd) == (200_000_000_000, 50_000_000_000)


def test_without_a_cap_there_is_none() -> None:
    made = subagent()
    assert (made.max_usd, made.max_tokens, made.max_calls) == (None, None, None)


@pytest.mark.parametrize(
    ("caps", "advice", "code"),
    [
        ({"max_usd": 0.2}, 'a float .*Write dollars as text, "0.2"', "cave_budget_max_invalid"),
        ({"max_usd": "1", "min_usd": 0.2}, "min_usd 0.2 is a float", "cave_budget_max_invalid"),
        ({"max_usd": "0"}, "max_usd is 0", "cave_budget_max_invalid"),
        ({"max_usd": "-1"}, "negative", "cave_budget_max_invalid"),
        ({"max_usd": "1", "min_usd": "2"}, "min_usd 2 is above max_usd 1", AGENT_CODE),
        ({"min_usd": "1"}, "min_usd goes with max_usd", AGENT_CODE),
        ({"max_tokens": 0}, "max_tokens is 0", "cave_budget_max_invalid"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5", "cave_budget_max_invalid"),
        ({"max_tokens": "9"}, "max_tokens is '9'", "cave_budget_max_invalid"),
        ({"max_tokens": 9, "min_tokens": "3"}, "min_tokens is '3'", "cave_budget_max_invalid"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens 6 is above max_tokens 5", AGENT_CODE),
        ({"min_tokens": 5}, "min_tokens goes with max_tokens", AGENT_CODE),
        (
            {"max_usd": "1", "max_tokens": 5},
            "a tree has one denomination",
            "cave_budget_denomination_ambiguous",
        ),
        ({"max_calls": 0}, "max_calls is 0, not a positive whole number", AGENT_CODE),
        ({"max_calls": 1.0}, "max_calls is 1.0", AGENT_CODE),
        ({"max_input_chars": 0}, "max_input_chars is 0", AGENT_CODE),
    ],
)
def test_a_cap_that_cannot_be_is_refused(caps: dict[str, Any], advice: str, code: str) -> None:
    assert refusal(lambda: subagent(**caps), advice) == code


def test_a_subagent_is_made_of_an_agent() -> None:
    advice = r"agent= is 'researcher', not an agent. Make one with tw.agent"
    assert refusal(lambda: subagent(agent="researcher"), advice) == AGENT_CODE


async def test_caps_of_two_denominations_below_one_run_are_refused_before_it_starts() -> None:
    root = agent(
        "root",
        model=ScriptedModel([Reply("never")]),
        tools=[subagent("a", max_usd="1"), subagent("b", max_tokens=100)],
    )
    with pytest.raises(tw.UsageError, match="max_usd= or max_tokens= throughout") as caught:
        await tw.run(root, "go")
    assert caught.value.code == "cave_budget_denomination_ambiguous"


# ── agents ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("id", ["", "A", "a b", "-a", "é", "a" * 97, "a/b"])
def test_an_id_is_short_and_plain(id: str) -> None:
    assert refusal(lambda: agent(id), "an id is at most 96 of a-z, 0-9, _ and -") == AGENT_CODE


@pytest.mark.parametrize("id", ["a", "0", "support-2_b", "a" * 96])
def test_a_short_and_plain_id_is_accepted(id: str) -> None:
    assert agent(id).id == id


@pytest.mark.parametrize("second", [lambda: tool("x"), lambda: subagent("x")])
def test_two_tools_of_one_name_are_refused(second: Callable[[], Any]) -> None:
    def make() -> Any:
        return agent(tools=[tool("x"), second()])

    assert refusal(make, "two tools are named 'x'. Give one another name=") == (
        "cave_duplicate_tool_name"
    )


def test_a_plain_function_is_told_how_to_become_a_tool() -> None:
    def make() -> Any:
        return agent(tools=[add])

    advice = r'is not a tool. Decorate the function with @tw.tool\(effect="read", runs="host"\)'
    assert refusal(make, advice) == TOOL_CODE


def test_an_agent_among_the_tools_is_told_of_subagents() -> None:
    def make() -> Any:
        return agent(tools=[agent("inner")])

    assert refusal(make, r"tw.subagent\(") == TOOL_CODE


def test_one_tool_is_given_in_a_list_too() -> None:
    assert refusal(lambda: agent(tools=tool()), "tools is a Tool, not a list") == AGENT_CODE


def test_a_sandbox_that_does_not_exist_is_refused() -> None:
    advice = 'sandbox is \'required\'. Use "host" or "fixture"'
    assert refusal(lambda: agent(sandbox="required"), advice) == AGENT_CODE


@pytest.mark.parametrize("name", ["max_model_calls", "max_tool_calls"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_a_limit_of_calls_is_a_positive_whole_number(name: str, value: Any) -> None:
    advice = f"{name} is .*, not a positive whole number"
    assert refusal(lambda: agent(**{name: value}), advice) == f"cave_{name}_invalid"


@pytest.mark.parametrize("model", [3, object(), ["anthropic/claude-haiku-4-5"]])
def test_what_is_no_model_is_refused(model: Any) -> None:
    advice = r'model is .*Give tw.model\("provider/name"\), that text itself, or tw.auto'
    assert refusal(lambda: agent(model=model), advice) == "cave_model_unavailable"


@pytest.mark.parametrize("retries", [-1, 11, 1.0, True])
def test_an_output_is_repaired_a_few_times_at_most(retries: Any) -> None:
    advice = "retries is .*, not a whole number from 0 to 10"
    assert refusal(lambda: tw.output(dict, retries=retries), advice) == AGENT_CODE


@pytest.mark.parametrize("limit", [0, -5, 10.0, "10"])
def test_an_output_limit_is_a_positive_whole_number(limit: Any) -> None:
    advice = "output: max_tokens is .*, not a positive whole number"
    assert refusal(lambda: tw.output(max_tokens=limit), advice) == AGENT_CODE


# ── graphs ───────────────────────────────────────────────────────────────────────────────────────


async def run_refused(root: tw.Agent, advice: str) -> str:
    """The code with which a run of ``root`` is refused before anything began."""
    journal: list[Any] = []
    with pytest.raises(tw.UsageError, match=advice) as caught:
        await tw.run(root, "go", journal=journal.append)
    assert journal == []
    return caught.value.code


async def test_an_agent_cannot_be_below_itself() -> None:
    model = ScriptedModel([Reply("never")])
    found: dict[str, tw.Agent] = {}
    found["a"] = agent("a", model=model, tools=[subagent("b", agent=lambda: found["b"])])
    found["b"] = agent("b", model=model, tools=[subagent("a", agent=lambda: found["a"])])
    code = await run_refused(found["a"], "a -> b -> a is a cycle.*Break it")
    assert code == "cave_subagent_definition_cycle"


async def test_the_same_agent_in_two_places_is_no_cycle() -> None:
    shared = agent("shared")
    middle = agent("middle", tools=[subagent("again", agent=shared)])
    root = agent(
        "root",
        model=ScriptedModel([Reply("fine")]),
        tools=[subagent("one", agent=shared), subagent("two", agent=middle)],
    )
    assert (await tw.run(root, "go")).text == "fine"


async def test_a_graph_is_at_most_eight_levels_deep() -> None:
    def chain(levels: int) -> tw.Agent:
        made = agent(f"level-{levels}")
        for level in reversed(range(levels)):
            tools = [subagent("next", agent=made)]
            made = agent(f"level-{level}", tools=tools, model=ScriptedModel([Reply("fine")]))
        return made

    assert (await tw.run(chain(8), "go")).text == "fine"
    code = await run_refused(chain(9), "level-8 -> level-9 is more than 8 levels deep")
    assert code == "cave_subagent_depth_limit"


async def test_what_a_function_gives_instead_of_an_agent_is_refused() -> None:
    root = agent("root", tools=[subagent("x", agent=lambda: "agent")])
    assert await run_refused(root, "'agent' below root is not an agent") == AGENT_CODE


async def test_a_limit_either_returns_or_raises() -> None:
    root = agent("root", model=ScriptedModel([Reply("never")]))
    with pytest.raises(tw.UsageError, match=r'on_stop is \'ignore\'. Use "return" or "raise"'):
        await tw.run(root, "go", on_stop="ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_a_prompt_is_text_or_messages() -> None:
    root = agent("root", model=ScriptedModel([Reply("never")]))
    with pytest.raises(tw.UsageError, match="Give text, or a list of treewarden messages") as found:
        await tw.run(root, [{"role": "user", "content": "hi"}])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    assert found.value.code == "cave_prompt_invalid"
