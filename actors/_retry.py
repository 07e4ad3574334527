"""``tw.Retry``: whether, how often and for how much a failed model call is made once more."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import attrs

from treewarden.ledgers import Purse, Unit, usd
from treewarden.protocols import UsageError

_MOST_ATTEMPTS = 100
LONGEST_BACKOFF_SECONDS = 60.0
"""A pause that doubles does not double past this. What a provider asks for is kept in full."""


@attrs.frozen(init=False)
class Retry:
    """How failed model calls are made once more. Nothing else in a tree repeats a request.

    A call is repeated only before the first token of its answer, and only for an error that may
    pass: too many requests, overload, a server's fault, a lost connection. The wallet pays for
    each attempt as for any call.

    Args:
        max_attempts: Requests for one call, its first included.
        max_spend_usd, max_spend_tokens: What all retries of the run and everything below it may
            come to, in the run's denomination. Open attempts count with what they hold, and an
            attempt is made smaller to fit. None: the run's budget is the only bound.
        backoff_seconds: The pause before the first retry; it doubles with each, up to 60 s. 0: no
            pause. A provider's ``retry-after`` goes before it.

    Raises:
        UsageError: ``cave_breaker_retry_spend_invalid``, ``cave_breaker_retry_backoff_invalid``
            or ``cave_option_invalid``; nothing was started.
    """

    max_attempts: int
    # The purse, in 10^-12 USD or in tokens; both None: there is none.
    max_spend: int | None
    unit: Unit | None
    backoff_seconds: float

    def __init__(
        self,
        *,
        max_attempts: int = 4,
        max_spend_usd: str | int | Decimal | None = None,
        max_spend_tokens: int | None = None,
        backoff_seconds: float | timedelta = 0.25,
    ) -> None:
        if type(max_attempts) is not int or not 1 <= max_attempts <= _MOST_ATTEMPTS:
            raise UsageError(
                f"max_attempts is {max_attempts!r}. Give a whole number from 1 to "
                f"{_MOST_ATTEMPTS}.",
                code="cave_option_invalid",
            )
        unit, spend = _spend(max_spend_usd, max_spend_tokens)
        self.__attrs_init__(  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            max_attempts, spend, unit, _backoff(backoff_seconds)
        )

    def purse_for(self, unit: Unit, parent: Purse | None) -> Purse | None:
        """The purse of a run that counts in ``unit``, inside the purse of a run above it.

        Raises:
            UsageError: The purse is in the other denomination.
        """
        if self.max_spend is None:
            return parent
        if self.unit != unit:
            raise UsageError(
                f"the run counts in {unit}, the purse of its retries in {self.unit}. Give "
                f"max_spend_{unit}= instead.",
                code="cave_breaker_retry_spend_invalid",
            )
        return Purse(self.max_spend, parent)

    def pause_seconds(self, attempt: int) -> float:
        """The pause before retry number ``attempt``, where the provider names none."""
        doubled = self.backoff_seconds * 2.0 ** (attempt - 1)
        return min(doubled, max(self.backoff_seconds, LONGEST_BACKOFF_SECONDS))


@attrs.frozen
class Retrying:
    """The retries of a run and everything below it: what is allowed, and what is left to spend."""

    options: Retry
    purse: Purse | None


def _spend(in_usd: Any, in_tokens: Any) -> tuple[Unit | None, int | None]:
    code = "cave_breaker_retry_spend_invalid"
    if in_usd is not None and in_tokens is not None:
        raise UsageError("a purse has one of max_spend_usd and max_spend_tokens.", code=code)
    if in_usd is not None:
        spend = usd(in_usd, what="max_spend_usd", code=code)
        if spend <= 0:
            raise UsageError(f"max_spend_usd is {in_usd!r}: it is above 0.", code=code)
        return "usd", spend
    if in_tokens is None:
        return None, None
    if type(in_tokens) is not int or not 0 < in_tokens < 2**53:
        raise UsageError(
            f"max_spend_tokens is {in_tokens!r}, not a positive whole number of tokens.", code=code
        )
    return "tokens", in_tokens


def _backoff(value: Any) -> float:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise UsageError(
            f"backoff_seconds is {value!r}. Give a number of seconds, 0 or more, or a timedelta.",
            code="cave_breaker_retry_backoff_invalid",
        )
    return float(value)
