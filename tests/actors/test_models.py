"""Models behind an HTTP API: how one is named, found and priced, and what it will not accept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from importlib import import_module
from typing import Any

import pytest

import treewarden as tw
from treewarden.actors import Auto, HttpModel, price_book
from treewarden.testing import Exchange, ReplayServer, Reply, ScriptedModel

HAIKU = "anthropic/claude-haiku-4-5"
HERE = "http://127.0.0.1:9"

# What `auto()` finds at the root, told what the environment is. Not public: nobody else has one.
resolve_auto: Callable[[Mapping[str, str]], HttpModel] = import_module(
    "treewarden.actors._models"
).resolve_auto


def refusal(advice: str, id: str = HAIKU, **options: Any) -> str:
    with pytest.raises(tw.UsageError, match=advice) as caught:
        tw.model(id, **options)
    return caught.value.code


def per_million(price: tw.Price | None) -> tuple[str, str]:
    """Input and output in USD per million tokens."""
    assert price is not None
    return str(Decimal(price.rates.input) / 10**6), str(Decimal(price.rates.output) / 10**6)


# ── names and places ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("id", ["claude-haiku-4-5", "anthropic/", "/claude", "", "/"])
def test_a_model_is_named_with_its_provider(id: str) -> None:
    assert refusal("has no provider. Write provider/name", id) == "cave_model_unavailable"


def test_a_name_may_hold_slashes_of_its_own() -> None:
    model = tw.model("openrouter/openai/gpt-4.1-mini", base_url=HERE)
    assert (model.provider, model.name) == ("openrouter", "openai/gpt-4.1-mini")


def test_a_provider_of_unknown_address_needs_one() -> None:
    advice = "the address of acme is not known. Give base_url="
    assert refusal(advice, "acme/new") == "cave_model_unavailable"


@pytest.mark.parametrize(
    "address", ["localhost:8080", "ftp://here", "http://", "http://here:port", "http://[::1", "/v1"]
)
def test_an_address_is_a_url_with_a_host(address: str) -> None:
    advice = "Give a URL that starts with http:// or https://, with a host after it"
    assert refusal(advice, base_url=address) == "cave_model_unavailable"


def test_a_slash_at_the_end_of_an_address_does_not_matter() -> None:
    assert tw.model(HAIKU, base_url=HERE + "/").base_url == HERE


def test_fallbacks_are_not_available_yet() -> None:
    code = refusal("fallbacks= is not available yet", fallbacks=["openai/gpt-5.4-mini"])
    assert code == "cave_option_unavailable"


@pytest.mark.parametrize("window", [0, -1, 1.5, "200000", True])
def test_a_context_window_is_a_positive_whole_number(window: Any) -> None:
    refusal("context_window is .*, not a positive whole number", context_window=window)


@pytest.mark.parametrize("price", ["3", 3, {"input": "3"}])
def test_a_pinned_price_is_a_price(price: Any) -> None:
    refusal(r"Write tw.Price\(", price=price)


def test_a_price_is_not_a_float() -> None:
    with pytest.raises(tw.UsageError, match="float"):
        tw.Price(input=3.0, output=15)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# ── settings that could not be sent, or not be held ──────────────────────────────────────────────


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize("limit", [0, -1, 1.5, "100", True])
def test_an_output_limit_is_a_positive_whole_number(name: str, limit: Any) -> None:
    refusal("an output limit is a positive whole number, not", settings={name: limit})


@pytest.mark.parametrize("id", [HAIKU, "acme/new"])
@pytest.mark.parametrize("limit", [None, "100", 0, True])
def test_an_extra_body_cannot_take_the_limit_off_the_wire(id: str, limit: Any) -> None:
    advice = "takes the output limit off the request"
    refusal(advice, id, base_url=HERE, extra_body={"max_tokens": limit})


@pytest.mark.parametrize("where", ["settings", "extra_body"])
def test_settings_cannot_hold_the_conversation(where: str) -> None:
    conversation: dict[str, Any] = {where: {"messages": []}}
    refusal("cannot hold 'messages'", **conversation)
    whole: dict[str, Any] = {where: {"stream": False}}
    refusal("cannot turn 'stream' to False", **whole)


def test_settings_are_json() -> None:
    refusal("must be JSON all through", settings={"temperature": object()})


def test_the_smallest_of_several_limits_is_meant() -> None:
    model = tw.model(HAIKU, settings={"max_tokens": 50, "max_completion_tokens": 40, "top_k": 1})
    assert (model.declared_limit, model.settings) == (40, {"top_k": 1})


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_is_taken_from_the_providers_variable_when_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tw.model(HAIKU)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "from-the-environment")
    assert model.api_key == "from-the-environment"
    model.require_ready()
    assert tw.model(HAIKU, api_key="mine").api_key == "mine"


def test_a_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "secret-of-the-environment")
    for model in (tw.model(HAIKU), tw.model(HAIKU, api_key="secret-given")):
        assert "secret" not in repr(model)
        assert "secret" not in repr(tw.agent(id="a", instructions="", model=model))


def test_a_missing_key_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "")
    with pytest.raises(tw.CredentialsError, match="set OPENAI_API_KEY or pass api_key=") as caught:
        tw.model("openai/gpt-5.4-mini").require_ready()
    assert not caught.value.was_sent


def test_a_server_of_ones_own_needs_no_key() -> None:
    tw.model("local/smollm2", base_url=HERE).require_ready()


@pytest.mark.parametrize("key", ["secret\n", " secret", "sec ret", "secrét", "secret\x00"])
def test_a_key_that_no_header_can_carry_is_refused_without_being_quoted(key: str) -> None:
    with pytest.raises(tw.CredentialsError, match="ANTHROPIC_API_KEY or api_key=") as caught:
        tw.model(HAIKU, api_key=key).require_ready()
    assert key.strip() not in str(caught.value)


# ── auto ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("environment", "id"),
    [
        ({"CAVE_MODEL": "anthropic/claude-opus-4-8"}, "anthropic/claude-opus-4-8"),
        ({"ANTHROPIC_API_KEY": "k"}, "anthropic/claude-haiku-4-5"),
        ({"OPENAI_API_KEY": "k"}, "openai/gpt-5.4-mini"),
        ({"OPENAI_API_KEY": "k", "ANTHROPIC_API_KEY": ""}, "openai/gpt-5.4-mini"),
        (
            {"CAVE_MODEL": HAIKU, "OPENAI_API_KEY": "k", "ANTHROPIC_API_KEY": "k"},
            "anthropic/claude-haiku-4-5",
        ),
    ],
)
def test_the_root_takes_the_one_model_that_the_environment_names(
    environment: dict[str, str], id: str
) -> None:
    assert resolve_auto(environment).id == id


def test_every_default_model_has_a_price() -> None:
    for key in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY"):
        assert resolve_auto({key: "k"}).card.price is not None


def test_without_a_key_it_says_what_to_set() -> None:
    with pytest.raises(tw.UsageError, match="set CAVE_MODEL to provider/name, or one of") as caught:
        resolve_auto({"HOME": "/"})
    assert caught.value.code == "cave_model_unavailable"
    assert "ANTHROPIC_API_KEY, OPENAI_API_KEY" in str(caught.value)


def test_between_two_keys_it_does_not_choose() -> None:
    with pytest.raises(tw.UsageError, match=r"and does not choose\. Set CAVE_MODEL") as caught:
        resolve_auto({"ANTHROPIC_API_KEY": "k", "OPENAI_API_KEY": "k"})
    assert caught.value.code == "cave_model_ambiguous"


def test_a_model_that_the_environment_misspells_is_refused() -> None:
    with pytest.raises(tw.UsageError, match="'haiku' has no provider"):
        resolve_auto({"CAVE_MODEL": "haiku"})


def test_an_agent_without_a_model_has_auto() -> None:
    for model in (None, tw.auto()):
        assert isinstance(tw.agent(id="a", instructions="", model=model).model, Auto)


async def test_a_run_looks_at_the_environment_when_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("CAVE_MODEL", "ANTHROPIC_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    agent = tw.agent(id="a", instructions="")
    with pytest.raises(tw.UsageError, match="found no model"):
        await tw.run(agent, "go")


async def test_a_subagent_takes_its_parents_model() -> None:
    model = ScriptedModel(
        lambda request: (
            Reply(tool_calls=[("help", {"task": "x"})])
            if request.agent_path.endswith("boss#1") and request.turn == 0
            else Reply("done")
        )
    )
    helper = tw.agent(id="helper", instructions="", model=tw.auto())
    boss = tw.agent(
        id="boss",
        instructions="",
        model=model,
        tools=[tw.subagent(name="help", description="", agent=helper)],
    )
    result = await tw.run(boss, "go")
    assert result.text == "done"
    assert len(model.requests) == 3


# ── cards and prices ─────────────────────────────────────────────────────────────────────────────


def test_a_known_model_has_the_snapshots_card() -> None:
    card = tw.model(HAIKU).card
    assert (card.context_window, card.max_output) == (200_000, 64_000)
    assert per_million(card.price) == ("1", "5")


def test_an_unknown_model_has_no_card_but_a_suggestion() -> None:
    with pytest.raises(tw.UsageError, match="'anthropic/claude-haiku-4-5'") as caught:
        _ = tw.model("anthropic/claude-haiku-4.5").card
    assert caught.value.code == "cave_budget_denomination_unavailable"


def test_a_pinned_price_and_window_win() -> None:
    price = tw.Price(input="0.5", output="2")
    card = tw.model(HAIKU, price=price, context_window=1_000).card
    assert (card.price, card.context_window, card.source) == (price, 1_000, "pinned")
    assert card.max_output == 64_000


def test_a_pinned_price_makes_an_unknown_model_known() -> None:
    price = tw.Price(input="0.5", output="2")
    card = tw.model("acme/new", base_url=HERE, price=price).card
    assert (card.id, card.price, card.context_window) == ("acme/new", price, None)


def test_a_setting_that_makes_a_model_dearer_makes_its_price_dearer() -> None:
    plain, fast = (
        tw.model("openai/gpt-5", base_url=HERE, settings=settings)
        for settings in ({}, {"service_tier": "priority"})
    )
    assert per_million(plain.card.price) == ("1.25", "10")
    assert fast.card.price == price_book().lookup("openai/gpt-5").variants["service_tier=priority"]
    assert fast.card.price != plain.card.price
    # The answer is by a dated release, at the price of the same setting.
    assert fast.price_of("gpt-5-2025-08-07") == fast.card.price


def test_another_model_of_the_provider_has_its_own_price() -> None:
    model = tw.model("deepseek/deepseek-reasoner", base_url=HERE)
    assert per_million(model.price_of("deepseek-v4-flash")) == ("0.3", "1.2")
    assert model.price_of("nobody-knows") is None


def test_a_pinned_price_holds_for_every_name_of_the_model_and_for_no_other() -> None:
    price = tw.Price(input="0.5", output="2")
    model = tw.model(HAIKU, price=price)
    assert model.price_of("claude-haiku-4-5") == price
    assert model.price_of("claude-haiku-4-5-20251001") == price
    assert per_million(model.price_of("claude-opus-4-8")) == ("5", "25")
    local = tw.model("acme/new", base_url=HERE, price=price)
    assert local.price_of("new") == price
    assert local.price_of("old") is None


async def test_a_pinned_price_is_charged_although_the_answer_has_a_dated_name() -> None:
    answer = (
        b'{"id": "m", "model": "claude-haiku-4-5-20251001", "content": [], "stop_reason":'
        b' "end_turn", "usage": {"input_tokens": 1000, "output_tokens": 100}}'
    )
    with ReplayServer([Exchange(200, {"content-type": "application/json"}, answer)]) as server:
        model = tw.model(HAIKU, base_url=server.base_url, price=tw.Price(input="0.5", output="2"))
        agent = tw.agent(id="a", instructions="", model=model)
        result = await tw.run(agent, "go", budget=tw.Budget(max_usd="0.10"))
    assert result.cost_usd == Decimal("0.0007")
    (line,) = result.receipt.lines
    assert (line.asked_model, line.model) == ("claude-haiku-4-5", "claude-haiku-4-5-20251001")
