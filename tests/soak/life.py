"""The life of one random tree: grown, asked for runs, disturbed, and checked at its end."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import attrs

import treewarden as tw
from treewarden.ledgers import Event, TreeState

from ..scenarios.kit import Witness, check_books, check_closed
from .callers import Live, ask
from .choices import FUNDING, LIMITS, dice, some_of
from .disturbances import disturb
from .trees import Grower, tokens_of

LONGEST = 200.0
"""Virtual seconds after which a tree is closed, whatever still stalls in it."""


@attrs.define
class SoakWitness(Witness):
    """Checks after every event what no single state can show: W5, and W8 at many prefixes."""

    # The ledger itself, once the tree is open.
    ledger: tw.TreeLedger | None = None

    def write(self, event: Event) -> None:
        refused = type(event).__name__ == "Refused"
        before = _granted(self.state) if refused else None
        Witness.write(self, event)
        if refused:
            assert _granted(self.state) == before, event
        if self.ledger is not None and len(self.journal) % 16 == 0:
            assert self.ledger.state.plain() == self.state.plain(), event


def _granted(state: TreeState) -> dict[str, Any]:
    """Everything that somebody has or waits for."""
    plain = state.plain()
    return {what: plain[what] for what in ("wallets", "holds", "waiting", "caps", "tranches")}


async def live(seed: int) -> SoakWitness:
    """Grow a tree, disturb it, and check what is left of it."""
    random = dice(seed, "tree")
    unit = random.choice(("usd", "usd", "tokens"))
    grower = Grower(seed, unit, random, uses_threads=random.random() < 0.08)
    agent = grower.agent(random.choice((0, 1, 2, 2, 3)), random.randint(1, 3))
    witness = SoakWitness()
    tree = tw.open_tree(
        budget=_budget(unit, random),
        limits=tw.Limits(**some_of(LIMITS, random, chance=random.choice((0.05, 0.1, 0.3)))),
        **witness.tree_options,
    )
    now = Live(seed, unit, agent, grower.models, tree)
    try:
        async with tree:
            witness.ledger = tree.ledger
            await _let_live(now, random)
    except tw.SupervisorCancelled:
        now.untold += 1
    finally:
        grower.release.set()
    _check(now, witness)
    return witness


def _budget(unit: str, random: Random) -> tw.Budget | None:
    """Room for a few calls or for all of them, or no ceiling at all."""
    if unit == "usd" and random.random() < 0.2:
        return None
    amount = random.choice(("0.10", "0.50", "2.00", "2.00", "50.00", "50.00"))
    given = {"max_usd": amount} if unit == "usd" else {"max_tokens": tokens_of(amount)}
    return tw.Budget(**given, **some_of(FUNDING, random, chance=0.25))


async def _let_live(now: Live, random: Random) -> None:
    with anyio.move_on_after(LONGEST) as scope:
        now.scopes["all"] = scope
        async with anyio.create_task_group() as group:
            group.start_soon(disturb, now)
            async with anyio.create_task_group() as callers:
                for n in range(random.randint(1, 4)):
                    callers.start_soon(ask, now, f"caller-{n}", dice(now.seed, "caller", n))
            group.cancel_scope.cancel()
    now.tree.check()


def _check(now: Live, witness: SoakWitness) -> None:
    for receipt in now.receipts:
        receipt.check()
    if not now.untold:
        check_books(witness, now.receipts, *now.models)
        return
    # Somebody is gone who had a receipt; the journal and the provider still have to agree.
    check_closed(witness)
    asked = [request for model in now.models for request in model.requests]
    assert witness.charged_calls() == len(asked)
    assert all(request.ended is not None for request in asked)
    settled = [e._asdict() for e in witness.journal if type(e).__name__ == "Settled"]
    column = "usd" if now.unit == "usd" else "tokens"
    assert sum(fields[column] for fields in settled) == witness.state.wallets[0].settled
