"""Amounts are exact at any size, and what cannot be exact is refused with advice."""

from __future__ import annotations

from decimal import Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewarden.ledgers import Money, format_usd, to_decimal, usd
from treewarden.protocols import UsageError

units = st.integers(0, 10**40)


@pytest.mark.parametrize(
    ("value", "units"),
    [
        ("0.05", 50_000_000_000),
        (Decimal("0.05"), 50_000_000_000),
        (3, 3_000_000_000_000),
        ("0.000000000001", 1),
        ("1e-12", 1),
        ("2E3", 2_000_000_000_000_000),
        ("0", 0),
        ("-0", 0),
        ("0.0500000000000000000000", 50_000_000_000),
        (10**30, 10**42),
    ],
)
def test_an_amount_is_a_whole_number_of_units(value: str | int | Decimal, units: int) -> None:
    assert usd(value) == units


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (0.05, "is a float and cannot say an amount exactly"),
        (True, "is a bool"),
        (None, "is a NoneType"),
        ("five", "is not a number"),
        ("$5", "is not a number"),
        ("1,000", "is not a number"),
        ("", "is not a number"),
        ("nan", "is not a finite number"),
        (Decimal("Infinity"), "is not a finite number"),
        (Decimal("sNaN"), "is not a finite number"),
        ("-1", "is negative"),
        ("1e-13", "has more than 12 decimals"),
        ("0.0000000000011", "has more than 12 decimals"),
        ("1e-999999999", "has more than 12 decimals"),
        ("1e999999999", "is beyond any amount of money"),
    ],
)
def test_what_is_no_exact_amount_is_refused_with_the_reason(value: object, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as refused:
        usd(value)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert refused.value.code == "cave_budget_max_invalid"


def test_the_refusal_of_a_float_shows_how_to_write_it() -> None:
    with pytest.raises(UsageError) as refused:
        usd(0.07, what="max_usd")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert str(refused.value) == (
        "cave_budget_max_invalid: max_usd 0.07 is a float and cannot say an amount exactly. "
        'Write dollars as text, "0.07", or as Decimal("0.07"), with at most 12 decimals.'
    )


def test_the_caller_names_the_code_of_a_refusal() -> None:
    with pytest.raises(UsageError) as refused:
        usd("-1", code="cave_budget_initial_invalid")
    assert refused.value.code == "cave_budget_initial_invalid"


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0"),
        (1, "0.000000000001"),
        (12_500_000_000, "0.0125"),
        (5 * 10**12, "5"),
        (10**13, "10"),
        (-500_000_000_000, "-0.5"),
        (10**30 + 1, "1000000000000000000.000000000001"),
    ],
)
def test_the_text_of_an_amount_is_exact_and_the_shortest(amount: int, text: str) -> None:
    assert format_usd(Money(amount)) == text


@given(units)
def test_an_amount_survives_its_text_and_its_decimal(amount: int) -> None:
    assert usd(format_usd(Money(amount))) == amount
    assert usd(to_decimal(Money(amount))) == amount


@given(units, units)
def test_sums_of_amounts_are_sums_of_dollars(a: int, b: int) -> None:
    with localcontext(prec=100):
        assert to_decimal(Money(a + b)) == to_decimal(Money(a)) + to_decimal(Money(b))


def test_conversions_do_not_depend_on_the_decimal_context() -> None:
    amount = Money(123_456_789_012_345_678_901)
    with localcontext(prec=3):
        assert str(to_decimal(amount)) == "123456789.012345678901"
        assert usd("123456789.012345678901") == amount
