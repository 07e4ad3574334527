"""The tree's ledger in sentences with numbers: admissions, wallets, calls, limits and refusals.

A token of the model here costs 0.10 USD of output and nothing of input, so a call of four tokens
holds 0.40 USD.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import pytest

from treewarden.ledgers import (
    Ask,
    Caps,
    Ending,
    Event,
    Hold,
    Kind,
    Lease,
    Outcome,
    Price,
    Stop,
    Ticket,
    TreeLedger,
    usd,
)
from treewarden.protocols import LedgerError, Receipt, RefusedError, Usage

TENTH = Price(input="0", output="100000")


def tree(max: str | None = None, *, initial: str | None = None, **caps: Any) -> TreeLedger:
    return TreeLedger(
        unit="usd",
        max=None if max is None else usd(max),
        initial=None if initial is None else usd(initial),
        caps=Caps(**caps),
    )


def child(
    ledger: TreeLedger, parent: Lease | None = None, cap: str | None = None, **options: Any
) -> Lease:
    return ledger.admit(
        parent or ledger.root,
        options.pop("name", "child"),
        kind=options.pop("kind", Kind.AGENT),
        at=0,
        cap=None if cap is None else usd(cap),
        **options,
    )


def call(tokens: int, *, wait: bool = True, clamp: bool = False, floor: int = 1) -> Ask:
    return Ask(
        input_tokens=0,
        output_tokens=tokens,
        price=TENTH,
        wait=wait,
        clamp=clamp,
        output_floor_tokens=floor,
    )


def held(ledger: TreeLedger, lease: Lease, tokens: int) -> Hold:
    """A call of so many tokens that has its money and was dispatched."""
    hold = ledger.fund(lease, call(tokens), 0)
    assert isinstance(hold, Hold), hold
    assert ledger.dispatch(hold, 0) is True
    hold.is_sent = True
    return hold


def settle(ledger: TreeLedger, hold: Hold, tokens: int) -> None:
    hold.progress.usage = Usage(output=tokens)
    ledger.settle(hold, Ending.FINISHED, 0)
    ledger.check()


def free(lease: Lease) -> Decimal:
    return Decimal(lease.node.wallet.free) / 10**12


def refused(act: Callable[[], object]) -> RefusedError:
    with pytest.raises(RefusedError) as raised:
        act()
    return raised.value


def stopped(ledger: TreeLedger, lease: Lease, ask: Ask) -> Stop:
    stop = ledger.fund(lease, ask, 0)
    assert isinstance(stop, Stop), stop
    return stop


def queued(ledger: TreeLedger, lease: Lease, ask: Ask, woken: list[str] | None = None) -> Ticket:
    ticket = ledger.fund(lease, ask, 0)
    assert isinstance(ticket, Ticket), ticket
    if woken is not None:
        ticket.on_ready = lambda: woken.append(lease.path)
    return ticket


def receipt_of(ledger: TreeLedger, lease: Lease, *below: Receipt) -> Receipt:
    wallet = lease.node.wallet
    lease.recorder.subagents.extend(below)
    return lease.recorder.receipt(
        run_id="run",
        path=lease.path,
        agent_id="agent",
        stop_reason="complete",
        reason="",
        error_code=None,
        unit=ledger.unit,
        wallet=wallet,
        tranches=[],
        spent=lease.node.usd,
        started_ns=0,
        ended_ns=0,
    )


# --- holds and settlements (agent contract, 23.1) ------------------------------------------------


def test_what_a_call_did_not_use_can_be_spent_again() -> None:
    ledger = tree("1")
    hold = held(ledger, ledger.root, 4)
    assert free(ledger.root) == Decimal("0.6")
    settle(ledger, hold, 1)
    assert ledger.root.node.wallet.settled == usd("0.1")
    assert free(ledger.root) == Decimal("0.9")


def test_a_call_that_used_nothing_gives_all_of_its_hold_back() -> None:
    ledger = tree("1")
    settle(ledger, held(ledger, ledger.root, 4), 0)
    assert ledger.root.node.wallet.settled == 0
    assert free(ledger.root) == 1


def test_unreadable_usage_of_a_model_that_reasons_unseen_books_the_whole_hold() -> None:
    ledger = tree("1")
    ask = Ask(input_tokens=0, output_tokens=4, price=TENTH, reasons_invisibly=True)
    hold = ledger.fund(ledger.root, ask, 0)
    assert isinstance(hold, Hold)
    ledger.dispatch(hold, 0)
    hold.progress.usage = Usage(output=-1)
    ledger.settle(hold, Ending.FINISHED, 0)
    assert ledger.root.node.wallet.settled == usd("0.4")
    ledger.check()


def test_a_second_settlement_is_an_error_and_a_late_release_is_nothing() -> None:
    ledger = tree("1")
    hold = held(ledger, ledger.root, 4)
    settle(ledger, hold, 1)
    with pytest.raises(LedgerError, match="was settled before") as raised:
        ledger.settle(hold, Ending.FINISHED, 0)
    assert raised.value.code == "cave_budget_reservation_double_settle"
    ledger.release(hold, 0)
    assert ledger.root.node.wallet.settled == usd("0.1")
    assert free(ledger.root) == Decimal("0.9")
    ledger.check()


def test_a_call_that_was_never_dispatched_cannot_be_charged() -> None:
    ledger = tree("1")
    hold = ledger.fund(ledger.root, call(4), 0)
    assert isinstance(hold, Hold)
    with pytest.raises(LedgerError, match="never dispatched; release it"):
        ledger.settle(hold, Ending.FINISHED, 0)
    assert free(ledger.root) == Decimal("0.6")
    ledger.release(hold, 0)
    assert free(ledger.root) == 1


def test_a_call_is_dispatched_once() -> None:
    ledger = tree("1", max_concurrent_calls=1)
    hold = held(ledger, ledger.root, 1)
    waiting = ledger.fund(ledger.root, call(1), 0)
    assert isinstance(waiting, Hold)
    assert ledger.dispatch(waiting, 0) is False
    for again in (hold, waiting):
        with pytest.raises(LedgerError, match="dispatched before"):
            ledger.dispatch(again, 0)
    assert ledger.counters.model_calls == ledger.counters.queued_slots == 1
    settle(ledger, hold, 0)
    with pytest.raises(LedgerError, match="dispatched before"):
        ledger.dispatch(hold, 0)
    ledger.check()


def test_a_price_list_that_fails_loses_no_hold() -> None:
    ledger = tree("1")
    lease = child(ledger)
    hold = held(ledger, lease, 4)
    hold.progress.usage = Usage(output=1, extra=(Usage(output=1, model="other"),))

    def fail(model: str) -> Price:
        raise OSError(f"no file of prices for {model}")

    with pytest.raises(OSError, match="no file of prices for other"):
        ledger.settle(hold, Ending.FINISHED, 0, price_of=fail)
    ledger.check()
    assert free(ledger.root) == Decimal("0.6")
    ledger.end(lease, Outcome.FAILED, 0)
    ledger.check_closed()


def test_overshoot_is_stored_flagged_and_closes_the_wallet() -> None:
    ledger = tree("1", initial="0.9")
    settle(ledger, held(ledger, ledger.root, 5), 14)
    wallet = ledger.root.node.wallet
    assert (wallet.settled, wallet.overspent) == (usd("1.4"), usd("0.4"))
    assert wallet.is_breached
    # A hold of nothing is refused too, and so are a tranche and a carve.
    assert stopped(ledger, ledger.root, call(0, floor=0)).reason == "budget_exhausted"
    with pytest.raises(LedgerError) as raised:
        ledger.release_tranche(ledger.root, usd("0.05"), "more", 0)
    assert raised.value.code == "cave_budget_cap_breached"
    assert (
        refused(lambda: child(ledger, cap="0.1", min_cap=0)).code
        == "cave_subagent_wallet_unavailable"
    )


def test_a_call_that_was_allowed_can_still_breach_by_what_it_costs_more() -> None:
    ledger = tree("1")
    settle(ledger, held(ledger, ledger.root, 9), 9)
    settle(ledger, held(ledger, ledger.root, 1), 2)
    wallet = ledger.root.node.wallet
    assert wallet.is_breached and wallet.overspent == usd("0.1")
    assert wallet.overrun == usd("0.1")


@pytest.mark.parametrize(("max", "above"), [("2", "3"), ("10", "0")])
def test_a_breach_is_flagged_up_the_tree_but_its_amount_is_not(max: str, above: str) -> None:
    """A child spends 5 of its 1: its parent of 2 has overspent 3, not 7; one of 10 nothing."""
    ledger = tree(max)
    agent = child(ledger, cap="1")
    settle(ledger, held(ledger, agent, 1), 50)
    child_receipt = receipt_of(ledger, agent)
    receipt = receipt_of(ledger, ledger.root, child_receipt)
    assert (child_receipt.overspent, receipt.overspent) == (Decimal(4), Decimal(above))
    assert child_receipt.cap_breached and receipt.cap_breached
    receipt.check()


def test_two_carves_of_five_from_eight_are_one() -> None:
    ledger = tree("8")
    first = child(ledger, cap="5")
    refusal = refused(lambda: child(ledger, cap="5"))
    assert refusal.code == "cave_subagent_wallet_unavailable"
    assert free(ledger.root) == 3
    settle(ledger, held(ledger, first, 10), 10)
    ledger.end(first, Outcome.OK, 0)
    assert free(ledger.root) == 7
    child(ledger, cap="5")
    assert free(ledger.root) == 2
    ledger.check()


def test_a_lease_that_ends_twice_gives_back_once() -> None:
    ledger = tree("8")
    lease = child(ledger, cap="5")
    ledger.end(lease, Outcome.OK, 0)
    with pytest.raises(LedgerError, match="has ended before"):
        ledger.end(lease, Outcome.OK, 0)
    assert free(ledger.root) == 8
    assert ledger.counters.active == 0
    ledger.check_closed()


# --- a hold that is not used (E11) ---------------------------------------------------------------


def test_a_call_that_fails_between_hold_and_dispatch_frees_its_money() -> None:
    ledger = tree("1")
    first = ledger.fund(ledger.root, call(6), 0)
    assert isinstance(first, Hold)
    ledger.release(first, 0)  # building the request raised
    assert isinstance(ledger.fund(ledger.root, call(6, wait=False), 0), Hold)
    ledger.check()


def test_a_lease_that_ends_frees_what_it_holds_and_leaves_its_queues() -> None:
    ledger = tree("1", max_concurrent_calls=1)
    lease = child(ledger)
    unsent = ledger.fund(lease, call(3), 0)
    sent = held(ledger, lease, 3)
    sent.progress.usage = Usage(output=1)
    waits_for_slot = ledger.fund(lease, call(3), 0)
    assert isinstance(unsent, Hold) and isinstance(waits_for_slot, Hold)
    assert ledger.dispatch(waits_for_slot, 0) is False
    waits_for_money = queued(ledger, lease, call(5))
    ledger.end(lease, Outcome.CANCELLED, 0)
    assert waits_for_money.outcome is None
    # What was sent has its price; the rest of it all is back.
    assert free(ledger.root) == Decimal("0.9")
    assert lease.recorder.lines[0].basis == "estimated"
    ledger.check_closed()


def test_a_call_that_was_dispatched_and_not_sent_was_no_call() -> None:
    ledger = tree("1", max_model_calls=1)
    lease = child(ledger)
    hold = ledger.fund(lease, call(3), 0)
    assert isinstance(hold, Hold)
    assert ledger.dispatch(hold, 0) is True
    assert ledger.counters.model_calls == 1
    ledger.end(lease, Outcome.CANCELLED, 0)
    assert ledger.counters.model_calls == 0
    assert (free(ledger.root), lease.recorder.lines[0].basis) == (Decimal(1), "not_dispatched")


def test_an_ending_lease_is_granted_nothing() -> None:
    """Its second call would fit as soon as the first one leaves the queue."""
    ledger = tree("1")
    lease, other = child(ledger), child(ledger)
    held(ledger, other, 8)
    woken: list[str] = []
    mine = [queued(ledger, lease, call(5), woken), queued(ledger, lease, call(2), woken)]
    its = queued(ledger, other, call(1), woken)
    ledger.end(lease, Outcome.CANCELLED, 0)
    assert [ticket.outcome for ticket in mine] == [None, None]
    assert isinstance(its.outcome, Hold)
    assert woken == [other.path]
    ledger.check()


def test_a_grant_that_was_never_taken_ends_with_its_lease() -> None:
    ledger = tree("1")
    first, second = child(ledger), child(ledger)
    hold = held(ledger, first, 8)
    ticket = queued(ledger, second, call(5))
    settle(ledger, hold, 1)
    assert isinstance(ticket.outcome, Hold)
    ledger.end(second, Outcome.CANCELLED, 0)
    assert free(ledger.root) == Decimal("0.9")
    ledger.check()


# --- admissions (agent contract, 23.2) -----------------------------------------------------------


def test_an_attempt_is_used_up_by_a_later_refusal() -> None:
    ledger = tree("1")
    options: dict[str, Any] = {"tool": "research", "max_attempts": 1}
    first = refused(lambda: child(ledger, cap="5", **options))
    second = refused(lambda: child(ledger, cap="5", **options))
    assert first.code == "cave_subagent_wallet_unavailable"
    assert second.code == "cave_subagent_call_budget"
    assert ledger.root.node.attempts == {"research": 1}


def test_attempts_are_counted_per_tool_and_per_parent() -> None:
    ledger = tree(max_subagents=None)
    first, second = child(ledger), child(ledger)
    for lease in (first, second):
        for tool in ("research", "write"):
            child(ledger, lease, tool=tool, max_attempts=1)
            refusal = refused(lambda t=tool, p=lease: child(ledger, p, tool=t, max_attempts=1))  # type: ignore[misc]
            assert refusal.code == "cave_subagent_call_budget"
            assert (refusal.node, refusal.at) == (f"{lease.path}/child", lease.path)
            assert (refusal.dimension, refusal.left) == (f"calls of {tool}", "0")


def test_who_breaks_both_caps_counts_as_an_invocation_rejection_only() -> None:
    ledger = tree(max_subagents=1, max_concurrent_subagents=1)
    child(ledger)
    assert refused(lambda: child(ledger)).code == "cave_subagent_invocation_limit"
    counters = ledger.counters
    assert (counters.invocation_rejections, counters.concurrency_rejections) == (1, 0)


def test_the_total_is_never_given_back_and_concurrency_is() -> None:
    ledger = tree(max_subagents=2, max_concurrent_subagents=1)
    first = child(ledger)
    assert refused(lambda: child(ledger)).code == "cave_subagent_concurrency_limit"
    ledger.end(first, Outcome.FAILED, 0)
    ledger.end(child(ledger), Outcome.OK, 0)
    assert refused(lambda: child(ledger)).code == "cave_subagent_invocation_limit"
    counters = ledger.counters
    assert (counters.admitted, counters.peak, counters.active) == (2, 1, 0)
    assert (counters.invocation_rejections, counters.concurrency_rejections) == (1, 1)


@pytest.mark.parametrize("most", [1, 2, 8])
def test_depth_counts_edges_below_a_run(most: int) -> None:
    ledger = tree(max_depth=most)
    lease = child(ledger, kind=Kind.RUN)
    for _ in range(most):
        lease = child(ledger, lease)
    assert lease.node.depth == most
    refusal = refused(lambda: child(ledger, lease))
    assert refusal.code == "cave_subagent_depth_limit"
    assert (refusal.asked, refusal.left) == (str(most + 1), str(most))
    # What is no agent has no depth of its own.
    assert child(ledger, lease, kind=Kind.TOOL).node.depth == most


def test_a_deadline_is_an_instant_and_the_earliest_above_holds() -> None:
    ledger = TreeLedger(deadline=60)
    run = child(ledger, kind=Kind.RUN)
    assert run.node.deadline == 60
    early = child(ledger, run, deadline=55.0)
    assert early.node.deadline == 55
    assert child(ledger, early, deadline=59.0).node.deadline == 55
    assert child(ledger, run, deadline=100.0).node.deadline == 60


def test_only_agents_count_as_subagents() -> None:
    ledger = tree(max_subagents=1, max_concurrent_subagents=1)
    for kind in (Kind.RUN, Kind.TOOL, Kind.COMPACTION, Kind.SERVICE):
        child(ledger, kind=kind)
    assert ledger.counters.admitted == ledger.counters.active == 0
    assert (ledger.counters.runs, ledger.counters.tool_calls) == (1, 1)
    child(ledger)
    assert (ledger.counters.admitted, ledger.counters.peak) == (1, 1)


def test_a_subagent_tools_call_is_a_tool_call_too() -> None:
    ledger = tree(max_tool_calls=2)
    child(ledger, tool="research", max_attempts=5)
    child(ledger, kind=Kind.TOOL)
    for options in ({"tool": "research"}, {"kind": Kind.TOOL}):
        refusal = refused(lambda o=options: child(ledger, **o))  # type: ignore[misc]
        assert refusal.code == "cave_tool_call_budget_exceeded"
    child(ledger)  # an agent that no tool started


def test_a_tree_has_so_many_runs() -> None:
    ledger = tree(max_runs=1)
    ledger.end(child(ledger, kind=Kind.RUN), Outcome.OK, 0)
    assert refused(lambda: child(ledger, kind=Kind.RUN)).code == "cave_run_limit"


def test_a_lowered_cap_may_be_exceeded_until_leases_end() -> None:
    ledger = tree(max_concurrent_subagents=3)
    leases = [child(ledger) for _ in range(3)]
    ledger.set_cap("max_concurrent_subagents", 1, 0)
    ledger.check()
    for lease in leases[:2]:
        ledger.end(lease, Outcome.OK, 0)
        assert refused(lambda: child(ledger)).code == "cave_subagent_concurrency_limit"
    ledger.end(leases[2], Outcome.OK, 0)
    child(ledger)
    assert ledger.counters.peak == 3


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("max_concurrent_subagents", 0),
        ("max_subagents", -1),
        ("max_model_calls", True),
        ("max_tool_calls", 1.5),
        ("max_depth", None),
        ("max_wishes", 3),
    ],
)
def test_a_cap_is_at_least_one_and_depth_is_always_a_number(name: str, to: Any) -> None:
    ledger = tree()
    caps = ledger.caps
    with pytest.raises(LedgerError) as raised:
        ledger.set_cap(name, to, 0)
    assert raised.value.code == "cave_limit_invalid"
    assert ledger.caps == caps
    child(ledger)


def test_nothing_starts_below_what_has_ended_and_a_parent_outlives_its_children() -> None:
    ledger = tree()
    parent = child(ledger)
    below = child(ledger, parent)
    with pytest.raises(LedgerError, match="still has 1 children"):
        ledger.end(parent, Outcome.OK, 0)
    ledger.end(below, Outcome.OK, 0)
    ledger.end(parent, Outcome.OK, 0)
    with pytest.raises(LedgerError, match="has ended; nothing can start below it"):
        child(ledger, parent)
    ledger.check_closed()


def test_a_path_names_a_place_and_a_refusal_takes_no_number() -> None:
    ledger = tree("1")
    run = child(ledger, kind=Kind.RUN, name="support")
    child(ledger, run, name="research")
    refused(lambda: child(ledger, run, name="write", cap="5"))
    tool = child(ledger, run, name="tool:search", kind=Kind.TOOL)
    assert tool.path == "root/support#1/tool:search#2"


# --- carves (architecture, section 3) ------------------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "least", "carved"),
    [
        ("0.5", None, "0.5"),
        ("1", None, "1"),
        ("5", "0", "1"),
        ("5", "0.3", "1"),
        ("5", "1", "1"),
    ],
)
def test_a_carve_is_its_cap_or_what_is_left(cap: str, least: str | None, carved: str) -> None:
    ledger = tree("1")
    lease = child(ledger, cap=cap, min_cap=None if least is None else usd(least))
    assert lease.node.wallet.max == lease.node.wallet.released == usd(carved)
    assert free(ledger.root) == 1 - Decimal(carved)
    ledger.check()


@pytest.mark.parametrize(("cap", "least"), [("1.1", None), ("5", "1.1"), ("0", None), ("0", "0")])
def test_a_carve_of_less_than_its_least_or_of_nothing_is_refused(
    cap: str, least: str | None
) -> None:
    ledger = tree("1")
    before = ledger.state.plain()
    refusal = refused(lambda: child(ledger, cap=cap, min_cap=None if least is None else usd(least)))
    assert refusal.code == "cave_subagent_wallet_unavailable"
    after = ledger.state.plain()
    assert after.pop("counters").pop("other_rejections") == 1
    assert before.pop("counters").pop("other_rejections") == 0
    assert (before.pop("events"), after.pop("events")) == (1, 2)
    assert after == before


def test_nothing_is_carved_while_a_call_waits() -> None:
    ledger = tree("1")
    hold = held(ledger, ledger.root, 8)
    ticket = queued(ledger, ledger.root, call(5))
    refusal = refused(lambda: child(ledger, cap="0.1"))
    assert refusal.code == "cave_subagent_wallet_unavailable"
    assert refusal.advice == "1 calls are waiting for money on it; they go first."
    ledger.leave(ticket, 0)
    child(ledger, cap="0.1")
    settle(ledger, hold, 0)


def test_a_spawn_leaves_its_parent_what_that_has_set_aside() -> None:
    ledger = tree("1")
    parent = child(ledger, set_aside=usd("0.3"))
    assert free(ledger.root) == Decimal("0.7")
    assert refused(lambda: child(ledger, parent, cap="0.8")).left == "0.7"
    assert child(ledger, parent, cap="0.8", min_cap=1).node.wallet.max == usd("0.7")
    ledger.check()


def test_a_reserve_that_does_not_fit_is_no_start() -> None:
    ledger = tree("1")
    refusal = refused(lambda: child(ledger, set_aside=usd("1.1")))
    assert refusal.code == "cave_subagent_wallet_unavailable"
    assert (refusal.asked, refusal.left) == ("1.1", "1")
    assert ledger.root.node.wallet.set_aside == 0


def test_a_reserve_of_a_node_with_a_wallet_is_set_aside_in_its_own() -> None:
    ledger = tree("1")
    lease = child(ledger, cap="1", set_aside=usd("0.2"))
    assert (lease.node.wallet.max, free(lease)) == (usd("1"), Decimal("0.8"))
    assert ledger.root.node.wallet.set_aside == 0
    ledger.check()
    ledger.end(lease, Outcome.OK, 0)
    assert free(ledger.root) == 1


@pytest.mark.parametrize("least", [None, 0])
def test_a_reserve_above_its_own_cap_is_refused(least: int | None) -> None:
    ledger = tree("5")
    refusal = refused(lambda: child(ledger, cap="0.1", min_cap=least, set_aside=usd("0.2")))
    assert refusal.advice == "It may have at most 0.1; raise its cap."
    ledger.check()


def test_the_end_of_a_lease_gives_its_reserve_to_who_waits() -> None:
    ledger = tree("1")
    lease = child(ledger, set_aside=usd("0.3"))
    hold = held(ledger, ledger.root, 5)
    ticket = queued(ledger, ledger.root, call(4))
    ledger.end(lease, Outcome.OK, 0)
    assert isinstance(ticket.outcome, Hold)
    settle(ledger, hold, 0)


def test_a_tree_without_a_ceiling_counts_all_the_same() -> None:
    ledger = tree()
    lease = child(ledger, cap="2")
    settle(ledger, held(ledger, lease, 10), 7)
    assert (ledger.root.node.usd, ledger.root.node.tokens) == (usd("0.7"), 7)
    snapshot = ledger.snapshot()["wallets"]
    assert (snapshot["root"]["max"], snapshot["root"]["free"]) == (None, None)
    assert snapshot[lease.path]["free"] == Decimal("1.3")


# --- queues --------------------------------------------------------------------------------------


def test_a_call_waits_while_another_is_open_and_nobody_passes_it() -> None:
    ledger = tree("1")
    hold = held(ledger, ledger.root, 6)
    woken: list[str] = []
    first, second, third = (child(ledger, name=name) for name in ("a", "b", "c"))
    tickets = [
        queued(ledger, first, call(7), woken),
        queued(ledger, second, call(3), woken),
        queued(ledger, third, call(2), woken),
    ]
    # Who does not wait is stopped, even if its call would fit.
    assert stopped(ledger, third, call(1, wait=False)).reason == "budget_exhausted"
    settle(ledger, hold, 0)
    assert [isinstance(ticket.outcome, Hold) for ticket in tickets] == [True, True, False]
    assert woken == [first.path, second.path]
    granted = tickets[1].outcome
    assert isinstance(granted, Hold)
    ledger.release(granted, 0)
    assert woken == [first.path, second.path, third.path]
    ledger.check()


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (call(9, clamp=True, floor=4), 4),
        (call(9, clamp=True, floor=5), "budget_exhausted"),
        (call(9), "budget_exhausted"),
    ],
)
def test_when_the_last_hold_is_back_a_waiter_is_clamped_or_stopped(
    ask: Ask, expected: int | str
) -> None:
    ledger = tree("1")
    hold = held(ledger, ledger.root, 6)
    ticket = queued(ledger, ledger.root, ask)
    settle(ledger, hold, 6)
    outcome = ticket.outcome
    if isinstance(outcome, Hold):
        assert (outcome.output_tokens, outcome.clamped_from) == (expected, 9)
    else:
        assert outcome is not None and outcome.reason == expected


def test_who_leaves_makes_room_for_the_next() -> None:
    ledger = tree("1")
    hold = held(ledger, ledger.root, 6)
    large, small = queued(ledger, ledger.root, call(9)), queued(ledger, ledger.root, call(4))
    ledger.leave(large, 0)
    assert (large.outcome, isinstance(small.outcome, Hold)) == (None, True)
    ledger.leave(small, 0)
    ledger.leave(large, 0)  # neither is there any more
    assert isinstance(small.outcome, Hold)
    settle(ledger, hold, 0)


@pytest.mark.parametrize("end", ["release", "settle", "end", "tranche", "raise", "carve"])
def test_whatever_brings_money_back_re_runs_the_queue(end: str) -> None:
    ledger = tree("0.9") if end == "raise" else tree("1", initial="0.9")
    spender, waiter = child(ledger), child(ledger)
    carved = child(ledger, cap="0.2")
    hold = ledger.fund(spender, call(3), 0)
    assert isinstance(hold, Hold)
    ticket = queued(ledger, waiter, call(5))
    match end:
        case "release":
            ledger.release(hold, 0)
        case "settle":
            ledger.dispatch(hold, 0)
            settle(ledger, hold, 2)
        case "end":
            ledger.end(spender, Outcome.CANCELLED, 0)
        case "tranche":
            ledger.release_tranche(ledger.root, usd("0.1"), "more", 0)
        case "raise":
            ledger.raise_max(ledger.root, usd("0.95"), 0)
            assert ticket.outcome is None
            ledger.raise_max(ledger.root, usd("1"), 0)
        case _:
            ledger.end(carved, Outcome.OK, 0)
    assert isinstance(ticket.outcome, Hold)
    ledger.check()


def test_a_breach_and_a_revocation_stop_everyone_who_waits_below() -> None:
    for breaks in (True, False):
        ledger = tree("1")
        spender, other = child(ledger, cap="0.3"), child(ledger, cap="0.5")
        sent = held(ledger, spender, 1)
        held(ledger, other, 4)
        ticket = queued(ledger, other, call(3))
        if breaks:
            settle(ledger, sent, 20)
        else:
            ledger.revoke(ledger.root, "enough", 0)
        assert isinstance(ticket.outcome, Stop)
        assert ticket.outcome.reason == ("budget_exhausted" if breaks else "wallet_revoked")
        assert ticket.outcome.refusal.at == "root"
        ledger.check()


# --- call slots ----------------------------------------------------------------------------------


def test_a_call_slot_is_handed_on_in_order() -> None:
    ledger = tree(max_concurrent_calls=1)
    first = held(ledger, ledger.root, 1)
    told: list[int] = []
    waiting: list[Hold] = []
    for _ in range(3):
        hold = ledger.fund(ledger.root, call(1), 0)
        assert isinstance(hold, Hold) and ledger.dispatch(hold, 0) is False
        hold.on_slot = partial(told.append, hold.id)
        waiting.append(hold)
    ledger.release(waiting[1], 0)
    settle(ledger, first, 1)
    assert told == [waiting[0].id] and waiting[0].is_dispatched
    ledger.set_cap("max_concurrent_calls", 2, 0)
    assert told == [waiting[0].id, waiting[2].id]
    assert ledger.counters.peak_calls == 2
    ledger.check()


def test_the_last_model_call_leaves_a_stop_to_who_waits_for_its_slot() -> None:
    ledger = tree(max_concurrent_calls=1, max_model_calls=1)
    hold = held(ledger, ledger.root, 1)
    other = ledger.fund(ledger.root, call(1), 0)
    assert isinstance(other, Hold)
    stop = ledger.dispatch(other, 0)
    assert isinstance(stop, Stop) and stop.reason == "call_budget_exhausted"
    assert stop.refusal.code == "cave_max_model_calls"
    ledger.set_cap("max_model_calls", 2, 0)
    assert ledger.dispatch(other, 0) is False
    ledger.set_cap("max_model_calls", 1, 0)
    assert other.stop is not None and not other.is_dispatched
    settle(ledger, hold, 0)
    ledger.release(other, 0)
    ledger.check()


# --- a ceiling that sinks (W1b) ------------------------------------------------------------------


def test_a_tree_above_its_target_funds_nothing_until_it_is_reached() -> None:
    ledger = tree("1")
    agent = child(ledger, cap="0.3")
    hold = held(ledger, ledger.root, 6)
    ledger.lower_max(ledger.root, usd("0.5"), 0)
    assert ledger.root.node.wallet.max == usd("0.9")
    assert refused(lambda: child(ledger, cap="0.1")).code == "cave_subagent_wallet_unavailable"
    # A call below waits on the tree, although its own wallet has the money.
    ticket = queued(ledger, agent, call(2))
    assert ticket.wallet is ledger.root.node.wallet
    assert stopped(ledger, agent, call(2, wait=False)).refusal.at == "root"
    settle(ledger, hold, 1)
    assert ledger.root.node.wallet.max == usd("0.5")
    assert isinstance(ticket.outcome, Hold)
    assert agent.node.wallet.held == usd("0.2")
    ledger.check()


def test_who_waits_on_a_ceiling_above_goes_on_to_wait_on_its_own_wallet() -> None:
    ledger = tree("1")
    agent = child(ledger, cap="0.3")
    above, own = held(ledger, ledger.root, 6), held(ledger, agent, 2)
    ledger.lower_max(ledger.root, usd("0.5"), 0)
    ticket = queued(ledger, agent, call(2))
    settle(ledger, above, 0)
    assert ticket.outcome is None and ticket.wallet is agent.node.wallet
    settle(ledger, own, 1)
    assert isinstance(ticket.outcome, Hold)
    ledger.check()


def test_above_its_target_with_no_call_open_nobody_waits() -> None:
    ledger = tree("1")
    agent = child(ledger, cap="0.8")
    ledger.lower_max(ledger.root, usd("0.5"), 0)
    stop = stopped(ledger, agent, call(1))
    assert (stop.reason, stop.refusal.at, stop.refusal.left) == ("budget_exhausted", "root", "0")


def test_a_waiter_on_a_ceiling_above_is_stopped_when_its_own_wallet_is_revoked() -> None:
    ledger = tree("1")
    agent = child(ledger, cap="0.3")
    hold = held(ledger, ledger.root, 6)
    ledger.lower_max(ledger.root, usd("0.5"), 0)
    ticket = queued(ledger, agent, call(2))
    ledger.revoke(agent, "enough", 0)
    assert isinstance(ticket.outcome, Stop)
    assert ticket.outcome.reason == "wallet_revoked"
    settle(ledger, hold, 0)


def test_a_lowered_child_gives_to_those_who_wait_on_its_parent() -> None:
    ledger = tree("1")
    agent = child(ledger, cap="0.6")
    held(ledger, ledger.root, 2)
    ticket = queued(ledger, ledger.root, call(5))
    ledger.lower_max(agent, usd("0.2"), 0)
    assert isinstance(ticket.outcome, Hold)
    ledger.check()


@pytest.mark.parametrize("to", [-1, usd("1.1"), 0.5, True])
def test_a_ceiling_is_lowered_to_a_whole_amount_between_nothing_and_itself(to: Any) -> None:
    ledger = tree("1")
    with pytest.raises(LedgerError) as raised:
        ledger.lower_max(ledger.root, to, 0)
    assert raised.value.code == "cave_budget_max_invalid"
    assert ledger.root.node.wallet.max == usd("1")


def test_a_raise_takes_from_the_parent_what_it_has_and_is_refused_beyond() -> None:
    ledger = tree("1")
    agent = child(ledger, cap="0.6")
    with pytest.raises(LedgerError, match=r"root cannot give 0\.5 more") as raised:
        ledger.raise_max(agent, usd("1.1"), 0)
    assert raised.value.code == "cave_subagent_wallet_unavailable"
    ledger.raise_max(agent, usd("1"), 0)
    assert (free(agent), free(ledger.root)) == (Decimal(1), Decimal(0))
    ledger.check()


# --- tranches (agent contract, 5.2) --------------------------------------------------------------


def test_a_tranche_is_refused_for_the_first_reason_in_order() -> None:
    ledger = tree("1", initial="0.5")

    def code(amount: Any, reason: str) -> str:
        with pytest.raises(LedgerError) as raised:
            ledger.release_tranche(ledger.root, amount, reason, 0)
        return raised.value.code

    too_much = usd("0.6")
    for amount in (0, -1, 0.1, True):
        assert code(amount, "") == "cave_budget_release_invalid"
    for reason in ("", " \n"):
        assert code(too_much, reason) == "cave_budget_release_reason_required"
    assert code(too_much, "more") == "cave_budget_release_exceeds_max"
    settle(ledger, held(ledger, ledger.root, 1), 20)
    assert code(too_much, "more") == "cave_budget_cap_breached"
    ledger.revoke(ledger.root, "enough", 0)
    assert code(too_much, "more") == "cave_budget_revoked"


def test_a_tranche_is_kept_with_its_reason_and_the_holds_until_then() -> None:
    ledger = tree("1", initial="0.5")
    held(ledger, ledger.root, 2)
    held(ledger, ledger.root, 1)
    ledger.release_tranche(ledger.root, usd("0.3"), "the draft is good", 0)
    assert [tuple(t) for t in ledger.state.tranches] == [
        ("root", usd("0.3"), "the draft is good", 2)
    ]
    assert free(ledger.root) == Decimal("0.5")


# --- refusals explain themselves -----------------------------------------------------------------


def test_a_refused_carve_says_who_asked_whom_for_what_and_who_has_it() -> None:
    ledger = tree("8")
    child(ledger, name="first", cap="5")
    run = child(ledger, name="support", kind=Kind.RUN)
    held(ledger, run, 10)
    refusal = refused(lambda: child(ledger, run, name="research", cap="5"))
    assert refusal.node == "root/support#2/research"
    assert refusal.at == "root"
    assert (refusal.dimension, refusal.asked, refusal.left) == ("USD", "5", "2")
    assert refusal.held_by == ("root/support#2", "root/first#1")
    assert str(refusal) == (
        "cave_subagent_wallet_unavailable: root/support#2/research asked for 5 of USD; root has "
        "2 left (held by root/support#2, root/first#1). Wait until a sibling has finished, ask for "
        "less (min_usd / min_tokens), or raise the budget."
    )


def test_a_stopped_call_names_the_node_that_asked_and_the_wallet_that_has_not_enough() -> None:
    ledger = tree("1")
    run = child(ledger, name="support", kind=Kind.RUN)
    other = child(ledger, name="other")
    held(ledger, other, 7)
    stop = stopped(ledger, run, call(9, wait=False, clamp=True, floor=4))
    refusal = stop.refusal
    assert (stop.reason, refusal.code) == ("budget_exhausted", "cave_budget_exhausted")
    assert (refusal.node, refusal.at) == (run.path, "root")
    assert (refusal.asked, refusal.left) == ("at least 0.4", "0.3")
    assert refusal.held_by == (other.path,)
    assert "Raise the budget" in refusal.advice
    # Who would not take less asked for all of it.
    assert stopped(ledger, run, call(9, wait=False)).refusal.asked == "at least 0.9"


def test_a_stop_names_the_ancestor_that_is_closed() -> None:
    ledger = tree("9")
    top = child(ledger, cap="5")
    low = child(ledger, top, cap="1")
    ledger.revoke(top, "enough", 0)
    stop = stopped(ledger, low, call(1))
    assert (stop.reason, stop.refusal.code) == ("wallet_revoked", "cave_budget_revoked")
    assert (stop.refusal.node, stop.refusal.at) == (low.path, top.path)
    assert (stop.refusal.left, stop.refusal.advice) == ("0", "That wallet was revoked.")


def test_a_full_tree_names_who_is_active() -> None:
    ledger = tree(max_concurrent_subagents=2)
    child(ledger, name="a")
    child(ledger, name="b")
    refusal = refused(lambda: child(ledger, name="c"))
    assert (refusal.node, refusal.at) == ("root/c", "the tree")
    assert refusal.dimension == "concurrent subagents"
    assert refusal.held_by == ("root/a#1", "root/b#2")
    assert refusal.advice.startswith("2 are active (max_concurrent_subagents); try again")


def test_tokens_are_named_as_tokens() -> None:
    ledger = TreeLedger(unit="tokens", max=1_000)
    stop = stopped(ledger, ledger.root, Ask(input_tokens=900, output_tokens=300, price=None))
    refusal = stop.refusal
    assert (refusal.dimension, refusal.asked, refusal.left) == ("tokens", "at least 1156", "1000")


# --- looking at it -------------------------------------------------------------------------------


def test_a_snapshot_shows_who_holds_what_and_who_waits_for_what() -> None:
    ledger = tree("1", max_concurrent_calls=1)
    agent = child(ledger, name="agent", cap="0.4")
    held(ledger, agent, 2)
    slot = ledger.fund(agent, call(1), 0)
    assert isinstance(slot, Hold) and ledger.dispatch(slot, 0) is False
    queued(ledger, agent, call(3))
    snapshot = ledger.snapshot()
    wallet = snapshot["wallets"]["root/agent#1"]
    assert (wallet["max"], wallet["held"], wallet["free"]) == (
        Decimal("0.4"), Decimal("0.3"), Decimal("0.1"),
    )  # fmt: skip
    assert snapshot["wallets"]["root"]["carved"] == Decimal("0.4")
    assert snapshot["nodes"]["root/agent#1"]["open_calls"] == 2
    assert snapshot["waiters"] == [
        {
            "path": "root/agent#1",
            "waits_for": "money",
            "on": "root/agent#1",
            "asked": Decimal("0.3"),
        },
        {"path": "root/agent#1", "waits_for": "call_slot", "on": "the tree"},
    ]


def test_a_closed_tree_is_empty_and_its_root_wallet_still_says_what_was_spent() -> None:
    events: list[Event] = []
    ledger = TreeLedger(unit="tokens", max=100, sink=events.append)
    agent = child(ledger)
    settle(ledger, held(ledger, agent, 30), 20)
    ledger.end(agent, Outcome.OK, 0)
    ledger.check_closed()
    ledger.end(ledger.root, Outcome.OK, 0)
    ledger.check_closed()
    assert ledger.root.node.wallet.settled == 20
    assert ledger.counters.open_spans == 0
    with pytest.raises(LedgerError, match="has ended"):
        child(ledger)


def test_an_open_lease_is_not_a_closed_tree() -> None:
    ledger = tree()
    child(ledger)
    ledger.check()
    with pytest.raises(AssertionError):
        ledger.check_closed()
