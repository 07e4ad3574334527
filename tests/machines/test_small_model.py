"""Every interleaving of three actors with four steps each, and every instant to cancel one at.

The search goes through all of them; what was reached before in the same state is not gone through
again, and the paths through it are counted all the same.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from treewarden.ledgers import (
    Ask,
    Caps,
    Ending,
    Hold,
    Kind,
    Lease,
    Outcome,
    Stop,
    Ticket,
    TreeLedger,
)
from treewarden.protocols import Usage

STEPS = ("fund", "dispatch", "settle", "end")


@attrs.frozen
class Script:
    """What one actor does: it asks, sends, is charged, and ends."""

    output: int
    # What the provider reports; None: the call is released instead of sent.
    spends: int | None = 0
    clamp: bool = False
    wait: bool = True
    floor: int = 1
    # Its own wallet, carved before the first step; None: it draws on the run's.
    cap: int | None = None

    @property
    def ask(self) -> Ask:
        return Ask(
            input_tokens=0,
            output_tokens=self.output,
            price=None,
            clamp=self.clamp,
            wait=self.wait,
            output_floor_tokens=self.floor,
        )


@attrs.define
class World:
    """One state of the search: the ledger, and how far each actor has come."""

    ledger: TreeLedger
    leases: list[Lease]
    # Steps done. Four: it has ended.
    done: list[int]
    got: list[Hold | Ticket | Stop | None]

    def outcome(self, actor: int) -> Hold | Stop | None:
        """What its request came to; None while it waits."""
        got = self.got[actor]
        return got.outcome if isinstance(got, Ticket) else got

    def is_ready(self, actor: int) -> bool:
        """Whether it can take its next step: not while it waits for money or a slot."""
        done = self.done[actor]
        if done == len(STEPS):
            return False
        outcome = self.outcome(actor)
        if done == 0 or isinstance(outcome, Stop):
            return True
        if outcome is None:
            return False
        hold = self.ledger.state.holds.get(outcome.id)
        return hold is None or not hold.waits_for_slot

    def key(self) -> str:
        """The state without what differs between equals: the numbers of holds and tickets."""
        plain = self.ledger.state.plain()
        nodes = [{**n, "holds": None, "tickets": None} for n in plain["nodes"].values()]
        holds = [[owner, *columns] for owner, *columns in plain["holds"].values()]
        # In the order in which they wait, for money and for a slot.
        waiters = self.ledger.snapshot()["waiters"]
        outcomes = [type(self.outcome(i)).__name__ for i in range(len(self.leases))]
        parts = [self.done, outcomes, nodes, plain["wallets"], plain["counters"], holds, waiters]
        return json.dumps(parts, default=str)

    def copy(self) -> World:
        """Another world in the same state. What never changes is shared."""
        tickets = [got for got in self.got if isinstance(got, Ticket)]
        found = [*self.got, *(ticket.outcome for ticket in tickets)]
        found += [hold.stop for hold in found if isinstance(hold, Hold)]
        return copy.deepcopy(self, {id(stop): stop for stop in found if isinstance(stop, Stop)})


class Search:
    """Goes through all interleavings depth first."""

    def __init__(self, scripts: list[Script], *, max: int, caps: Caps, cancels: bool) -> None:
        self.scripts, self.cancels = scripts, cancels
        self.is_honest = all((s.spends or 0) <= s.output for s in scripts)
        self.max = max
        # Paths to the end from each state that was gone through.
        self.paths: dict[str, int] = {}
        self.steps = 0
        self.seen: set[str] = set()
        ledger = TreeLedger(unit="tokens", max=max, caps=caps)
        run = ledger.admit(ledger.root, "run", kind=Kind.RUN, at=0)
        leases = [
            ledger.admit(run, "agent", kind=Kind.AGENT, at=0, cap=script.cap) for script in scripts
        ]
        self.start = World(ledger, leases, [0] * len(scripts), [None] * len(scripts))

    def go(self) -> int:
        """The number of ways to the end. Asserts that each ends with closed books."""
        return self.paths_from(self.start)

    def paths_from(self, world: World) -> int:
        key = world.key()
        if key not in self.paths:
            self.paths[key] = self._paths_from(world)
        return self.paths[key]

    def _paths_from(self, world: World) -> int:
        actors = range(len(self.scripts))
        if all(done == len(STEPS) for done in world.done):
            self.close(world)
            return 1
        ready = [actor for actor in actors if world.is_ready(actor)]
        assert ready, f"everybody waits: {world.ledger.snapshot()}"
        paths = 0
        for actor in ready:
            paths += self.after(world, actor, self.step)
        if self.cancels:
            for actor in actors:
                if 0 < world.done[actor] < len(STEPS):
                    paths += self.after(world, actor, self.end)
        return paths

    def after(self, world: World, actor: int, act: Callable[[World, int], None]) -> int:
        branch = world.copy()
        act(branch, actor)
        self.steps += 1
        branch.ledger.check()
        if self.is_honest:
            # Nobody spends more than was held for it, so nothing ever passes the ceiling.
            root = branch.ledger.root.node.wallet
            assert root.committed + root.set_aside <= root.released <= self.max
            assert not root.is_breached
        return self.paths_from(branch)

    def step(self, world: World, actor: int) -> None:
        name = STEPS[world.done[actor]]
        world.done[actor] += 1
        script, outcome = self.scripts[actor], world.outcome(actor)
        if name == "fund":
            self.fund(world, actor)
        elif name == "end":
            world.done[actor] -= 1
            self.end(world, actor)
        elif isinstance(outcome, Hold):
            if script.spends is None:
                if name == "settle":
                    world.ledger.release(outcome, 0)
            elif name == "dispatch":
                self.dispatch(world, outcome)
            elif outcome.is_dispatched:
                spent = script.spends
                if spent <= script.output:  # its provider honours the limit on the wire
                    spent = min(spent, outcome.output_tokens)
                outcome.progress.usage = Usage(output=spent)
                world.ledger.settle(outcome, Ending.FINISHED, 0)
            else:
                world.ledger.release(outcome, 0)

    def fund(self, world: World, actor: int) -> None:
        got = world.ledger.fund(world.leases[actor], self.scripts[actor].ask, 0)
        world.got[actor] = got
        self.seen.add(type(got).__name__)

    def dispatch(self, world: World, hold: Hold) -> None:
        answer = world.ledger.dispatch(hold, 0)
        if answer is True:
            hold.is_sent = True
        elif isinstance(answer, Stop):
            hold.stop = answer
        else:
            self.seen.add("slot queue")

    def end(self, world: World, actor: int) -> None:
        world.done[actor] = len(STEPS)
        world.ledger.end(world.leases[actor], Outcome.OK, 0)

    def close(self, world: World) -> None:
        ledger = world.ledger
        for actor, script in enumerate(self.scripts):
            got, outcome = world.got[actor], world.outcome(actor)
            if isinstance(got, Ticket) and outcome is not None:
                self.seen.add(f"waited for a {type(outcome).__name__}")
            if isinstance(outcome, Hold) and outcome.output_tokens < script.output:
                assert script.clamp and outcome.output_tokens >= script.floor
                self.seen.add("clamped")
        root = ledger.root.node.wallet
        assert root.carved == root.held == root.set_aside == 0
        ledger.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scripts", "caps", "cancels", "must_see"),
    [
        pytest.param(
            [
                Script(60, spends=60),
                Script(50, spends=50, clamp=True, floor=10),
                Script(70, spends=None),
            ],
            {},
            True,
            {"Hold", "Ticket", "Stop", "clamped", "waited for a Hold", "waited for a Stop"},
            id="contention, clamp and stop",
        ),
        pytest.param(
            [
                Script(60, spends=140),
                Script(60, spends=60),
                Script(30, spends=20, clamp=True),
            ],
            {},
            True,
            {"Hold", "Ticket", "Stop", "waited for a Hold", "waited for a Stop"},
            id="one spends more than was held",
        ),
        pytest.param(
            [
                Script(20, spends=90, cap=30),
                Script(40, spends=10, cap=40),
                Script(30, spends=30, clamp=True),
            ],
            {},
            True,
            {"Hold", "Stop"},
            id="wallets of their own",
        ),
        pytest.param(
            [Script(40, spends=40), Script(40, spends=40), Script(40, spends=1)],
            {"max_concurrent_calls": 1, "max_model_calls": 2},
            True,
            {"Hold", "Ticket", "slot queue", "waited for a Hold"},
            id="one call slot and two calls",
        ),
    ],
)
def test_every_interleaving_keeps_the_books_and_ends_closed(
    scripts: list[Script],
    caps: dict[str, Any],
    cancels: bool,
    must_see: set[str],
    record_property: Callable[[str, object], None],
) -> None:
    search = Search(scripts, max=100, caps=Caps(**caps), cancels=cancels)
    paths = search.go()
    record_property(
        "measured",
        f"small model: {paths:,} interleavings through {len(search.paths):,} states, "
        f"{search.steps:,} steps",
    )
    assert must_see <= search.seen, must_see - search.seen


def test_three_actors_that_never_meet_have_every_interleaving() -> None:
    """12! / (4! 4! 4!) orders: the search leaves out none."""
    scripts = [Script(10, spends=5), Script(20, spends=20), Script(30, spends=0)]
    assert Search(scripts, max=1000, caps=Caps(), cancels=False).go() == 34_650
