"""Receipts: what a run cost, by whom and for what, in a form that adds up to the unit.

Two forms. ``Receipt.to_json()`` is ours: exact, with own and descendant totals and the bounds of
every estimate. ``Receipt.to_contract_json()`` is the strict public schema
``caveman.agent.run-receipt.v1``: a lossy view whose amounts are JSON numbers.

Amounts in USD are Decimals here and strings in our JSON form; tokens are ints.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Literal, TypeAlias

import attrs

from ._errors import UsageError

OUR_SCHEMA = "treewarden.run-receipt.v1"
CONTRACT_SCHEMA = "caveman.agent.run-receipt.v1"

Purpose: TypeAlias = Literal["model", "repair", "retry", "compaction", "final"]
Basis: TypeAlias = Literal[
    "provider_reported",
    "estimated",
    "unavailable_worst_case",
    "pre_stream_no_usage",
    "not_dispatched",
    "refused",
]

ZERO = Decimal(0)


@attrs.frozen(kw_only=True)
class Line:
    """One call and its charge.

    ``usd`` and ``tokens`` lie within [``low_*``, ``high_*``]; on a ``provider_reported`` line the
    three are equal. ``is_unpriced`` says that no price was known: ``usd`` then counts 0.
    """

    purpose: str
    provider: str
    # The model that answered, and the one that was asked where that differs.
    model: str
    asked_model: str | None = None
    input_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    # Inside output_tokens.
    reasoning_tokens: int = 0
    # All that counts: the four classes and those of inner answers.
    tokens: int = 0
    usd: Decimal = ZERO
    basis: str = "provider_reported"
    low_usd: Decimal = ZERO
    high_usd: Decimal = ZERO
    low_tokens: int = 0
    high_tokens: int = 0
    is_unpriced: bool = False
    is_upper_bound: bool = False
    # The output limit on the wire, and what it was before it was cut to fit the wallet.
    output_limit: int = 0
    clamped_from: int | None = None
    # Why the call ended the way it did, where that needs saying.
    note: str | None = None
    # Which of several keys paid, by a name that its owner gave it; never the key.
    credential: str | None = None
    # When the call ended, by the wall clock. 0: not known.
    ended_ns: int = 0


@attrs.frozen(kw_only=True)
class ToolRow:
    """Calls of one tool in first-use order. A blocked call counts as a call and an error."""

    name: str
    calls: int
    errors: int


@attrs.frozen(kw_only=True)
class Refusal:
    """Something that was asked for and not given."""

    code: str
    message: str


@attrs.frozen(kw_only=True)
class BackgroundRow:
    """How one background subagent ended. Its own receipt is among ``subagents``."""

    path: str
    # As on its receipt: "cancelled" where it was cut off, else what it came to by itself.
    stop_reason: str
    reason: str = ""
    # The model of whoever started it was given the result.
    was_read: bool = False


@attrs.frozen(kw_only=True)
class TrancheRow:
    """A staged release. ``amount`` is in the receipt's denomination."""

    amount: Decimal
    reason: str
    at_call: int


@attrs.frozen(kw_only=True)
class BreakerRow:
    """A decision of a breaker or of a retry. ``kind`` says which.

    ``spend`` amounts are in the receipt's denomination: what a retried call had held, and what it
    came to.
    """

    kind: str
    tool: str | None = None
    count: int | None = None
    signature: str | None = None
    # "steered": the model was told. "stopped", "blocked", "waited", "retried".
    action: str = ""
    reason: str = ""
    reserved_spend: Decimal | None = None
    measured_spend: Decimal | None = None
    spend_basis: str | None = None


@attrs.frozen(kw_only=True)
class CompactionRow:
    """One rewrite of what a model sees of its conversation, or a try that came to nothing.

    ``metered_cost`` is measured, in the receipt's denomination. The modelled effect is a guess at
    what it saved and never part of a sum (contract 7.8).
    """

    # Place among the run's compactions, from 0.
    index: int
    # "evicted", "summarized", or "discarded" with the reason.
    tier: str
    reason: str = ""
    pre_tokens: int = 0
    post_tokens: int = 0
    pinned_segment_ids: tuple[str, ...] = ()
    elided_segment_digests: tuple[str, ...] = ()
    summary_schema_version: int | None = None
    cache_state: str = "unknown"
    metered_cost: Decimal = ZERO
    working_calls_after: int = 0

    @property
    def modeled_net_tokens(self) -> int:
        """Tokens that later calls did not have to read, less what the rewrite made them read."""
        calls = self.working_calls_after
        return (self.pre_tokens - self.post_tokens) * calls - (self.post_tokens if calls else 0)


@attrs.frozen(kw_only=True)
class Totals:
    """A sum of lines."""

    calls: int = 0
    tokens: int = 0
    usd: Decimal = ZERO
    low_usd: Decimal = ZERO
    high_usd: Decimal = ZERO
    low_tokens: int = 0
    high_tokens: int = 0
    # At least one line had no price: the true USD is at least ``usd``.
    is_unpriced: bool = False

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            calls=self.calls + other.calls,
            tokens=self.tokens + other.tokens,
            usd=self.usd + other.usd,
            low_usd=self.low_usd + other.low_usd,
            high_usd=self.high_usd + other.high_usd,
            low_tokens=self.low_tokens + other.low_tokens,
            high_tokens=self.high_tokens + other.high_tokens,
            is_unpriced=self.is_unpriced or other.is_unpriced,
        )


def total_of(lines: Iterable[Line]) -> Totals:
    """Sum up lines. Calls that were never sent count 0 calls."""
    every = list(lines)
    return Totals(
        calls=sum(_was_sent(line) for line in every),
        tokens=sum(line.tokens for line in every),
        usd=sum((line.usd for line in every), ZERO),
        low_usd=sum((line.low_usd for line in every), ZERO),
        high_usd=sum((line.high_usd for line in every), ZERO),
        low_tokens=sum(line.low_tokens for line in every),
        high_tokens=sum(line.high_tokens for line in every),
        is_unpriced=any(line.is_unpriced for line in every),
    )


@attrs.frozen(kw_only=True)
class Receipt:
    """What one run, and everything below it, did and cost.

    ``denomination`` is the unit of ``max``, ``released``, ``spent`` and ``overspent``; ``max`` and
    ``released`` are None where no wallet of its own bounded the run.

    ``spent`` is what this run cost, and what its lines add up to. Where the run goes on under a
    limit that an earlier one had spent from, ``carried`` is that earlier part: what is left of
    ``max`` is ``max - carried - spent``.
    """

    run_id: str
    path: str
    agent_id: str
    stop_reason: str
    # Why it stopped, failed or was cancelled, in words. Empty for a complete run.
    reason: str = ""
    # The error code of a failed run.
    error_code: str | None = None
    denomination: Literal["usd", "tokens", "none"] = "none"
    max: Decimal | None = None
    released: Decimal | None = None
    spent: Decimal = ZERO
    # Spent before this run under the same limit; in no line and no sum of this receipt.
    carried: Decimal = ZERO
    overspent: Decimal = ZERO
    # This run's wallet was breached, or one below it was. A flag for people; it stops nobody.
    cap_breached: bool = False
    lines: tuple[Line, ...] = ()
    tools: tuple[ToolRow, ...] = ()
    subagents: tuple[Receipt, ...] = ()
    tranches: tuple[TrancheRow, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    breakers: tuple[BreakerRow, ...] = ()
    compactions: tuple[CompactionRow, ...] = ()
    # The stop report: its background subagents in the order they ended, each once.
    background: tuple[BackgroundRow, ...] = ()
    # What went wrong beside the outcome: clean-up that raised, abandoned threads.
    faults: tuple[str, ...] = ()
    # Processes that had to be killed, by name. Empty until tools run confined.
    killed: tuple[str, ...] = ()
    is_detached: bool = False
    started_ns: int = 0
    ended_ns: int = 0

    @property
    def own(self) -> Totals:
        """What this run's own calls cost."""
        return total_of(self.lines)

    @property
    def descendants(self) -> Totals:
        """What everything below it cost."""
        sum_ = Totals()
        for child in self.subagents:
            sum_ += child.total
        return sum_

    @property
    def total(self) -> Totals:
        return self.own + self.descendants

    @property
    def cost_usd(self) -> Decimal:
        """All of it, in USD."""
        return self.total.usd

    def walk(self) -> Iterable[Receipt]:
        """This receipt and all below it, parents first."""
        yield self
        for child in self.subagents:
            yield from child.walk()

    def check(self) -> None:
        """Assert that everything adds up to the unit, here and below."""
        problem = self.problem()
        assert problem is None, problem

    def problem(self) -> str | None:
        """Say what does not add up, here or below, or None."""
        for receipt in self.walk():
            total = receipt.total
            spent = total.usd if receipt.denomination == "usd" else total.tokens
            if receipt.denomination != "none" and receipt.spent != spent:
                return f"{receipt.path}: spent says {receipt.spent}, its lines add up to {spent}"
            if receipt.carried < 0:
                return f"{receipt.path}: carried says {receipt.carried}"
            for line in receipt.lines:
                if not (
                    line.low_usd <= line.usd <= line.high_usd
                    and line.low_tokens <= line.tokens <= line.high_tokens
                ):
                    return f"{receipt.path}: a line is outside of its own bounds: {line}"
                if line.basis == "provider_reported" and line.low_tokens != line.high_tokens:
                    return f"{receipt.path}: a measured line has bounds: {line}"
        return None

    def to_json(self) -> dict[str, Any]:
        """Our form, ready for ``json.dumps``: USD as exact strings, tokens as ints."""
        own, below, total = self.own, self.descendants, self.total
        return {
            "schema": OUR_SCHEMA,
            **_plain(self, skip=_ROWS),
            "own": _plain(own),
            "descendants": _plain(below),
            "total": _plain(total),
            "lines": [_plain(line) for line in self.lines],
            "tools": [_plain(row) for row in self.tools],
            "tranches": [_plain(row) for row in self.tranches],
            "refusals": [_plain(row) for row in self.refusals],
            "breakers": [_plain(row) for row in self.breakers],
            "compactions": [
                {**_plain(row), "modeled_net_tokens": row.modeled_net_tokens}
                for row in self.compactions
            ],
            "background": [_plain(row) for row in self.background],
            "subagents": [child.to_json() for child in self.subagents],
        }

    @classmethod
    def from_json(cls, value: Any) -> Receipt:
        """Read our form back.

        Raises:
            UsageError: It is not our form, or its sums do not add up.
        """
        from ._receipt_reader import read_receipt  # cattrs, only when a receipt is read

        return read_receipt(value)

    def to_contract_json(self) -> dict[str, Any]:
        """The public schema v1. Lossy: numbers instead of exact strings, and fewer facts.

        Totals are rounded half up at 10 decimals as that contract says; bases it does not know
        become ``unavailable``; calls that were never sent are left out. It has no place for
        ``carried``, so its wallet is shown as if it had been fresh.
        """
        total = self.total
        bounded = {} if self.max is None else _contract_wallet(self)
        return {
            "schema": CONTRACT_SCHEMA,
            "runId": self.run_id,
            "agentId": self.agent_id,
            "basis": "estimated_list_price_subtotal",
            "claimBasis": "inferred",
            "stopReason": self.stop_reason,
            "denomination": self.denomination if self.max is not None else "none",
            **bounded,
            "capBreached": self.cap_breached,
            "overspent": _number(self.overspent),
            "totalEstimatedUsd": _number(total.usd),
            "totalTokens": total.tokens,
            "unpriced": total.is_unpriced,
            "calls": [_contract_call(line) for line in self.lines if _was_sent(line)],
            "tools": [_plain(row) for row in self.tools],
            "subagents": [child.to_contract_json() for child in self.subagents],
            "tranches": [
                {"amount": _number(t.amount), "reason": t.reason, "atCall": t.at_call}
                for t in self.tranches
            ],
            "breakers": [],
            "compactions": [],
        }


# Fields of a receipt that are written out row by row.
_ROWS = (
    "lines",
    "tools",
    "subagents",
    "tranches",
    "refusals",
    "breakers",
    "compactions",
    "background",
)


def _plain(value: attrs.AttrsInstance, *, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    names = (name for name in attrs.fields_dict(type(value)) if name not in skip)
    return {name: _text(getattr(value, name)) for name in names}


def _text(value: object) -> object:
    if isinstance(value, Decimal):
        return f"{value:f}"
    return [*value] if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownVariableType]


def _number(amount: Decimal) -> float | int:
    rounded = amount.quantize(Decimal("1e-10"), ROUND_HALF_UP)
    return int(rounded) if rounded == rounded.to_integral_value() else float(rounded)


def _was_sent(line: Line) -> bool:
    return line.basis not in ("not_dispatched", "refused")


def _contract_wallet(receipt: Receipt) -> dict[str, Any]:
    released = receipt.max if receipt.released is None else receipt.released
    assert receipt.max is not None, receipt
    assert released is not None, receipt
    return {
        "max": _number(receipt.max),
        "released": _number(released),
        "spent": _number(receipt.spent),
    }


def _contract_call(line: Line) -> dict[str, Any]:
    clamped = {} if line.clamped_from is None else {"clampedOutputTokens": line.output_limit}
    is_measured = line.basis == "provider_reported"
    return {
        "provider": line.provider,
        "model": line.model,
        "inputTokens": line.input_tokens,
        "outputTokens": line.output_tokens,
        "cacheReadTokens": line.cache_read_tokens,
        "cacheWriteTokens": line.cache_write_tokens,
        "reasoningTokens": line.reasoning_tokens,
        "estimatedUsd": _number(line.usd),
        "unpriced": line.is_unpriced,
        "usageBasis": "provider_reported" if is_measured else "unavailable",
        **clamped,
    }


def bad_receipt(why: str) -> UsageError:
    """The error of a file that is no receipt of ours."""
    return UsageError(
        f"this is not a {OUR_SCHEMA} receipt: {why}. Give a file written by `treewarden run "
        "--json` or by json.dump(receipt.to_json(), file).",
        code="cave_receipt_invalid",
    )
