"""A receipt goes through JSON and back to the unit, and one that does not add up is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treewarden.protocols import (
    CONTRACT_SCHEMA,
    OUR_SCHEMA,
    Line,
    Receipt,
    Refusal,
    ToolRow,
    Totals,
    TrancheRow,
    UsageError,
    total_of,
)

LINE = Line(
    purpose="model",
    provider="anthropic",
    model="claude-haiku-4-5",
    input_tokens=1_000,
    output_tokens=300,
    tokens=1_300,
    usd=Decimal("0.0025"),
    low_usd=Decimal("0.0025"),
    high_usd=Decimal("0.0025"),
    low_tokens=1_300,
    high_tokens=1_300,
    output_limit=300,
)
ESTIMATE = attrs.evolve(
    LINE,
    basis="estimated",
    usd=Decimal("0.002"),
    low_usd=Decimal(0),
    high_usd=Decimal("0.00275"),
    tokens=1_100,
    low_tokens=0,
    clamped_from=8_000,
    note="the reader hung up",
)
CHILD = Receipt(
    run_id="run-2",
    path="root/support#1/research#1",
    agent_id="researcher",
    stop_reason="budget_exhausted",
    reason="root/support#1/research#1 has 0 left",
    denomination="usd",
    max=Decimal("0.001"),
    released=Decimal("0.001"),
    spent=Decimal("0.002"),
    overspent=Decimal("0.001"),
    cap_breached=True,
    lines=(ESTIMATE,),
)
PARENT = Receipt(
    run_id="run-1",
    path="root/support#1",
    agent_id="support",
    stop_reason="complete",
    denomination="usd",
    spent=Decimal("0.0045"),
    cap_breached=True,
    lines=(LINE, attrs.evolve(LINE, basis="not_dispatched", tokens=0, usd=Decimal(0),
                              low_usd=Decimal(0), high_usd=Decimal(0), low_tokens=0,
                              high_tokens=0)),
    tools=(ToolRow(name="search", calls=3, errors=1),),
    subagents=(CHILD,),
    tranches=(TrancheRow(amount=Decimal("0.5"), reason="go on", at_call=2),),
    refusals=(Refusal(code="cave_subagent_depth_limit", message="too deep"),),
    faults=("a tool's clean-up raised",),
    started_ns=1,
    ended_ns=2,
)  # fmt: skip

# --- any receipt at all --------------------------------------------------------------------------

dollars = st.integers(0, 10**15).map(lambda units: Decimal(units).scaleb(-12))
texts = st.text(max_size=8)
counts = st.integers(0, 10**7)


@st.composite
def lines(draw: st.DrawFn) -> Line:
    basis = draw(
        st.sampled_from(["provider_reported", "estimated", "unavailable_worst_case", "refused"])
    )
    low_usd, usd, high_usd = sorted(draw(st.tuples(dollars, dollars, dollars)))
    low, tokens, high = sorted(draw(st.tuples(counts, counts, counts)))
    if basis == "provider_reported":
        low_usd, high_usd, low, high = usd, usd, tokens, tokens
    return Line(
        purpose=draw(texts),
        provider=draw(texts),
        model=draw(texts),
        asked_model=draw(st.none() | texts),
        input_tokens=draw(counts),
        cache_read_tokens=draw(counts),
        tokens=tokens,
        usd=usd,
        basis=basis,
        low_usd=low_usd,
        high_usd=high_usd,
        low_tokens=low,
        high_tokens=high,
        is_unpriced=draw(st.booleans()),
        clamped_from=draw(st.none() | counts),
        note=draw(st.none() | texts),
    )


@st.composite
def receipts(draw: st.DrawFn, depth: int = 2) -> Receipt:
    below = draw(st.lists(receipts(depth - 1), max_size=2)) if depth else []
    receipt = Receipt(
        run_id=draw(texts),
        path=draw(texts),
        agent_id=draw(texts),
        stop_reason=draw(texts),
        reason=draw(texts),
        error_code=draw(st.none() | texts),
        denomination=draw(st.sampled_from(["usd", "tokens", "none"])),
        max=draw(st.none() | dollars),
        released=draw(st.none() | dollars),
        overspent=draw(dollars),
        cap_breached=draw(st.booleans()),
        lines=tuple(draw(st.lists(lines(), max_size=3))),
        tools=tuple(draw(st.lists(st.builds(ToolRow, name=texts, calls=counts, errors=counts)))),
        subagents=tuple(below),
        tranches=tuple(
            draw(st.lists(st.builds(TrancheRow, amount=dollars, reason=texts, at_call=counts)))
        ),
        refusals=tuple(draw(st.lists(st.builds(Refusal, code=texts, message=texts)))),
        faults=tuple(draw(st.lists(texts))),
        killed=tuple(draw(st.lists(texts))),
        is_detached=draw(st.booleans()),
        started_ns=draw(counts),
        ended_ns=draw(counts),
    )
    total = receipt.total
    spent = total.usd if receipt.denomination == "usd" else Decimal(total.tokens)
    return attrs.evolve(receipt, spent=spent)


@pytest.mark.slow
@given(receipts())
@settings(deadline=None, max_examples=40)
def test_a_receipt_goes_through_json_and_back_to_the_unit(receipt: Receipt) -> None:
    receipt.check()
    text = json.dumps(receipt.to_json())
    again = Receipt.from_json(json.loads(text))
    assert again == receipt
    assert json.dumps(again.to_json()) == text


@pytest.mark.slow
@given(receipts())
@settings(deadline=None, max_examples=40)
def test_totals_are_the_sum_of_all_lines_below(receipt: Receipt) -> None:
    every = [line for each in receipt.walk() for line in each.lines]
    assert receipt.total == total_of(every) == receipt.own + receipt.descendants
    assert receipt.total.usd == sum((line.usd for line in every), Decimal(0))
    assert receipt.cost_usd == receipt.total.usd


@pytest.mark.slow
@given(receipts())
@settings(deadline=None, max_examples=40)
def test_the_contract_form_is_json_with_numbers(receipt: Receipt) -> None:
    value = receipt.to_contract_json()
    assert json.loads(json.dumps(value)) == value
    assert value["totalTokens"] == receipt.total.tokens
    assert len(value["subagents"]) == len(receipt.subagents)


# --- our form ------------------------------------------------------------------------------------


def test_our_form_has_exact_amounts_as_text_and_sums_for_people() -> None:
    value = PARENT.to_json()
    assert value["schema"] == OUR_SCHEMA
    assert value["spent"] == "0.0045"
    assert value["own"] == {
        "calls": 1,  # what was never sent is a line and no call
        "tokens": 1_300,
        "usd": "0.0025",
        "low_usd": "0.0025",
        "high_usd": "0.0025",
        "low_tokens": 1_300,
        "high_tokens": 1_300,
        "is_unpriced": False,
    }
    assert value["descendants"]["usd"] == "0.002"
    assert (value["total"]["usd"], value["total"]["tokens"]) == ("0.0045", 2_400)
    assert (value["total"]["low_usd"], value["total"]["high_usd"]) == ("0.0025", "0.00525")
    assert value["max"] is None
    assert [child["path"] for child in value["subagents"]] == [CHILD.path]
    assert Receipt.from_json(value) == PARENT


def test_an_amount_is_never_written_with_an_exponent() -> None:
    tiny = Decimal("1E-12")
    line = attrs.evolve(LINE, usd=tiny, low_usd=tiny, high_usd=tiny)
    receipt = attrs.evolve(CHILD, lines=(line,), spent=tiny)
    assert receipt.to_json()["spent"] == "0.000000000001"


def test_an_empty_receipt_sums_up_to_nothing() -> None:
    receipt = Receipt(run_id="r", path="root", agent_id="a", stop_reason="complete")
    receipt.check()
    assert receipt.total == Totals()
    assert Receipt.from_json(receipt.to_json()) == receipt


def test_one_line_without_a_price_makes_all_above_it_unpriced() -> None:
    child = attrs.evolve(CHILD, lines=(attrs.evolve(ESTIMATE, is_unpriced=True),))
    parent = attrs.evolve(PARENT, subagents=(child,))
    assert (parent.own.is_unpriced, parent.total.is_unpriced) == (False, True)


# --- what is no receipt --------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], None]


def set_to(*way: str | int, to: Any) -> Change:
    def change(value: Any) -> None:
        for step in way[:-1]:
            value = value[step]
        value[way[-1]] = to

    return change


OFF: dict[str, tuple[str, Change]] = {
    "what was spent": (PARENT.path, set_to("spent", to="0.0046")),
    "what a child spent": (CHILD.path, set_to("subagents", 0, "spent", to="0.0021")),
    "a line": (PARENT.path, set_to("lines", 0, "usd", to="0.0024")),
    "own": (PARENT.path, set_to("own", "usd", to="0.0026")),
    "own calls": (PARENT.path, set_to("own", "calls", to=2)),
    "what is below": (PARENT.path, set_to("descendants", "tokens", to=1_101)),
    "the total": (PARENT.path, set_to("total", "high_usd", to="0.00526")),
    "a child's total": (CHILD.path, set_to("subagents", 0, "total", "tokens", to=1)),
    "a child that is gone": (PARENT.path, set_to("subagents", to=[])),
}


@pytest.mark.parametrize("what", OFF)
def test_a_receipt_whose_sum_is_off_is_refused_and_says_where(what: str) -> None:
    path, change = OFF[what]
    value = json.loads(json.dumps(PARENT.to_json()))
    change(value)
    with pytest.raises(UsageError) as raised:
        Receipt.from_json(value)
    assert raised.value.code == "cave_receipt_invalid"
    assert "add up" in str(raised.value)
    # The path and no longer one.
    assert path in str(raised.value).replace(CHILD.path, "" if path != CHILD.path else path)


def test_a_charge_outside_its_bounds_is_refused() -> None:
    value = json.loads(json.dumps(PARENT.to_json()))
    set_to("subagents", 0, "lines", 0, "high_tokens", to=1_099)(value)
    with pytest.raises(UsageError, match="add up"):
        Receipt.from_json(value)


WRONG: dict[str, Change] = {
    "an amount as a float": set_to("spent", to=0.0045),
    "an amount that is none": set_to("overspent", to="much"),
    "a count as text": set_to("lines", 0, "tokens", to="1300"),
    "a count as a float": set_to("started_ns", to=1.0),
    "a count as a bool": set_to("ended_ns", to=True),
    "an unknown denomination": set_to("denomination", to="eur"),
    "lines that are no list": set_to("lines", to=3),
    "a field that is missing": lambda value: value.pop("agent_id"),
    "another schema": set_to("schema", to=CONTRACT_SCHEMA),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_our_form_is_refused_with_advice(what: str) -> None:
    value = json.loads(json.dumps(PARENT.to_json()))
    WRONG[what](value)
    with pytest.raises(UsageError, match=r"this is not a treewarden\.run-receipt\.v1 receipt"):
        Receipt.from_json(value)


@pytest.mark.parametrize("value", [None, [], "{}", 3, {}, {"schema": "other"}])
def test_what_is_no_receipt_at_all_is_refused(value: Any) -> None:
    with pytest.raises(UsageError) as raised:
        Receipt.from_json(value)
    assert raised.value.code == "cave_receipt_invalid"
    assert "json.dump(receipt.to_json(), file)" in str(raised.value)


# --- the contract's form -------------------------------------------------------------------------

TOP = {
    "schema", "runId", "agentId", "basis", "claimBasis", "stopReason", "denomination",
    "capBreached", "overspent", "totalEstimatedUsd", "totalTokens", "unpriced", "calls", "tools",
    "subagents", "tranches", "breakers", "compactions",
}  # fmt: skip
CALL = {
    "provider", "model", "inputTokens", "outputTokens", "cacheReadTokens", "cacheWriteTokens",
    "reasoningTokens", "estimatedUsd", "unpriced", "usageBasis",
}  # fmt: skip


def test_the_contract_form_has_the_contracts_fields_and_no_others() -> None:
    value = PARENT.to_contract_json()
    assert set(value) == TOP
    assert value["schema"] == CONTRACT_SCHEMA
    # No wallet of its own bounded it.
    assert value["denomination"] == "none"
    assert set(value["calls"][0]) == CALL
    assert value["tools"] == [{"name": "search", "calls": 3, "errors": 1}]
    assert value["tranches"] == [{"amount": 0.5, "reason": "go on", "atCall": 2}]
    assert (value["totalEstimatedUsd"], value["totalTokens"]) == (0.0045, 2_400)


def test_a_bounded_run_has_its_amounts_in_its_denomination() -> None:
    value = PARENT.to_contract_json()["subagents"][0]
    assert set(value) == TOP | {"max", "released", "spent"}
    assert (value["denomination"], value["max"], value["released"]) == ("usd", 0.001, 0.001)
    assert (value["spent"], value["overspent"], value["capBreached"]) == (0.002, 0.001, True)


def test_a_call_that_was_never_sent_is_no_call_there() -> None:
    assert len(PARENT.lines) == 2
    assert len(PARENT.to_contract_json()["calls"]) == 1


def test_what_was_not_reported_is_unavailable_and_a_clamp_is_its_limit() -> None:
    (call,) = PARENT.to_contract_json()["subagents"][0]["calls"]
    assert set(call) == CALL | {"clampedOutputTokens"}
    assert (call["usageBasis"], call["clampedOutputTokens"]) == ("unavailable", 300)
    (measured,) = PARENT.to_contract_json()["calls"]
    assert measured["usageBasis"] == "provider_reported"


@pytest.mark.parametrize(
    ("exact", "number"),
    [
        ("0.00000000005", 0.0000000001),  # half up at ten decimals
        ("0.00000000004", 0),
        ("2", 2),
        ("0.30000000000000004", 0.3),
    ],
)
def test_totals_are_rounded_half_up_at_ten_decimals(exact: str, number: float) -> None:
    usd = Decimal(exact)
    line = attrs.evolve(LINE, usd=usd, low_usd=usd, high_usd=usd)
    value = attrs.evolve(CHILD, lines=(line,), spent=usd).to_contract_json()
    assert value["totalEstimatedUsd"] == value["calls"][0]["estimatedUsd"] == number
    assert value["spent"] == number
