"""Whatever is done to a ledger in whatever order, W1 to W10 hold, and every prefix is a state."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis.stateful import run_state_machine_as_test

from treewarden.ledgers import Event, TreeState, fold
from treewarden.testing import LedgerMachine, TokenMachine, UsdMachine

from ..soak.seconds import LEDGER_MACHINES, soak_seconds
from .histories import HISTORIES
from .profiles import QUICK, SHORT, SOAK

MACHINES = [UsdMachine, TokenMachine]


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_any_order_of_calls_keeps_the_books_balanced(machine: type[LedgerMachine]) -> None:
    run_state_machine_as_test(machine, settings=QUICK)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("machine", MACHINES)
def test_any_order_of_many_more_calls_keeps_the_books_balanced(
    machine: type[LedgerMachine],
) -> None:
    until = time.monotonic() + soak_seconds(LEDGER_MACHINES) / len(MACHINES)
    while time.monotonic() < until:
        run_state_machine_as_test(machine, settings=SOAK)


class RememberingMachine(UsdMachine):
    """Remembers the state at each event, and at the end folds its way to each of them."""

    keep = 10**6

    def __init__(self) -> None:
        super().__init__()
        self.states: list[dict[str, Any]] = []

    def saw(self, event: Event) -> None:
        super().saw(event)
        # The first event comes before the ledger has a name.
        state = self.ledger.state if len(self.events) > 1 else fold(self.events)
        self.states.append(state.plain())

    def close(self) -> None:
        super().close()
        self.fold_every_prefix()
        self.fold_onto_every_state()
        assert self.ledger.journal.tail == self.events

    def fold_every_prefix(self) -> None:
        state = TreeState()
        for event, remembered in zip(self.events, self.states, strict=True):
            state.apply(event)
            state.check()
            assert state.plain() == remembered
        assert fold(self.events).plain() == self.states[-1]

    def fold_onto_every_state(self) -> None:
        """A snapshot taken at any event, and the events after it, make the same end."""
        for i, remembered in enumerate(self.states, start=1):
            base = json.loads(json.dumps(remembered))
            state = fold(self.events[i:], onto=base)
            state.check()
            assert json.dumps(state.plain()) == json.dumps(self.states[-1])


@pytest.mark.slow
def test_every_prefix_of_a_journal_folds_to_the_state_at_that_event() -> None:
    run_state_machine_as_test(RememberingMachine, settings=SHORT)


@pytest.mark.parametrize("name", HISTORIES)
def test_a_written_history_keeps_the_books_balanced(name: str) -> None:
    RememberingMachine().play(HISTORIES[name])


@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_makes_the_same_journal_to_the_byte_when_run_again(name: str) -> None:
    def journal() -> str:
        machine = UsdMachine()
        machine.play(HISTORIES[name])
        return json.dumps([[type(e).__name__, *map(str, e)] for e in machine.events])

    assert journal() == journal()
