"""Amounts of money, exactly: whole numbers of 10^-12 US dollars.

One rule keeps this file simple: an amount is an ``int`` from the border inwards. Prices are given
per million tokens with a few decimals, so a token costs a whole number of these units ($0.0375 per
million is 37,500), and every sum, product and comparison is exact at any size. Floats are refused
where they would come in, because 0.1 + 0.2 is not 0.3.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import NewType

from treewarden.protocols import UsageError

Money = NewType("Money", int)
"""US dollars in units of 10^-12. Sums and differences of amounts are ints again."""

DECIMALS = 12
ONE_DOLLAR = 10**DECIMALS

# "1e999999999" is short to write and would fill the memory as an int. No amount is above this.
_MOST_DIGITS = 300


def usd(
    value: str | int | Decimal,
    *,
    what: str = "the amount",
    code: str = "cave_budget_max_invalid",
) -> Money:
    """The amount of ``value`` US dollars, exactly.

    Args:
        value: Text such as "0.05", a Decimal, or an int of whole dollars.
        what: How an error names the value.
        code: The contract code of that error.

    Raises:
        UsageError: The value is a float, is not a finite number, is negative, or has more than 12
            decimals.
    """
    number = _decimal(value, what, code)
    if not number.is_finite():
        raise _refused(value, what, code, "is not a finite number")
    if number < 0:
        raise _refused(value, what, code, "is negative")
    if number.adjusted() > _MOST_DIGITS:
        raise _refused(value, what, code, "is beyond any amount of money")
    units, is_exact = _units(number)
    if not is_exact:
        reason = f"has more than {DECIMALS} decimals, and nothing is rounded behind your back"
        raise _refused(value, what, code, reason)
    return Money(units)


def not_below(dollars: Decimal) -> Money | None:
    """The smallest amount that is not below ``dollars``; None when that makes no amount.

    For what a provider says it charged. That was a float on its way here, so there may be digits
    below our unit; a charge is never understated.
    """
    if not dollars.is_finite() or dollars < 0 or dollars.adjusted() > _MOST_DIGITS:
        return None
    units, is_exact = _units(dollars)
    return Money(units if is_exact else units + 1)


_NOTHING = Decimal(0)


def to_decimal(amount: Money) -> Decimal:
    """The amount in dollars, exactly and without trailing zeros."""
    # Through text on purpose: Decimal arithmetic rounds to the thread's context, parsing does not.
    return Decimal(format_usd(amount)) if amount else _NOTHING


def format_usd(amount: Money) -> str:
    """The shortest text that says the amount in dollars exactly: ``0.0125``, ``5``, ``-0.5``."""
    dollars, units = divmod(abs(amount), ONE_DOLLAR)
    sign = "-" if amount < 0 else ""
    if not units:
        return f"{sign}{dollars}"
    return f"{sign}{dollars}.{units:0{DECIMALS}d}".rstrip("0")


def _decimal(value: object, what: str, code: str) -> Decimal:
    # The annotation of usd() already forbids all else; a caller without a type checker needs the
    # sentence. bool is an int to Python, but True is not a dollar.
    if isinstance(value, Decimal):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Decimal(value)
    if not isinstance(value, str):
        reason = f"is a {type(value).__name__} and cannot say an amount exactly"
        raise _refused(value, what, code, reason)
    try:
        return Decimal(value)
    except InvalidOperation:
        raise _refused(value, what, code, "is not a number") from None


def _units(number: Decimal) -> tuple[int, bool]:
    """The whole units in ``number`` dollars, and whether that is all of it."""
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int), number  # only NaN and infinity have letters there
    # Shift the decimal point by moving digits. An exponent has no limit worth the name, so it is
    # never made into a power of ten.
    whole, rest = digits, digits[:0]
    shift = exponent + DECIMALS
    if shift < 0:
        whole, rest = digits[:shift], digits[shift:]
    text = "".join(map(str, whole)) + "0" * max(shift, 0) if any(whole) else "0"
    return int(text), not any(rest)


def _refused(value: object, what: str, code: str, reason: str) -> UsageError:
    # A float's own digits are most likely what the caller meant to write.
    meant = repr(value) if isinstance(value, float) and 0 <= value < ONE_DOLLAR else "0.05"
    return UsageError(
        f'{what} {value!r} {reason}. Write dollars as text, "{meant}", or as '
        f'Decimal("{meant}"), with at most {DECIMALS} decimals.',
        code=code,
    )
