"""One invocation of an agent: the loop that calls the model and its tools until it is over.

The loop awaits and carries out; what may happen is decided by the gates (pure) and by the ledger.
It gives nothing back: holds, slots and leases that are open when it ends are ended by its
supervisor. Whatever way it ends, ``conclude`` makes a receipt of it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import attrs

from treewarden.ledgers import (
    Kind,
    LeaseRequest,
    Outcome,
    Unit,
    Wallet,
    refusal_row,
)
from treewarden.protocols import (
    ActorStopped,
    FinishReason,
    JSONObject,
    Message,
    Receipt,
    Refusal,
    RefusedError,
    Reply,
    RunCancelled,
    RunError,
    RunStarted,
    RunStopped,
    SubagentEnded,
    Text,
    ToolCall,
    ToolEnded,
    ToolResult,
    ToolStarted,
    TreewardenError,
    mend_text,
)

from ._actor import Actor, StopKind
from ._admission import Admission
from ._background import Background, BackgroundChild, OversightRun
from ._calls import ModelCalls
from ._definitions import Agent, Output, Subagent, ToolCallback
from ._gates import (
    Blocked,
    Decision,
    Delegate,
    Halt,
    Oversee,
    Refuse,
    RunTool,
    answer_gate,
    own_limit,
    runs_side_by_side,
    tool_gate,
)
from ._mailbox import Mailbox
from ._models import Auto, Brief, Model
from ._schemas import Mismatch, plain_json
from ._settings import RunSettings
from ._siblings import PendingCall, Siblings
from ._slot import Slot, slot_of
from ._tools import ToolRun

if TYPE_CHECKING:
    from ._watch import Watch


@attrs.frozen(kw_only=True, eq=False)
class Result:
    """What a run came to.

    ``complete`` is True only for a full answer; otherwise ``stop_reason`` names the limit that
    ended the run and ``stop_detail`` explains it. ``output`` is the answer as the declared type,
    None where the run is not complete.
    """

    run_id: str
    agent_id: str
    text: str
    output: Any
    stop_reason: str
    stop_detail: str
    receipt: Receipt
    messages: tuple[Message, ...] = attrs.field(repr=False)

    @property
    def complete(self) -> bool:
        return self.stop_reason == "complete"

    @property
    def cost_usd(self) -> Decimal:
        """What this run and everything below it cost."""
        return self.receipt.total.usd

    def raise_for_stop(self) -> Result:
        """Return this result if it is complete.

        Raises:
            RunStopped: A limit ended the run; the error carries the receipt and the partial text.
        """
        if not self.complete:
            raise RunStopped(self.stop_reason, self.stop_detail, self.receipt, text=self.text)
        return self

    def __str__(self) -> str:
        if self.complete:
            return self.text
        partial = f"\n{self.text}" if self.text else ""
        return f"[stopped: {self.stop_reason}: {self.stop_detail}]{partial}"


class Invocation:
    """An agent at work. Its own instance is the body of its actor."""

    def __init__(
        self,
        agent: Agent,
        model: Model,
        messages: Sequence[Message],
        settings: RunSettings,
        *,
        is_fixture: bool = False,
        is_detached: bool = False,
        is_in_background: bool = False,
        shown_wallet: Wallet | None = None,
    ) -> None:
        self.agent = agent
        self.run_id = settings.tree.new_run_id()
        # The transcript so far; only grows.
        self.messages = list(messages)
        # What came of it, one of the two; set when the lease is given back.
        self.result: Result | None = None
        self.failure: TreewardenError | BaseException | None = None
        self.model, self.settings = model, settings
        self.is_fixture = is_fixture or agent.sandbox == "fixture"
        self._is_detached, self._is_in_background = is_detached, is_in_background
        # The wallet to show on the receipt where it is not the lease's own.
        self._shown_wallet = shown_wallet
        self._offered = {item.name: item for item in agent.tools}
        # Subagents that go on beside it.
        self._background = Background()
        # The tool calls of its last reply.
        self._siblings = Siblings(agent.on_sibling_failure)
        # Texts to be put into the conversation before the next call, from the first one on.
        self._inbox: Mailbox | None = None
        # Why the next call is to be the last, or None.
        self._wrap_up: str | None = None
        self._tool_calls_started = 0
        # Sees whether it goes round in circles; None: nobody does.
        self._watch: Watch | None = None
        # Text of the answer that is being written, then of the last answer.
        self._text: list[str] = []
        self._halt = Halt("complete", "")
        self._output: Any = None
        # What it gives back while it waits for children; None: there is nothing to give back.
        self.slot: Slot | None = None
        self._started_ns = 0
        # Made at the first step, which a start that is cut off never comes to.
        self._model_calls: ModelCalls | None = None

    # Set at the first step.
    _actor: Actor
    # Set when the lease is given back.
    receipt: Receipt

    # --- the loop --------------------------------------------------------------------------------

    async def __call__(self, actor: Actor) -> None:
        """Run until the answer is there or a limit says stop."""
        self._actor = actor
        self.slot = slot_of(actor)
        self._started_ns = actor.root.clock.wall_ns()
        if self.settings.tell is not None:
            self.settings.tell(
                RunStarted(actor.path, self.run_id, self.agent.id, self._is_in_background)
            )
        declared = self.agent.output
        session = self.model.open(
            Brief(
                agent_path=actor.path,
                system=_system_text(self.agent),
                tools=self.agent.specs,
                output_limit=None if declared is None else declared.max_tokens,
                transport=self.settings.tree.transport,
            )
        )
        self._model_calls = ModelCalls(
            actor,
            self.model,
            session,
            self.settings,
            text=self._text,
            max_calls=self.agent.max_model_calls,
        )
        if self.settings.breakers is not None:
            from ._watch import Watch  # what most runs do without

            self._watch = Watch(self.settings.breakers, self._offered, actor, len(self.messages))
        try:
            self._halt = await self._loop(declared)
        except Exception as error:
            why = getattr(error, "code", type(error).__name__)
            self._background.stop(f"{actor.path} failed: {why}")
            raise
        # None of them runs after an answer; of any other end the reason is told to them.
        self._background.stop(f"{actor.path} stopped: {self._halt.stop_reason}")

    @property
    def _calls(self) -> ModelCalls:
        assert self._model_calls is not None, self
        return self._model_calls

    async def _loop(self, declared: Output | None) -> Halt:
        purpose, repairs = "model", 0
        while True:
            if self._watch is not None and (tripped := self._watch.look_at(self.messages)):
                return tripped
            is_last = await self._take_instructions()
            answered = await self._calls.call(self.messages, "final" if is_last else purpose)
            if isinstance(answered, Halt):
                return answered
            reply, was_clamped = answered
            purpose = "model"
            self.messages.append(reply.message)
            if is_last:
                return await self._last_words(reply, declared, was_clamped=was_clamped)
            if reply.message.tool_calls:
                await self._use_tools(reply.message, was_clamped=was_clamped)
                continue
            if reply.finish_reason is FinishReason.PAUSE:
                continue
            halt = _end_of(reply, was_clamped, self._calls.session.output_limit)
            if halt.stop_reason == "complete":
                if self._inbox:
                    continue  # somebody has something to add before this is the answer
                looked = await self._look_after_background(halt)
                if looked is None or self._inbox:
                    continue
                halt = looked
            if halt.stop_reason != "complete" or declared is None or declared.shape is None:
                return halt
            problem = self._check_output(declared, reply.message.text)
            if problem is None:
                return halt
            if repairs >= declared.retries:
                raise problem
            repairs, purpose = repairs + 1, "repair"
            self.messages.append(_repair_request(problem))

    # --- what others ask of it while it runs ----------------------------------------------------

    def send(self, text: str) -> None:
        """Add a user message before the next model call.

        Raises:
            ActorStopped: The invocation is over, or on its last call.
            MailboxFull: It has not read what it was sent before.
        """
        if self.result is not None or self.failure is not None or self._wrap_up is not None:
            raise ActorStopped(self.agent.id)
        if self._inbox is None:
            self._inbox = Mailbox(self.agent.id)
        self._inbox.put(mend_text(text))

    def wrap_up(self, reason: str) -> None:
        """Make the next model call the last one. The first reason stays."""
        if self._wrap_up is None:
            self._wrap_up = reason

    async def _take_instructions(self) -> bool:
        """Put what was asked for meanwhile into the conversation; say if this call is the last."""
        if self._wrap_up is not None and self._background.unread:
            # After the last call nothing can be read any more.
            if self.agent.background != "cancel":
                await self._wait_for_background()
            self._hand_over_results()
        for text in self._inbox.take_all() if self._inbox else ():
            self.messages.append(Message("user", (Text(text),)))
        if self._wrap_up is None:
            return False
        self.messages.append(_wrap_up_request(self._wrap_up))
        return True

    async def _last_words(
        self, reply: Reply, declared: Output | None, *, was_clamped: bool
    ) -> Halt:
        """The end after a call that was announced as the last: nothing of it is run any more."""
        if reply.message.tool_calls:
            refused = Blocked("cave_run_wrapped_up", f"the run is over: {self._wrap_up}")
            decisions = [Refuse(call, refused) for call in reply.message.tool_calls]
            results = [self._begin(decision).result for decision in decisions]
            self.messages.append(Message("tool", tuple(r for r in results if r is not None)))
            return Halt("wrapped_up", f"{self._wrap_up}; the model asked for tools instead")
        halt = _end_of(reply, was_clamped, self._calls.session.output_limit)
        if halt.stop_reason == "complete" and declared is not None and declared.shape is not None:
            problem = self._check_output(declared, reply.message.text)
            if problem is not None:
                return Halt("wrapped_up", f"{self._wrap_up}; {problem.message}")
        if halt.stop_reason == "complete" and self._background.unread:
            return await self._drop_background()
        return halt

    def _check_output(self, declared: Output, text: str) -> _OutputProblem | None:
        assert declared.shape is not None, declared
        try:
            value = json.loads(_without_fence(text))
        except ValueError as error:
            return _OutputProblem("cave_output_schema_invalid_json", f"it is not JSON: {error}")
        try:
            self._output = declared.shape.convert(value)
        except Mismatch as mismatch:
            return _OutputProblem("cave_output_schema_mismatch", str(mismatch))
        return None

    # --- an answer, and background subagents that go on -------------------------------------------

    async def _look_after_background(self, halt: Halt) -> Halt | None:
        """What an answer comes to while background subagents run or were not read.

        Returns:
            How the run ends, or None: the model is to answer once more.
        """
        running, unread = self._background.running, self._background.unread
        match answer_gate(
            self.agent.background,
            running=len(running),
            unread=len(unread),
            has_tool_calls_left=self._has_tool_calls_left,
        ):
            case "accept":
                return halt
            case "drop":
                return await self._drop_background()
            case "insist":
                self.messages.append(_insistence([child.id for child in running]))
                return None
            case "hand over":
                await self._wait_for_background()
                self._hand_over_results()
                return None

    @property
    def _has_tool_calls_left(self) -> bool:
        ledger = self._actor.root.ledger
        most = ledger.caps.max_tool_calls
        if most is not None and ledger.counters.tool_calls >= most:
            return False
        return self._tool_calls_started < own_limit(self.agent.max_tool_calls, most)

    async def _wait_for_background(self) -> None:
        """The one place where an agent waits for its background subagents by itself."""
        if self.slot is None:
            return await self._background.wait()
        running = self._background.running
        for child in running:
            self.slot.began(child, waits=True)
        self.slot.let_calls_run()
        await self._background.wait()
        await self.slot.take_results()
        for child in running:  # those that never started
            self.slot.over(child)

    def _hand_over_results(self) -> None:
        """Put into the conversation what has ended and was not read, if there is any."""
        told = self._background.hand_over()
        if told is not None:
            text = f"Results of your background subagents that you have not read: {told}"
            self.messages.append(Message("user", (Text(text),)))

    async def _drop_background(self) -> Halt:
        """Cancel those that run; the answer stands, but what was not read is missing from it."""
        unread = [child.id for child in self._background.unread]
        stopped = [
            child.id for child in self._background.stop(f"{self._actor.path} gave its final answer")
        ]
        await self._wait_for_background()
        finished = [id_ for id_ in unread if id_ not in stopped]
        return Halt(
            "background_dropped",
            "the answer came before its background subagents were read: "
            f"{', '.join(stopped) or 'none'} cancelled, {', '.join(finished) or 'none'} finished",
        )

    # --- tools -----------------------------------------------------------------------------------

    async def _use_tools(self, asked: Message, *, was_clamped: bool) -> None:
        """Answer every call of a reply with exactly one result, in the order of the calls."""
        ledger = self._actor.root.ledger
        limit = own_limit(self.agent.max_tool_calls, ledger.caps.max_tool_calls)
        decisions: list[Decision] = []
        for position, call in enumerate(asked.tool_calls, 1):
            decision = tool_gate(
                call,
                agent=self.agent,
                offered=self._offered,
                is_fixture=self.is_fixture,
                calls_started=self._tool_calls_started,
                limit=limit,
                was_clamped=was_clamped,
            )
            self._tool_calls_started += 1
            if self._watch is not None:
                decision = self._watch.allowed(decision, position)
            if self.settings.approve is not None:
                decision = await self._approved(decision, self.settings.approve)
            decisions.append(decision)
        if self._watch is not None:
            await self._watch.leave_alone(decisions)
        self._siblings = Siblings(self.agent.on_sibling_failure)
        if runs_side_by_side(decisions):
            results = await self._results_of([self._begin(decision) for decision in decisions])
        else:
            results = list[ToolResult]()
            for decision in decisions:
                results += await self._results_of([self._begin(decision)])
        self.messages.append(Message("tool", tuple(results)))

    async def _results_of(self, calls: list[PendingCall]) -> list[ToolResult]:
        """Wait for calls that have begun, without the slot where it may go to others meanwhile."""
        if self.slot is not None:
            self.slot.let_calls_run()
        results = [await self._result_of(call) for call in calls]
        if self.slot is not None:
            await self.slot.take_results()
        return results

    async def _result_of(self, pending: PendingCall) -> ToolResult:
        admission = pending.admission
        if admission is not None:
            try:
                pending.actor = await admission.wait()
            except RefusedError as refused:
                self._note_refusal(pending, refused)
            if admission.why_left is not None:
                self._refuse(pending, f"cave_run_aborted: {admission.why_left}")
        if pending.actor is not None:
            await pending.actor.wait()
        assert pending.result is not None, pending
        return pending.result

    async def _approved(self, decision: Decision, approve: ToolCallback) -> Decision:
        if isinstance(decision, Refuse):
            return decision
        answer = approve(decision.call)
        if inspect.isawaitable(answer):
            answer = await answer
        if answer is True or answer is None:
            return decision
        why = answer if isinstance(answer, str) else "the caller did not approve this call"
        return Refuse(decision.call, Blocked("cave_tool_call_denied", why))

    def _begin(self, decision: Decision) -> PendingCall:
        """Start what a decision says. Never raises: what cannot start is an error result."""
        decision, call = self._siblings.allowed(decision), decision.call
        pending, recorder = PendingCall(call), self._actor.lease.recorder
        self._siblings.add(pending)
        recorder.count_tool(call.name, is_error=False)
        if self.settings.tell is not None:
            self.settings.tell(ToolStarted(self._actor.path, call.id, call.name))
        try:
            match decision:
                case RunTool():
                    run = ToolRun(decision, self.settings, lambda r: self._answer(pending, r))
                    pending.actor = run.start(self._actor)
                case Delegate() if decision.subagent.background:
                    self._start_in_background(decision, pending)
                case Delegate():
                    pending.admission = self._delegate(decision, pending)
                case Oversee():
                    pending.actor = self._oversee(decision, pending)
                case Refuse():
                    self._block(pending, decision.blocked)
        except RefusedError as refused:
            self._note_refusal(pending, refused)
        if self.slot is not None and pending.in_slot is not None:
            self.slot.began(pending.in_slot, waits=pending.admission is not None)
        return pending

    def _note_refusal(self, pending: PendingCall, refused: RefusedError) -> None:
        self._actor.lease.recorder.refusals.append(refusal_row(refused))
        self._refuse(pending, str(refused))

    def _oversee(self, decision: Oversee, pending: PendingCall) -> Actor | None:
        blocked = self._background.refusal(decision.order)
        if blocked is not None:
            self._block(pending, blocked)
            return None
        run = OversightRun(
            decision, self._background, self.slot, lambda r: self._answer(pending, r)
        )
        return run.start(self._actor)

    def _delegate(self, decision: Delegate, pending: PendingCall) -> Admission:
        """Start a subagent that the call waits for."""
        child = self._child_for(decision, ())

        def on_end(actor: Actor) -> None:
            child.conclude(actor)
            self._answer(pending, child.as_tool_result(decision.call))

        return self._enter(
            decision.subagent, child, lambda _: self._wait_no_longer_for(pending), on_end
        )

    def _start_in_background(self, decision: Delegate, pending: PendingCall) -> None:
        """Start a subagent that goes on beside this one; the call has its result at once."""
        history: Sequence[Message] = ()
        if decision.resume is not None:
            blocked = self._background.why_not_resumed(decision.resume, decision.subagent)
            if blocked is not None:
                self._block(pending, blocked)
                return
            history = self._background.history_of(decision.resume)
        child = BackgroundChild(decision.subagent, self._child_for(decision, history))

        def on_end(actor: Actor) -> None:
            child.invocation.conclude(actor)
            self._background.note_end(child)

        child.admission = self._enter(
            decision.subagent,
            child.invocation,
            lambda _: self._wait_no_longer_for(child),
            on_end,
            lambda refused: self._background.note_refusal(child, refused),
        )
        self._background.add(child)
        call = decision.call
        self._answer(pending, ToolResult(call.id, call.name, plain_json(child.status())))

    def _child_for(self, decision: Delegate, history: Sequence[Message]) -> Invocation:
        agent = decision.subagent.agent
        return Invocation(
            agent,
            self.model if isinstance(agent.model, Auto) else agent.model,
            [*history, Message("user", (Text(decision.task),))],
            self.settings,
            is_fixture=self.is_fixture,
            is_in_background=decision.subagent.background,
        )

    def _enter(
        self,
        item: Subagent,
        child: Invocation,
        on_ending: Callable[[Actor], None],
        on_end: Callable[[Actor], None],
        on_refused: Callable[[RefusedError], None] | None = None,
    ) -> Admission:
        """Start a subagent's actor as soon as there is room for it, in the background or not.

        Raises:
            RefusedError: Nothing was started.
        """
        root = self._actor.root
        cap, min_cap = _wallet_of(item, root.ledger.unit, self._actor.path)
        request = LeaseRequest(
            item.name,
            Kind.AGENT,
            cap=cap,
            min_cap=min_cap,
            seconds=item.timeout_seconds,
            tool=item.name,
        )
        return root.enter(
            self._actor,
            request,
            child,
            on_ending=on_ending,
            on_end=on_end,
            on_refused=on_refused,
            max_attempts=item.max_calls,
        )

    def _wait_no_longer_for(self, call: object) -> None:
        if self.slot is not None:
            self.slot.over(call)

    def _block(self, pending: PendingCall, blocked: Blocked) -> None:
        row = Refusal(code=blocked.code, message=blocked.message)
        self._actor.lease.recorder.refusals.append(row)
        self._refuse(pending, blocked.text)

    def _refuse(self, pending: PendingCall, why: str) -> None:
        call = pending.call
        self._answer(pending, ToolResult(call.id, call.name, why, is_error=True))

    def _answer(self, pending: PendingCall, result: ToolResult) -> None:
        """A call has its result: the only place where it gets one."""
        assert pending.result is None, pending
        pending.result = result
        self._wait_no_longer_for(pending.in_slot)
        if self._watch is not None:
            self._watch.hear(pending)
        if result.is_error:
            self._actor.lease.recorder.count_tool_error(result.name)
        if self.settings.tell is not None:
            self.settings.tell(
                ToolEnded(self._actor.path, result.call_id, result.name, result.is_error)
            )
        self._siblings.note_result(pending)

    # --- the end ---------------------------------------------------------------------------------

    def conclude(self, actor: Actor) -> None:
        """Make the receipt and the result. Called by the supervisor when the lease is back."""
        if self._model_calls is not None:
            self._model_calls.conclude()
        stop_reason, detail, code = self._how_it_ended(actor)
        self.receipt = receipt = self._receipt(actor, stop_reason, detail, code)
        if actor.parent is not None and actor.parent.lease is not actor.root.ledger.root:
            actor.parent.lease.recorder.subagents.append(receipt)
        text = "".join(self._text)
        if code is None:
            self.result = Result(
                run_id=self.run_id,
                agent_id=self.agent.id,
                text=text,
                output=self._output if stop_reason == "complete" else None,
                stop_reason=stop_reason,
                stop_detail=detail,
                receipt=receipt,
                messages=tuple(self.messages),
            )
        elif actor.outcome is Outcome.FAILED:
            self.failure = RunError(code, detail, receipt, text=text)
            self.failure.__cause__ = actor.error
        else:
            self.failure = RunCancelled(detail, receipt, text=text)
        if self.settings.tell is not None and actor.lease.node.kind is Kind.AGENT:
            self.settings.tell(SubagentEnded(actor.path, self.agent.id, stop_reason, receipt))

    def _how_it_ended(self, actor: Actor) -> tuple[str, str, str | None]:
        """Stop reason, words for it, and the error code of what was no orderly end."""
        match actor.outcome:
            case Outcome.OK:
                return self._halt.stop_reason, self._halt.detail, None
            case Outcome.FAILED:
                error = actor.error
                code = getattr(error, "code", "cave_agent_run_failed")
                message = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
                return "failed", message, code
            case _:
                asked = actor.stop_asked
                if asked is not None and asked.kind is StopKind.DEADLINE:
                    return "deadline", asked.reason, None
                why = "it was cancelled before its first step" if asked is None else asked.reason
                return "cancelled", why, "cave_run_aborted"

    def _receipt(self, actor: Actor, stop_reason: str, detail: str, code: str | None) -> Receipt:
        node, ledger, clock = actor.lease.node, actor.root.ledger, actor.root.clock
        wallet = node.wallet if node.owns_wallet else self._shown_wallet
        path = "" if wallet is None else wallet.path
        receipt = actor.lease.recorder.receipt(
            run_id=self.run_id,
            path=node.path,
            agent_id=self.agent.id,
            stop_reason=stop_reason,
            reason=detail,
            error_code=code,
            unit=ledger.unit,
            wallet=wallet,
            tranches=[t for t in ledger.state.tranches if t.wallet == path],
            spent=node.usd if ledger.unit == "usd" else node.tokens,
            started_ns=self._started_ns,
            ended_ns=clock.wall_ns(),
            is_detached=self._is_detached,
        )
        rows = self._background.rows(node.path)
        return attrs.evolve(receipt, background=rows) if rows else receipt

    def as_tool_result(self, call: ToolCall) -> ToolResult:
        """What the parent's model reads about this subagent."""
        if self.result is None:
            return ToolResult(call.id, call.name, str(self.failure), is_error=True)
        return ToolResult(call.id, call.name, plain_json(self.told()))

    def told(self) -> JSONObject:
        """What a parent's model is told of this subagent when it has ended."""
        result, receipt = self.result, self.receipt
        lines = [line for each in receipt.walk() for line in each.lines]
        measured = all(line.basis == "provider_reported" for line in lines)
        told: dict[str, Any] = {
            "text": "".join(self._text),
            "agent_id": self.agent.id,
            "usage_basis": "provider_reported" if measured else "unavailable",
            "input_tokens": sum(
                line.input_tokens + line.cache_read_tokens + line.cache_write_tokens
                for line in lines
            ),
            "output_tokens": sum(line.output_tokens for line in lines),
            "cost_usd": f"{sum((line.usd for line in lines), Decimal(0)):f}",
            "stop_reason": receipt.stop_reason,
            "claim_basis": "inferred",
        }
        if result is None:
            told["error"] = str(self.failure)
        elif not result.complete:
            told["stop_detail"] = result.stop_detail
        return told

    def take(self) -> Result:
        """The result of a run that has ended.

        Raises:
            RunError: It failed or was cancelled.
        """
        if self.failure is not None:
            raise self.failure
        assert self.result is not None, self
        return self.result


class _OutputProblem(TreewardenError):
    """The final answer does not fit what was declared."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


def _end_of(reply: Reply, was_clamped: bool, limit: int) -> Halt:
    """How a reply without tool calls ends the run."""
    match reply.finish_reason:
        case FinishReason.LENGTH if was_clamped:
            return Halt(
                "budget_exhausted",
                "the answer was cut off by the output limit that the budget still paid for",
            )
        case FinishReason.LENGTH:
            return Halt("output_limit", f"the answer was cut off at {limit} output tokens")
        case FinishReason.REFUSAL:
            return Halt("refusal", f"the model refused ({reply.raw_finish_reason})")
        case _:
            return Halt("complete", "")


def _system_text(agent: Agent) -> str:
    declared = agent.output
    if declared is None or declared.shape is None:
        return agent.instructions
    schema = json.dumps(declared.shape.schema, ensure_ascii=False, separators=(",", ":"))
    return (
        f"{agent.instructions}\n\n<cave-output>Answer with one JSON value that fits this JSON "
        f"schema, and nothing else: {schema}</cave-output>"
    )


def _wrap_up_request(reason: str) -> Message:
    return Message(
        "user",
        (
            Text(
                f"Wrap up now: {reason}. Give your final answer from what you have, without "
                "calling any tool."
            ),
        ),
    )


def _insistence(running: list[str]) -> Message:
    return Message(
        "user",
        (
            Text(
                f"Your answer is not accepted yet: {', '.join(running)} still run in the "
                "background. Wait for them with cave_wait or end them with cave_cancel, then "
                "answer."
            ),
        ),
    )


def _repair_request(problem: _OutputProblem) -> Message:
    return Message(
        "user",
        (
            Text(
                f"Your answer cannot be used: {problem.message}. Answer again with only the JSON "
                "value that fits the schema."
            ),
        ),
    )


def _without_fence(text: str) -> str:
    stripped = text.strip()
    if stripped.startswith("```") and stripped.endswith("```") and "\n" in stripped:
        return stripped[stripped.index("\n") + 1 : -3]
    return stripped


def _wallet_of(item: Subagent, unit: Unit, path: str) -> tuple[int | None, int | None]:
    """The carve that a subagent declares, in the tree's unit."""
    in_usd, in_tokens = (item.max_usd, item.min_usd), (item.max_tokens, item.min_tokens)
    own, other = (in_usd, in_tokens) if unit == "usd" else (in_tokens, in_usd)
    if own[0] is None and other[0] is not None:
        raise RefusedError(
            "cave_subagent_wallet_denomination_unavailable",
            node=path,
            at="the tree",
            dimension=unit,
            asked="a wallet in another denomination",
            left=f"only {unit}",
            advice=f"Declare the subagent's cap in {unit}.",
        )
    return own
