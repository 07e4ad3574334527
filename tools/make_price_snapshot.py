"""Make ``ledgers/prices.json``: the prices that Treewarden ships with.

A maintainer runs this after an update of genai-prices, reads the difference, and commits it:

    python tools/make_price_snapshot.py            write the snapshot and its digest
    python tools/make_price_snapshot.py --check    fail if what is committed is not what this makes

The source is the data inside the installed genai-prices package; ``tools/price_overrides.json``
says what we know better, each time with the reason. Nothing is fetched and no clock is read, so
the same two inputs make the same bytes.

One rule decides what goes in: a hold must be a ceiling. A model whose text use is billed by
something that a price of ours cannot say (hours, pages, images that it writes) is left out; using
it needs a pinned price. Where the source itself is only sure of a range, the dearest end is taken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Decimal
from fnmatch import fnmatchcase
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from genai_prices.data import providers
from genai_prices.types import (
    ClauseEquals,
    ClauseOr,
    ModelInfo,
    ModelPrice,
    Provider,
    StartDateConstraint,
    TieredPrices,
    TimeOfDateConstraint,
)

from treewarden.ledgers import PriceBook
from treewarden.protocols import canonical_json

ROOT = Path(__file__).parents[1]
SNAPSHOT = ROOT / "ledgers" / "prices.json"
DIGEST = ROOT / "ledgers" / "prices.sha256"
OVERRIDES = ROOT / "tools" / "price_overrides.json"

# The snapshot is read at start-up and lies in every wheel.
MOST_BYTES = 700_000

Row = dict[str, Any]

RATES = {
    "input": "input_mtok",
    "output": "output_mtok",
    "cache_read": "cache_read_mtok",
    "cache_write": "cache_write_mtok",
    "cache_write_1h": "cache_write_1h_mtok",
    "reasoning": "output_reasoning_mtok",
}
# Fees for a thousand server-side tool requests, under the names that usage reports them by.
FEES = {
    "web_search_requests": "web_searches_kcount",
    "file_search_requests": "storage_searches_kcount",
    "x_search_requests": "social_searches_kcount",
    "code_execution_requests": "code_executions_kcount",
}
PER_REQUEST = "requests_kcount"
# What a conversation in text does not use, so that it may be left unsaid.
NOT_TEXT_INPUT = ("input_audio_", "input_image_", "input_video_", "cache_audio_", "cache_image_")

# A day before every dated price.
LONG_AGO = date(2000, 1, 1)
# A release day that no source lists by hand: it is only accepted where every day is.
ANY_DAY = ("-20991231", "-2099-12-31", "@20991231")


class LeftOut(Exception):
    """A price of ours cannot say what this model costs. The text is the reason."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    is_check = parser.parse_args().check
    left_out: Counter[str] = Counter()
    snapshot = make_snapshot(json.loads(OVERRIDES.read_text("utf-8")), left_out)
    data = canonical_json(snapshot)
    digest = f"{hashlib.sha256(data).hexdigest()}\n".encode()
    verify(data)
    if is_check:
        return report_difference(data, digest)
    SNAPSHOT.write_bytes(data)
    DIGEST.write_bytes(digest)
    print(f"{len(snapshot['models'])} models, {len(data):,} bytes, {digest.decode().strip()}")
    for reason, count in left_out.most_common():
        print(f"  left out {count:4}: {reason}")
    return 0


def report_difference(data: bytes, digest: bytes) -> int:
    committed = SNAPSHOT.read_bytes() if SNAPSHOT.exists() else b"{}"
    if committed == data and DIGEST.read_bytes() == digest:
        print("the committed snapshot is what this makes")
        return 0
    old, new = json.loads(committed).get("models", {}), json.loads(data)["models"]
    changed = sorted(id for id in old.keys() | new.keys() if old.get(id) != new.get(id))
    print(f"the committed snapshot is not what this makes: {len(changed)} models differ")
    print(*changed[:20], sep="\n")
    return 1


def verify(data: bytes) -> None:
    """Read the snapshot as a user will, every price of it."""
    assert len(data) < MOST_BYTES, f"{len(data):,} bytes is too much to ship"
    book = PriceBook.from_json(data)
    for id, model in json.loads(data)["models"].items():
        for rows in (model["prices"], *model.get("variants", {}).values()):
            days = [row.get("since", "") for row in rows]
            assert all(a < b for a, b in pairwise(days)), f"{id}: dates out of order"
            for day in days:
                assert book.lookup(id, on=day or str(LONG_AGO)).price is not None


def make_snapshot(overrides: Row, left_out: Counter[str]) -> Row:
    models: dict[str, Row] = {}
    for provider in providers:
        for model in provider.models:
            try:
                row = model_row(provider, model, overrides)
            except LeftOut as reason:
                left_out[str(reason)] += 1
            else:
                models.setdefault(f"{provider.id}/{model.id}", row)
    for id in (*overrides["limits"], *overrides["free"]):
        assert id in models, f"{OVERRIDES.name} speaks of {id}, which the source does not have"
    for id, better in overrides["models"].items():
        models[id] = merged(models.get(id, {}), better)
    drop_taken_names(models)
    return {
        "format": "treewarden.prices.v1",
        "source": f"genai-prices {version('genai-prices')}",
        "date": overrides["date"],
        "aliases": overrides["aliases"],
        "fallback": {
            p.id: p.fallback_model_providers for p in providers if p.fallback_model_providers
        },
        "makers": overrides["makers"],
        "models": models,
    }


def merged(row: Row, better: Row) -> Row:
    also = sorted({*row.get("also", ()), *better.get("also", ())})
    later = better.get("later_prices", [])
    known = {k: v for k, v in better.items() if k != "later_prices"}
    prices = better.get("prices", row.get("prices", [])) + later
    return {**row, **known, "prices": prices, **({"also": also} if also else {})}


def drop_taken_names(models: dict[str, Row]) -> None:
    """A name belongs to the model whose id it is; of two that only also have it, to neither."""
    wanted = Counter(all_names(models))
    for id, row in models.items():
        provider = id.partition("/")[0]
        kept = [
            name
            for name in row.pop("also", [])
            if f"{provider}/{name}" not in models and wanted[f"{provider}/{name}"] == 1
        ]
        if kept:
            row["also"] = kept


def all_names(models: Mapping[str, Row]) -> Iterator[str]:
    for id, row in models.items():
        yield from (f"{id.partition('/')[0]}/{name}" for name in row.get("also", ()))


def model_row(provider: Provider, model: ModelInfo, overrides: Row) -> Row:
    id = f"{provider.id}/{model.id}"
    if (reason := overrides["left_out"].get(provider.id)) is not None:
        raise LeftOut(f"{provider.id}: {reason}")
    row: Row = {"prices": dated_prices(model, is_free(id, overrides))}
    if names := other_names(provider, model):
        row["also"] = names
    if accepts_any_day(provider, model, (model.id, *names)):
        row["dated"] = True
    if variants := variant_prices(model):
        row["variants"] = variants
    window, max_output = overrides["limits"].get(id, (model.context_window, None))
    row |= {k: v for k, v in (("window", window), ("max_output", max_output)) if v}
    name = model.id.rpartition("/")[2]
    if matches(name, overrides["reasons_invisibly"]):
        row["reasons_invisibly"] = True
    if has_dearer_write(row) and not matches(id, overrides["caches_only_when_asked"]):
        row["caches_automatically"] = True
    return row


def is_free(id: str, overrides: Row) -> bool:
    # The source says "free" by giving no price at all, but also leaves out the price of what it
    # cannot express. Only where the name or a maintainer says so is nothing taken for zero.
    return id.endswith(":free") or id in overrides["free"]


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def has_dearer_write(row: Row) -> bool:
    every = [rates for price in row["prices"] for rates in (price, *price.get("tiers", ()))]
    return any(Decimal(r.get("cache_write", 0)) > Decimal(r["input"]) for r in every)


# Names ---------------------------------------------------------------------------------------


def other_names(provider: Provider, model: ModelInfo) -> list[str]:
    """Names that the source spells out for this model, and only for it."""
    names = set(spelled_out(model.match))
    names.add(model.id.removesuffix("-latest"))
    names.discard(model.id)
    return sorted(name for name in names if provider.find_model(name) is model)


def spelled_out(match: object) -> Iterator[str]:
    # A prefix is not a name: it would give tomorrow's model the price of today's.
    if isinstance(match, ClauseEquals):
        yield match.equals
    elif isinstance(match, ClauseOr):
        for clause in match.or_:
            yield from spelled_out(clause)


def accepts_any_day(provider: Provider, model: ModelInfo, names: tuple[str, ...]) -> bool:
    releases = (f"{name}{day}" for name in names for day in ANY_DAY)
    return any(provider.find_model(release) is model for release in releases)


# Prices --------------------------------------------------------------------------------------


def dated_prices(model: ModelInfo, free: bool) -> list[Row]:
    rows = [(day, price_at(model, day, None)) for day in change_days(model)]
    if free and not any(row for _, row in rows):
        return [{"input": "0", "output": "0"}]
    if any("input" not in row for _, row in rows):
        raise LeftOut("the source has no price per token")
    return with_days(rows)


def variant_prices(model: ModelInfo) -> dict[str, list[Row]]:
    """Prices under a request setting, from the day on which they differ from the plain ones."""
    found: dict[str, list[Row]] = {}
    for setting in settings_of(model):
        days = change_days(model)
        rows = [(day, price_at(model, day, setting)) for day in days]
        differs = [row != price_at(model, day, None) for day, row in rows]
        if any(differs):
            ((name, value),) = setting.items()
            found[f"{name}={value}"] = with_days(rows[differs.index(True) :])
    return found


def settings_of(model: ModelInfo) -> list[dict[str, str]]:
    # Batches are another interface than the one that we speak, and a route is no request field.
    every = [variant.when for variant in model.price_variants or ()]
    return [when for when in every if when.keys() <= {"service_tier", "speed"} and len(when) == 1]


def with_days(rows: list[tuple[date, Row]]) -> list[Row]:
    """The rows, each with the day that it holds from, without those that change nothing."""
    kept: list[Row] = []
    last: Row | None = None
    for day, row in rows:
        if row != last:
            kept.append(row if day == LONG_AGO else {**row, "since": day.isoformat()})
        last = row
    return kept


def constraints(model: ModelInfo) -> Iterator[StartDateConstraint | TimeOfDateConstraint | None]:
    if not isinstance(model.prices, ModelPrice):
        yield from (price.constraint for price in model.prices)
    yield from (variant.constraint for variant in model.price_variants or ())


def change_days(model: ModelInfo) -> list[date]:
    starts = (c.start_date for c in constraints(model) if isinstance(c, StartDateConstraint))
    return [LONG_AGO, *sorted(set(starts))]


def price_at(model: ModelInfo, day: date, setting: dict[str, str] | None) -> Row:
    """The price on a day: where it changes by the hour, the dearest of each rate."""
    midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
    by_hour = any(isinstance(c, TimeOfDateConstraint) for c in constraints(model))
    # All known windows begin and end on a half hour.
    moments = [midnight + timedelta(minutes=30 * n) for n in range(48 if by_hour else 1)]
    rows = [price_row(model.get_prices(moment, setting)) for moment in moments]
    if all(row == rows[0] for row in rows):
        return rows[0]
    assert not any("tiers" in row for row in rows), f"{model.id} has tiers and hours"
    dearest = {k: max((r[k] for r in rows if k in r), key=Decimal) for row in rows for k in row}
    return {**dearest, "varies_by_hour": True}


def price_row(price: ModelPrice) -> Row:
    rates = {key: value for key, value in vars(price).items() if value is not None}
    refuse_what_cannot_be_said(rates)
    row = rates_up_to(rates, 0)
    starts = {tier.start for v in rates.values() if isinstance(v, TieredPrices) for tier in v.tiers}
    if starts:
        row["tiers"] = [{**threshold(s), **rates_up_to(rates, s + 1)} for s in sorted(starts)]
    if PER_REQUEST in rates:
        row["per_request"] = dollars(rates[PER_REQUEST] / 1000)
    if fees := {name: dollars(rates[key]) for name, key in FEES.items() if key in rates}:
        row["per_thousand"] = fees
    return row


def refuse_what_cannot_be_said(rates: Mapping[str, object]) -> None:
    for key in rates.keys() - {*RATES.values(), *FEES.values(), PER_REQUEST}:
        if not key.startswith(NOT_TEXT_INPUT):
            raise LeftOut(f"it is also billed by {key}")


def rates_up_to(rates: Mapping[str, Any], context: int) -> Row:
    """The rates of a request with this context."""
    found = {name: rate_at(rates[key], context) for name, key in RATES.items() if key in rates}
    if "input" in found and "output" not in found:
        found["output"] = Decimal(0)  # an embedding model writes nothing
    if found.get("cache_write", Decimal(0)) < found.get("input", Decimal(0)):
        found |= write_above_input(found)
    return {name: dollars(rate) for name, rate in found.items()}


def write_above_input(found: Mapping[str, Decimal]) -> dict[str, Decimal]:
    # A written token is read too. A write price below the input price is either a fee beside the
    # input price (OpenRouter's Gemini models: storage for five minutes) or a discount that nobody
    # gives; the sum is a ceiling for both.
    if not found.get("cache_write"):
        return {}
    return {"cache_write": found["input"] + found["cache_write"]}


def rate_at(rate: Decimal | TieredPrices, context: int) -> Decimal:
    if isinstance(rate, Decimal):
        return rate
    reached = [tier.price for tier in rate.tiers if context > tier.start]  # tiers are sorted
    return reached[-1] if reached else rate.base


def threshold(start: int) -> Row:
    # The source can only say "above"; it writes "from 200,000 on" as "above 199,999".
    if start % 1000 == 999:
        return {"above_context_tokens": start + 1, "inclusive": True}
    return {"above_context_tokens": start, "inclusive": False}


def dollars(rate: Decimal) -> str:
    """The rate as text, rounded up where it is no whole number of 10^-12 USD for one."""
    step = Decimal("0.000001")
    nearest = rate.quantize(step, ROUND_HALF_EVEN)
    # Some rates went through a float on their way here: 0.18000000000000002 is 0.18.
    is_noise = abs(rate - nearest) < step / 1000
    return f"{nearest if is_noise else rate.quantize(step, ROUND_CEILING):f}".rstrip("0").rstrip(
        "."
    )


if __name__ == "__main__":
    sys.exit(main())
