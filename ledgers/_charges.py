"""What every ending of a model call costs.

One rule: a call that was sent has a charge, whatever became of it. What the provider reported is
taken as it is; everything else is an estimate that says between which bounds the truth lies.
"""

from __future__ import annotations

from enum import Enum

import attrs

from treewarden.protocols import Usage

from ._money import Money
from ._prices import Price, PriceOf, UnpricedModel, largest_output, measured_cost, worst_case
from ._purse import Purse
from ._wallet import Unit


class Ending(Enum):
    """What became of a call."""

    NOT_SENT = "not_sent"  # it failed or was cancelled before the request left
    PROVIDER_ERROR = "provider_error"  # an error instead of an answer
    BROKEN = "broken"  # cancelled or broken off after the request had left
    FINISHED = "finished"


# Ask and Charge are values: nobody changes one. They are not frozen because each call makes one of
# both, and a frozen class takes twice as long to make.
@attrs.define(kw_only=True)
class Ask:
    """What one call may need at most, and how it may be made smaller.

    ``input_tokens`` is the input ceiling, ``output_tokens`` the limit that would go on the wire.
    ``price`` None is an unpriced model: allowed only where money is not what is counted.
    """

    input_tokens: int
    output_tokens: int
    price: Price | None
    can_write_cache: bool = False
    can_write_1h: bool = False
    # Smallest output worth a call; below it the call is not shrunk but stopped.
    output_floor_tokens: int = 256
    clamp: bool = True
    # Whether to queue while another call's hold may still come back.
    wait: bool = True
    # The model thinks where nobody can see or count it, so silence is not proof of little.
    reasons_invisibly: bool = False
    # The route goes on billing when the reader hangs up.
    bills_after_disconnect: bool = False
    # For the receipt: what the call is for, and who is asked.
    purpose: str = "model"
    provider: str = ""
    model: str = ""
    # What the hold counts against beside the wallet, or None.
    purse: Purse | None = None

    def usd(self, output_tokens: int) -> Money:
        if self.price is None:
            return Money(0)
        return worst_case(
            self.price,
            input_tokens=self.input_tokens,
            output_tokens=output_tokens,
            can_write_cache=self.can_write_cache,
            can_write_1h=self.can_write_1h,
        )

    def tokens(self, output_tokens: int) -> int:
        return self.input_tokens + output_tokens

    def amount(self, unit: Unit, output_tokens: int) -> int:
        return self.usd(output_tokens) if unit == "usd" else self.tokens(output_tokens)

    def purse_output(self, unit: Unit) -> int | None:
        """The output tokens that the purse pays for; None where it pays for no call at all."""
        if self.purse is None or self.amount(unit, self.output_tokens) <= self.purse.free:
            return self.output_tokens
        return self.largest_output(unit, self.purse.free) if self.clamp else None

    def largest_output(self, unit: Unit, free: int) -> int | None:
        """The largest output that ``free`` pays for, or None when that is below the floor."""
        if unit == "tokens":
            most = min(self.output_tokens, free - self.input_tokens)
        elif self.price is None:
            most = self.output_tokens
        else:
            most = largest_output(
                self.price,
                input_tokens=self.input_tokens,
                limit=self.output_tokens,
                can_write_cache=self.can_write_cache,
                can_write_1h=self.can_write_1h,
                money=Money(free),
            )
        # An allowance that is itself below the floor is never made smaller.
        return most if self.output_floor_tokens <= most <= self.output_tokens else None


@attrs.define(slots=True)
class Progress:
    """What has arrived of an answer. The call's own task writes it, the ledger reads it."""

    # Reported so far; each report replaces the one before.
    usage: Usage | None = None
    deltas: int = 0
    bytes: int = 0
    # The model that answers, once it has said so.
    model: str | None = None

    @property
    def estimated_output(self) -> int:
        """At least one token a delta, and four bytes a token."""
        return max(self.deltas, -(-self.bytes // 4))


@attrs.define(kw_only=True)
class Charge:
    """What a call costs, and between which bounds the truth lies."""

    usd: Money
    tokens: int
    # provider_reported, estimated, unavailable_worst_case, pre_stream_no_usage, not_dispatched
    basis: str
    low_usd: Money
    high_usd: Money
    low_tokens: int
    high_tokens: int
    usage: Usage
    is_unpriced: bool = False
    # The figure is measured but may be too high (a tier chosen on a sum).
    is_upper_bound: bool = False


def charge_for(
    ending: Ending,
    ask: Ask,
    output_tokens: int,
    progress: Progress,
    *,
    price_of: PriceOf | None = None,
    answered_by: Price | None = None,
) -> Charge:
    """The charge of a call that ended as ``ending``.

    Args:
        output_tokens: The output limit that was on the wire.
        price_of: Price of another model by its id, for inner answers.
        answered_by: Price of the model that answered, where it is not the one that was asked.
    """
    price = answered_by or ask.price
    match ending:
        case Ending.FINISHED if _is_readable(progress.usage):
            assert progress.usage is not None
            return _measured(ask, output_tokens, progress.usage, price, price_of)
        case Ending.NOT_SENT:
            return _nothing("not_dispatched")
        case Ending.PROVIDER_ERROR if progress.deltas == 0:
            if progress.usage is None:
                return _nothing("pre_stream_no_usage")
            if _is_readable(progress.usage):
                return _measured(ask, output_tokens, progress.usage, price, price_of)
        case _:
            pass
    return _estimated(ending, ask, output_tokens, progress, price, price_of)


def _is_readable(usage: Usage | None) -> bool:
    return usage is not None and usage.problem() is None


def _nothing(basis: str) -> Charge:
    zero = Money(0)
    return Charge(
        usd=zero, tokens=0, basis=basis, low_usd=zero, high_usd=zero, low_tokens=0,
        high_tokens=0, usage=Usage(),
    )  # fmt: skip


@attrs.frozen
class _Cost:
    """What of a cost is known, in USD."""

    usd: Money
    is_upper_bound: bool
    # A part has no known price: of a model that answered, or only of a server-side tool.
    lacks_model: bool
    lacks_tool: bool

    @property
    def is_unpriced(self) -> bool:
        return self.lacks_model or self.lacks_tool


def _cost(usage: Usage, price: Price | None, price_of: PriceOf | None) -> _Cost:
    try:
        cost = measured_cost(price, usage, of_model=price_of)
    except UnpricedModel:
        if not usage.extra:
            return _Cost(Money(0), False, True, False)
        # Each answer inside for itself, so that one without a price does not hide the others.
        parts = [_cost(attrs.evolve(usage, extra=()), price, price_of)]
        for inner in usage.extra:
            its_price = price if inner.model in (None, usage.model) else None
            if its_price is None and inner.model is not None and price_of is not None:
                its_price = price_of(inner.model)
            parts.append(_cost(inner, its_price, price_of))
        return _Cost(
            Money(sum(part.usd for part in parts)),
            any(part.is_upper_bound for part in parts),
            True,
            any(part.lacks_tool for part in parts),
        )
    return _Cost(cost.usd, cost.is_upper_bound, False, bool(cost.unpriced_tools))


def _measured(
    ask: Ask, output_tokens: int, usage: Usage, price: Price | None, price_of: PriceOf | None
) -> Charge:
    cost = _cost(usage, price, price_of)
    tokens = usage.total
    usd = cost.usd
    # Unknown is not free: where money was held for it, at least the hold is charged.
    is_guess = cost.lacks_model and ask.price is not None
    if is_guess:
        usd = max(usd, ask.usd(output_tokens))
    return Charge(
        usd=usd,
        tokens=tokens,
        basis="unavailable_worst_case" if is_guess else "provider_reported",
        low_usd=cost.usd,
        high_usd=usd,
        low_tokens=tokens,
        high_tokens=tokens,
        usage=usage,
        is_unpriced=cost.is_unpriced,
        is_upper_bound=cost.is_upper_bound,
    )


def _estimated(
    ending: Ending,
    ask: Ask,
    output_tokens: int,
    progress: Progress,
    price: Price | None,
    price_of: PriceOf | None,
) -> Charge:
    reported = progress.usage if _is_readable(progress.usage) else None
    hold_usd, hold_tokens = ask.usd(output_tokens), ask.tokens(output_tokens)
    is_blind = ask.reasons_invisibly or (
        ask.bills_after_disconnect and ending is not Ending.FINISHED
    )
    usage = _likely_usage(ask, output_tokens, progress, reported, is_blind=is_blind)
    cost = _cost(usage, price, price_of)
    usd, tokens = cost.usd, usage.total
    is_guess = cost.lacks_model and ask.price is not None
    if is_blind or is_guess:
        usd = max(usd, hold_usd)
    if is_blind:
        tokens = max(tokens, hold_tokens)
    low_usd, low_tokens = Money(0), 0
    if reported is not None:
        low_usd, low_tokens = _cost(reported, price, price_of).usd, reported.total
    return Charge(
        usd=max(usd, low_usd),
        tokens=max(tokens, low_tokens),
        basis="unavailable_worst_case" if is_blind or is_guess else "estimated",
        low_usd=low_usd,
        high_usd=max(hold_usd, usd, low_usd),
        low_tokens=low_tokens,
        high_tokens=max(hold_tokens, tokens, low_tokens),
        usage=usage,
        is_unpriced=cost.is_unpriced,
    )


def _likely_usage(
    ask: Ask, output_tokens: int, progress: Progress, reported: Usage | None, *, is_blind: bool
) -> Usage:
    """What was most likely used: what the provider said so far, completed by what arrived."""
    output = output_tokens if is_blind else progress.estimated_output
    if reported is None:
        return Usage(input=ask.input_tokens, output=output)
    # A report from the middle of an answer counts the input in full and the output so far.
    return attrs.evolve(reported, output=max(reported.output, output))
