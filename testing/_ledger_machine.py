"""A machine that does to a ``TreeLedger`` whatever can be done to one, in any order.

After every step the ledger's own ``check()`` holds, its state is what the ``Books`` say, and the
journal folds to it. Subclass ``LedgerMachine`` to run other units or other ledgers through it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, ClassVar, TypeAlias

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from treewarden.ledgers import (
    Ask,
    Caps,
    Ending,
    Entry,
    Event,
    Hold,
    Kind,
    Lease,
    LeaseRequest,
    Outcome,
    Price,
    Stop,
    Ticket,
    TreeLedger,
    Unit,
    fold,
)
from treewarden.protocols import LedgerError, RefusedError, Usage

from ._books import Account, Books, Place, Rate, Want

RATES = {
    "cheap": Rate(input=3, output=5, cache_read=1, cache_write=4),
    "dear": Rate(input=6, output=11, cache_read=2, cache_write=9),
    "inner": Rate(input=2, output=2, cache_read=1, cache_write=3),
}
PRICES = {model: rate.price() for model, rate in RATES.items()}

History: TypeAlias = Sequence[tuple[str, Mapping[str, Any]]]
"""Rules by their names, with the values they are called with."""

few = st.integers(0, 7)
caps_at_first = st.builds(
    Caps,
    max_runs=st.none() | st.integers(1, 3),
    max_depth=st.integers(1, 3),
    max_subagents=st.none() | st.integers(1, 6),
    max_concurrent_subagents=st.none() | st.integers(1, 3),
    max_concurrent_calls=st.sampled_from([None, 1, 2]),
    max_model_calls=st.none() | st.integers(1, 8),
    max_tool_calls=st.none() | st.integers(1, 3),
    max_descendants=st.none() | st.none() | st.integers(1, 4),
    max_spawns_per_minute=st.none() | st.none() | st.integers(1, 3),
    admission=st.sampled_from(["reject", "wait", "wait"]),
)
asks = st.builds(
    Ask,
    input_tokens=st.integers(0, 6),
    output_tokens=st.integers(1, 12),
    price=st.none(),
    can_write_cache=st.booleans(),
    output_floor_tokens=st.integers(1, 5),
    clamp=st.booleans(),
    # Mostly they wait: a queue needs company.
    wait=st.sampled_from([True, True, True, False]),
    reasons_invisibly=st.sampled_from([False, False, True]),
    bills_after_disconnect=st.sampled_from([False, False, True]),
)
readable_usages = st.builds(
    Usage,
    input=st.integers(0, 6),
    output=st.integers(0, 14),
    cache_read=st.integers(0, 3),
    cache_write=st.integers(0, 3),
    extra=st.sampled_from(
        [
            (),
            (),
            (Usage(input=2, output=1),),
            (Usage(input=2, output=1, model="inner"),),
            (Usage(input=1, model="nobody knows"),),
        ]
    ),
    reported_cost_usd=st.sampled_from([None, None, None, Decimal("0.000000000007")]),
)
endings = st.sampled_from([*Ending, Ending.FINISHED, Ending.FINISHED])
unreadable_usages = st.sampled_from([Usage(input=-1), Usage(output=2, reasoning=3)])


def _settle_without_a_price_list(ledger: TreeLedger, hold: Hold, at: float) -> None:
    """Nobody's error may lose a hold: it can still be settled after."""

    def fail(model: str) -> Price:
        raise OSError(model)

    kept, progress = hold.progress.usage, hold.progress
    progress.usage = Usage(input=1, extra=(Usage(input=1, model="other"),))
    try:
        ledger.settle(hold, Ending.FINISHED, at, price_of=fail, answered_by=PRICES["cheap"])
    finally:
        progress.usage = kept


@attrs.frozen
class Misuse:
    """What only a bug in the caller would do."""

    # Whom it can be done to just now.
    whom: Callable[[LedgerMachine], Sequence[Any]]
    act: Callable[[TreeLedger, Any, float], object]
    # What it raises; None: it has no effect, and says nothing.
    error: type[Exception] | None = LedgerError


MISUSES = {
    "admit below what has ended": Misuse(
        lambda machine: machine.ended,
        lambda ledger, lease, at: ledger.admit(lease, "x", kind=Kind.AGENT, at=at),
    ),
    "end twice": Misuse(
        lambda machine: machine.ended, lambda ledger, lease, at: ledger.end(lease, Outcome.OK, at)
    ),
    "end a parent": Misuse(
        lambda machine: machine.parents, lambda ledger, lease, at: ledger.end(lease, Outcome.OK, at)
    ),
    "dispatch twice": Misuse(
        lambda machine: [*machine.sent_holds, *machine.holds_in_line],
        lambda ledger, hold, at: ledger.dispatch(hold, at),
    ),
    "settle twice": Misuse(
        lambda machine: machine.closed_holds,
        lambda ledger, hold, at: ledger.settle(hold, Ending.FINISHED, at),
    ),
    "settle what was never dispatched": Misuse(
        lambda machine: machine.unsent_holds,
        lambda ledger, hold, at: ledger.settle(hold, Ending.FINISHED, at),
    ),
    "settle without a price list": Misuse(
        lambda machine: machine.sent_holds, _settle_without_a_price_list, OSError
    ),
    "release twice": Misuse(
        lambda machine: machine.closed_holds,
        lambda ledger, hold, at: ledger.release(hold, at),
        None,
    ),
}


class LedgerMachine(RuleBasedStateMachine):
    """Any order of calls keeps the books balanced; ``Books`` is the model."""

    unit: ClassVar[Unit] = "usd"
    # Models that a call may ask for; None is one without a price.
    models: ClassVar[tuple[str | None, ...]] = ("cheap", "dear")
    # What ceilings are divided by, where calls are counted in smaller numbers.
    shrink: ClassVar[int] = 1
    # How many events the journal keeps before it may take a snapshot: few, so that it does.
    keep: ClassVar[int] = 4

    def __init__(self) -> None:
        super().__init__()
        self.at = 0.0
        self.books = Books(self.unit, RATES)
        self.events: list[Event] = []
        # Leases by node id, all that ever were.
        self.leases: dict[int, Lease] = {}
        self.tickets: dict[int, Ticket] = {}
        self.left: set[int] = set()
        self.holds: dict[int, Hold] = {}
        # How often each ticket and slot waiter was told.
        self.told: dict[int, int] = {}
        self.slots_told: dict[int, int] = {}
        # Entries by their number, and how often each was told; the same of parked agents.
        self.entries: dict[int, Entry] = {}
        self.entries_told: dict[int, int] = {}
        self.resumes_told: dict[int, int] = {}
        # The state after the last step, and whether that step was judged to the end.
        self.plain: dict[str, Any] = {}
        self.is_sound = False

    # The ledger to be tried; a subclass may try another.
    ledger_class: ClassVar[type[TreeLedger]] = TreeLedger

    @initialize(
        max=st.none() | st.integers(20, 260),
        staged=st.none() | st.integers(1, 99),
        deadline=st.none() | st.just(5.0),
        caps=caps_at_first,
        actors=st.lists(st.tuples(few, st.booleans(), asks), max_size=4),
    )
    def open(
        self,
        max: int | None,
        staged: int | None,
        deadline: float | None,
        caps: Caps,
        actors: list[tuple[int, bool, Ask]],
    ) -> None:
        """A tree in which something goes on, for a history should not be spent on getting there.

        Args:
            actors: Below whom each is, whether it has a wallet of its own, and what it asks for.
        """
        max = None if max is None else max // self.shrink
        initial = None if max is None or staged is None else 1 + max * staged // 100
        self.ledger = self.ledger_class(
            unit=self.unit, max=max, initial=initial, deadline=deadline, caps=caps, sink=self.saw
        )
        self.ledger.journal._keep = self.keep  # pyright: ignore[reportPrivateUsage]
        self.leases[0] = self.ledger.root
        self.books_agree()
        for below, has_wallet, ask in actors:
            parent = self.place(below)
            grant = min(60, self.books.free(parent.account)) if has_wallet else None
            if grant is None or (grant > 0 and not self.books.queues.get(parent.account.id)):
                self.admit_one(parent, Kind.SERVICE, cap=grant)
                self.books_agree()
            self.fund_one(self.places[-1], ask, 0)
            self.books_agree()

    def saw(self, event: Event) -> None:
        """The sink: every event is judged as it happens."""
        self.events.append(event)
        self.books.see(event)

    # --- what there is to choose from ------------------------------------------------------------

    @property
    def places(self) -> list[Place]:
        return self.books.open_places()

    @property
    def waiting(self) -> list[Ticket]:
        return [self.tickets[i] for i in self.books.requests]

    @property
    def open_holds(self) -> list[Hold]:
        return [self.holds[i] for i in self.books.calls]

    @property
    def sent_holds(self) -> list[Hold]:
        return [h for h in self.open_holds if self.books.calls[h.id].is_dispatched]

    @property
    def unsent_holds(self) -> list[Hold]:
        return [h for h in self.open_holds if not self.books.calls[h.id].is_dispatched]

    @property
    def holds_in_line(self) -> list[Hold]:
        """Those that wait for a call slot."""
        return [self.holds[i] for i in self.books.slots]

    @property
    def closed_holds(self) -> list[Hold]:
        return [hold for i, hold in self.holds.items() if i not in self.books.calls]

    @property
    def ended(self) -> list[Lease]:
        return [lease for i, lease in self.leases.items() if not self.books.places[i].is_open]

    @property
    def parents(self) -> list[Lease]:
        return [self.leases[p.id] for p in self.places if p.live_children]

    def place(self, which: int) -> Place:
        return self.places[which % len(self.places)]

    def now(self, what: str, subject: int = 0) -> float:
        """Begin a step: say what is wanted, and give it an instant of its own."""
        self.is_sound = False
        self.books.want = Want(what, subject)
        self.books.ending = self.books.asking = None
        self.at += 1
        return self.at

    def assert_nothing_changed(self) -> None:
        assert self.ledger.state.plain() == self.plain

    @rule(seconds=st.sampled_from([28, 58, 59, 60]))
    def let_time_pass(self, seconds: int) -> None:
        """A step is a second; what is limited by the minute needs more."""
        self.now("nothing")
        self.at += seconds

    # --- leases ----------------------------------------------------------------------------------

    @rule(
        below=few,
        kind=st.sampled_from([Kind.RUN, Kind.AGENT, Kind.AGENT, Kind.AGENT, Kind.TOOL]),
        cap=st.none() | st.integers(0, 150),
        least=st.none() | st.integers(0, 20),
        set_aside=st.just(0) | st.integers(0, 40),
        deadline=st.none() | st.integers(1, 9).map(float),
        attempts=st.none() | st.integers(1, 3),
    )
    def admit(
        self,
        below: int,
        kind: Kind,
        cap: int | None,
        least: int | None,
        set_aside: int,
        deadline: float | None,
        attempts: int | None,
    ) -> None:
        tool = "research" if attempts is not None and kind is Kind.AGENT else None
        self.admit_one(
            self.place(below),
            kind,
            cap=cap,
            min_cap=least,
            set_aside=set_aside,
            deadline=deadline,
            tool=tool,
            max_attempts=attempts,
        )

    def admit_one(
        self,
        parent: Place,
        kind: Kind,
        *,
        cap: int | None = None,
        min_cap: int | None = None,
        set_aside: int = 0,
        deadline: float | None = None,
        tool: str | None = None,
        max_attempts: int | None = None,
    ) -> None:
        expected = self.books.why_not(
            parent,
            kind,
            cap=cap,
            min_cap=min_cap,
            set_aside=set_aside,
            tool=tool,
            max_attempts=max_attempts,
            at=self.at + 1,
        )
        if kind is Kind.AGENT and deadline is None and self.books.caps.admission == "wait":
            self.enter_one(parent, expected, cap, min_cap, set_aside, tool, max_attempts)
            return
        grant = None if cap is None else min(cap, self.books.free(parent.account))
        at = self.now("admit", parent.id)
        try:
            lease = self.ledger.admit(
                self.leases[parent.id],
                "x",
                kind=kind,
                at=at,
                cap=cap,
                min_cap=min_cap,
                set_aside=set_aside,
                deadline=deadline,
                tool=tool,
                max_attempts=max_attempts,
            )
        except RefusedError as refused:
            assert refused.code == expected, (refused.code, expected)
            self.assert_only_counted(parent)
            self.assert_is_told(refused, parent.path)
            return
        assert expected is None, expected
        if grant is not None:
            assert lease.node.wallet.max == grant
        assert lease.node.owns_wallet == (cap is not None)
        assert lease.node.started_at == at
        self.leases[lease.id] = lease

    def enter_one(
        self,
        parent: Place,
        expected: str | None,
        cap: int | None,
        min_cap: int | None,
        set_aside: int,
        tool: str | None,
        max_attempts: int | None,
    ) -> None:
        """Start an agent below ``parent``, or line up for it."""
        waits = expected is not None and self.books.may_wait(expected, parent)
        request = LeaseRequest("x", Kind.AGENT, cap, min_cap, set_aside, None, tool)
        at = self.now("admit", parent.id)
        self.books.starting = attrs.asdict(request)
        try:
            got = self.ledger.enter(self.leases[parent.id], request, at, max_attempts=max_attempts)
        except RefusedError as refused:
            assert refused.code == expected and not waits, (refused.code, expected)
            self.assert_only_counted(parent)
            self.assert_is_told(refused, parent.path)
            return
        if isinstance(got, Entry):
            assert waits, expected
            self.entries[got.id] = got
            self.entries_told[got.id] = 0
            got.on_ready = partial(self.answered, got)
        else:
            assert expected is None, expected
            self.leases[got.id] = got

    def answered(self, entry: Entry) -> None:
        """An entry is told; by then it must be able to read what came of it."""
        self.entries_told[entry.id] += 1
        outcome = entry.outcome
        if isinstance(outcome, Lease):
            self.leases[outcome.id] = outcome
        elif outcome is not None:
            self.assert_is_told(outcome, entry.parent.path)
        else:
            assert entry.parent.takes_no_more or self.ledger.root.takes_no_more

    @precondition(lambda self: self.books.entries)
    @rule(which=few)
    def leave_line(self, which: int) -> None:
        entry = self.entries[self.books.entries[which % len(self.books.entries)]]
        self.ledger.leave_line(entry, self.now("leave_line", entry.id))
        assert entry.id not in self.books.line
        assert self.entries_told[entry.id] == 0

    @property
    def agents(self) -> list[Place]:
        return [place for place in self.places if place.kind is Kind.AGENT]

    @precondition(lambda self: self.agents)
    @rule(which=few)
    def park(self, which: int) -> None:
        place = self.agents[which % len(self.agents)]
        was = place.is_parked, place.id in self.books.line
        self.ledger.park(self.leases[place.id], self.now("park", place.id))
        assert place.is_parked and place.id not in self.books.line
        if was == (True, False):
            self.assert_nothing_changed()

    @precondition(lambda self: self.books.parked)
    @rule(which=few)
    def resume(self, which: int) -> None:
        parked = [place for place in self.agents if place.is_parked]
        place = parked[which % len(parked)]
        was_in_line = place.id in self.books.line
        lease = self.leases[place.id]
        lease.on_slot = partial(self.resumed, place.id)
        if self.ledger.resume(lease, self.now("resume", place.id)):
            assert not place.is_parked
        else:
            assert place.id in self.books.line
            if was_in_line:
                self.assert_nothing_changed()
            else:
                self.resumes_told[place.id] = 0

    def resumed(self, node: int) -> None:
        assert not self.books.places[node].is_parked
        self.resumes_told[node] += 1

    @precondition(lambda self: self.books.entries)
    @rule(which=few)
    def stop_taking(self, which: int) -> None:
        """Its actor is stopped: it is not ended yet, but starts nothing more."""
        entry = self.entries[self.books.entries[which % len(self.books.entries)]]
        entry.parent.takes_no_more = True
        self.books.places[entry.parent.id].takes_no_more = True

    def assert_only_counted(self, parent: Place) -> None:
        """W5: a refusal moves its own counters and nothing else."""

        def without_counters(plain: dict[str, Any]) -> dict[str, Any]:
            mine = str(parent.id)
            node = {**plain["nodes"][mine], "attempts": None}
            kept = {k: v for k, v in plain["counters"].items() if not k.endswith("_rejections")}
            nodes = {**plain["nodes"], mine: node}
            return {**plain, "nodes": nodes, "counters": kept, "events": None}

        assert without_counters(self.ledger.state.plain()) == without_counters(self.plain)

    def assert_is_told(self, refused: RefusedError, path: str) -> None:
        """A refusal names node, ancestor, dimension, amounts and advice."""
        assert refused.node.startswith(path)
        assert refused.at and refused.dimension and refused.asked and refused.left
        assert refused.advice and refused.advice in str(refused)

    @precondition(lambda self: any(not p.live_children for p in self.places if p.id))
    @rule(which=few, outcome=st.sampled_from(Outcome))
    def end(self, which: int, outcome: Outcome) -> None:
        leaves = [p for p in self.places if p.id and not p.live_children]
        self.end_one(leaves[which % len(leaves)], outcome)

    def end_one(self, place: Place, outcome: Outcome) -> None:
        lease = self.leases[place.id]
        self.left |= {i for i, r in self.books.requests.items() if r.node == place.id}
        self.ledger.end(lease, outcome, self.now("end", place.id))
        assert lease.is_ended
        assert not place.is_open

    # --- calls -----------------------------------------------------------------------------------

    @rule(which=few, ask=asks, model=few)
    def fund(self, which: int, ask: Ask, model: int) -> None:
        self.fund_one(self.place(which), ask, model)

    @precondition(lambda self: self.books.calls)
    @rule(which=few, ask=asks, model=few)
    def fund_beside(self, which: int, ask: Ask, model: int) -> None:
        """One more call on a wallet with one open: queues get long by nothing else."""
        call = self.open_holds[which % len(self.open_holds)]
        wallet = call.lease.node.wallet
        callers = [p for p in self.places if p.account.id == wallet.id]
        self.fund_one(callers[which % len(callers)], ask, model)

    def fund_one(self, place: Place, ask: Ask, model: int) -> None:
        name = self.models[model % len(self.models)]
        rate = None if name is None else RATES[name]
        ask = attrs.evolve(ask, price=None if name is None else PRICES[name], model=name or "")
        expected = self.books.decide(place, ask, rate)
        at = self.now("fund", place.id)
        self.books.asking = ask, rate
        got = self.ledger.fund(self.leases[place.id], ask, at)
        if isinstance(got, Stop):
            assert ("stop", got.reason) == expected, (got, expected)
            self.assert_is_told(got.refusal, place.path)
            self.assert_nothing_changed()
        elif isinstance(got, Ticket):
            assert ("wait", got.wallet.id) == expected, (got, expected)
            self.tickets[got.id] = got
            self.told[got.id] = 0
            got.on_ready = partial(self.ready, got)
        else:
            assert ("hold", got.output_tokens) == expected, (got, expected)
            self.holds[got.id] = got

    def ready(self, ticket: Ticket) -> None:
        """A waiter is told; by then it must be able to read what it got."""
        assert ticket.outcome is not None
        assert ticket.id not in self.left
        self.told[ticket.id] += 1
        if isinstance(ticket.outcome, Hold):
            self.holds[ticket.outcome.id] = ticket.outcome

    @precondition(lambda self: self.tickets)
    @rule(which=few)
    def leave(self, which: int) -> None:
        ticket = [*self.waiting, *self.tickets.values()][which % len(self.tickets)]
        is_waiting = ticket.id in self.books.requests
        self.ledger.leave(ticket, self.now("leave", ticket.id))
        if is_waiting:
            self.left.add(ticket.id)
        else:
            self.assert_nothing_changed()

    @precondition(lambda self: len(self.open_holds) > len(self.books.slots))
    @rule(
        which=few,
        usage=readable_usages | st.none() | unreadable_usages | readable_usages,
        deltas=st.integers(0, 14),
        bytes=st.integers(0, 60),
        ending=endings,
        answered_by=st.sampled_from([None, None, "cheap", "dear"]),
        is_over=st.booleans(),
    )
    def go_on(
        self,
        which: int,
        usage: Usage | None,
        deltas: int,
        bytes: int,
        ending: Ending,
        answered_by: str | None,
        is_over: bool,
    ) -> None:
        """The next thing in the life of a call, or all that is to come in it."""
        going = [h for h in self.open_holds if h.id not in self.books.slots]
        hold = going[which % len(going)]
        if not hold.is_dispatched:
            self.dispatch_one(hold)
            self.books_agree()
            if not hold.is_dispatched or not is_over:
                return
        self.hear(hold, usage, deltas, bytes)
        if is_over:
            self.settle_one(hold, ending, answered_by)

    def dispatch_one(self, hold: Hold) -> None:
        must_stop = self.books.why_no_call()
        must_wait = bool(self.books.slots) or self.books.slots_are_full()
        got = self.ledger.dispatch(hold, self.now("dispatch", hold.id))
        if must_stop:
            assert isinstance(got, Stop) and got.reason == "call_budget_exhausted"
            self.assert_is_told(got.refusal, hold.lease.path)
            self.assert_nothing_changed()
        else:
            assert got is not must_wait
        if got is False:
            self.slots_told[hold.id] = 0
            hold.on_slot = partial(self.got_slot, hold)

    def got_slot(self, hold: Hold) -> None:
        assert hold.is_dispatched or hold.stop is not None
        assert not (hold.is_dispatched and hold.stop)
        self.slots_told[hold.id] += 1

    def hear(self, hold: Hold, usage: Usage | None, deltas: int, bytes: int) -> None:
        """The request leaves, and so much of its answer arrives."""
        call = self.books.calls[hold.id]
        self.now("nothing")
        hold.is_sent = call.is_sent = True
        if usage is not None or call.usage is None:
            hold.progress.usage = call.usage = usage
        call.deltas += deltas
        call.bytes += bytes if call.deltas else 0
        hold.progress.deltas, hold.progress.bytes = call.deltas, call.bytes

    def settle_one(self, hold: Hold, ending: Ending, answered_by: str | None) -> None:
        at = self.now("settle", hold.id)
        self.books.ending = ending, answered_by
        usd, tokens, basis, usd_bounds, token_bounds = self.books.charge(self.books.calls[hold.id])
        charge = self.ledger.settle(
            hold,
            ending,
            at,
            price_of=PRICES.get,
            answered_by=None if answered_by is None else PRICES[answered_by],
        )
        assert (charge.usd, charge.tokens, charge.basis) == (usd, tokens, basis)
        assert (charge.low_usd, charge.high_usd) == usd_bounds
        assert (charge.low_tokens, charge.high_tokens) == token_bounds
        assert charge.low_usd <= charge.usd <= charge.high_usd
        assert charge.low_tokens <= charge.tokens <= charge.high_tokens
        line = hold.lease.recorder.lines[-1]
        assert line.usd == Decimal(usd) / 10**12
        assert (line.tokens, line.basis) == (tokens, basis)
        assert line.output_limit == hold.output_tokens

    @precondition(lambda self: self.sent_holds)
    @rule(
        which=few,
        ending=endings,
        answered_by=st.sampled_from([None, None, "cheap", "dear"]),
    )
    def settle(self, which: int, ending: Ending, answered_by: str | None) -> None:
        self.settle_one(self.sent_holds[which % len(self.sent_holds)], ending, answered_by)

    @precondition(lambda self: self.unsent_holds)
    @rule(which=few)
    def release(self, which: int) -> None:
        hold = self.unsent_holds[which % len(self.unsent_holds)]
        self.ledger.release(hold, self.now("release", hold.id))
        assert hold.id not in self.books.calls

    # --- limits ----------------------------------------------------------------------------------

    def account(self, which: int) -> Account:
        """A live wallet; the root's is as likely as all others together."""
        accounts = [a for a in self.books.accounts.values() if a.is_open]
        return accounts[(which // 2) % len(accounts)] if which % 2 else accounts[0]

    @rule(
        which=few,
        how=st.sampled_from(["lower", "lower", "raise", "raise", "release", "release", "revoke"]),
        percent=st.sampled_from([90, 75, 50, 101, 25, 100, 0, -1]),
        more=st.integers(-1, 60),
        reason=st.sampled_from(["more", "more", " "]),
    )
    def change_a_wallet(self, which: int, how: str, percent: int, more: int, reason: str) -> None:
        account = self.account(which)
        if how == "lower":
            self.lower_max(account, min(account.max, 200) * percent // 100)
        elif how == "raise":
            self.raise_max(account, account.max + more)
        elif how == "release":
            self.release_tranche(account, more, reason)
        elif account.id:  # in a revoked tree nothing happens any more
            self.revoke(account)
        else:
            self.count_restart(account)

    def release_tranche(self, account: Account, amount: int, reason: str) -> None:
        code = None
        if amount <= 0:
            code = "cave_budget_release_invalid"
        elif not reason.strip():
            code = "cave_budget_release_reason_required"
        elif account.is_revoked:
            code = "cave_budget_revoked"
        elif account.is_breached:
            code = "cave_budget_cap_breached"
        elif amount > account.max - account.released:
            code = "cave_budget_release_exceeds_max"
        at = self.now("release_tranche", account.id)
        lease = self.leases[account.id]
        self.expect(code, lambda: self.ledger.release_tranche(lease, amount, reason, at))

    def revoke(self, account: Account) -> None:
        was_revoked = account.is_revoked
        self.ledger.revoke(self.leases[account.id], "enough", self.now("revoke", account.id))
        assert account.is_revoked
        if was_revoked:
            self.assert_nothing_changed()

    def lower_max(self, account: Account, to: int) -> None:
        code = None if 0 <= to <= account.max else "cave_budget_max_invalid"
        was_breached = account.is_breached
        at = self.now("lower_max", account.id)
        lease = self.leases[account.id]
        self.expect(code, lambda: self.ledger.lower_max(lease, to, at))
        assert account.is_breached == was_breached

    def raise_max(self, account: Account, to: int) -> None:
        code = None
        if to < account.max:
            code = "cave_budget_max_invalid"
        elif account.parent is not None:
            above = account.parent
            needed = max(0, to - account.charged) - account.carve_left
            is_blocked = any(
                up.is_revoked or up.is_breached or up.is_over_target for up in above.upwards()
            )
            if self.books.queues.get(above.id) or is_blocked or needed > self.books.free(above):
                code = "cave_subagent_wallet_unavailable"
        at = self.now("raise_max", account.id)
        lease = self.leases[account.id]
        self.expect(code, lambda: self.ledger.raise_max(lease, to, at))

    def count_restart(self, account: Account) -> None:
        self.ledger.count_restart(self.leases[account.id], self.now("restart", account.id))

    @rule(
        name=st.sampled_from([*attrs.fields_dict(Caps), "max_concurrent_calls", "max_wishes"]),
        to=st.none() | st.integers(0, 5),
    )
    def set_cap(self, name: str, to: int | None) -> None:
        is_lawful = name in attrs.fields_dict(Caps) and to != 0 and name != "admission"
        # Depth is never without a limit: a tree that deep is a loop.
        is_lawful = is_lawful and not (name == "max_depth" and to is None)
        at = self.now("set_cap", 0)
        code = None if is_lawful else "cave_limit_invalid"
        self.expect(code, lambda: self.ledger.set_cap(name, to, at))

    def expect(self, code: str | None, act: Callable[[], None]) -> None:
        """``act`` is refused with ``code`` and changes nothing, or is not refused at all."""
        try:
            act()
        except LedgerError as raised:
            assert raised.code == code, (raised.code, code)
            self.assert_nothing_changed()
        else:
            assert code is None, f"it was not refused with {code}"

    # --- what only a bug would do ----------------------------------------------------------------

    @rule(which=few, how=st.sampled_from(sorted(MISUSES)))
    def misuse(self, which: int, how: str) -> None:
        """An error, or nothing at all; in no case a change."""
        misuse = MISUSES[how]
        subjects = misuse.whom(self)
        if not subjects:
            return
        self.now("nothing")
        try:
            misuse.act(self.ledger, subjects[which % len(subjects)], self.at)
        except Exception as raised:
            assert misuse.error is not None, raised
            assert isinstance(raised, misuse.error), raised
        else:
            assert misuse.error is None, "it was not refused"
        self.assert_nothing_changed()

    # --- what holds after every step -------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        self.ledger.check()
        self.books.compare(self.ledger)
        for hold in self.open_holds:
            call = self.books.calls[hold.id]
            assert (hold.output_tokens, hold.amount) == (call.output, call.amount), hold
            assert hold.is_dispatched == call.is_dispatched, hold
            asked = call.ask.output_tokens
            assert hold.clamped_from == (asked if call.output < asked else None)
        self.plain = self.ledger.state.plain()
        self.is_sound = True

    @invariant()
    def the_journal_folds_to_the_state(self) -> None:
        journal = self.ledger.journal
        # As text: the order of waiters is part of the state, and a snapshot must survive JSON.
        state = json.dumps(self.plain)
        base = None if journal.base is None else json.loads(json.dumps(journal.base))
        assert json.dumps(fold(journal.tail, onto=base).plain()) == state
        waiting = sum(len(queue) for queue in self.books.queues.values())
        waiting += len(self.books.entries)
        most = max(self.keep, 4 * (len(self.places) + len(self.open_holds) + waiting)) + 1
        assert len(journal.tail) <= most + 4

    @invariant()
    def everyone_is_told_once(self) -> None:
        for ticket in self.tickets.values():
            is_over = ticket.outcome is not None
            assert self.told[ticket.id] == is_over, ticket
            verdict = self.books.verdicts.get(ticket.id)
            if isinstance(ticket.outcome, Hold):
                assert verdict == ("hold", ticket.outcome.output_tokens)
            elif isinstance(ticket.outcome, Stop):
                assert verdict == ("stop", ticket.outcome.reason)
            else:
                assert (ticket.id in self.left) != (ticket.id in self.books.requests), ticket
        for hold_id in self.slots_told:
            if hold_id in self.books.slots:
                assert self.slots_told[hold_id] == 0

    @invariant()
    def everyone_in_line_is_told_once(self) -> None:
        for number, told in self.entries_told.items():
            if number in self.books.line:
                assert told == 0
            assert told <= 1
            assert told or self.entries[number].outcome is None
        for node, told in self.resumes_told.items():
            assert told <= 1
            if node in self.books.line:
                assert told == 0

    def play(self, history: History) -> None:
        """Run through a history that is written down, and close."""
        for name, values in history:
            getattr(self, name)(**values)
            self.books_agree()
            self.the_journal_folds_to_the_state()
            self.everyone_is_told_once()
        self.close()

    def teardown(self) -> None:
        if not self.is_sound:
            return  # a step has failed; that is the news
        self.close()

    def close(self) -> None:
        """End everything, children first: then nothing is left (W6)."""
        while places := self.places:  # an end may let begin what has waited
            leaf = max((p for p in places if not p.live_children), key=lambda p: p.id)
            self.end_one(leaf, Outcome.CANCELLED)
            self.books_agree()
        self.the_journal_folds_to_the_state()
        self.everyone_is_told_once()
        self.ledger.check_closed()
        assert not self.books.requests and not self.books.calls and not self.books.slots
        assert not self.books.line


class UsdMachine(LedgerMachine):
    unit = "usd"


class TokenMachine(LedgerMachine):
    unit = "tokens"
    shrink = 4
    models = ("cheap", None)
