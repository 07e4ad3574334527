"""A second set of books: the ledger's rules written down from their text, as naively as possible.

One rule: nothing is kept that can be summed up anew, and nothing is taken from the ledger but the
events it wrote. Each event is judged before it is carried out here (was this grant right, was it
this one's turn, is that the charge?), so a wrong decision is named at the event that made it.
Everything is O(everything), which is what makes it easy to believe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeAlias

import attrs

from treewarden.ledgers import (
    UNBOUNDED,
    Ask,
    Caps,
    Ending,
    Event,
    Kind,
    Price,
    TreeLedger,
    Unit,
)
from treewarden.protocols import Usage

Verdict: TypeAlias = "tuple[Literal['hold', 'wait'], int] | tuple[Literal['stop'], str]"
"""A hold of so many output tokens, a wait on that wallet, or a stop for that reason."""


@attrs.frozen
class Rate:
    """What a token of each class costs, in 10^-12 USD, and the ledger's own form of the same."""

    input: int
    output: int
    cache_read: int
    cache_write: int

    def price(self) -> Price:
        def per_million(units: int) -> Decimal:
            return Decimal(units) / 10**6

        return Price(
            input=per_million(self.input),
            output=per_million(self.output),
            cache_read=per_million(self.cache_read),
            cache_write=per_million(self.cache_write),
        )

    def ceiling(self, ask: Ask, output: int) -> int:
        """The most that a call of this size can cost."""
        dearest = max(self.input, self.cache_read)
        if ask.can_write_cache:
            dearest = max(dearest, self.cache_write)
        return ask.input_tokens * dearest + output * self.output

    def cost(self, usage: Usage) -> int:
        """What these tokens cost, without what other models answered inside."""
        return (
            usage.input * self.input
            + usage.output * self.output
            + usage.cache_read * self.cache_read
            + usage.cache_write * self.cache_write
        )


class Want(NamedTuple):
    """What the ledger was just asked to do: only its subject may be acted on without a reason."""

    what: str
    id: int = -1


@attrs.define(eq=False)
class Call:
    """A call somewhere between its hold and its charge, as its task knows it."""

    node: int
    ask: Ask
    rate: Rate | None
    output: int
    amount: int
    is_dispatched: bool = False
    is_sent: bool = False
    usage: Usage | None = None
    deltas: int = 0
    bytes: int = 0


@attrs.define(eq=False)
class Account:
    """One wallet."""

    id: int
    parent: Account | None
    max: int
    released: int
    charged: int = 0
    overrun: int = 0
    set_aside: int = 0
    is_revoked: bool = False
    target: int | None = None
    is_open: bool = True

    @property
    def carve_left(self) -> int:
        """What its parent still keeps for it."""
        return max(0, self.max - self.charged) if self.is_open and self.parent is not None else 0

    @property
    def is_breached(self) -> bool:
        return self.charged > self.max

    @property
    def is_over_target(self) -> bool:
        return self.target is not None and self.max > self.target

    def upwards(self) -> Iterator[Account]:
        account: Account | None = self
        while account is not None:
            yield account
            account = account.parent


@attrs.define(eq=False)
class Place:
    """One node, kept when it has closed."""

    id: int
    parent: Place | None
    path: str
    kind: Kind
    account: Account
    depth: int
    deadline: float | None
    set_aside: int = 0
    own_usd: int = 0
    own_tokens: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    attempts: dict[str, int] = attrs.field(factory=dict[str, int])
    children: list[Place] = attrs.field(factory=list["Place"])
    is_open: bool = True
    is_parked: bool = False
    # Its actor is being stopped: what waits to start below it is not started any more.
    takes_no_more: bool = False

    def total(self, unit: Unit) -> int:
        own = self.own_usd if unit == "usd" else self.own_tokens
        return own + sum(child.total(unit) for child in self.children)

    @property
    def live_children(self) -> int:
        return sum(child.is_open for child in self.children)


@attrs.define(eq=False)
class Request:
    """A call that waits for money: what it needs and on which wallet it waits."""

    node: int
    ask: Ask
    rate: Rate | None
    account: Account


@attrs.define(eq=False)
class Waiter:
    """A start that waits in line, or a parked agent that wants its slot back."""

    # The parent of what is to start, or the parked agent.
    place: Place
    # What is to start; None: a resume.
    start: Mapping[str, Any] | None

    @property
    def run(self) -> int:
        """The top-level run it belongs to: the older, the smaller."""
        place = self.place
        while place.parent is not None and place.parent.parent is not None:
            place = place.parent
        return place.id

    def rank(self, number: int) -> tuple[int, int, int]:
        """Its place within its run: resumes first, then the deeper, then the earlier."""
        if self.start is None:
            return 0, -self.place.depth, number
        return 1, -self.place.depth - 1, number

    @property
    def needs_money(self) -> bool:
        start = self.start
        return start is not None and (start["cap"] is not None or start["set_aside"] > 0)


class Books:
    """What must be so, from the events alone."""

    def __init__(self, unit: Unit, rates: Mapping[str, Rate]) -> None:
        self.unit: Unit = unit
        # By model id, to price an answer by who gave it.
        self.rates = rates
        self.caps = Caps()
        self.places: dict[int, Place] = {}
        self.accounts: dict[int, Account] = {}
        self.calls: dict[int, Call] = {}
        self.requests: dict[int, Request] = {}
        # Ticket ids per wallet and hold ids, in the order of their arrival.
        self.queues: dict[int, list[int]] = {}
        self.slots: list[int] = []
        # Who waits for an agent's slot, by the number of the entry or of the parked node.
        self.line: dict[int, Waiter] = {}
        # What the start that is asked for just now is to begin with.
        self.starting: Mapping[str, Any] = {}
        self.grants = 0
        # Grants to others since each waiting run had one, or could have had its first.
        self.passed: dict[int, int] = {}
        # Outcomes of tickets and slot waiters that are not waiting any more.
        self.verdicts: dict[int, Verdict] = {}
        self.want = Want("open")
        self.asking: tuple[Ask, Rate | None] | None = None
        self.ending: tuple[Ending, str | None] | None = None
        self.runs = self.admitted = self.peak = self.refusals = self.restarts = 0
        self.invocation_rejections = self.concurrency_rejections = 0
        self.model_calls = self.tool_calls = self.peak_calls = 0
        # When subagents were started since that is limited.
        self.spawns: list[float] = []
        # For coverage: which verdicts and endings a history has seen.
        self.seen: set[str] = set()

    # --- what follows from the books -------------------------------------------------------------

    @property
    def active(self) -> int:
        return sum(
            p.is_open and p.kind is Kind.AGENT and not p.is_parked for p in self.places.values()
        )

    @property
    def parked(self) -> int:
        return sum(p.is_open and p.is_parked for p in self.places.values())

    @property
    def entries(self) -> list[int]:
        return [number for number, waiter in self.line.items() if waiter.start is not None]

    @property
    def in_flight(self) -> int:
        return sum(call.is_dispatched for call in self.calls.values())

    def open_places(self) -> list[Place]:
        return [place for place in self.places.values() if place.is_open]

    def holds_on(self, account: Account) -> list[int]:
        return [c.amount for c in self.calls.values() if self.places[c.node].account is account]

    def carves_of(self, account: Account) -> list[Account]:
        return [a for a in self.accounts.values() if a.is_open and a.parent is account]

    def committed(self, account: Account) -> int:
        carved = sum(child.carve_left for child in self.carves_of(account))
        return account.charged + sum(self.holds_on(account)) + carved

    def free(self, account: Account) -> int:
        return max(0, account.released - self.committed(account) - account.set_aside)

    def size(self, ask: Ask, rate: Rate | None, output: int) -> int:
        if self.unit == "tokens":
            return ask.input_tokens + output
        return 0 if rate is None else rate.ceiling(ask, output)

    def ticket_is_due(self, ticket: int) -> bool:
        """Whether it is the head of the queue it stands in."""
        return self.queues[self.requests[ticket].account.id][0] == ticket

    def decide(
        self, place: Place, ask: Ask, rate: Rate | None, *, ticket: int | None = None
    ) -> Verdict:
        """Section "Funding a call" and W1b, W7."""
        account = place.account
        for up in account.upwards():
            if up.is_revoked:
                return "stop", "wallet_revoked"
            if up.is_breached:
                return "stop", "budget_exhausted"
        over = next((up for up in account.upwards() if up.is_over_target), None)
        if over is not None:
            if self.holds_on(over) and ask.wait:
                return "wait", over.id
            return "stop", "budget_exhausted"
        queue = self.queues.get(account.id, [])
        is_first = not queue or queue[0] == ticket
        if is_first and self.size(ask, rate, ask.output_tokens) <= self.free(account):
            return "hold", ask.output_tokens
        if ask.wait and (self.holds_on(account) or not is_first):
            return "wait", account.id
        if ask.clamp and is_first:
            for output in range(ask.output_tokens, ask.output_floor_tokens - 1, -1):
                if self.size(ask, rate, output) <= self.free(account):
                    return "hold", output
        return "stop", "budget_exhausted"

    def why_no_call(self) -> bool:
        most = self.caps.max_model_calls
        return most is not None and self.model_calls >= most

    def slots_are_full(self) -> bool:
        most = self.caps.max_concurrent_calls
        return most is not None and self.in_flight >= most

    def why_not(
        self,
        parent: Place,
        kind: Kind,
        *,
        cap: int | None,
        min_cap: int | None,
        set_aside: int,
        tool: str | None,
        max_attempts: int | None,
        at: float,
    ) -> str | None:
        """The code an admission is refused with, in the order of the agent contract, 3.3."""
        if tool is not None and max_attempts is not None:
            if parent.attempts.get(tool, 0) >= max_attempts:
                return "cave_subagent_call_budget"
        if kind is Kind.AGENT and parent.depth + 1 > self.caps.max_depth:
            return "cave_subagent_depth_limit"
        caps = self.caps
        if kind is Kind.TOOL or tool is not None:
            if caps.max_tool_calls is not None and self.tool_calls >= caps.max_tool_calls:
                return "cave_tool_call_budget_exceeded"
        if kind is Kind.RUN and caps.max_runs is not None and self.runs >= caps.max_runs:
            return "cave_run_limit"
        if cap is not None or set_aside:
            account = parent.account
            grant = set_aside if cap is None else min(cap, self.free(account))
            least = cap if min_cap is None or cap is None else min_cap
            if (
                any(
                    up.is_revoked or up.is_breached or up.is_over_target for up in account.upwards()
                )
                or self.queues.get(account.id)
                or set_aside > min(grant, self.free(account))
                or (least is not None and grant < least)
                or (cap is not None and grant <= 0)
            ):
                return "cave_subagent_wallet_unavailable"
        if kind is Kind.AGENT:
            if caps.max_subagents is not None and self.admitted >= caps.max_subagents:
                return "cave_subagent_invocation_limit"
            if self.descendants_are_used_up(parent):
                return "cave_subagent_breadth_limit"
            of_this_minute = [started for started in self.spawns if at - started < 60]
            rate = caps.max_spawns_per_minute
            if rate is not None and len(of_this_minute) >= rate:
                return "cave_subagent_spawn_rate_limit"
            most = caps.max_concurrent_subagents
            if most is not None and self.active >= most:
                return "cave_subagent_concurrency_limit"
        return None

    def top_of(self, place: Place) -> Place:
        """The top-level run that it belongs to, or the root."""
        up: Place | None = place
        while up is not None and up.kind is not Kind.RUN:
            up = up.parent
        return self.places[0] if up is None else up

    def descendants(self, top: Place) -> int:
        agents = [place for place in self.places.values() if place.kind is Kind.AGENT]
        return sum(self.top_of(place) is top for place in agents)

    def descendants_are_used_up(self, parent: Place) -> bool:
        most = self.caps.max_descendants
        return most is not None and self.descendants(self.top_of(parent)) >= most

    # --- whose turn it is ------------------------------------------------------------------------

    def slots_of_agents_are_full(self) -> bool:
        most = self.caps.max_concurrent_subagents
        return most is not None and self.active >= most

    def may_wait(self, code: str, parent: Place) -> bool:
        """Section "Admission": a full tree, or a wallet on which calls wait, is waited for."""
        if self.caps.admission != "wait":
            return False
        if code == "cave_subagent_concurrency_limit":
            return True
        if any(
            up.is_revoked or up.is_breached or up.is_over_target for up in parent.account.upwards()
        ):
            return False
        most = self.caps.max_subagents
        if code != "cave_subagent_wallet_unavailable" or (most and self.admitted >= most):
            return False
        if self.descendants_are_used_up(parent):
            return False
        return self.slots_of_agents_are_full() or bool(self.queues.get(parent.account.id))

    def could_go(self, waiter: Waiter) -> bool:
        """Whether it stands in the way of those behind it: nobody waits for its money first."""
        return not (waiter.needs_money and self.queues.get(waiter.place.account.id))

    def is_turn_of(self, number: int) -> bool:
        """Whether a free slot may be given to this waiter now."""
        waiter = self.line[number]
        able = {i: w for i, w in self.line.items() if self.could_go(w)}
        of_run = {i: w for i, w in able.items() if w.run == waiter.run}
        is_first_of_run = min(of_run, key=lambda i: of_run[i].rank(i)) == number
        is_of_oldest = waiter.run == min(w.run for w in able.values())
        # The eighth goes by waiting time, which is judged by how long anybody is passed over.
        return is_first_of_run and (is_of_oldest or (self.grants + 1) % 8 == 0)

    def grant(self, number: int) -> None:
        """Give the waiter the slot: it must be its turn, and nobody may have starved."""
        assert self.is_turn_of(number), (number, self.line)
        assert not self.slots_of_agents_are_full()
        self.grants += 1
        run = self.line.pop(number).run
        able = {w.run for w in self.line.values() if self.could_go(w)}
        self.passed = {r: self.passed.get(r, 0) + 1 for r in able if r != run}
        runs = len(able | {run})
        assert all(passed <= 8 * runs for passed in self.passed.values()), self.passed
        self.seen.add("granted from the line")

    def takes_no_more(self, place: Place) -> bool:
        """Whether nothing more starts below it: it is being stopped, or its whole tree is."""
        return place.takes_no_more or self.places[0].takes_no_more

    def why_not_now(self, waiter: Waiter, at: float) -> str | None:
        start = waiter.start
        assert start is not None
        asked = {name: start[name] for name in ("cap", "min_cap", "set_aside", "tool")}
        return self.why_not(waiter.place, start["kind"], **asked, max_attempts=None, at=at)

    def charge(self, call: Call) -> tuple[int, int, str, tuple[int, int], tuple[int, int]]:
        """Section 4: USD, tokens, basis, and [low, high] of each."""
        ending, answered = self._ending_of(call)
        rate = self.rates[answered] if answered is not None else call.rate
        usage = call.usage if call.usage is not None and call.usage.problem() is None else None
        nothing = (0, 0), (0, 0)
        if ending is Ending.NOT_SENT:
            return 0, 0, "not_dispatched", *nothing
        if ending is Ending.PROVIDER_ERROR and call.usage is None and not call.deltas:
            return 0, 0, "pre_stream_no_usage", *nothing
        ask, limit = call.ask, call.output
        hold = 0 if call.rate is None else call.rate.ceiling(ask, limit)
        hold_tokens = ask.input_tokens + limit
        is_answer = ending is Ending.FINISHED or (
            ending is Ending.PROVIDER_ERROR and not call.deltas
        )
        if usage is not None and is_answer:
            usd, is_whole = self._cost(usage, rate)
            tokens = usage.total, usage.total
            if is_whole or call.rate is None:
                return usd, usage.total, "provider_reported", (usd, usd), tokens
            worst = max(usd, hold)
            return worst, usage.total, "unavailable_worst_case", (usd, worst), tokens
        is_blind = ask.reasons_invisibly or (
            ask.bills_after_disconnect and ending is not Ending.FINISHED
        )
        output = limit if is_blind else max(call.deltas, (call.bytes + 3) // 4)
        low = low_tokens = 0
        guess = Usage(input=ask.input_tokens, output=output)
        if usage is not None:
            low, low_tokens = self._cost(usage, rate)[0], usage.total
            guess = attrs.evolve(usage, output=max(usage.output, output))
        usd, is_whole = self._cost(guess, rate)
        tokens_ = guess.total
        if is_blind:
            usd, tokens_ = max(usd, hold), max(tokens_, hold_tokens)
        is_unknown = not is_whole and call.rate is not None
        if is_unknown:
            usd = max(usd, hold)
        basis = "unavailable_worst_case" if is_blind or is_unknown else "estimated"
        return (
            usd,
            tokens_,
            basis,
            (low, max(hold, usd)),
            (low_tokens, max(hold_tokens, tokens_)),
        )

    def _ending_of(self, call: Call) -> tuple[Ending, str | None]:
        if self.ending is not None:
            return self.ending
        return (Ending.BROKEN if call.is_sent else Ending.NOT_SENT), None

    def _cost(self, usage: Usage, rate: Rate | None) -> tuple[int, bool]:
        """What is known of its cost, and whether that is all of it."""
        if usage.reported_cost_usd is not None:
            return int(usage.reported_cost_usd * 10**12), True
        usd, is_whole = (0, False) if rate is None else (rate.cost(usage), True)
        for inner in usage.extra:
            its_rate = rate
            if inner.model is not None:
                # The end of a lease settles what is open without a price list at hand.
                its_rate = None if self.ending is None else self.rates.get(inner.model)
            inner_usd, is_known = self._cost(inner, its_rate)
            usd += inner_usd
            is_whole = is_whole and is_known
        return usd, is_whole

    # --- judging and carrying out one event ------------------------------------------------------

    def see(self, event: Event) -> None:
        """Assert that this event had to be, then carry it out."""
        kind = type(event).__name__
        self.seen.add(kind)
        handler = getattr(self, f"_see_{kind}")
        handler(**event._asdict())
        self._approach_targets()

    def _see_Opened(
        self,
        at: float,
        unit: Unit,
        max: int,
        released: int,
        span_id: str,
        deadline: float | None,
        caps: Caps,
        carried_usd: int,
        carried_tokens: int,
    ) -> None:
        assert unit == self.unit
        assert carried_usd == carried_tokens == 0
        self.caps = caps
        self.accounts[0] = Account(0, None, max, released)
        self.places[0] = Place(0, None, "root", Kind.ROOT, self.accounts[0], -1, deadline)

    def _see_Admitted(
        self,
        at: float,
        node: int,
        parent: int,
        name: str,
        kind: Kind,
        span_id: str,
        deadline: float | None,
        carve: int | None,
        set_aside: int,
        tool: str | None,
        entry: int | None,
    ) -> None:
        above = self.places[parent]
        assert above.is_open
        if entry is not None:
            waiter = self.line[entry]
            assert waiter.place is above and not self.takes_no_more(above)
            assert self.why_not_now(waiter, at) is None
            self.grant(entry)
        else:
            assert self.want == ("admit", parent), self.want
        if tool is not None and entry is None:
            above.attempts[tool] = above.attempts.get(tool, 0) + 1
        account = above.account
        if carve is not None:
            assert 0 < carve <= self.free(account), (carve, self.free(account))
            assert set_aside <= carve, (set_aside, carve)
            account = Account(node, account, carve, carve)
        else:
            # W1: a grant takes from what is free, never from what is overrun.
            assert not set_aside or set_aside <= self.free(account), (set_aside, account)
        account.set_aside += set_aside
        self.accounts[account.id] = account
        depth = 0 if kind is Kind.RUN else above.depth + (kind is Kind.AGENT)
        limits = [d for d in (deadline, above.deadline) if d is not None]
        assert deadline == min(limits, default=None), (deadline, above.deadline)
        # Only what was admitted has a number: a refusal leaves no gap.
        path = f"{above.path}/{name}#{len(above.children) + 1}"
        place = Place(node, above, path, kind, account, depth, deadline, set_aside)
        above.children.append(place)
        self.places[node] = place
        self.runs += kind is Kind.RUN
        self.admitted += kind is Kind.AGENT
        if kind is Kind.AGENT and self.caps.max_spawns_per_minute is not None:
            self.spawns.append(at)
        self.peak = max(self.peak, self.active)
        if kind is Kind.TOOL or tool is not None:
            self.tool_calls += 1
            above.tool_calls += 1

    def _see_EntryQueued(
        self, at: float, entry: int, parent: int, name: str, tool: str | None
    ) -> None:
        assert self.want == ("admit", parent), self.want
        above = self.places[parent]
        waiter = Waiter(above, self.starting)
        code = self.why_not_now(waiter, at)
        assert code is not None and self.may_wait(code, above), code
        if tool is not None:
            above.attempts[tool] = above.attempts.get(tool, 0) + 1
        self.line[entry] = waiter

    def _see_EntryLeft(self, at: float, entry: int) -> None:
        waiter = self.line.pop(entry)
        its_own = self.want in (("leave_line", entry), ("end", waiter.place.id))
        assert its_own or self.takes_no_more(waiter.place), self.want

    def _see_Parked(self, at: float, node: int) -> None:
        assert self.want == ("park", node), self.want
        self.places[node].is_parked = True

    def _see_ResumeQueued(self, at: float, node: int) -> None:
        assert self.want == ("resume", node), self.want
        assert self.slots_of_agents_are_full()
        self.line[node] = Waiter(self.places[node], None)

    def _see_ResumeLeft(self, at: float, node: int) -> None:
        assert self.want == ("park", node), self.want
        del self.line[node]

    def _see_Resumed(self, at: float, node: int) -> None:
        place = self.places[node]
        assert place.is_open and place.is_parked
        if node in self.line:
            self.grant(node)
        else:
            assert self.want == ("resume", node), self.want
            assert not self.slots_of_agents_are_full()
        place.is_parked = False
        self.peak = max(self.peak, self.active)

    def _see_Refused(
        self, at: float, parent: int, code: str, tool: str | None, entry: int | None
    ) -> None:
        self.seen.add(code)
        if entry is not None:
            waiter = self.line[entry]
            assert self.is_turn_of(entry), (entry, self.line)
            assert self.why_not_now(waiter, at) == code, code
            assert not self.could_go(waiter) or not self.slots_of_agents_are_full()
            del self.line[entry]
            self.seen.add("refused from the line")
        else:
            assert self.want == ("admit", parent), self.want
        if tool is not None and entry is None:
            attempts = self.places[parent].attempts
            attempts[tool] = attempts.get(tool, 0) + 1
        if code == "cave_subagent_invocation_limit":
            self.invocation_rejections += 1
        elif code == "cave_subagent_concurrency_limit":
            self.concurrency_rejections += 1
        else:
            self.refusals += 1

    def _see_Queued(self, at: float, ticket: int, node: int, wallet: int) -> None:
        if ticket not in self.requests:
            assert self.want == ("fund", node), self.want
            assert self.asking is not None
            self.requests[ticket] = Request(node, *self.asking, self.accounts[wallet])
        request = self.requests[ticket]
        verdict = self.decide(self.places[node], request.ask, request.rate)
        assert verdict == ("wait", wallet), (verdict, wallet)
        request.account = self.accounts[wallet]
        self.queues.setdefault(wallet, []).append(ticket)
        self.seen.add("waits above" if request.account.id != self._own(node) else "waits")

    def _see_Left(self, at: float, ticket: int) -> None:
        request = self.requests[ticket]
        if self.want == ("leave", ticket) or self.want == ("end", request.node):
            self.verdicts.pop(ticket, None)
            self._unqueue(ticket)
            del self.requests[ticket]
            return
        verdict = self._due(ticket)
        assert verdict[0] != "hold", verdict
        assert verdict != ("wait", request.account.id), verdict
        self._unqueue(ticket)
        if verdict[0] == "stop":
            self.verdicts[ticket] = verdict
            del self.requests[ticket]

    def _see_Held(
        self, at: float, hold: int, node: int, wallet: int, amount: int, ticket: int | None
    ) -> None:
        place = self.places[node]
        assert place.is_open and wallet == place.account.id
        if ticket is None:
            assert self.want == ("fund", node), self.want
            assert self.asking is not None
            ask, rate = self.asking
            verdict = self.decide(place, ask, rate)
        else:
            request = self.requests[ticket]
            assert request.node == node
            ask, rate = request.ask, request.rate
            verdict = self._due(ticket)
            self.verdicts[ticket] = verdict
            self._unqueue(ticket)
            del self.requests[ticket]
        assert verdict[0] == "hold", (verdict, amount)
        output = verdict[1]
        assert amount == self.size(ask, rate, output), (amount, output)
        assert amount <= self.free(place.account), (amount, self.free(place.account))
        self.seen.add("clamped" if output < ask.output_tokens else "whole")
        self.calls[hold] = Call(node, ask, rate, output, amount)

    def _due(self, ticket: int) -> Verdict:
        """The verdict on a ticket whose turn it must be."""
        assert self.ticket_is_due(ticket), (ticket, self.queues)
        request = self.requests[ticket]
        place = self.places[request.node]
        assert place.is_open
        return self.decide(place, request.ask, request.rate, ticket=ticket)

    def _unqueue(self, ticket: int) -> None:
        wallet = self.requests[ticket].account.id
        self.queues[wallet].remove(ticket)
        if not self.queues[wallet]:
            del self.queues[wallet]

    def _own(self, node: int) -> int:
        return self.places[node].account.id

    def _see_SlotQueued(self, at: float, hold: int) -> None:
        assert self.want == ("dispatch", hold), self.want
        assert not self.why_no_call()
        assert self.slots or self.slots_are_full()
        self.slots.append(hold)

    def _see_SlotLeft(self, at: float, hold: int) -> None:
        assert self.slots.pop(0) == hold
        assert self.why_no_call()

    def _see_Dispatched(self, at: float, hold: int) -> None:
        assert not self.why_no_call()
        assert not self.slots_are_full()
        if self.slots:
            assert self.slots.pop(0) == hold
        else:
            assert self.want == ("dispatch", hold), self.want
        call = self.calls[hold]
        assert not call.is_dispatched
        call.is_dispatched = True
        self.model_calls += 1
        self.places[call.node].model_calls += 1
        self.peak_calls = max(self.peak_calls, self.in_flight)

    def _see_Settled(self, at: float, hold: int, usd: int, tokens: int, basis: str) -> None:
        call = self.calls[hold]
        assert self.want in (("settle", hold), ("end", call.node)), self.want
        assert call.is_dispatched
        self.seen.add(basis)
        expected = self.charge(call)
        assert (usd, tokens, basis) == expected[:3], (usd, tokens, basis, expected)
        del self.calls[hold]
        place = self.places[call.node]
        if basis == "not_dispatched":
            self.model_calls -= 1
            place.model_calls -= 1
        place.own_usd += usd
        place.own_tokens += tokens
        amount = usd if self.unit == "usd" else tokens
        # What covers it: here the hold, at every ancestor what the carve it came through has left.
        covers = call.amount
        for account in place.account.upwards():
            left = account.carve_left
            account.overrun += amount - min(amount, covers)
            account.charged += amount
            covers = left
        if place.account.is_breached:
            self.seen.add("breach")

    def _see_HoldReleased(self, at: float, hold: int) -> None:
        call = self.calls[hold]
        assert self.want in (("release", hold), ("end", call.node)), self.want
        assert not call.is_dispatched
        del self.calls[hold]
        if hold in self.slots:
            self.slots.remove(hold)

    def _see_Ended(self, at: float, node: int, outcome: Enum) -> None:
        assert self.want == ("end", node), self.want
        place = self.places[node]
        assert place.is_open and not place.live_children
        assert not any(w.place is place and w.start is not None for w in self.line.values())
        self.line.pop(node, None)
        assert not any(call.node == node for call in self.calls.values())
        assert not any(request.node == node for request in self.requests.values())
        place.is_open = False
        account = place.account
        if account.id == node and node:  # the root's stays to be looked at
            account.is_open = False
        # The rest of its reserve goes back; what a lowered ceiling ate is its loss before others'.
        asked = sum(p.set_aside for p in self.open_places() if p.account is account)
        account.set_aside = min(account.set_aside, asked)

    def _see_Restarted(self, at: float, node: int) -> None:
        assert self.want == ("restart", node), self.want
        assert self.places[node].is_open
        self.restarts += 1

    def _see_TrancheReleased(self, at: float, wallet: int, amount: int, reason: str) -> None:
        assert self.want == ("release_tranche", wallet), self.want
        self.accounts[wallet].released += amount

    def _see_Revoked(self, at: float, wallet: int, reason: str) -> None:
        assert self.want == ("revoke", wallet), self.want
        assert not self.accounts[wallet].is_revoked
        self.accounts[wallet].is_revoked = True

    def _see_MaxLowered(self, at: float, wallet: int, to: int) -> None:
        assert self.want == ("lower_max", wallet), self.want
        self.accounts[wallet].target = to

    def _see_MaxRaised(self, at: float, wallet: int, to: int) -> None:
        assert self.want == ("raise_max", wallet), self.want
        account = self.accounts[wallet]
        if account.parent is not None:
            more = max(0, to - account.charged) - account.carve_left
            assert more <= self.free(account.parent), (more, account.parent)
        if account.released == account.max:
            account.released = to
        account.max = to
        account.target = None

    def _see_CapChanged(self, at: float, name: str, to: int | None) -> None:
        assert self.want == ("set_cap", 0), self.want
        changed: dict[str, Any] = {name: to}
        self.caps = attrs.evolve(self.caps, **changed)
        if self.caps.max_spawns_per_minute is None:
            self.spawns.clear()

    def _approach_targets(self) -> None:
        """W1b, until nothing changes any more: a lowered child gives back to its parent."""
        is_moving = True
        while is_moving:
            is_moving = False
            for account in self.accounts.values():
                if account.is_open and account.target is not None:
                    is_moving |= self._approach(account, account.target)

    def _approach(self, account: Account, target: int) -> bool:
        before = account.max, account.released, account.set_aside, account.target
        committed = self.committed(account)
        account.max = min(account.max, max(target, committed))
        account.released = min(account.released, account.max)
        account.set_aside = min(account.set_aside, max(0, account.max - committed))
        if account.max <= target:
            account.target = None
        else:
            self.seen.add("over target")
        return before != (account.max, account.released, account.set_aside, account.target)

    # --- comparing -------------------------------------------------------------------------------

    def compare(self, ledger: TreeLedger) -> None:
        """Assert that the ledger's state is what the books say, and that nobody waits in vain."""
        self._compare_wallets(ledger)
        self._compare_nodes(ledger)
        self._compare_counters(ledger)
        for queue in self.queues.values():
            request = self.requests[queue[0]]
            place = self.places[request.node]
            verdict = self.decide(place, request.ask, request.rate, ticket=queue[0])
            assert verdict == ("wait", request.account.id), (queue[0], verdict)
        assert not self.slots or self.slots_are_full()
        if any(self.could_go(waiter) for waiter in self.line.values()):
            assert self.slots_of_agents_are_full(), self.line

    def _compare_wallets(self, ledger: TreeLedger) -> None:
        wallets = ledger.state.wallets
        assert set(wallets) == {a.id for a in self.accounts.values() if a.is_open}
        for wallet in wallets.values():
            account = self.accounts[wallet.id]
            holds, carves = self.holds_on(account), self.carves_of(account)
            is_so = {
                "max": wallet.max,
                "released": wallet.released,
                "settled": wallet.settled,
                "held": wallet.held,
                "open_holds": wallet.open_holds,
                "carved": wallet.carved,
                "live_carves": wallet.live_carves,
                "set_aside": wallet.set_aside,
                "overrun": wallet.overrun,
                "carve_left": wallet.carve_left,
                "free": wallet.free,
                "target": wallet.target,
                "is_revoked": wallet.is_revoked,
                "is_breached": wallet.is_breached,
                "is_over_target": wallet.is_over_target,
                "queued": wallet.queued,
            }
            must_be = {
                "max": account.max,
                "released": account.released,
                "settled": account.charged,
                "held": sum(holds),
                "open_holds": len(holds),
                "carved": sum(child.carve_left for child in carves),
                "live_carves": len(carves),
                "set_aside": account.set_aside,
                "overrun": account.overrun,
                "carve_left": account.carve_left,
                "free": self.free(account),
                "target": account.target,
                "is_revoked": account.is_revoked,
                "is_breached": account.is_breached,
                "is_over_target": account.is_over_target,
                "queued": len(self.queues.get(account.id, ())),
            }
            assert is_so == must_be, (wallet.path, _differences(is_so, must_be))
            if account.max >= UNBOUNDED:
                assert not wallet.is_bounded

    def _compare_nodes(self, ledger: TreeLedger) -> None:
        nodes = ledger.state.nodes
        assert set(nodes) == {place.id for place in self.open_places()}
        tops = [self.top_of(p).id for p in self.places.values() if p.kind is Kind.AGENT]
        below = Counter(tops)
        for node in nodes.values():
            place = self.places[node.id]
            is_so = {
                "path": node.path,
                "kind": node.kind,
                "wallet": node.wallet.id,
                "depth": node.depth,
                "deadline": node.deadline,
                "own": (node.own_usd, node.own_tokens),
                "total": (node.usd, node.tokens),
                "attempts": node.attempts or {},
                "live_children": node.live_children,
                "calls": (node.model_calls, node.tool_calls),
                "holds": list(node.holds or ()),
                "entries": list(node.entries or ()),
                "is_parked": node.is_parked,
                "waits_for_slot": node.waits_for_slot,
                "descendants": node.descendants,
            }
            must_be = {
                "path": place.path,
                "kind": place.kind,
                "wallet": place.account.id,
                "depth": place.depth,
                "deadline": place.deadline,
                "own": (place.own_usd, place.own_tokens),
                "total": (place.total("usd"), place.total("tokens")),
                "attempts": place.attempts,
                "live_children": place.live_children,
                "calls": (place.model_calls, place.tool_calls),
                "holds": [i for i, call in self.calls.items() if call.node == place.id],
                "entries": [i for i in self.entries if self.line[i].place is place],
                "is_parked": place.is_parked,
                "waits_for_slot": node.id in self.line,
                "descendants": below[place.id],
            }
            assert is_so == must_be, (node.path, _differences(is_so, must_be))

    def _compare_counters(self, ledger: TreeLedger) -> None:
        counters = attrs.asdict(ledger.counters)
        must_be = {
            "runs": self.runs,
            "admitted": self.admitted,
            "active": self.active,
            "parked": self.parked,
            "peak": self.peak,
            "released": self.admitted - self.active - self.parked,
            "invocation_rejections": self.invocation_rejections,
            "concurrency_rejections": self.concurrency_rejections,
            "other_rejections": self.refusals,
            "model_calls": self.model_calls,
            "tool_calls": self.tool_calls,
            "calls_in_flight": self.in_flight,
            "peak_calls": self.peak_calls,
            "queued_slots": len(self.slots),
            "queued_money": len(self.requests),
            "queued_entries": len(self.entries),
            "queued_resumes": len(self.line) - len(self.entries),
            "open_spans": len(self.open_places()),
            "restarts": self.restarts,
        }
        assert counters == must_be, _differences(counters, must_be)
        assert ledger.caps == self.caps
        # The ledger may forget what no minute holds any more; what it keeps is the newest.
        spawns = list(ledger.state.spawns)
        assert spawns == self.spawns[len(self.spawns) - len(spawns) :], (spawns, self.spawns)
        of_last_minute = [s for s in self.spawns if self.spawns[-1] - s < 60]
        assert len(spawns) == len(of_last_minute), (spawns, self.spawns)


def _differences(
    is_so: Mapping[str, object], must_be: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """What is so and what must be, where they differ."""
    return {k: (is_so[k], must_be[k]) for k in must_be if is_so[k] != must_be[k]}
