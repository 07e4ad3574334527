"""A model has the price that the snapshot or the user gives it, or none: nothing is guessed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from treewarden.ledgers import (
    ModelCard,
    Price,
    PriceBook,
    Snapshot,
    UnknownModel,
    format_usd,
    measured_cost,
    usd,
    worst_case,
)
from treewarden.protocols import JSONObject, Usage, UsageError, canonical_json

ROOT = Path(__file__).parents[2]
DATA = (ROOT / "ledgers" / "prices.json").read_bytes()
DIGEST = (ROOT / "ledgers" / "prices.sha256").read_text()
SHIPPED = PriceBook.from_json(DATA, DIGEST)

SMALL: Snapshot = {
    "format": "treewarden.prices.v1",
    "source": "a test",
    "date": "2026-11-30",
    "aliases": {"gemini": "google"},
    "fallback": {"azure": ["openai"]},
    "makers": ["openai"],
    "models": {
        "openai/gpt-9": {
            "prices": [
                {"input": "8", "output": "8"},
                {"input": "4", "output": "4", "since": "2026-10-01"},
                {"input": "2", "output": "2", "since": "2027-01-01"},
            ],
            "variants": {
                "service_tier=priority": [{"input": "9", "output": "9", "since": "2026-11-01"}]
            },
            "also": ["gpt-nine"],
            "dated": True,
            "window": 400_000,
            "max_output": 128_000,
            "caches_automatically": True,
            "reasons_invisibly": True,
        },
        "openai/gpt-8": {"prices": [{"input": "1", "output": "1"}], "because": "we asked"},
        "router/gpt-9": {"prices": [{"input": "5", "output": "5"}]},
        "router/openai/gpt-8:free": {"prices": [{"input": "0", "output": "0"}]},
        "google/flash": {"prices": [{"input": "1", "output": "1"}]},
    },
}
BOOK = PriceBook(SMALL)


def dollars_in(card: ModelCard) -> int:
    """The input rate in whole dollars per million tokens."""
    assert card.price is not None
    return card.price.rates.input // 1_000_000


# Finding a card --------------------------------------------------------------------------------


def test_a_card_says_all_that_is_known_and_who_says_so() -> None:
    card = BOOK.lookup("openai/gpt-9")
    assert (card.id, card.context_window, card.max_output) == ("openai/gpt-9", 400_000, 128_000)
    assert (card.caches_automatically, card.reasons_invisibly) == (True, True)
    assert (card.source, card.date, card.since) == ("a test", "2026-11-30", "2026-10-01")
    assert BOOK.lookup("openai/gpt-8").source == "treewarden: we asked"


@pytest.mark.parametrize(
    ("day", "dollars"),
    [
        ("2020-01-01", 8),
        ("2026-09-30", 8),
        ("2026-10-01", 4),
        ("2026-12-31", 4),
        ("2027-01-01", 2),
        (None, 4),  # the day of the snapshot
    ],
)
def test_a_price_holds_from_its_day_until_the_next(day: str | None, dollars: int) -> None:
    assert dollars_in(BOOK.lookup("openai/gpt-9", on=day)) == dollars


@pytest.mark.parametrize(
    "name",
    [
        "openai/gpt-nine",
        "openai/gpt-9-2026-10-05",
        "openai/gpt-9-20261005",
        "openai/gpt-9@20261005",
        "openai/gpt-nine-20261005",
        "azure/gpt-9",
        "azure/gpt-nine-20261005",
    ],
)
def test_a_model_is_found_under_its_other_names(name: str) -> None:
    assert BOOK.lookup(name) is BOOK.lookup("openai/gpt-9")


def test_a_provider_is_found_under_its_other_names() -> None:
    assert BOOK.lookup("gemini/flash").id == "google/flash"


@pytest.mark.parametrize(
    "name", ["openai/gpt-8-20261005", "openai/gpt-9-mini", "openai/gpt-99", "gpt-9", "", "openai/"]
)
def test_a_name_that_only_looks_like_a_known_one_is_unknown(name: str) -> None:
    with pytest.raises(UnknownModel):
        BOOK.lookup(name)


def test_a_request_setting_changes_the_price_from_the_day_it_does() -> None:
    priority: JSONObject = {"service_tier": "priority", "temperature": 0}
    card = BOOK.lookup("openai/gpt-9")
    price = card.price_with(priority)
    assert price is not None
    assert price.rates.input == 9_000_000
    assert card.price_with({"service_tier": "default"}) is card.price
    before = BOOK.lookup("openai/gpt-9", on="2026-10-31")
    assert before.price_with(priority) is before.price


def test_a_price_that_the_user_pins_wins_and_keeps_the_limits() -> None:
    pinned = Price(input="7", output="7")
    book = PriceBook(SMALL, overrides={"openai/gpt-9": pinned, "mine/own": pinned})
    card = book.lookup("openai/gpt-9")
    assert (card.price, card.source, card.context_window) == (pinned, "pinned", 400_000)
    assert card.price_with({"service_tier": "priority"}) is pinned
    assert book.lookup("mine/own") == ModelCard(id="mine/own", price=pinned)


def test_a_card_that_the_user_pins_is_taken_as_it_is() -> None:
    card = ModelCard(id="mine/own", price=None, context_window=1)
    assert PriceBook(SMALL, overrides={"mine/own": card}).lookup("mine/own") is card


# Unknown ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "closest"),
    [
        ("claude-opus-4.1", "anthropic/claude-opus-4-1"),
        ("anthropic/claude-opus-4.1", "anthropic/claude-opus-4-1"),
        ("anthropic/Claude_Opus_4_1", "anthropic/claude-opus-4-1"),
        ("openai/gpt-5.2-proo", "openai/gpt-5.2-pro"),
        ("gemini/gemini-3.6-flahs", "google/gemini-3.6-flash"),
        ("nowhere/gpt-4o-mini", "openai/gpt-4o-mini"),
        ("anthropic/zzzzzzzz", None),
    ],
)
def test_E29_an_unknown_model_is_refused_with_the_closest_known_id(
    asked: str, closest: str | None
) -> None:
    with pytest.raises(UnknownModel) as refused:
        SHIPPED.lookup(asked)
    assert refused.value.closest == closest
    assert refused.value.code == "cave_budget_denomination_unavailable"


def test_E29_the_refusal_says_how_to_pin_a_price() -> None:
    with pytest.raises(UnknownModel) as refused:
        SHIPPED.lookup("claude-opus-4.1")
    assert str(refused.value) == (
        "cave_budget_denomination_unavailable: no price is known for 'claude-opus-4.1', and none "
        "is guessed. The closest known id is 'anthropic/claude-opus-4-1'. Use that, or pin the "
        'price: tw.model("claude-opus-4.1", price=tw.Price(input="…", output="…")), in USD per '
        "million tokens."
    )


def test_E29_a_known_model_has_the_floor_that_a_small_budget_refuses() -> None:
    price = SHIPPED.lookup("anthropic/claude-opus-4-1").price
    assert price is not None
    floor = worst_case(price, input_tokens=0, output_tokens=768, can_write_cache=False)
    assert format_usd(floor) == "0.0576"
    assert floor > usd("0.02")


def test_E29_a_model_that_is_listed_as_free_costs_nothing_and_is_not_unknown() -> None:
    price = SHIPPED.lookup("openrouter/qwen/qwen3-coder:free").price
    assert price is not None
    assert measured_cost(price, Usage(input=956_000, output=10_000)).usd == 0


def test_E32_no_model_gets_a_default_price() -> None:
    # The report's 956,000 tokens were billed at a made-up rate. Here there is no rate to take.
    with pytest.raises(UnknownModel):
        SHIPPED.lookup("nowhere/some-new-model")


# The file --------------------------------------------------------------------------------------


def test_a_price_file_that_was_changed_is_refused() -> None:
    with pytest.raises(UsageError, match="was changed or cut off"):
        PriceBook.from_json(DATA[:-1] + b" ", DIGEST)


def test_a_price_file_of_another_format_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'v0'; this version reads 'treewarden\.prices\.v1'"):
        PriceBook.from_json(b'{"format":"v0"}')


def test_the_shipped_file_is_canonical_and_has_the_digest_beside_it() -> None:
    assert canonical_json(json.loads(DATA)) == DATA
    assert hashlib.sha256(DATA).hexdigest() == DIGEST.strip()
    assert len(DATA) < 700_000


def test_every_shipped_model_has_a_price_on_every_day() -> None:
    for id in SHIPPED.ids:
        assert SHIPPED.lookup(id, on="2000-01-01").price is not None
        assert SHIPPED.lookup(id).price is not None


@pytest.mark.slow
@pytest.mark.skipif(find_spec("genai_prices") is None, reason="the maintainers' source of prices")
def test_the_shipped_file_is_what_the_tool_makes() -> None:
    tool = ROOT / "tools" / "make_price_snapshot.py"
    done = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# input, output, cache read, cache write of the contract's section 10.2. A cache write that is 0
# there is not free but without a price of its own; here it costs what other input costs.
CONTRACT = [
    ("anthropic/claude-haiku-4-5", "1", "5", "0.1", "1.25"),
    ("anthropic/claude-haiku-4-5-20251001", "1", "5", "0.1", "1.25"),
    ("anthropic/claude-opus-4-1", "15", "75", "1.5", "18.75"),
    ("anthropic/claude-opus-4-8", "5", "25", "0.5", "6.25"),
    ("anthropic/claude-opus-5", "5", "25", "0.5", "6.25"),
    ("anthropic/claude-sonnet-4-5", "3", "15", "0.3", "3.75"),
    ("anthropic/claude-sonnet-4-5-20250929", "3", "15", "0.3", "3.75"),
    ("anthropic/claude-sonnet-4-6", "3", "15", "0.3", "3.75"),
    ("anthropic/claude-sonnet-5", "2", "10", "0.2", "2.5"),
    ("gemini/gemini-2.5-flash", "0.3", "2.5", "0.03", "0.3"),
    ("google/gemini-2.5-flash", "0.3", "2.5", "0.03", "0.3"),
    ("google-vertex/gemini-2.5-flash", "0.3", "2.5", "0.03", "0.3"),
    ("vertex/gemini-2.5-flash", "0.3", "2.5", "0.03", "0.3"),
    ("gemini/gemini-2.5-pro", "1.25", "10", "0.125", "1.25"),
    ("vertex/gemini-2.5-pro", "1.25", "10", "0.125", "1.25"),
    ("openai/gpt-5.4-mini", "0.75", "4.5", "0.075", "0.75"),
    ("openai/gpt-5.4-mini-2026-03-17", "0.75", "4.5", "0.075", "0.75"),
    ("openai/gpt-5.4-nano", "0.2", "1.25", "0.02", "0.2"),
    ("openai/gpt-5.4-nano-2026-03-17", "0.2", "1.25", "0.02", "0.2"),
    ("openai/gpt-5.5", "5", "30", "0.5", "5"),
    ("openai/gpt-5.5-2026-04-23", "5", "30", "0.5", "5"),
    ("openai/gpt-5.6", "5", "30", "0.5", "6.25"),
    ("openai/gpt-5.6-sol", "5", "30", "0.5", "6.25"),
    ("openai/text-embedding-3-large", "0.13", "0", "0.13", "0.13"),
    ("openai/text-embedding-3-small", "0.02", "0", "0.02", "0.02"),
    ("vertex/claude-haiku-4-5@20251001", "1", "5", "0.1", "1.25"),
    ("vertex/claude-sonnet-4-6", "3", "15", "0.3", "3.75"),
]


@pytest.mark.parametrize(("model", "input", "output", "read", "write"), CONTRACT)
def test_the_contracts_rows_are_in_the_shipped_file(
    model: str, input: str, output: str, read: str, write: str
) -> None:
    # GPT-5.6 became cheaper on 2026-08-21, after the contract was written.
    price = SHIPPED.lookup(model, on="2026-08-01").price
    assert price is not None
    plain = Price(input=input, output=output, cache_read=read, cache_write=write)
    for name in ("input", "output", "cache_read", "cache_write", "reasoning"):
        assert getattr(price.rates, name) == getattr(plain.rates, name), name


def test_a_million_tokens_of_sonnet_cost_three_dollars_and_hold_three_seventy_five() -> None:
    price = SHIPPED.lookup("anthropic/claude-sonnet-4-5").price
    assert price is not None
    assert measured_cost(price, Usage(input=1_000_000)).usd == usd("3")
    hold = worst_case(price, input_tokens=1_000_000, output_tokens=0, can_write_cache=True)
    assert hold == usd("3.75")


def test_a_write_for_an_hour_costs_twice_the_input_at_anthropic() -> None:
    for model in ("claude-haiku-4-5", "claude-sonnet-5", "claude-opus-5"):
        price = SHIPPED.lookup(f"anthropic/{model}").price
        assert price is not None
        assert price.rates.cache_write_1h == 2 * price.rates.input


@pytest.mark.parametrize(
    ("model", "threshold", "inclusive"),
    [("x-ai/grok-4.7", 200_000, True), ("openai/gpt-5.6", 272_000, False)],
)
def test_E33_the_shipped_tiers_begin_where_their_providers_say(
    model: str, threshold: int, inclusive: bool
) -> None:
    price = SHIPPED.lookup(model).price
    assert price is not None
    (tier,) = price.tiers
    assert (tier.above_context_tokens, tier.inclusive) == (threshold, inclusive)
    assert tier.rates.input == 2 * price.rates.input


def test_only_models_that_pay_for_unasked_cache_writes_are_held_for_them() -> None:
    assert SHIPPED.lookup("openai/gpt-5.6").caches_automatically
    assert not SHIPPED.lookup("openai/gpt-4o").caches_automatically
    assert not SHIPPED.lookup("anthropic/claude-haiku-4-5").caches_automatically


def test_models_that_think_unseen_are_marked() -> None:
    for model in ("openai/o3", "openai/gpt-5", "google/gemini-2.5-flash", "x-ai/grok-4"):
        assert SHIPPED.lookup(model).reasons_invisibly, model
    for model in ("openai/gpt-4o", "anthropic/claude-haiku-4-5", "deepseek/deepseek-reasoner"):
        assert not SHIPPED.lookup(model).reasons_invisibly, model
