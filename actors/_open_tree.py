"""A tree that is open: its root supervisor, and what all of its runs share."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treewarden.ledgers import Carried, Lease, TreeLedger, Unit, carried_from
from treewarden.protocols import UsageError

from ._clock import Clock, LoopClock
from ._limits import Budget, CallTimes, Limits
from ._root import RootSupervisor
from ._sinks import Watched, read_journal

if TYPE_CHECKING:
    from treewarden.ledgers import Event

    from ._provider_pause import ProviderPause
    from ._transport import Transport


class OpenTree:
    """A root supervisor with what its runs share: options, transport, ids."""

    def __init__(
        self,
        root: RootSupervisor,
        budget: Budget | None,
        times: CallTimes,
        ids: random.Random,
        clock_scope: Any,
    ) -> None:
        self.root = root
        self.budget = budget
        self.times = times
        self._ids = ids
        self._clock_scope = clock_scope
        self._transport: Transport | None = None
        self._pauses: dict[str, ProviderPause] = {}

    @classmethod
    async def open(
        cls,
        unit: Unit,
        budget: Budget | None,
        limits: Limits,
        clock: Clock | None,
        seed: int | None,
        journal: Callable[[Event], None] | None,
        resume_from: str | Path | None,
    ) -> OpenTree:
        carried = None if resume_from is None else _carried(resume_from, budget)
        # A clock that drives the loop has to be in place before anything looks at the time.
        clock_scope = _installed(clock)
        try:
            told = clock or LoopClock()
            now, seconds = told.monotonic(), limits.deadline_seconds
            ids = random.Random(seed)
            watched = None if journal is None else Watched(journal)
            with nullcontext() if watched is None else watched.opening():
                ledger = TreeLedger(
                    unit=unit,
                    max=None if budget is None else budget.max,
                    initial=None if budget is None else budget.initial,
                    caps=limits.caps,
                    deadline=None if seconds is None else now + seconds,
                    at=now,
                    new_span_id=lambda: f"{ids.getrandbits(64):016x}",
                    sink=watched,
                    carried_usd=0 if carried is None else carried.usd,
                    carried_tokens=0 if carried is None else carried.tokens,
                )
            root = await RootSupervisor.open(ledger, told, watched)
        except BaseException:
            _uninstall(clock_scope)
            raise
        tree = cls(root, budget, limits.times, ids, clock_scope)
        root.on_close, root.tree = tree._give_back, tree
        return tree

    def transport(self) -> Transport:
        """The tree's connections, made at the first call that needs them."""
        if self._transport is None:
            from ._transport import Transport  # httpx is loaded only by who calls a provider

            self._transport = Transport()
        return self._transport

    def pause_of(self, provider: str) -> ProviderPause:
        """The pause that all calls of the tree to one provider share."""
        if provider not in self._pauses:
            from ._provider_pause import ProviderPause

            self._pauses[provider] = ProviderPause()
        return self._pauses[provider]

    def new_run_id(self) -> str:
        # A version 4 UUID. Written out here, because uuid.UUID takes longer than a ledger entry.
        digits = f"{self._ids.getrandbits(128):032x}"
        variant = "89ab"[int(digits[16], 16) & 3]
        return (
            f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
        )

    async def close(self) -> None:
        await self.root.close()

    async def _give_back(self) -> None:
        """The tree's own task calls this when all actors are gone."""
        try:
            if self._transport is not None:
                await self._transport.close()
        finally:
            _uninstall(self._clock_scope)


def set_ceiling(root: RootSupervisor, lease: Lease, budget: Budget) -> None:
    """Raise or lower the ceiling of a lease's wallet to a budget's maximum."""
    ledger, now = root.ledger, root.clock.monotonic()
    if budget.unit != ledger.unit:
        raise UsageError(
            f"the tree counts in {ledger.unit}, this ceiling is in {budget.unit}.",
            code="cave_budget_denomination_ambiguous",
        )
    if budget.max < lease.node.wallet.max:
        ledger.lower_max(lease, budget.max, now)
    else:
        ledger.raise_max(lease, budget.max, now)


def _carried(journal: str | Path, budget: Budget | None) -> Carried:
    """What a journal says was spent before.

    Raises:
        UsageError: It cannot be read, or there is nothing to count it against.
    """
    if budget is None:
        raise UsageError(
            "resume_from= counts earlier spend against a ceiling, and there is none. Give budget=.",
            code="cave_option_invalid",
        )
    try:
        carried = carried_from(read_journal(journal))
    except OSError as error:
        raise UsageError(
            f"resume_from= cannot be read: {error}", code="cave_journal_invalid"
        ) from error
    if carried.unit != budget.unit:
        raise UsageError(
            f"{journal} counts in {carried.unit}, this budget in {budget.unit}. Give a budget in "
            f"{carried.unit}.",
            code="cave_budget_denomination_ambiguous",
        )
    return carried


def _installed(clock: Clock | None) -> Any:
    """Put a clock that drives the event loop in place, and return what takes it out again."""
    install = getattr(clock, "installed", None)
    if install is None:
        return None
    scope = install()
    scope.__enter__()
    return scope


def _uninstall(scope: Any) -> None:
    if scope is not None:
        scope.__exit__(None, None, None)
