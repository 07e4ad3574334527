"""The model calls of one invocation: each is held, sent, and charged by how it ended.

A call passes the same stations in the same order: its worst case is asked for, funded (or waits for
money), takes a call slot, leaves, and is settled. Where one of them says no, the run gets a
``Halt`` that says why. Nothing is given back here when the invocation is cancelled in between: its
supervisor ends what is open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import attrs

from treewarden.ledgers import (
    Ask,
    Charge,
    Ending,
    Hold,
    ModelCard,
    Progress,
    Purse,
    Stop,
    Ticket,
    UnknownModel,
)
from treewarden.protocols import (
    CallEnded,
    CallIdle,
    CallStarted,
    Message,
    ProviderError,
    ProviderInterrupted,
    Reply,
    TextWritten,
    ThoughtWritten,
    mend_message,
    mend_text,
)

from ._actor import Actor
from ._ceiling import InputCeiling
from ._gates import Halt, call_gate, deadline_gate, own_limit, too_late
from ._models import Model, ModelSession
from ._settings import RunSettings
from ._silence import Silence
from ._waiting import wait_until

if TYPE_CHECKING:
    from ._retries import Retries


class _CallSink:
    """What one model call reports, handed on to the hold and to whoever listens."""

    def __init__(self, calls: ModelCalls, hold: Hold, silence: Silence | None) -> None:
        self._calls, self._hold, self._silence = calls, hold, silence
        self.progress: Progress = hold.progress

    def sent(self) -> None:
        self._hold.is_sent = True

    def alive(self) -> None:
        if self._silence is not None:
            self._silence.heard_at = self._calls.now()

    def text(self, text: str) -> None:
        self.alive()
        self._calls.hear(text)

    def thought(self, text: str) -> None:
        self.alive()
        self._calls.hear_thought(text)


class ModelCalls:
    """The model calls of one invocation."""

    def __init__(
        self,
        actor: Actor,
        model: Model,
        session: ModelSession,
        settings: RunSettings,
        *,
        text: list[str],
        max_calls: int | None,
    ) -> None:
        self.session = session
        # The answer that is being written, then the last one; whoever made this reads it too.
        self._text = text
        self._actor, self._model, self._settings = actor, model, settings
        # The agent's own limit, or None: the default, or what the tree allows.
        self._max_calls = max_calls
        self._calls_made = 0
        # The last call's hold, if it came to one.
        self.last_hold: Hold | None = None
        # Made at the first call, where the run has retries.
        self._retries: Retries | None = None
        self._ceiling = InputCeiling(session)

    async def call(self, messages: Sequence[Message], purpose: str) -> tuple[Reply, bool] | Halt:
        """Make one call with the whole conversation, and once more where that may help.

        Returns:
            The answer, and whether its output limit had been cut to fit the wallet; or why there
            is none.

        Raises:
            ProviderError: It failed; what it cost is charged.
        """
        if self._settings.retrying is None:
            return await self.attempt(messages, purpose, None)
        if self._retries is None:
            from ._retries import Retries  # who has no retries does not load them

            self._retries = Retries(self, self._actor, self._settings, self._model.provider)
        return await self._retries.call(messages, purpose)

    def conclude(self) -> None:
        """Every call is over and charged: write down what became of a retry that was cut off."""
        if self._retries is not None:
            self._retries.conclude()

    async def attempt(
        self, messages: Sequence[Message], purpose: str, purse: Purse | None
    ) -> tuple[Reply, bool] | Halt:
        """Send one request; see ``call``. ``purse``: what it counts against beside the wallet."""
        self.last_hold = None
        ledger, clock = self._actor.root.ledger, self._actor.root.clock
        limit = own_limit(self._max_calls, ledger.caps.max_model_calls)
        halt = call_gate(calls_made=self._calls_made, limit=limit)
        if halt is not None:
            return halt
        hold = await self._fund(self.ask(messages, purpose, purse))
        if isinstance(hold, Halt):
            return hold
        if isinstance(hold, Stop):
            return Halt(hold.reason, str(hold.refusal))
        self.last_hold = hold
        stop = await self._take_slot(hold)
        if stop is not None:
            ledger.release(hold, clock.monotonic())
            return stop
        self._calls_made += 1
        self._text.clear()
        reply = await self._send(messages, hold)
        if isinstance(reply, Halt):
            return reply
        charge = self._settle(hold, Ending.FINISHED)
        # A client that is not ours may hand on what no later request could carry.
        if (message := mend_message(reply.message)) is not reply.message:
            reply = attrs.evolve(reply, message=message)
        counted = charge.usage.context_tokens if charge.basis == "provider_reported" else 0
        if counted:
            self._ceiling.note_count(counted)
        return reply, hold.clamped_from is not None

    def ask(self, messages: Sequence[Message], purpose: str, purse: Purse | None) -> Ask:
        """What a call with these messages may need at most."""
        session, model, funding = self.session, self._model, self._settings.funding
        self._ceiling.measure(messages)
        # A model without a known price has none to give; whether that may run was checked at start.
        card = _card_of(model)
        return Ask(
            input_tokens=self._ceiling.tokens(card.context_window if card else None),
            output_tokens=session.output_limit,
            price=card.price if card else None,
            can_write_cache=session.can_write_cache,
            can_write_1h=session.can_write_1h,
            output_floor_tokens=funding.output_floor_tokens,
            clamp=funding.clamp and not session.is_limit_pinned,
            wait=funding.waits,
            reasons_invisibly=session.reasons_invisibly,
            purpose=purpose,
            provider=model.provider,
            model=model.name,
            purse=purse,
        )

    # --- waiting for a call's money and slot, at most until it is too late to send it -----------

    def now(self) -> float:
        return self._actor.root.clock.monotonic()

    @property
    def time_left(self) -> float:
        """Seconds to the deadline."""
        deadline = self._actor.lease.node.deadline
        return math.inf if deadline is None else deadline - self.now()

    @property
    def latest_send(self) -> float:
        """The last instant at which a call may be sent."""
        deadline = self._actor.lease.node.deadline
        return math.inf if deadline is None else deadline - self._settings.times.min_call_seconds

    def waited_too_long(self, waited_for: str) -> Halt:
        least = self._settings.times.min_call_seconds
        return too_late(self.time_left, least, waited_for=waited_for)

    async def _fund(self, ask: Ask) -> Hold | Stop | Halt:
        ledger, lease = self._actor.root.ledger, self._actor.lease
        halt = deadline_gate(self.time_left, self._settings.times.min_call_seconds)
        if halt is not None:
            return halt
        funded = ledger.fund(lease, ask, self.now())
        if not isinstance(funded, Ticket):
            return funded
        latest = self.latest_send
        longest = self._settings.funding.max_wait_seconds
        until = latest if longest is None else min(latest, self.now() + longest)
        ready = anyio.Event()
        funded.on_ready = ready.set
        await wait_until(ready, until)
        if funded.outcome is not None:
            return funded.outcome
        ledger.leave(funded, self.now())
        if until == latest:
            return self.waited_too_long(f"money on {funded.wallet.path}")
        # It waited as long as it may; what is there now is all there is.
        settled = ledger.fund(lease, attrs.evolve(ask, wait=False), self.now())
        assert not isinstance(settled, Ticket), settled
        return settled

    async def _take_slot(self, hold: Hold) -> Halt | None:
        root = self._actor.root
        taken = root.ledger.dispatch(hold, self.now())
        if isinstance(taken, Stop):
            return Halt(taken.reason, str(taken.refusal))
        if not taken:
            ready = anyio.Event()
            hold.on_slot = ready.set
            await wait_until(ready, self.latest_send)
        if root.journal_failure is not None:
            # The call could not be written down, so it must not leave: here its actor is cancelled.
            await anyio.lowlevel.checkpoint()
        if hold.stop is not None:
            return Halt(hold.stop.reason, str(hold.stop.refusal))
        return None if hold.is_dispatched else self.waited_too_long("a call slot")

    # --- the call itself -------------------------------------------------------------------------

    async def _send(self, messages: Sequence[Message], hold: Hold) -> Reply | Halt:
        if self._settings.tell is not None:
            self._settings.tell(CallStarted(self._actor.path, self._model.id, hold.output_tokens))
        idle = self._settings.times.idle_timeout_seconds
        try:
            if idle is None:
                return await self._answer_to(messages, hold, None)
            silence = Silence(idle, self.now(), self._warn_of_silence)
            return await self._send_watched(messages, hold, silence)
        except ProviderError as error:
            if error.usage is not None:
                hold.progress.usage = error.usage
            self._settle(hold, _ending_of(hold, error), note=str(error))
            raise

    async def _answer_to(
        self, messages: Sequence[Message], hold: Hold, silence: Silence | None
    ) -> Reply:
        sink = _CallSink(self, hold, silence)
        return await self.session.call(messages, hold.output_tokens, sink)

    async def _send_watched(
        self, messages: Sequence[Message], hold: Hold, silence: Silence
    ) -> Reply | Halt:
        root = self._actor.root
        root.watch(hold.id, silence.rings_at, silence.ring)
        try:
            with silence.scope:
                return await self._answer_to(messages, hold, silence)
        finally:
            root.unwatch(hold.id)
        why = (
            f"the model call was silent for {silence.ended_after_seconds:g} s (idle_timeout "
            f"{silence.limit_seconds:g} s), after {hold.progress.deltas} pieces of its answer"
        )
        self._settle(hold, Ending.BROKEN if hold.is_sent else Ending.NOT_SENT, note=why)
        return Halt("stalled", why)

    def _warn_of_silence(self, seconds: float) -> None:
        idle = self._settings.times.idle_timeout_seconds
        if self._settings.tell is not None and idle is not None:
            self._settings.tell(CallIdle(self._actor.path, seconds, idle))

    def _settle(self, hold: Hold, ending: Ending, *, note: str | None = None) -> Charge:
        root, model = self._actor.root, self._model
        answered = hold.progress.model
        other = None
        if answered is not None and answered != model.name:
            other = model.price_of(answered)
        charge = root.ledger.settle(
            hold,
            ending,
            root.clock.monotonic(),
            price_of=model.price_of,
            answered_by=other,
            note=note,
        )
        if self._settings.tell is not None:
            lines = self._actor.lease.recorder.lines
            self._settings.tell(CallEnded(self._actor.path, lines[-1]))
        return charge

    def hear(self, text: str) -> None:
        """The model wrote this."""
        text = mend_text(text)
        self._text.append(text)
        if self._settings.tell is not None:
            self._settings.tell(TextWritten(self._actor.path, text))

    def hear_thought(self, text: str) -> None:
        if self._settings.tell is not None:
            self._settings.tell(ThoughtWritten(self._actor.path, text))


def _ending_of(hold: Hold, error: ProviderError) -> Ending:
    if not hold.is_sent or not error.was_sent:
        return Ending.NOT_SENT
    # An error answer says what became of the call. A connection that was lost says nothing.
    was_answered = not isinstance(error, ProviderInterrupted) and error.kind != "transport"
    has_begun = hold.progress.deltas > 0
    return Ending.PROVIDER_ERROR if was_answered and not has_begun else Ending.BROKEN


def _card_of(model: Model) -> ModelCard | None:
    try:
        return model.card
    except UnknownModel:
        return None
