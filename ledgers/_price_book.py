"""Which model costs what on which day, out of a snapshot that is handed in.

One rule keeps this file simple: nothing is guessed. An id is in the snapshot, or is pinned by the
user, or is refused before anything is spent. There is no default price, and a model that is
listed as free is not the same as one that is not listed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Required, TypedDict, cast

import attrs

from treewarden.protocols import JSONObject, UsageError

from ._prices import Price, Tier

SNAPSHOT_FORMAT = "treewarden.prices.v1"

# A model's name with the day of its release: -20251001, -2026-03-17, @20251001.
_DATED = re.compile(r"(.+)[-@](?:\d{8}|\d{4}-\d{2}-\d{2})")


class SnapshotRates(TypedDict, total=False):
    """US dollars per million tokens, as text. What is absent has the default of ``Price``."""

    input: Required[str]
    output: Required[str]
    cache_read: str
    cache_write: str
    cache_write_1h: str
    reasoning: str


class SnapshotTier(SnapshotRates):
    above_context_tokens: int
    inclusive: bool


class SnapshotPrice(SnapshotRates, total=False):
    """One price of a model; it holds from ``since`` until the next one of the list."""

    since: str
    tiers: list[SnapshotTier]
    per_request: str
    per_thousand: dict[str, str]
    varies_by_hour: bool


class SnapshotModel(TypedDict, total=False):
    # Ascending by ``since``; the first has none.
    prices: Required[list[SnapshotPrice]]
    # Prices under a request setting, by ``name=value``. Each list may begin with a ``since``:
    # until then the setting makes no known difference.
    variants: dict[str, list[SnapshotPrice]]
    # Other names of the same model at the same provider.
    also: list[str]
    # Any release of this model, named with its day, has this price.
    dated: bool
    window: int
    max_output: int
    caches_automatically: bool
    reasons_invisibly: bool
    # Why a maintainer put other numbers here than the source has.
    because: str


class Snapshot(TypedDict):
    """The content of the price file."""

    format: str
    source: str
    date: str
    # Other names of providers: gemini is google.
    aliases: dict[str, str]
    # Whose prices a provider charges for models that it only passes on.
    fallback: dict[str, list[str]]
    # Providers that make models. Of two ids that are equally close, theirs is meant.
    makers: list[str]
    models: dict[str, SnapshotModel]


class UnknownModel(UsageError):
    """No price is known for a model, so no budget in money can be kept. Nothing was spent."""

    def __init__(self, model: str, closest: str | None) -> None:
        hint = f"The closest known id is {closest!r}. Use that" if closest else "Check the id"
        super().__init__(
            f"no price is known for {model!r}, and none is guessed. {hint}, or pin the price: "
            f'tw.model("{model}", price=tw.Price(input="…", output="…")), in USD per million '
            "tokens.",
            code="cave_budget_denomination_unavailable",
        )
        self.model, self.closest = model, closest


@attrs.frozen(kw_only=True)
class ModelCard:
    """What is known of one model at one provider."""

    id: str
    # None: it is known, but not what it costs.
    price: Price | None
    # None: not known.
    context_window: int | None = None
    max_output: int | None = None
    # The provider writes to its cache unasked, and charges for that.
    caches_automatically: bool = False
    # It may bill output that is never shown, even when the request does not ask for thinking.
    reasons_invisibly: bool = False
    # Who says so, and on which day that was known.
    source: str = "pinned"
    date: str | None = None
    # The day from which the price holds; None: as long as is known.
    since: str | None = None
    # Prices under a request setting, by ``name=value`` (``service_tier=priority``).
    variants: Mapping[str, Price] = attrs.field(factory=dict[str, Price])

    def price_with(self, settings: JSONObject) -> Price | None:
        """The price of a request with these provider settings: a faster tier may cost double."""
        for name, value in settings.items():
            if (price := self.variants.get(f"{name}={value}")) is not None:
                return price
        return self.price


class PriceBook:
    """Finds the card of a model.

    Args:
        snapshot: The content of a price file.
        overrides: What the user knows better, by id: a whole card, or only a price.
    """

    def __init__(
        self, snapshot: Snapshot, *, overrides: Mapping[str, Price | ModelCard] | None = None
    ) -> None:
        if snapshot.get("format") != SNAPSHOT_FORMAT:
            raise UsageError(
                f"the price snapshot has format {snapshot.get('format')!r}; this version reads "
                f"{SNAPSHOT_FORMAT!r}. Make it anew with the tools of this version."
            )
        self._snapshot = snapshot
        self._overrides = dict(overrides or {})
        # Every name of every model, to the id it stands under.
        self._names = dict(_names(snapshot["models"]))
        # Cards already made. They are values, so they are shared.
        self._cards: dict[tuple[str, str], ModelCard] = {}

    @classmethod
    def from_json(
        cls,
        data: bytes,
        sha256: str | None = None,
        *,
        overrides: Mapping[str, Price | ModelCard] | None = None,
    ) -> PriceBook:
        """The book of a price file.

        Raises:
            UsageError: The file does not have the digest, or is of another format.
        """
        found = hashlib.sha256(data).hexdigest()
        if sha256 is not None and found != sha256.strip():
            raise UsageError(
                f"the price file has the SHA-256 {found}, not {sha256.strip()}: it was changed or "
                "cut off. Install the package again."
            )
        return cls(cast("Snapshot", json.loads(data)), overrides=overrides)

    @property
    def date(self) -> str:
        """The day on which the snapshot's prices were known."""
        return self._snapshot["date"]

    @property
    def ids(self) -> Iterable[str]:
        """The id of every model in the snapshot."""
        return self._snapshot["models"].keys()

    def lookup(self, model: str, on: str | None = None) -> ModelCard:
        """The card of a model, with the price that holds on a day.

        Args:
            model: ``provider/name``, for example ``anthropic/claude-haiku-4-5``.
            on: The day as ``2026-11-30``. None: the day of the snapshot.

        Raises:
            UnknownModel: Neither the snapshot nor an override has it.
        """
        pinned = self._overrides.get(model)
        if isinstance(pinned, ModelCard):
            return pinned
        known = self._id_of(model)
        if known is None:
            if pinned is None:
                raise UnknownModel(model, self.closest(model))
            return ModelCard(id=model, price=pinned)
        card = self._card(known, on or self.date)
        if pinned is None:
            return card
        return attrs.evolve(
            card, id=model, price=pinned, variants={}, source="pinned", date=None, since=None
        )

    def closest(self, model: str) -> str | None:
        """The known id that was most likely meant, None when none is similar."""
        from difflib import get_close_matches  # only ever needed on the way to an error

        provider, name = self._split(model)
        at_provider = [id for id in self.ids if id.startswith(f"{provider}/")]
        ids = at_provider or list(self.ids)
        spelled: dict[str, list[str]] = {}
        for id in ids:
            spelled.setdefault(_loosely(id.partition("/")[2]), []).append(id)
        wanted = _loosely(name if at_provider else model.rpartition("/")[2])
        similar = [wanted] if wanted in spelled else get_close_matches(wanted, spelled, n=1)
        return min(spelled[similar[0]], key=self._rank) if similar else None

    def _split(self, model: str) -> tuple[str, str]:
        provider, _, name = model.partition("/")
        return self._snapshot["aliases"].get(provider, provider), name

    def _rank(self, id: str) -> tuple[bool, int, str]:
        return id.partition("/")[0] not in self._snapshot["makers"], len(id), id

    def _id_of(self, model: str) -> str | None:
        provider, name = self._split(model)
        for home in (provider, *self._snapshot["fallback"].get(provider, ())):
            if (exact := self._names.get(f"{home}/{name}")) is not None:
                return exact
            release = _DATED.fullmatch(name)
            undated = self._names.get(f"{home}/{release[1]}") if release else None
            if undated is not None and self._snapshot["models"][undated].get("dated", False):
                return undated
        return None

    def _card(self, id: str, on: str) -> ModelCard:
        if (card := self._cards.get((id, on))) is None:
            card = self._cards[id, on] = self._new_card(id, on)
        return card

    def _new_card(self, id: str, on: str) -> ModelCard:
        model = self._snapshot["models"][id]
        row = _on(model["prices"], on)
        assert row is not None, f"{id} has no price without a date"
        variants = {name: _on(rows, on) for name, rows in model.get("variants", {}).items()}
        because = model.get("because")
        return ModelCard(
            id=id,
            price=_price(row),
            context_window=model.get("window"),
            max_output=model.get("max_output"),
            caches_automatically=model.get("caches_automatically", False),
            reasons_invisibly=model.get("reasons_invisibly", False),
            source=f"treewarden: {because}" if because else self._snapshot["source"],
            date=self.date,
            since=row.get("since"),
            variants={name: _price(found) for name, found in variants.items() if found},
        )


def _names(models: Mapping[str, SnapshotModel]) -> Iterable[tuple[str, str]]:
    for id, model in models.items():
        provider = id.partition("/")[0]
        yield id, id
        for name in model.get("also", ()):
            yield f"{provider}/{name}", id


def _loosely(name: str) -> str:
    """The name without what people spell differently: case, dots, dashes, underscores."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def _on(rows: list[SnapshotPrice], on: str) -> SnapshotPrice | None:
    """The row that holds on a day. Days are ISO dates, so they sort as text."""
    held = [row for row in rows if row.get("since", "") <= on]
    return held[-1] if held else None


def _price(row: SnapshotPrice) -> Price:
    return Price(
        input=row["input"],
        output=row["output"],
        cache_read=row.get("cache_read"),
        cache_write=row.get("cache_write"),
        cache_write_1h=row.get("cache_write_1h"),
        reasoning=row.get("reasoning"),
        tiers=tuple(Tier(**tier) for tier in row.get("tiers", ())),
        per_request=row.get("per_request", 0),
        per_thousand=row.get("per_thousand"),
        varies_by_hour=row.get("varies_by_hour", False),
    )
