"""Known ways to get the actors wrong: real code with one mistake, by name.

Each is put in place by ``pytest.MonkeyPatch`` on the code that users run, so that what catches it
here is what would catch it in a change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from treewarden.actors import Actor, RootSupervisor, StopKind
from treewarden.ledgers import Ask, Hold, Lease, Node, Outcome, Stop, Ticket, TreeLedger, Wallet

Put = Callable[[pytest.MonkeyPatch], None]

# The private parts in which some of the mistakes are made.
_PART = RootSupervisor.__module__.rpartition(".")[0]
_FRAME: Any = sys.modules[f"{_PART}._frame"]
_CALLS: Any = sys.modules[f"{_PART}._calls"]


def _release_in_the_body(patch: pytest.MonkeyPatch) -> None:
    """The body gives its lease back when it is done; nobody does when it is cancelled."""
    real = RootSupervisor.see_off

    def see_off(self: RootSupervisor, actor: Actor, **options: Any) -> None:
        if actor.outcome is not Outcome.CANCELLED:
            real(self, actor, **options)

    patch.setattr(RootSupervisor, "see_off", see_off)


def _release_behind_an_await(patch: pytest.MonkeyPatch) -> None:
    """A stopped actor's lease is given back a turn later, by a task that may be cancelled too."""
    real = RootSupervisor.see_off

    def see_off(self: RootSupervisor, actor: Actor, **options: Any) -> None:
        async def later() -> None:
            await anyio.lowlevel.checkpoint()
            real(self, actor, **options)

        group: Any = vars(self)["_group"]
        if group is None or actor.stop_asked is None:
            real(self, actor, **options)
        else:
            group.start_soon(later)

    patch.setattr(RootSupervisor, "see_off", see_off)


def _lost_granted_ticket(patch: pytest.MonkeyPatch) -> None:
    """A hold that was granted to a waiter is forgotten if the waiter never takes it."""
    # The holds themselves are kept, or another one would get the same id.
    granted: dict[int, Hold] = {}
    grant: Any = vars(TreeLedger)["_grant"]
    end_open_calls: Any = vars(TreeLedger)["_end_open_calls"]

    def granting(
        self: TreeLedger, lease: Lease, ask: Ask, output: int, at: float, ticket: Ticket | None
    ) -> Hold:
        hold: Hold = grant(self, lease, ask, output, at, ticket)
        if ticket is not None:
            granted[id(hold)] = hold
        return hold

    def ending(self: TreeLedger, node: Node, at: float) -> None:
        holds: dict[int, Hold] = vars(self)["_holds"]
        for hold_id in list(node.holds or ()):
            if id(holds[hold_id]) in granted and not holds[hold_id].is_dispatched:
                assert node.holds is not None
                del node.holds[hold_id]
        end_open_calls(self, node, at)

    patch.setattr(TreeLedger, "_grant", granting)
    patch.setattr(TreeLedger, "_end_open_calls", ending)


def _lost_granted_slot(patch: pytest.MonkeyPatch) -> None:
    """A call slot that was granted to a waiter stays taken if the waiter never sends."""
    real: Any = vars(TreeLedger)["_end_open_call"]

    def ending(self: TreeLedger, hold: Hold, at: float) -> None:
        if not (hold.is_dispatched and not hold.is_sent and hold.on_slot is not None):
            real(self, hold, at)

    patch.setattr(TreeLedger, "_end_open_call", ending)


def _carve_not_ended_on_failed_start(patch: pytest.MonkeyPatch) -> None:
    """What was carved for an actor that never started stays carved."""
    real = TreeLedger.end

    def end(self: TreeLedger, lease: Lease, outcome: Outcome, at: float) -> None:
        parent, left = lease.node.wallet.parent, lease.node.wallet.carve_left
        owns = lease.node.owns_wallet
        real(self, lease, outcome, at)
        if outcome is Outcome.FAILED_TO_START and owns and parent is not None:
            parent.carved += left

    patch.setattr(TreeLedger, "end", end)


def _never_started_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks for the task that was cancelled before its first step."""

    async def look_away(_: RootSupervisor) -> None:
        pass

    patch.setattr(RootSupervisor, "_settle_what_never_started", look_away)


def _native_cancel_passed_on(patch: pytest.MonkeyPatch) -> None:
    """The frame gives back in order, and then lets the cancellation out to the group."""
    note = _FRAME._note_cancellation

    def noting(actor: Actor, error: BaseException) -> None:
        note(actor, error)
        if actor.stop_asked is not None and actor.stop_asked.kind is StopKind.NATIVE:
            actor.root.see_off(actor, raised=error)
            raise error

    patch.setattr(_FRAME, "_note_cancellation", noting)


def _await_between_check_and_hold(patch: pytest.MonkeyPatch) -> None:
    """Whether a call fits is looked at first, and it is held a turn later."""
    decide: Any = vars(TreeLedger)["_decide"]
    grant: Any = vars(TreeLedger)["_grant"]
    real = _CALLS.ModelCalls._fund

    async def fund(self: Any, ask: Ask) -> Hold | Stop:
        actor: Actor = self._actor
        ledger, clock = actor.root.ledger, actor.root.clock
        seen: object = decide(ledger, actor.lease.node, ask, is_head=False)
        await anyio.lowlevel.checkpoint()
        if isinstance(seen, int):
            hold: Hold = grant(ledger, actor.lease, ask, seen, clock.monotonic(), None)
            return hold
        funded: Hold | Stop = await real(self, ask)
        return funded

    patch.setattr(_CALLS.ModelCalls, "_fund", fund)


def _double_refund(patch: pytest.MonkeyPatch) -> None:
    """What a carve did not spend comes back twice."""

    def refund(self: Wallet) -> None:
        parent = self.parent
        assert parent is not None
        self.is_ended = True
        parent.carved -= 2 * self.carve_left
        parent.live_carves -= 1
        self.carve_left = 0

    patch.setattr(Wallet, "end_carve", refund)


def _queue_not_rerun_on_breach(patch: pytest.MonkeyPatch) -> None:
    """Who waits below a wallet that was overspent is not told."""

    def after_charge(self: Any, wallet: Wallet, at: float) -> None:
        self._rerun_slots(at)
        self._rerun_upwards(wallet, at)

    patch.setattr(TreeLedger, "_after_charge", after_charge)


ACTOR_MUTANTS: dict[str, Put] = {
    "await between check and hold": _await_between_check_and_hold,
    "release in the body": _release_in_the_body,
    "release behind an await": _release_behind_an_await,
    "lost granted ticket": _lost_granted_ticket,
    "lost granted slot": _lost_granted_slot,
    "carve not ended on failed start": _carve_not_ended_on_failed_start,
    "never started and not noticed": _never_started_not_noticed,
    "native cancel passed on to the group": _native_cancel_passed_on,
    "double refund": _double_refund,
    "queue not re-run on breach": _queue_not_rerun_on_breach,
}
