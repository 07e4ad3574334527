"""The retries of one invocation's model calls: the only place where a request is repeated.

An attempt waits for the provider's pause before it asks for money, so nothing is held while nobody
may ask. What a retry may cost is decided by the ledger, in the same transaction as its hold. Each
retry has a row on the receipt, which is there from its decision on and is closed when the attempt
is over, whatever way it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import anyio
import attrs

from treewarden.ledgers import amount_of
from treewarden.protocols import (
    BreakerRow,
    CallRetried,
    Line,
    Message,
    ProviderError,
    Reply,
    RetryBudgetSpent,
)

from ._actor import Actor
from ._calls import ModelCalls
from ._gates import Halt
from ._provider_pause import Turn
from ._retry import Retrying
from ._settings import RunSettings
from ._waiting import wait_until

# How a run ends that is over for a reason of its own, and not because a call failed.
_OWN_REASONS = ("deadline", "wallet_revoked", "stalled")


@attrs.frozen
class _Failure:
    """An attempt that failed: with what, which it was, and the pause before the next."""

    error: ProviderError
    # Attempts at this call so far, from 1.
    attempts: int
    pause_seconds: float


class Retries:
    """Attempt after attempt at one call, for one invocation."""

    def __init__(
        self, calls: ModelCalls, actor: Actor, settings: RunSettings, provider: str
    ) -> None:
        assert settings.retrying is not None, settings
        self._calls, self._actor, self._settings = calls, actor, settings
        self._retrying: Retrying = settings.retrying
        self._provider = provider
        self._pause = settings.tree.pause_of(provider)
        # Place of the row of the retry that is under way, in the receipt's list.
        self._open_row: int | None = None

    async def call(self, messages: Sequence[Message], purpose: str) -> tuple[Reply, bool] | Halt:
        """See ``ModelCalls.call``."""
        failure: _Failure | None = None
        while True:
            try:
                outcome = await self._once(messages, purpose, failure)
            finally:
                self.conclude()
            if isinstance(outcome, Halt) and failure and not self._is_own_reason(outcome):
                self._give_up(failure, outcome)
            if not isinstance(outcome, _Failure):
                return outcome
            failure = outcome
            self._decide(failure, messages)
            halt = await self._wait(failure)
            if halt is not None:
                self.conclude()
                return halt

    async def _once(
        self, messages: Sequence[Message], purpose: str, before: _Failure | None
    ) -> tuple[Reply, bool] | Halt | _Failure:
        """Make one attempt, the first or one after another."""
        turn = await self._turn()
        if isinstance(turn, Halt):
            return turn
        attempts = 0 if before is None else before.attempts
        try:
            if before is None:
                outcome = await self._calls.attempt(messages, purpose, None)
            else:
                outcome = await self._calls.attempt(messages, "retry", self._retrying.purse)
            if not isinstance(outcome, Halt):
                turn.answered()
            return outcome
        except ProviderError as error:
            return _Failure(error, attempts + 1, self._learn(turn, error, attempts + 1))
        finally:
            turn.leave()

    # --- pauses ----------------------------------------------------------------------------------

    async def _turn(self) -> Turn | Halt:
        calls = self._calls
        turn = await self._pause.turn(calls.now, calls.latest_send)
        return turn or calls.waited_too_long(f"{self._provider}, which asked for a pause")

    def _learn(self, turn: Turn, error: ProviderError, attempt: int) -> float:
        """Tell the pause what an error says of the provider, and return the pause in seconds."""
        pause = error.retry_after_seconds
        if not error.is_overload:
            turn.answered()
            return self._retrying.options.pause_seconds(attempt) if pause is None else pause
        if pause is None:
            pause = self._retrying.options.pause_seconds(max(attempt, turn.round))
        turn.overloaded(self._calls.now() + pause)
        return pause

    async def _wait(self, failed: _Failure) -> Halt | None:
        """Wait until the call may be made again, or say that it would be too late."""
        calls, pause_seconds = self._calls, failed.pause_seconds
        instant = calls.now() + pause_seconds
        if instant > calls.latest_send:
            return calls.waited_too_long(
                f"{self._provider}, which is asked again after {pause_seconds:g} s ({failed.error})"
            )
        # After an overload the provider's own pause is waited for, with everybody else.
        if not failed.error.is_overload and pause_seconds > 0:
            await wait_until(anyio.Event(), instant)
        return None

    # --- whether once more -----------------------------------------------------------------------

    def _decide(self, failed: _Failure, messages: Sequence[Message]) -> None:
        """Write down the retry that follows, or raise why there is none.

        Raises:
            ProviderError: The failure, where nothing is tried again.
        """
        error, attempts = failed.error, failed.attempts
        if not error.is_retryable:
            raise error
        options, purse = self._retrying.options, self._retrying.purse
        if attempts >= options.max_attempts:
            self._exhausted(attempts - 1, f"all {options.max_attempts} attempts failed")
            raise error
        ledger = self._actor.root.ledger
        ask = self._calls.ask(messages, "retry", purse)
        paid = ask.purse_output(ledger.unit)
        if paid is None:
            assert purse is not None, ask
            left = f"{amount_of(ledger.unit, purse.free):f} {ledger.unit} of the purse are left"
            self._exhausted(attempts - 1, f"retry-budget: {left}")
            raise RetryBudgetSpent(error, left) from error
        reserved = amount_of(ledger.unit, ask.amount(ledger.unit, paid))
        rows = self._actor.lease.recorder.breakers
        self._calls.last_hold = None  # that of the call that failed
        self._open_row = len(rows)
        rows.append(
            BreakerRow(
                kind="retry_attempted",
                count=attempts,
                action="retried",
                reason=str(error),
                reserved_spend=reserved,
            )
        )
        if self._settings.tell is not None:
            pause = failed.pause_seconds
            self._settings.tell(CallRetried(self._actor.path, attempts, pause, str(error)))

    def _is_own_reason(self, halt: Halt) -> bool:
        """Whether the run ends for what it says, and not because its last call failed."""
        breached = halt.stop_reason == "budget_exhausted" and self._is_blocked
        return breached or halt.stop_reason in _OWN_REASONS

    @property
    def _is_blocked(self) -> bool:
        return self._actor.lease.node.wallet.blocked_by() is not None

    def _give_up(self, failed: _Failure, halt: Halt) -> None:
        """There is no money, call or purse for another attempt.

        Raises:
            ProviderError: Always.
        """
        self._exhausted(failed.attempts - 1, halt.detail)
        if halt.stop_reason == "retry_budget":
            raise RetryBudgetSpent(failed.error, halt.detail) from failed.error
        raise failed.error

    def _exhausted(self, retries: int, why: str) -> None:
        row = BreakerRow(kind="retry_exhausted", count=retries, action="stopped", reason=why)
        self._actor.lease.recorder.breakers.append(row)

    # --- what a retry came to --------------------------------------------------------------------

    def conclude(self) -> None:
        """Close the row of the retry that is over. No effect where none is open."""
        if self._open_row is None:
            return
        hold, recorder = self._calls.last_hold, self._actor.lease.recorder
        if hold is not None and hold.id in self._actor.root.ledger.state.holds:
            return  # cut off: its supervisor charges it, and asks for this once more
        row = recorder.breakers[self._open_row]
        line = recorder.lines[-1] if hold is not None and hold.is_dispatched else None
        spend, basis = self._came_to(line)
        recorder.breakers[self._open_row] = attrs.evolve(
            row, measured_spend=spend, spend_basis=basis
        )
        self._open_row = None

    def _came_to(self, line: Line | None) -> tuple[Decimal, str]:
        if line is None:
            return Decimal(0), "pre_stream_no_usage"
        in_usd = self._actor.root.ledger.unit == "usd"
        return line.usd if in_usd else Decimal(line.tokens), line.basis
