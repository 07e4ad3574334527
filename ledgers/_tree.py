"""``TreeLedger``: the one mutable book of a tree, and the only thing that changes it.

Every public method is one synchronous transaction: it decides, writes one event per change, and
wakes whoever that change admits. There is no await, no clock and no randomness in here, so a
transaction is atomic between two awaits of any event loop, and the same calls give the same
journal to the byte.

Who waits is represented by a ticket or a hold with a callback. The callback only marks the waiter
runnable; it must not call back into the ledger.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import attrs

from treewarden.protocols import LedgerError, Line, Refusal, RefusedError

from ._admissions import Caps, Counters, Kind, Node, Outcome, top_of
from ._charges import Ask, Charge, Ending, Progress, charge_for
from ._events import (
    Admitted,
    CapChanged,
    Dispatched,
    Ended,
    EntryLeft,
    EntryQueued,
    Event,
    Held,
    HoldReleased,
    Left,
    MaxLowered,
    MaxRaised,
    Opened,
    Parked,
    Queued,
    Refused,
    Restarted,
    Resumed,
    ResumeLeft,
    ResumeQueued,
    Revoked,
    Settled,
    SlotLeft,
    SlotQueued,
    TrancheReleased,
)
from ._grant_order import GrantOrder
from ._journal import Journal
from ._leases import Entry, Hold, Lease, LeaseRequest, Stop, Ticket, Wake
from ._prices import Price, PriceOf
from ._purse import Purse
from ._receipts import amount_of, line_for
from ._state import MINUTE, TreeState
from ._wallet import UNBOUNDED, Unit, Wallet

# Looked up once; see _state.py.
_AGENT, _TOOL, _RUN = Kind.AGENT, Kind.TOOL, Kind.RUN


class TreeLedger:
    """The ledger of one tree.

    Args:
        unit: What ``max`` and every cap below are counted in.
        max: The ceiling, in 10^-12 USD or tokens. None: no ceiling, but everything is counted.
        initial: What is released at the start; None: all.
        deadline: The instant after which nothing may be open, in the caller's clock.
        at: The instant of opening, in the caller's clock.
        new_span_id: Gives fresh span ids (16 hex digits).
        sink: Sees every event once, in order.
        carried_usd, carried_tokens: What was spent before under the same limit. It counts as spent
            from the start; it may be above ``max``, and then nothing is funded.

    Raises:
        LedgerError: What is carried is negative.
    """

    def __init__(
        self,
        *,
        unit: Unit = "usd",
        max: int | None = None,
        initial: int | None = None,
        caps: Caps | None = None,
        deadline: float | None = None,
        at: float = 0.0,
        new_span_id: Callable[[], str] = lambda: "0" * 16,
        sink: Callable[[Event], None] | None = None,
        carried_usd: int = 0,
        carried_tokens: int = 0,
    ) -> None:
        if carried_usd < 0 or carried_tokens < 0:
            raise LedgerError("what was spent before is not negative", code="cave_journal_invalid")
        self._state = TreeState()
        self._journal = Journal(self._state, sink=sink)
        self._record = self._journal.record
        self._new_span_id = new_span_id
        self._last_id = 0
        self._holds: dict[int, Hold] = {}
        self._tickets: dict[int, Ticket] = {}
        # Waiting tickets by the wallet they wait on, oldest first. No empty queue stays. Ordered
        # dicts, because finding the head of a plain one takes longer the more have left before.
        self._money_queues: dict[int, OrderedDict[int, Ticket]] = {}
        # The ids of the wallets with a queue that are this wallet or below it. No empty one stays.
        self._queues_below: dict[int, dict[int, None]] = {}
        # Holds that wait for a call slot, oldest first.
        self._slot_queue: OrderedDict[int, Hold] = OrderedDict()
        # Whose turn it is for an agent's slot: entries and the nodes of parked leases.
        self._line = GrantOrder()
        self._entries: dict[int, Entry] = {}
        self._resuming: dict[int, Lease] = {}
        # Entries that cannot carve while calls wait for money on that wallet. They are not in line.
        self._entries_behind: dict[int, dict[int, None]] = {}
        ceiling = UNBOUNDED if max is None else max
        released = ceiling if initial is None else initial
        self._record(
            Opened(
                at,
                unit,
                ceiling,
                released,
                new_span_id(),
                deadline,
                caps or Caps(),
                carried_usd,
                carried_tokens,
            )
        )
        self.unit: Unit = unit
        self.root = Lease(0, self._state.nodes[0])

    # --- leases ----------------------------------------------------------------------------------

    def admit(
        self,
        parent: Lease,
        name: str,
        *,
        kind: Kind,
        at: float,
        cap: int | None = None,
        min_cap: int | None = None,
        set_aside: int = 0,
        deadline: float | None = None,
        tool: str | None = None,
        max_attempts: int | None = None,
    ) -> Lease:
        """Begin a lease below ``parent``: place, slot, wallet, set-aside, deadline and span.

        Args:
            cap: Carve a wallet of at most this much for it. None: it draws on its parent's.
            min_cap: The least that is worth a start; None: the whole ``cap``.
            deadline: Its own instant; the parent's holds where it is earlier.
            tool: The subagent tool whose attempt this is; it counts even when refused.
            max_attempts: How many attempts that tool has per parent.

        Raises:
            RefusedError: Nothing was started; only counters changed.
            LedgerError: ``parent`` has ended.
        """
        if parent.is_ended:
            raise LedgerError(f"{parent.path} has ended; nothing can start below it")
        node = parent.node
        if tool is not None and max_attempts is not None:
            self._check_attempts(node, name, tool, max_attempts, at)
        carve, least = cap, set_aside
        if cap is not None:
            carve, least = _carve_sizes(node.wallet, cap, min_cap, set_aside)
        code = self._limit_in_the_way(node, kind, tool, carve, least, at)
        if code is not None:
            self._record(Refused(at, node.id, code, tool))
            raise self._why_not(code, node, name, cap, least)
        return self._begin(node, name, kind, at, deadline, carve, set_aside, tool)

    def _begin(
        self,
        node: Node,
        name: str,
        kind: Kind,
        at: float,
        deadline: float | None,
        carve: int | None,
        set_aside: int,
        tool: str | None,
        entry: int | None = None,
    ) -> Lease:
        above = node.deadline
        if deadline is None or (above is not None and above < deadline):
            deadline = above
        self._last_id = lease_id = self._last_id + 1
        self._record(
            Admitted(
                at,
                lease_id,
                node.id,
                name,
                kind,
                self._new_span_id(),
                deadline,
                carve,
                set_aside,
                tool,
                entry,
            )
        )
        return Lease(lease_id, self._state.nodes[lease_id])

    def end(self, lease: Lease, outcome: Outcome, at: float) -> None:
        """End a lease: settle or cancel all it has open, and give everything back.

        Raises:
            LedgerError: It has ended before, or something below it is alive. Nothing changed.
        """
        node = lease.node
        if lease.is_ended:
            raise LedgerError(f"the lease of {node.path} has ended before")
        if node.live_children:
            raise LedgerError(f"{node.path} still has {node.live_children} children")
        lease.takes_no_more = True
        if node.entries:
            for entry in [self._entries[entry_id] for entry_id in node.entries]:
                self.leave_line(entry, at)
                # Whoever waits for it may run elsewhere, in a thread of the actor that ends.
                _wake(entry.on_ready)
        if node.tickets or node.holds:
            self._end_open_calls(node, at)
        if node.waits_for_slot:
            self._leave_line_of_resumes(node)
        lease.is_ended = True
        gives_back = node.owns_wallet or node.set_aside
        self._record(Ended(at, node.id, outcome))
        if gives_back and self._money_queues and node.parent is not None:
            self._rerun_upwards(node.parent.wallet, at)
        if self._line:
            self._rerun_line(at)

    def count_restart(self, lease: Lease, at: float) -> None:
        """Record that a supervised actor was started again under its lease."""
        self._record(Restarted(at, lease.id))

    def _end_open_calls(self, node: Node, at: float) -> None:
        # Youngest first: when an older one leaves, the next of this lease would be granted.
        for ticket_id in reversed(list(node.tickets or ())):
            self.leave(self._tickets[ticket_id], at)
        for hold_id in list(node.holds or ()):
            self._end_open_call(self._holds[hold_id], at)

    def _end_open_call(self, hold: Hold, at: float) -> None:
        if hold.is_dispatched:
            self.settle(hold, Ending.BROKEN if hold.is_sent else Ending.NOT_SENT, at)
        else:
            self.release(hold, at)

    # --- waiting for an agent's slot -------------------------------------------------------------

    def enter(
        self, parent: Lease, request: LeaseRequest, at: float, *, max_attempts: int | None = None
    ) -> Lease | Entry:
        """Begin an agent's lease as ``admit`` does, or take a place in line for it.

        An entry waits where the tree's ``admission`` is "wait" and every slot is taken, or where
        calls wait for the money that it would carve. Slot, carve and tree counters are taken
        together when its turn comes; the attempt of its tool counts at once.

        Raises:
            RefusedError: Waiting would not help, or is not allowed. Only counters changed.
            LedgerError: ``parent`` has ended.
        """
        if parent.is_ended:
            raise LedgerError(f"{parent.path} has ended; nothing can start below it")
        node, tool = parent.node, request.tool
        if tool is not None and max_attempts is not None:
            self._check_attempts(node, request.name, tool, max_attempts, at)
        lease = self._try_to_begin(node, request, at)
        if isinstance(lease, Lease):
            return lease
        if request.kind is _AGENT and self._may_wait(lease, node):
            return self._line_up(parent, request, at)
        self._record(Refused(at, node.id, lease, tool))
        raise self._why_no_start(lease, node, request)

    def leave_line(self, entry: Entry, at: float) -> None:
        """Leave the line without a trace. No effect on an entry that was answered."""
        if self._entries.pop(entry.id, None) is None:
            return
        self._stand_aside(entry)
        self._record(EntryLeft(at, entry.id))

    def park(self, lease: Lease, at: float) -> None:
        """Give an agent's slot to others while all it waits for are children.

        Its lease, place and wallet stay. A parked agent that waits to resume stops waiting.
        """
        node = lease.node
        assert node.kind is _AGENT and not lease.is_ended, node
        if not node.is_parked:
            self._record(Parked(at, node.id))
            self._rerun_line(at)
        elif node.waits_for_slot:
            self._leave_line_of_resumes(node)
            self._record(ResumeLeft(at, node.id))

    def resume(self, lease: Lease, at: float) -> bool:
        """Take a parked agent's slot back.

        Returns:
            True: it has one. False: it waits for one, before all starts of its run;
            ``lease.on_slot`` is called when it has it.
        """
        node = lease.node
        if not node.is_parked:
            return True
        if node.waits_for_slot:
            return False
        if not self._slots_are_taken():
            self._record(Resumed(at, node.id))
            return True
        self._record(ResumeQueued(at, node.id))
        self._resuming[node.id] = lease
        self._line.add(node.id, run=_run_of(node), is_resume=True, depth=node.depth)
        return False

    def _may_wait(self, code: str, node: Node) -> bool:
        """Whether a start that is refused for now is granted when others give something back."""
        if self._state.caps.admission != "wait":
            return False
        if code == "cave_subagent_concurrency_limit":
            return True
        if code != "cave_subagent_wallet_unavailable" or self._admissions_are_used_up(node):
            return False
        # A wallet that funds nothing has nothing to wait for.
        comes_back = self._slots_are_taken() or bool(node.wallet.queued)
        return comes_back and node.wallet.blocked_by() is None

    def _line_up(self, parent: Lease, request: LeaseRequest, at: float) -> Entry:
        self._last_id += 1
        entry = self._entries[self._last_id] = Entry(self._last_id, parent, request)
        self._record(EntryQueued(at, entry.id, parent.id, request.name, request.tool))
        self._stand_in_line(entry)
        return entry

    def _stand_in_line(self, entry: Entry) -> None:
        node = entry.parent.node
        if node.wallet.queued and entry.request.needs_money:
            self._entries_behind.setdefault(node.wallet.id, {})[entry.id] = None
        else:
            self._join_line(entry)

    def _join_line(self, entry: Entry) -> None:
        node = entry.parent.node
        self._line.add(entry.id, run=_run_of(node), is_resume=False, depth=node.depth + 1)

    def _stand_aside(self, entry: Entry) -> None:
        if entry.id in self._line:
            self._line.drop(entry.id)
            return
        wallet_id = entry.parent.node.wallet.id
        behind = self._entries_behind[wallet_id]
        del behind[entry.id]
        if not behind:
            del self._entries_behind[wallet_id]

    def _leave_line_of_resumes(self, node: Node) -> None:
        self._line.drop(node.id)
        del self._resuming[node.id]

    def _rerun_line(self, at: float) -> None:
        """Give free slots to whose turn it is, until there is none or nobody waits."""
        while self._line and not self._slots_are_taken():
            waiter = self._line.head()
            entry = self._entries.get(waiter)
            if entry is not None:
                self._answer(entry, at)
                continue
            self._line.grant(waiter)
            lease = self._resuming.pop(waiter)
            self._record(Resumed(at, waiter))
            _wake(lease.on_slot)

    def _answer(self, entry: Entry, at: float) -> None:
        """Begin, refuse or put off the start whose turn it is."""
        node, request = entry.parent.node, entry.request
        if entry.parent.takes_no_more or self.root.takes_no_more:
            self.leave_line(entry, at)
            _wake(entry.on_ready)
            return
        lease = self._try_to_begin(node, request, at, entry.id)
        if isinstance(lease, Lease):
            self._line.grant(entry.id)
            entry.outcome = lease
        elif node.wallet.queued and self._may_wait(lease, node):
            # Calls wait for the money that it would carve: the turn goes to the next.
            self._line.drop(entry.id)
            self._stand_in_line(entry)
            return
        else:
            self._line.drop(entry.id)
            self._record(Refused(at, node.id, lease, request.tool, entry.id))
            entry.outcome = self._why_no_start(lease, node, request)
        del self._entries[entry.id]
        _wake(entry.on_ready)

    def _try_to_begin(
        self, node: Node, request: LeaseRequest, at: float, entry: int | None = None
    ) -> Lease | str:
        """A lease, or the code of the limit in its way."""
        carve, least = _sizes(node.wallet, request)
        code = self._limit_in_the_way(node, request.kind, request.tool, carve, least, at)
        if code is not None:
            return code
        seconds = request.seconds
        return self._begin(
            node,
            request.name,
            request.kind,
            at,
            None if seconds is None else at + seconds,
            carve,
            request.set_aside,
            request.tool,
            entry,
        )

    def _why_no_start(self, code: str, node: Node, request: LeaseRequest) -> RefusedError:
        _, least = _sizes(node.wallet, request)
        return self._why_not(code, node, request.name, request.cap, least)

    def _slots_are_taken(self) -> bool:
        return _is_full(self._state.caps.max_concurrent_subagents, self._state.counters.active)

    def _admissions_are_used_up(self, node: Node) -> bool:
        caps, admitted = self._state.caps, self._state.counters.admitted
        return _is_full(caps.max_subagents, admitted) or self._has_all_descendants(node)

    def _has_all_descendants(self, node: Node) -> bool:
        return _is_full(self._state.caps.max_descendants, top_of(node).descendants)

    def _spawns_too_fast(self, at: float) -> bool:
        """Whether as many subagents as a minute may have were started in the minute before."""
        most, spawns = self._state.caps.max_spawns_per_minute, self._state.spawns
        return most is not None and len(spawns) >= most and at - spawns[-most] < MINUTE

    # --- what refuses a lease --------------------------------------------------------------------

    def _check_attempts(self, node: Node, name: str, tool: str, most: int, at: float) -> None:
        used = (node.attempts or {}).get(tool, 0)
        if used < most:
            return
        code = "cave_subagent_call_budget"
        self._record(Refused(at, node.id, code, None))
        raise self._refusal(
            code, node, name, node.path, f"calls of {tool}", "1", "0",
            "Its max_calls is used up for this run; answer with what is known.",
        )  # fmt: skip

    def _limit_in_the_way(
        self, node: Node, kind: Kind, tool: str | None, carve: int | None, least: int, at: float
    ) -> str | None:
        """The code of the limit that refuses a lease below ``node``, or None. Changes nothing.

        Args:
            carve: What its wallet would get; None: it draws on the parent's.
            least: What it must get, or what must be free to be set aside.
        """
        caps, counters = self._state.caps, self._state.counters
        is_agent = kind is _AGENT
        if is_agent and node.depth >= caps.max_depth:
            return "cave_subagent_depth_limit"
        is_tool_call = kind is _TOOL or tool is not None
        if is_tool_call and _is_full(caps.max_tool_calls, counters.tool_calls):
            return "cave_tool_call_budget_exceeded"
        if kind is _RUN and _is_full(caps.max_runs, counters.runs):
            return "cave_run_limit"
        if least:
            wallet = node.wallet
            gets = wallet.free if carve is None else carve
            if gets < least or wallet.queued or wallet.blocked_by() is not None:
                return "cave_subagent_wallet_unavailable"
        if is_agent:
            # A call that violates both limits counts as an invocation rejection only.
            most, most_active = caps.max_subagents, caps.max_concurrent_subagents
            if most is not None and counters.admitted >= most:
                return "cave_subagent_invocation_limit"
            if caps.max_descendants is not None and self._has_all_descendants(node):
                return "cave_subagent_breadth_limit"
            if caps.max_spawns_per_minute is not None and self._spawns_too_fast(at):
                return "cave_subagent_spawn_rate_limit"
            if most_active is not None and counters.active >= most_active:
                return "cave_subagent_concurrency_limit"
        return None

    def _why_not(
        self, code: str, node: Node, name: str, cap: int | None, least: int
    ) -> RefusedError:
        """Say in words what ``_limit_in_the_way`` found."""
        caps, counters = self._state.caps, self._state.counters
        match code:
            case "cave_subagent_depth_limit":
                return self._refusal(
                    code, node, name, "the tree", "levels of subagents", str(node.depth + 1),
                    str(caps.max_depth),
                    "Do this work here: asking to delegate it again cannot help.",
                )  # fmt: skip
            case "cave_tool_call_budget_exceeded":
                return self._refusal(
                    code, node, name, "the tree", "tool calls", "1", "0",
                    f"All {caps.max_tool_calls} tool calls of the tree are used.",
                )  # fmt: skip
            case "cave_run_limit":
                return self._refusal(
                    code, node, name, "the tree", "runs", "1", "0",
                    f"The tree was opened for {caps.max_runs} runs (max_runs).",
                )  # fmt: skip
            case "cave_subagent_invocation_limit":
                return self._refusal(
                    code, node, name, "the tree", "subagents", "1", "0",
                    f"All {caps.max_subagents} subagents of the tree were started "
                    "(max_subagents), and asking again cannot help. Go on without delegating.",
                )  # fmt: skip
            case "cave_subagent_breadth_limit":
                return self._refusal(
                    code, node, name, top_of(node).path, "subagents below it", "1", "0",
                    f"All {caps.max_descendants} that one run may ever start below it were "
                    "started (max_descendants), and asking again cannot help. Go on without "
                    "delegating.",
                )  # fmt: skip
            case "cave_subagent_spawn_rate_limit":
                return self._refusal(
                    code, node, name, "the tree", "subagent starts in a minute", "1", "0",
                    f"{caps.max_spawns_per_minute} were started within the last minute "
                    "(max_spawns_per_minute); asking again at once cannot help. Do other work "
                    "first, or go on without delegating.",
                )  # fmt: skip
            case "cave_subagent_concurrency_limit":
                return self._refusal(
                    code, node, name, "the tree", "concurrent subagents", "1", "0",
                    f"{counters.active} are active (max_concurrent_subagents); try again when "
                    "one has finished.",
                    held_by=self._active_paths(),
                )  # fmt: skip
            case _:
                wallet = node.wallet
                return self._refusal(
                    code, node, name, wallet.path, self._dimension(), self._amount(least),
                    self._amount(wallet.free), self._wallet_advice(wallet, cap, least),
                    held_by=self._holders(wallet),
                )  # fmt: skip

    def _wallet_advice(self, wallet: Wallet, cap: int | None, least: int) -> str:
        if wallet.blocked_by() is not None:
            return "That wallet funds nothing any more."
        if wallet.queued:
            return f"{wallet.queued} calls are waiting for money on it; they go first."
        if cap is not None and cap < least:
            return f"It may have at most {self._amount(cap)}; raise its cap."
        return (
            "Wait until a sibling has finished, ask for less (min_usd / min_tokens), or "
            "raise the budget."
        )

    # --- funding a call --------------------------------------------------------------------------

    def fund(self, lease: Lease, ask: Ask, at: float) -> Hold | Ticket | Stop:
        """Hold money for a call, or say how to wait for it, or why there will be none.

        A Hold is granted at once. A Ticket waits: set its ``on_ready``, then read ``outcome``.
        """
        assert not lease.is_ended, lease
        decided = self._decide(lease.node, ask, is_head=False)
        if isinstance(decided, int):
            return self._grant(lease, ask, decided, at, None)
        if isinstance(decided, Stop):
            return decided
        self._last_id += 1
        ticket = Ticket(self._last_id, lease, ask, decided)
        self._tickets[ticket.id] = ticket
        self._enqueue(ticket, at)
        return ticket

    def leave(self, ticket: Ticket, at: float) -> None:
        """Leave a queue without a trace. No effect on a ticket that was resolved."""
        if self._tickets.pop(ticket.id, None) is None:
            return
        self._dequeue(ticket)
        self._record(Left(at, ticket.id))
        # The one behind it may fit where it did not.
        self._rerun(ticket.wallet, at)
        if self._line:
            self._rerun_line(at)

    def dispatch(self, hold: Hold, at: float) -> bool | Stop:
        """Take a call slot and count the call, right before it is sent.

        Returns:
            True: send it. False: every slot is taken; ``on_slot`` is called once
            ``is_dispatched`` or ``stop`` is set. A Stop: the tree has no model calls left; the
            hold is still there to be released.

        Raises:
            LedgerError: It is dispatched, waits for a slot, or is over. Nothing changed.
        """
        if hold.is_dispatched or hold.id in self._slot_queue or hold.id not in self._holds:
            raise LedgerError(f"the hold {hold.id} of {hold.lease.path} was dispatched before")
        stop = self._why_no_call(hold)
        if stop is not None:
            return stop
        caps, counters = self._state.caps, self._state.counters
        if self._slot_queue or _is_full(caps.max_concurrent_calls, counters.calls_in_flight):
            self._slot_queue[hold.id] = hold
            self._record(SlotQueued(at, hold.id))
            return False
        hold.is_dispatched = True
        self._record(Dispatched(at, hold.id))
        return True

    def settle(
        self,
        hold: Hold,
        ending: Ending,
        at: float,
        *,
        price_of: PriceOf | None = None,
        answered_by: Price | None = None,
        note: str | None = None,
    ) -> Charge:
        """Charge a dispatched call by how it ended, and give its money and slot back.

        Raises:
            LedgerError: It was settled or released before, or never dispatched. Nothing changed.
        """
        if hold.id not in self._holds:
            raise LedgerError(f"the hold {hold.id} of {hold.lease.path} was settled before")
        if not hold.is_dispatched:
            raise LedgerError(
                f"the hold {hold.id} of {hold.lease.path} was never dispatched; release it"
            )
        # Before anything changes, because this asks a price list that is not ours.
        charge = charge_for(
            ending,
            hold.ask,
            hold.output_tokens,
            hold.progress,
            price_of=price_of,
            answered_by=answered_by,
        )
        del self._holds[hold.id]
        if (purse := hold.ask.purse) is not None:
            purse.settle(hold.amount, charge.usd if self.unit == "usd" else charge.tokens)
        self._record(Settled(at, hold.id, charge.usd, charge.tokens, charge.basis))
        hold.lease.recorder.lines.append(_line(hold, charge, note))
        self._after_charge(hold.lease.node.wallet, at)
        return charge

    def release(self, hold: Hold, at: float) -> None:
        """Give back the hold of a call that was never dispatched. No effect on a settled one."""
        if hold.id not in self._holds:
            return
        assert not hold.is_dispatched, hold
        del self._holds[hold.id]
        if hold.ask.purse is not None:
            hold.ask.purse.give_back(hold.amount)
        self._slot_queue.pop(hold.id, None)
        self._record(HoldReleased(at, hold.id))
        self._rerun_upwards(hold.lease.node.wallet, at)
        if self._line:
            self._rerun_line(at)

    def _decide(self, node: Node, ask: Ask, *, is_head: bool) -> int | Wallet | Stop:
        """The output tokens to fund, the wallet to wait on, or the stop. Changes nothing."""
        wallet = node.wallet
        blocked = self._blocked(node, ask)
        if blocked is not None:
            return blocked
        free, most = wallet.free, ask.output_tokens
        if ask.purse is not None:
            paid = ask.purse_output(self.unit)
            if paid is None:
                return self._purse_is_empty(ask, ask.purse, node)
            most, free = paid, min(free, ask.purse.free)
        may_pass = is_head or not wallet.queued
        if may_pass and ask.amount(self.unit, most) <= free:
            return most
        if ask.wait and (wallet.open_holds or not may_pass):
            return wallet
        if ask.clamp and may_pass:
            output = ask.largest_output(self.unit, free)
            if output is not None:
                return output
        return self._stop("budget_exhausted", wallet, node, ask)

    def _blocked(self, node: Node, ask: Ask) -> Wallet | Stop | None:
        over_target: Wallet | None = None
        up: Wallet | None = node.wallet
        while up is not None:
            if up.is_revoked:
                return self._stop("wallet_revoked", up, node, ask)
            if up.is_breached:
                return self._stop("budget_exhausted", up, node, ask)
            if over_target is None and up.is_over_target:
                over_target = up
            up = up.parent
        if over_target is None:
            return None
        if over_target.open_holds and ask.wait:
            return over_target
        return self._stop("budget_exhausted", over_target, node, ask)

    def _grant(
        self, lease: Lease, ask: Ask, output_tokens: int, at: float, ticket: Ticket | None
    ) -> Hold:
        amount = ask.amount(self.unit, output_tokens)
        self._last_id += 1
        hold = Hold(self._last_id, lease, ask, output_tokens, amount, Progress())
        self._holds[hold.id] = hold
        if ask.purse is not None:
            ask.purse.hold(amount)
        ticket_id = None if ticket is None else ticket.id
        node = lease.node
        self._record(Held(at, hold.id, node.id, node.wallet.id, amount, ticket_id))
        return hold

    def _purse_is_empty(self, ask: Ask, purse: Purse, node: Node) -> Stop:
        least = ask.amount(self.unit, min(ask.output_floor_tokens, ask.output_tokens))
        return Stop(
            "retry_budget",
            self._refusal(
                "retry-budget", node, "", "the retry purse", self._dimension(),
                self._amount(least), self._amount(purse.free),
                "Give retries more (max_spend_usd / max_spend_tokens of tw.Retry).",
            ),
        )  # fmt: skip

    def _why_no_call(self, hold: Hold) -> Stop | None:
        caps, counters = self._state.caps, self._state.counters
        if not _is_full(caps.max_model_calls, counters.model_calls):
            return None
        return Stop(
            "call_budget_exhausted",
            self._refusal(
                "cave_max_model_calls", hold.lease.node, "", "the tree", "model calls", "1", "0",
                f"All {caps.max_model_calls} model calls of the tree are used (max_model_calls).",
            ),
        )  # fmt: skip

    # --- queues ----------------------------------------------------------------------------------

    def _enqueue(self, ticket: Ticket, at: float) -> None:
        wallet = ticket.wallet
        queue = self._money_queues.get(wallet.id)
        if queue is None:
            queue = self._money_queues[wallet.id] = OrderedDict()
            for up in _upwards(wallet):
                self._queues_below.setdefault(up.id, {})[wallet.id] = None
        queue[ticket.id] = ticket
        self._record(Queued(at, ticket.id, ticket.lease.id, wallet.id))

    def _dequeue(self, ticket: Ticket) -> None:
        queue = self._money_queues[ticket.wallet.id]
        del queue[ticket.id]
        if queue:
            return
        del self._money_queues[ticket.wallet.id]
        for entry_id in self._entries_behind.pop(ticket.wallet.id, ()):
            self._join_line(self._entries[entry_id])
        for up in _upwards(ticket.wallet):
            below = self._queues_below[up.id]
            del below[ticket.wallet.id]
            if not below:
                del self._queues_below[up.id]

    def _after_charge(self, wallet: Wallet, at: float) -> None:
        self._rerun_slots(at)
        if not self._money_queues:
            return
        self._rerun_upwards(wallet, at)
        up: Wallet | None = wallet
        while up is not None:
            if up.is_breached:
                self._rerun_below(up, at)
            up = up.parent
        if self._line:
            self._rerun_line(at)

    def _rerun_upwards(self, wallet: Wallet, at: float) -> None:
        up: Wallet | None = wallet
        while up is not None and self._money_queues:
            self._rerun(up, at)
            up = up.parent

    def _rerun_below(self, top: Wallet, at: float) -> None:
        """Re-run every queue on ``top`` and beneath it. O(those), whoever waits elsewhere."""
        for wallet_id in list(self._queues_below.get(top.id, ())):
            self._rerun(self._state.wallets[wallet_id], at)
        if self._line:
            self._rerun_line(at)

    def _rerun(self, wallet: Wallet, at: float) -> None:
        """Resolve tickets from the head of a wallet's queue until one has to stay."""
        while (queue := self._money_queues.get(wallet.id)) is not None:
            ticket = next(iter(queue.values()))
            node = ticket.lease.node
            decided = self._decide(node, ticket.ask, is_head=node.wallet is wallet)
            if decided is wallet:
                return
            self._resolve(ticket, decided, at)

    def _resolve(self, ticket: Ticket, decided: int | Wallet | Stop, at: float) -> None:
        self._dequeue(ticket)
        if isinstance(decided, Wallet):
            # It waited on a ceiling above and now waits on another wallet.
            self._record(Left(at, ticket.id))
            ticket.wallet = decided
            self._enqueue(ticket, at)
            return
        del self._tickets[ticket.id]
        if isinstance(decided, Stop):
            self._record(Left(at, ticket.id))
            ticket.outcome = decided
        else:
            ticket.outcome = self._grant(ticket.lease, ticket.ask, decided, at, ticket)
        if ticket.on_ready is not None:
            ticket.on_ready()

    def _rerun_slots(self, at: float) -> None:
        caps, counters = self._state.caps, self._state.counters
        while self._slot_queue:
            hold = next(iter(self._slot_queue.values()))
            hold.stop = self._why_no_call(hold)
            if hold.stop is not None:
                self._record(SlotLeft(at, hold.id))
            elif _is_full(caps.max_concurrent_calls, counters.calls_in_flight):
                return
            else:
                hold.is_dispatched = True
                self._record(Dispatched(at, hold.id))
            del self._slot_queue[hold.id]
            if hold.on_slot is not None:
                hold.on_slot()

    # --- limits that change while running --------------------------------------------------------

    def release_tranche(self, lease: Lease, amount: int, reason: str, at: float) -> None:
        """Release more of the ceiling of the lease's own wallet.

        Raises:
            LedgerError: With the contract's code; nothing changed.
        """
        wallet = lease.node.wallet
        if type(amount) is not int or amount <= 0:
            raise LedgerError(f"{amount!r} cannot be released", code="cave_budget_release_invalid")
        if not reason.strip():
            raise LedgerError("say why", code="cave_budget_release_reason_required")
        if wallet.is_revoked:
            raise LedgerError(f"{wallet.path} is revoked", code="cave_budget_revoked")
        if wallet.is_breached:
            raise LedgerError(f"{wallet.path} is overspent", code="cave_budget_cap_breached")
        if amount > wallet.max - wallet.released:
            left = self._amount(wallet.max - wallet.released)
            raise LedgerError(
                f"only {left} of {wallet.path} is not released yet",
                code="cave_budget_release_exceeds_max",
            )
        self._record(TrancheReleased(at, wallet.id, amount, reason))
        self._rerun_below(wallet, at)

    def revoke(self, lease: Lease, reason: str, at: float) -> None:
        """Close the lease's wallet for good: it and all below it fund nothing any more."""
        wallet = lease.node.wallet
        if not wallet.is_revoked:
            self._record(Revoked(at, wallet.id, reason))
            self._rerun_below(wallet, at)
            # One of its calls may wait above, on a wallet that is over its lowered ceiling.
            self._rerun_upwards(wallet, at)

    def lower_max(self, lease: Lease, to: int, at: float) -> None:
        """Lower a ceiling as far as what is committed allows, and further as that comes back."""
        wallet = lease.node.wallet
        if type(to) is not int or not 0 <= to <= wallet.max:
            raise LedgerError(f"{to!r} is not below the ceiling", code="cave_budget_max_invalid")
        self._record(MaxLowered(at, wallet.id, to))
        self._rerun_below(wallet, at)
        self._rerun_upwards(wallet, at)

    def raise_max(self, lease: Lease, to: int, at: float) -> None:
        """Raise a ceiling; a carved wallet takes the difference from its parent.

        Raises:
            LedgerError: It is no raise, or the parent has not that much free. Nothing changed.
        """
        wallet = lease.node.wallet
        if type(to) is not int or to < wallet.max:
            raise LedgerError(f"{to!r} is below the ceiling", code="cave_budget_max_invalid")
        parent = wallet.parent
        if parent is not None:
            more = max(0, to - wallet.settled) - wallet.carve_left
            if parent.queued or parent.blocked_by() is not None or more > parent.free:
                raise LedgerError(
                    f"{parent.path} cannot give {self._amount(more)} more to {wallet.path}",
                    code="cave_subagent_wallet_unavailable",
                )
        self._record(MaxRaised(at, wallet.id, to))
        self._rerun_below(wallet, at)

    def set_cap(self, name: str, to: int | None, at: float) -> None:
        """Change one of the tree's ``Caps`` by name. A lowered cap may stay exceeded for a while.

        Raises:
            LedgerError: There is no such cap, or the value is out of range. Nothing changed.
        """
        if name not in attrs.fields_dict(Caps) or name == "admission":
            raise LedgerError(f"there is no cap {name!r}", code="cave_limit_invalid")
        if to is None and name == "max_depth":
            raise LedgerError("max_depth is always a number", code="cave_limit_invalid")
        if to is not None and (type(to) is not int or to < 1):
            raise LedgerError(f"{name} is at least 1, not {to!r}", code="cave_limit_invalid")
        self._record(CapChanged(at, name, to))
        self._rerun_slots(at)
        self._rerun_line(at)

    # --- looking at it ---------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        """The live counters. Read them; only the ledger changes them."""
        return self._state.counters

    @property
    def caps(self) -> Caps:
        return self._state.caps

    @property
    def journal(self) -> Journal:
        return self._journal

    @property
    def state(self) -> TreeState:
        """The live state. Read it; only the ledger changes it."""
        return self._state

    def snapshot(self) -> dict[str, Any]:
        """What is so right now, by path. USD amounts are Decimals, token amounts ints."""
        state = self._state
        return {
            "unit": self.unit,
            "nodes": {node.path: self._node_view(node) for node in state.nodes.values()},
            "wallets": {w.path: self._wallet_view(w) for w in state.wallets.values()},
            "counters": attrs.asdict(state.counters),
            "waiters": [self._waiter_view(t, "money") for t in self._tickets.values()]
            + [
                {"path": h.lease.path, "waits_for": "call_slot", "on": "the tree"}
                for h in self._slot_queue.values()
            ]
            + [
                {
                    "path": f"{e.parent.path}/{e.request.name}",
                    "waits_for": "subagent_slot",
                    "on": "the tree",
                }
                for e in self._entries.values()
            ]
            + [
                {"path": lease.path, "waits_for": "subagent_slot", "on": "the tree"}
                for lease in self._resuming.values()
            ],
        }

    def check(self) -> None:
        """Assert every invariant that can be seen from the state (W1 to W4, W7). O(what lives)."""
        self._state.check()
        state = self._state
        assert set(self._holds) == set(state.holds), (self._holds, state.holds)
        assert set(self._tickets) == set(state.waiting), (self._tickets, state.waiting)
        queued = [t for q in self._money_queues.values() for t in q]
        assert sorted(queued) == sorted(self._tickets), self._money_queues
        assert all(self._money_queues.values()), self._money_queues
        below: dict[int, set[int]] = {}
        for wallet_id in self._money_queues:
            for up in _upwards(state.wallets[wallet_id]):
                below.setdefault(up.id, set()).add(wallet_id)
        assert {i: set(ids) for i, ids in self._queues_below.items()} == below, self._queues_below
        for hold in self._holds.values():
            assert hold.is_dispatched == state.holds[hold.id].is_dispatched, hold
        waiting = {i for i, hold in state.holds.items() if hold.waits_for_slot}
        assert set(self._slot_queue) == waiting, (self._slot_queue, waiting)
        assert state.counters.queued_slots == len(waiting), state.counters
        self._check_purses()
        self._check_line()
        self._check_nobody_waits_in_vain()

    def check_closed(self) -> None:
        """Assert W6: nothing but the root, or not even that, is left. O(what lives)."""
        self.check()
        state = self._state
        assert set(state.nodes) <= {0}, [n.path for n in state.nodes.values()]
        assert set(state.wallets) == {0}, [w.path for w in state.wallets.values()]
        root = state.wallets[0]
        assert root.held == root.carved == root.set_aside == root.queued == 0, root
        counters = state.counters
        assert counters.active == counters.calls_in_flight == 0, counters
        assert counters.queued_money == counters.queued_slots == 0, counters
        assert counters.parked == counters.queued_entries == counters.queued_resumes == 0, counters

    def _check_purses(self) -> None:
        held: dict[int, int] = {}
        for hold in self._holds.values():
            purse = hold.ask.purse
            while purse is not None:
                purse.check()
                held[id(purse)] = held.get(id(purse), 0) + hold.amount
                assert held[id(purse)] <= purse.held, (purse, hold)
                purse = purse.parent

    def _check_line(self) -> None:
        state = self._state
        assert set(self._entries) == set(state.entries), (self._entries, state.entries)
        wanting = {node.id for node in state.nodes.values() if node.waits_for_slot}
        assert set(self._resuming) == wanting, (self._resuming, wanting)
        behind = [i for ids in self._entries_behind.values() for i in ids]
        assert all(self._entries_behind.values()), self._entries_behind
        for wallet_id in self._entries_behind:
            assert state.wallets[wallet_id].queued, wallet_id
        in_line = {i for i in (*self._entries, *self._resuming) if i in self._line}
        assert len(in_line) == len(self._line), self._line
        assert sorted([*in_line, *behind]) == sorted([*self._entries, *self._resuming]), behind
        assert not self._line or self._slots_are_taken(), self._line

    def _check_nobody_waits_in_vain(self) -> None:
        for wallet_id, queue in self._money_queues.items():
            head = next(iter(queue.values()))
            node = head.lease.node
            wallet = self._state.wallets[wallet_id]
            assert self._decide(node, head.ask, is_head=node.wallet is wallet) is wallet, head
        caps, counters = self._state.caps, self._state.counters
        if self._slot_queue:
            assert _is_full(caps.max_concurrent_calls, counters.calls_in_flight), counters

    def _node_view(self, node: Node) -> dict[str, Any]:
        return {
            "kind": node.kind.value,
            "wallet": node.wallet.path,
            "depth": max(0, node.depth),
            "deadline": node.deadline,
            "spent": amount_of("usd", node.usd),
            "tokens": node.tokens,
            "own_spent": amount_of("usd", node.own_usd),
            "own_tokens": node.own_tokens,
            "children": node.live_children,
            "open_calls": len(node.holds or ()),
            "waiting": len(node.tickets or ()),
            "parked": node.is_parked,
        }

    def _wallet_view(self, wallet: Wallet) -> dict[str, Any]:
        columns = ("released", "settled", "held", "carved", "set_aside", "overrun", "free")
        view: dict[str, Any] = {
            name: amount_of(self.unit, getattr(wallet, name)) for name in columns
        }
        if not wallet.is_bounded:
            view["released"] = view["free"] = None
        view["max"] = amount_of(self.unit, wallet.max) if wallet.is_bounded else None
        view["queued"] = wallet.queued
        view["open_holds"] = wallet.open_holds
        view["breached"] = wallet.is_breached
        view["revoked"] = wallet.is_revoked
        view["over_target"] = wallet.is_over_target
        return view

    def _waiter_view(self, ticket: Ticket, what: str) -> dict[str, Any]:
        return {
            "path": ticket.lease.path,
            "waits_for": what,
            "on": ticket.wallet.path,
            "asked": amount_of(self.unit, ticket.ask.amount(self.unit, ticket.ask.output_tokens)),
        }

    # --- saying why ------------------------------------------------------------------------------

    def _stop(self, reason: str, at_wallet: Wallet, node: Node, ask: Ask) -> Stop:
        may_shrink_to = ask.output_floor_tokens if ask.clamp else ask.output_tokens
        least = ask.amount(self.unit, min(ask.output_tokens, may_shrink_to))
        # A wallet that funds nothing has nothing left, whatever its columns say.
        left = at_wallet.free if at_wallet.blocked_by() is None else 0
        advice = {
            "wallet_revoked": "That wallet was revoked.",
        }.get(reason, "Raise the budget, ask for less output, or shorten the history.")
        code = {"wallet_revoked": "cave_budget_revoked"}.get(reason, "cave_budget_exhausted")
        refusal = RefusedError(
            code,
            node=node.path,
            at=at_wallet.path,
            dimension=self._dimension(),
            asked=f"at least {self._amount(least)}",
            left=self._amount(left),
            held_by=self._holders(at_wallet),
            advice=advice,
        )
        return Stop(reason, refusal)

    def _refusal(
        self,
        code: str,
        node: Node,
        name: str,
        at: str,
        dimension: str,
        asked: str,
        left: str,
        advice: str,
        *,
        held_by: tuple[str, ...] = (),
    ) -> RefusedError:
        return RefusedError(
            code,
            node=f"{node.path}/{name}" if name else node.path,
            at=at,
            dimension=dimension,
            asked=asked,
            left=left,
            held_by=held_by,
            advice=advice,
        )

    def _holders(self, wallet: Wallet) -> tuple[str, ...]:
        # Three names say enough; a look at all holders would cost more than the refusal.
        calls = islice(reversed(self._holds.values()), 64)
        carves = islice(reversed(self._state.wallets.values()), 64)
        holding = chain(
            (h.lease.path for h in calls if h.lease.node.wallet is wallet and h.amount),
            (w.path for w in carves if w.parent is wallet and w.carve_left),
        )
        return tuple(islice(dict.fromkeys(holding), 3))

    def _active_paths(self) -> tuple[str, ...]:
        alive = islice(self._state.nodes.values(), 64)
        return tuple(islice((n.path for n in alive if n.kind is _AGENT), 3))

    def _dimension(self) -> str:
        return "USD" if self.unit == "usd" else "tokens"

    def _amount(self, amount: int) -> str:
        return f"{amount_of(self.unit, amount):f}"


def refusal_row(refused: RefusedError) -> Refusal:
    """What a receipt keeps of a refusal."""
    return Refusal(code=refused.code, message=str(refused))


def _carve_sizes(wallet: Wallet, cap: int, min_cap: int | None, set_aside: int) -> tuple[int, int]:
    """What a carve of at most ``cap`` gets right now, and the least that is worth a start."""
    free = wallet.free
    # The reserve is set aside on the wallet that the node draws on: inside its own carve.
    least = (cap if min_cap is None else min_cap) or 1
    # Written out, because every start with a wallet comes by here.
    return cap if cap < free else free, least if least > set_aside else set_aside


def _sizes(wallet: Wallet, request: LeaseRequest) -> tuple[int | None, int]:
    if request.cap is None:
        return None, request.set_aside
    return _carve_sizes(wallet, request.cap, request.min_cap, request.set_aside)


def _run_of(node: Node) -> int:
    """The node right below the root that this one belongs to: a top-level run."""
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
    return node.id


def _wake(waiter: Wake | None) -> None:
    if waiter is not None:
        waiter()


def _upwards(wallet: Wallet | None) -> Iterator[Wallet]:
    while wallet is not None:
        yield wallet
        wallet = wallet.parent


def _is_full(cap: int | None, used: int) -> bool:
    return cap is not None and used >= cap


def _line(hold: Hold, charge: Charge, note: str | None) -> Line:
    ask = hold.ask
    answered = hold.progress.model or ask.model
    return line_for(
        charge,
        purpose=ask.purpose,
        provider=ask.provider,
        model=answered,
        asked_model=ask.model if answered != ask.model else None,
        output_limit=hold.output_tokens,
        clamped_from=hold.clamped_from,
        note=note,
    )
