"""What an answer costs, and what it can cost at most.

Two rules keep this file simple. A rate is a whole number of money units per token, so a cost is a
sum of products of ints: nothing is rounded. And the two questions share one shape: the price tier
is chosen first, then the tokens are multiplied out; so whatever is held is never below whatever
is measured for the same tokens.

A tier applies to the whole request, not to the tokens above its threshold. That is how every
provider with a long-context price bills.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from itertools import pairwise
from typing import TypeAlias

import attrs

from treewarden.protocols import TreewardenError, Usage, UsageError

from ._money import DECIMALS, Money, not_below, usd

PerMillion: TypeAlias = str | int | Decimal
"""US dollars per million tokens, as providers print it: ``"0.30"``."""

_MILLION = 1_000_000
_CODE = "cave_agent_definition_invalid"


class UnpricedModel(TreewardenError):
    """A model answered that has no price, so what it cost cannot be said.

    Unknown is not free: the charge has to fall back on what was held.
    """

    code = "cave_budget_denomination_unavailable"

    def __init__(self, model: str | None) -> None:
        super().__init__(
            f"{self.code}: {model or 'the model that answered'} has no price. Pin one: "
            f'tw.model("{model or "provider/model"}", price=tw.Price(input="…", output="…")).'
        )
        self.model = model


@attrs.frozen(init=False)
class Rates:
    """What one token of each class costs, in money units (10^-12 USD).

    They are given as US dollars per million tokens. ``cache_read`` and ``cache_write`` default to
    the input rate. ``cache_write_1h`` defaults to twice the input rate where writing has a price
    of its own, else to ``cache_write``. ``reasoning`` defaults to the output rate.

    Raises:
        UsageError: A rate is a float, or not a whole number of 10^-12 USD per token.
    """

    input: int
    output: int
    cache_read: int
    cache_write: int
    cache_write_1h: int
    reasoning: int

    # The dearest that an input token can become: when nothing is written to a cache, when it may
    # be, and when it may be for an hour. Kept because a hold is taken before every call.
    most_input: int = attrs.field(eq=False, repr=False)
    most_input_written: int = attrs.field(eq=False, repr=False)
    most_input_written_1h: int = attrs.field(eq=False, repr=False)
    most_output: int = attrs.field(eq=False, repr=False)

    def __init__(
        self,
        *,
        input: PerMillion,
        output: PerMillion,
        cache_read: PerMillion | None = None,
        cache_write: PerMillion | None = None,
        cache_write_1h: PerMillion | None = None,
        reasoning: PerMillion | None = None,
    ) -> None:
        fresh, answer = _part(input, _MILLION, "input"), _part(output, _MILLION, "output")
        read = _part_or(fresh, cache_read, "cache_read")
        write = _part_or(fresh, cache_write, "cache_write")
        # Who charges for writing at all charges more for keeping it longer.
        hour = _part_or(2 * fresh if write > fresh else write, cache_write_1h, "cache_write_1h")
        thought = _part_or(answer, reasoning, "reasoning")
        _fill(
            self,
            input=fresh,
            output=answer,
            cache_read=read,
            cache_write=write,
            cache_write_1h=hour,
            reasoning=thought,
            most_input=max(fresh, read),
            most_input_written=max(fresh, read, write),
            most_input_written_1h=max(fresh, read, write, hour),
            most_output=max(answer, thought),
        )


@attrs.frozen(init=False)
class Tier:
    """Rates for a whole request whose context is above a threshold.

    The context is all that the model reads: fresh, cached and written input together. With
    ``inclusive`` a context of exactly ``above_context_tokens`` is in the tier too.
    """

    rates: Rates
    above_context_tokens: int
    inclusive: bool
    # The smallest context that is priced here: the threshold and its comparison as one number.
    starts_at: int = attrs.field(eq=False, repr=False)

    def __init__(
        self,
        *,
        above_context_tokens: int,
        inclusive: bool = False,
        input: PerMillion,
        output: PerMillion,
        cache_read: PerMillion | None = None,
        cache_write: PerMillion | None = None,
        cache_write_1h: PerMillion | None = None,
        reasoning: PerMillion | None = None,
    ) -> None:
        if type(above_context_tokens) is not int or above_context_tokens < 0:
            raise UsageError(
                f"above_context_tokens is {above_context_tokens!r}, not a count of tokens. "
                "Write an int such as 200_000.",
                code=_CODE,
            )
        rates = Rates(
            input=input,
            output=output,
            cache_read=cache_read,
            cache_write=cache_write,
            cache_write_1h=cache_write_1h,
            reasoning=reasoning,
        )
        _fill(
            self,
            rates=rates,
            above_context_tokens=above_context_tokens,
            inclusive=inclusive,
            starts_at=above_context_tokens + (0 if inclusive else 1),
        )


@attrs.frozen(init=False)
class Price:
    """What a model costs: ``Price(input="3", cache_read="0.30", cache_write="3.75", output="15")``.

    Args:
        tiers: Rates that replace these for requests with a larger context.
        per_request: US dollars for each request, whatever its tokens.
        per_thousand: US dollars for a thousand server-side tool requests, by their name in the
            usage: ``{"web_search_requests": "10"}``.
        varies_by_hour: These are the rates of the dearest hour of the day. A cost at them is an
            upper bound.
    """

    # For every request that reaches no tier.
    rates: Rates
    # Ascending by threshold: the last tier that a context reaches is the one it is priced at.
    tiers: tuple[Tier, ...]
    per_request: Money
    # What one request costs, by name.
    server_tools: tuple[tuple[str, Money], ...]
    varies_by_hour: bool

    def __init__(
        self,
        *,
        input: PerMillion,
        output: PerMillion,
        cache_read: PerMillion | None = None,
        cache_write: PerMillion | None = None,
        cache_write_1h: PerMillion | None = None,
        reasoning: PerMillion | None = None,
        tiers: tuple[Tier, ...] = (),
        per_request: str | int | Decimal = 0,
        per_thousand: Mapping[str, str | int | Decimal] | None = None,
        varies_by_hour: bool = False,
    ) -> None:
        requests = per_thousand or {}
        rates = Rates(
            input=input,
            output=output,
            cache_read=cache_read,
            cache_write=cache_write,
            cache_write_1h=cache_write_1h,
            reasoning=reasoning,
        )
        _fill(
            self,
            rates=rates,
            tiers=_ascending(tiers),
            per_request=usd(per_request, what="per_request", code=_CODE),
            server_tools=tuple((k, _part(requests[k], 1000, k)) for k in sorted(requests)),
            varies_by_hour=varies_by_hour,
        )

    def at(self, context_tokens: int) -> Rates:
        """The rates for a request whose context has this many tokens."""
        return self.up_to(context_tokens)[-1]

    def up_to(self, context_tokens: int) -> list[Rates]:
        """The rates of every tier that a context of at most this many tokens can be priced at."""
        return [
            self.rates,
            *(tier.rates for tier in self.tiers if context_tokens >= tier.starts_at),
        ]


@attrs.frozen
class Cost:
    """What an answer cost.

    ``is_upper_bound`` says that the true cost may be lower: the rates change by the hour, or the
    usage was a sum over several requests and which price tier each had cannot be told.
    ``unpriced_tools`` names server-side tools that were used and have no known price: their fees
    are not in the amount.
    """

    usd: Money
    is_upper_bound: bool = False
    unpriced_tools: tuple[str, ...] = ()


PriceOf: TypeAlias = Callable[[str], Price | None]
"""Gives the price of a model by its id, None when it has none."""


def measured_cost(price: Price | None, usage: Usage, *, of_model: PriceOf | None = None) -> Cost:
    """What the usage that a provider reported costs at ``price``.

    Args:
        price: The price of the model that answered. None when it has none: then only a cost that
            the provider itself reports can be used.
        usage: Numbers without a ``problem()``.
        of_model: Where to find the price of another model that answered inside (``usage.extra``).

    Raises:
        UnpricedModel: A model that answered has no price.
    """
    reported = usage.reported_cost_usd
    if reported is not None and (billed := not_below(reported)) is not None:
        return Cost(billed)
    if price is None:
        raise UnpricedModel(usage.model)
    if price.tiers or usage.extra or usage.server_tool_requests:
        return _compound_cost(price, usage, of_model)
    return Cost(Money(_tokens(price.rates, usage) + price.per_request), price.varies_by_hour)


def worst_case(
    price: Price,
    *,
    input_tokens: int,
    output_tokens: int,
    can_write_cache: bool,
    can_write_1h: bool = False,
) -> Money:
    """The most that a request can cost which reads and writes no more than these tokens.

    Every input token is taken as the dearest it can become, at the dearest tier that so many can
    reach. Fees of server-side tools are not in it.
    """
    most = 0
    for rates in price.up_to(input_tokens) if price.tiers else (price.rates,):
        rate = _input_rate(rates, can_write_cache, can_write_1h)
        most = max(most, input_tokens * rate + output_tokens * rates.most_output)
    return Money(most + price.per_request)


def largest_output(
    price: Price,
    *,
    input_tokens: int,
    limit: int,
    can_write_cache: bool,
    can_write_1h: bool = False,
    money: Money,
) -> int:
    """The largest output, at most ``limit``, whose ``worst_case`` is at most ``money``.

    -1 when not even an empty answer fits.
    """
    largest = limit
    for rates in price.up_to(input_tokens):
        rate = _input_rate(rates, can_write_cache, can_write_1h)
        left = money - price.per_request - input_tokens * rate
        if left < 0:
            return -1
        # The worst case is the dearest of the tiers, so an output must fit each of them.
        if rates.most_output:
            largest = min(largest, left // rates.most_output)
    return largest


def _input_rate(rates: Rates, can_write_cache: bool, can_write_1h: bool) -> int:
    if can_write_1h:
        return rates.most_input_written_1h
    return rates.most_input_written if can_write_cache else rates.most_input


def _tokens(rates: Rates, usage: Usage) -> int:
    """The cost of this answer's own tokens, each counted in one class only."""
    written_1h = usage.cache_write_1h
    return (
        usage.input * rates.input
        + usage.cache_read * rates.cache_read
        + (usage.cache_write - written_1h) * rates.cache_write
        + written_1h * rates.cache_write_1h
        + usage.output * rates.output
        # Reasoning is inside output; only where it has a rate of its own is there a difference.
        + usage.reasoning * (rates.reasoning - rates.output)
    )


def _compound_cost(price: Price, usage: Usage, of_model: PriceOf | None) -> Cost:
    tools, unpriced = _server_tools(price, usage)
    own, is_upper_bound = _own_tokens(price, usage)
    total = own + tools + price.per_request
    for inner in usage.extra:
        its_price: Price | None = price
        # An inner answer without a model of its own (a compaction) is by the model that answered.
        if inner.model is not None and inner.model != usage.model:
            its_price = of_model(inner.model) if of_model else None
        cost = measured_cost(its_price, inner, of_model=of_model)
        total += cost.usd
        is_upper_bound |= cost.is_upper_bound
        unpriced += cost.unpriced_tools
    return Cost(Money(total), is_upper_bound, tuple(dict.fromkeys(unpriced)))


def _own_tokens(price: Price, usage: Usage) -> tuple[int, bool]:
    """The cost of the answer's own tokens, and whether that is only an upper bound."""
    candidates = price.up_to(usage.context_tokens)
    if usage.is_aggregate and len(candidates) > 1:
        # A sum that reaches a tier does not say that any one request did.
        return max(_tokens(rates, usage) for rates in candidates), True
    return _tokens(candidates[-1], usage), price.varies_by_hour


def _server_tools(price: Price, usage: Usage) -> tuple[int, tuple[str, ...]]:
    fees = dict(price.server_tools)
    used = [(name, count) for name, count in usage.server_tool_requests if count]
    priced = sum(count * fees[name] for name, count in used if name in fees)
    return priced, tuple(name for name, _ in used if name not in fees)


def _part(value: PerMillion, of: int, name: str) -> Money:
    """What one costs when ``of`` of them cost ``value`` dollars."""
    units, rest = divmod(usd(value, what=name, code=_CODE), of)
    if rest:
        raise UsageError(
            f"{name} is {value!r} USD per {of:,}, which is no whole number of 10^-12 USD for one. "
            f"Round it up to {DECIMALS - len(str(of)) + 1} decimals.",
            code=_CODE,
        )
    return Money(units)


def _part_or(default: int, value: PerMillion | None, name: str) -> int:
    return default if value is None else _part(value, _MILLION, name)


def _fill(value: object, **fields: object) -> None:
    """Set the fields of a frozen value that is just being made."""
    for name, content in fields.items():
        object.__setattr__(value, name, content)


def _ascending(tiers: tuple[Tier, ...]) -> tuple[Tier, ...]:
    ordered = tuple(sorted(tiers, key=lambda tier: tier.starts_at))
    for lower, upper in pairwise(ordered):
        if lower.starts_at == upper.starts_at:
            raise UsageError(
                f"two tiers start at a context of {lower.starts_at} tokens. Keep one of them.",
                code=_CODE,
            )
    return ordered
