"""Known ways to get a ledger wrong, and the proof that the machine sees each of them.

A mutant is a ledger, or a part of one, with one mistake. A machine that it survives is not a proof
of anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from treewarden.ledgers import (
    Ask,
    Hold,
    Lease,
    Node,
    Outcome,
    Progress,
    Stop,
    Ticket,
    TreeLedger,
    Unit,
    Wallet,
)
from treewarden.protocols import RefusedError
from treewarden.testing import LedgerMachine, TokenMachine, UsdMachine

from .histories import HISTORIES
from .profiles import LEDGER

HUNT = settings(
    LEDGER,
    # The same histories in every run: a mutant that is found is found again.
    derandomize=True,
    database=None,
    max_examples=30,
    stateful_step_count=40,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
# What a machine says no with. Anything else is a mistake in the mutant.
CAUGHT = (AssertionError, KeyError)

# --- ledgers with a mistake ----------------------------------------------------------------------


class LosesGrantedTickets(TreeLedger):
    """A hold that was granted to a waiter does not end with its lease."""

    def __init__(self, **options: Any) -> None:
        self.granted: set[int] = set()
        super().__init__(**options)

    def _grant(
        self, lease: Lease, ask: Ask, output_tokens: int, at: float, ticket: Ticket | None
    ) -> Hold:
        hold = super()._grant(lease, ask, output_tokens, at, ticket)
        if ticket is not None:
            self.granted.add(hold.id)
        return hold

    def _end_open_calls(self, node: Node, at: float) -> None:
        for hold_id in self.granted.intersection(node.holds or ()):
            assert node.holds is not None
            del node.holds[hold_id]
        super()._end_open_calls(node, at)


class ForgetsTheBreach(TreeLedger):
    """A breach does not re-run the queues below."""

    def _after_charge(self, wallet: Wallet, at: float) -> None:
        self._rerun_slots(at)
        self._rerun_upwards(wallet, at)


class KeepsTheCarveOfAFailedStart(TreeLedger):
    """A lease that never started does not give its carve back."""

    def end(self, lease: Lease, outcome: Outcome, at: float) -> None:
        node = lease.node
        parent, left = node.wallet.parent, node.wallet.carve_left
        super().end(lease, outcome, at)
        if outcome is Outcome.FAILED_TO_START and node.owns_wallet and parent is not None:
            parent.carved += left


class RefusesWithAnEffect(TreeLedger):
    """A refused child takes a number."""

    def admit(self, parent: Lease, name: str, **options: Any) -> Lease:
        try:
            return super().admit(parent, name, **options)
        except RefusedError:
            parent.node.children += 1
            raise


class LetsAnybodyPass(TreeLedger):
    """Who asks later and fits is funded before who waits."""

    def _decide(self, node: Node, ask: Ask, *, is_head: bool) -> int | Wallet | Stop:
        return super()._decide(node, ask, is_head=True)


class IgnoresTargets(TreeLedger):
    """A wallet above its lowered ceiling goes on funding calls."""

    def _blocked(self, node: Node, ask: Ask) -> Wallet | Stop | None:
        blocked = super()._blocked(node, ask)
        up: Wallet | None = node.wallet
        while up is not None:
            if up.is_revoked or up.is_breached:
                return blocked
            up = up.parent
        return None


class CarvesPastTheQueue(TreeLedger):
    """A spawn takes what a waiting call waits for."""

    def admit(self, parent: Lease, name: str, **options: Any) -> Lease:
        wallet = parent.node.wallet
        queued, wallet.queued = wallet.queued, 0
        try:
            return super().admit(parent, name, **options)
        finally:
            wallet.queued = queued


class KeepsTheSlot(TreeLedger):
    """A call slot that came free is not handed on."""

    def _rerun_slots(self, at: float) -> None:
        pass


class TellsTwice(TreeLedger):
    """A waiter is woken twice."""

    def _resolve(self, ticket: Ticket, decided: int | Wallet | Stop, at: float) -> None:
        super()._resolve(ticket, decided, at)
        if ticket.outcome is not None and ticket.on_ready is not None:
            ticket.on_ready()


class EndsOldestFirst(TreeLedger):
    """The bug the machine found first: a lease that ends is granted what it still waits for."""

    def _end_open_calls(self, node: Node, at: float) -> None:
        for ticket_id in list(node.tickets or ()):
            self.leave(self._tickets[ticket_id], at)
        super()._end_open_calls(node, at)


# --- parts with a mistake ------------------------------------------------------------------------


class MutantWallet(Wallet):
    def refund_twice(self) -> None:
        parent = self.parent
        assert parent is not None
        self.is_ended = True
        parent.carved -= 2 * self.carve_left
        parent.live_carves -= 1
        self.carve_left = 0

    def charge_itself_only(self, amount: int, *, through_hold: int) -> None:
        self.held -= through_hold
        self.open_holds -= 1
        self.settled += amount
        self.overrun += max(0, amount - through_hold)
        if self.parent is not None:
            covered = min(amount, self.carve_left)
            self.carve_left -= covered
            self.parent.carved -= covered

    def forget_the_overrun(self, amount: int, *, through_hold: int) -> None:
        ORIGINAL["charge"](self, min(amount, through_hold), through_hold=through_hold)

    def lower_at_once(self, to: int) -> None:
        self.max, self.released = to, min(self.released, to)


class MutantAsk(Ask):
    def largest_output_without_a_floor(self, unit: Unit, free: int) -> int | None:
        without = attrs.evolve(self, output_floor_tokens=1)
        return ORIGINAL["largest_output"](without, unit, free)  # type: ignore[no-any-return]

    def usd_at_the_read_rate(self, output_tokens: int) -> int:
        reading = attrs.evolve(self, can_write_cache=False)
        return ORIGINAL["usd"](reading, output_tokens)  # type: ignore[no-any-return]

    def tokens_without_the_input(self, output_tokens: int) -> int:
        return output_tokens


class MutantProgress(Progress):
    @property
    def nothing_arrived(self) -> int:
        return 0


ORIGINAL: dict[str, Callable[..., Any]] = {
    "charge": Wallet.charge,
    "largest_output": Ask.largest_output,
    "usd": Ask.usd,
}


@attrs.frozen
class Mutant:
    """One mistake: in the ledger, or in a part of it."""

    ledger: type[TreeLedger] = TreeLedger
    part: type | None = None
    name: str = ""
    mistake: object = None
    machine: type[LedgerMachine] = UsdMachine


MUTANTS: dict[str, Mutant] = {
    "double refund": Mutant(part=Wallet, name="end_carve", mistake=MutantWallet.refund_twice),
    "queue not re-run on breach": Mutant(ForgetsTheBreach),
    "lost granted ticket": Mutant(LosesGrantedTickets),
    "carve not ended on failed start": Mutant(KeepsTheCarveOfAFailedStart),
    "clamp ignores the floor": Mutant(
        part=Ask, name="largest_output", mistake=MutantAsk.largest_output_without_a_floor
    ),
    "hold at the wrong rate": Mutant(part=Ask, name="usd", mistake=MutantAsk.usd_at_the_read_rate),
    "hold without the input": Mutant(
        part=Ask,
        name="tokens",
        mistake=MutantAsk.tokens_without_the_input,
        machine=TokenMachine,
    ),
    "charge not booked at ancestors": Mutant(
        part=Wallet, name="charge", mistake=MutantWallet.charge_itself_only
    ),
    "charge cut to the hold": Mutant(
        part=Wallet, name="charge", mistake=MutantWallet.forget_the_overrun
    ),
    "refusal leaves an effect": Mutant(RefusesWithAnEffect),
    "first in, first out not kept": Mutant(LetsAnybodyPass),
    "carve passes the queue": Mutant(CarvesPastTheQueue),
    "over target ignored": Mutant(IgnoresTargets),
    "lowered below what is committed": Mutant(
        part=Wallet, name="lower_max", mistake=MutantWallet.lower_at_once
    ),
    "call slot not handed on": Mutant(KeepsTheSlot),
    "waiter told twice": Mutant(TellsTwice),
    "ending lease is granted": Mutant(EndsOldestFirst),
    "estimate forgets what arrived": Mutant(
        part=Progress, name="estimated_output", mistake=MutantProgress.nothing_arrived
    ),
}


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[LedgerMachine]:
    """A machine whose ledger has one mistake."""
    mutant = MUTANTS[request.param]
    if mutant.part is not None:
        monkeypatch.setattr(mutant.part, mutant.name, mutant.mistake)

    class MutantMachine(mutant.machine):  # type: ignore[name-defined, misc]
        ledger_class = mutant.ledger

    return MutantMachine


def what_history_catches(machine: type[LedgerMachine]) -> str | None:
    if machine.unit != "usd":
        return None  # they are written in its numbers
    for name, history in HISTORIES.items():
        try:
            machine().play(history)
        except CAUGHT:
            return name
    return None


def what_chance_catches(machine: type[LedgerMachine]) -> str | None:
    try:
        run_state_machine_as_test(machine, settings=HUNT)
    except CAUGHT as caught:
        return type(caught).__name__
    return None


def test_the_ledger_itself_survives_every_written_history() -> None:
    assert what_history_catches(UsdMachine) is None


@pytest.mark.slow
@pytest.mark.parametrize("machine", MUTANTS, indirect=True)
def test_a_mutant_is_caught(
    machine: type[LedgerMachine],
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    written = what_history_catches(machine)
    chance = what_chance_catches(machine)
    assert written or chance, "it survived"
    name: str = request.node.callspec.params["machine"]
    found = f"chance ({chance})" if chance else ""
    record_property("mutant", f"{name:<34} {found:<24} {written or ''}")
