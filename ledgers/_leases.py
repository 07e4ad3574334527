"""What the ledger hands out: leases, holds, and places in line for money or for a slot.

A callback here only marks its waiter runnable. It is called once, when what it waits for is set.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from treewarden.protocols import RefusedError

from ._admissions import Kind, Node
from ._charges import Ask, Progress
from ._receipts import Recorder
from ._wallet import Wallet

Wake = Callable[[], None]


@attrs.frozen
class Stop:
    """The ledger funds no further call. ``reason`` is the stop reason; ``refusal`` explains it."""

    reason: str
    refusal: RefusedError


@attrs.define(eq=False, slots=True)
class Lease:
    """What one actor holds: its place, slot, wallet, span, and all calls it has open."""

    id: int
    node: Node
    is_ended: bool = False
    # Whoever waits to start below it starts no more. Set by who stops it.
    takes_no_more: bool = False
    # Called when a parked agent has its slot again.
    on_slot: Wake | None = None
    _recorder: Recorder | None = None

    @property
    def recorder(self) -> Recorder:
        """What belongs on its receipt; made when the first thing does."""
        if self._recorder is None:
            self._recorder = Recorder()
        return self._recorder

    @property
    def has_record(self) -> bool:
        """Whether anything was recorded for it."""
        return self._recorder is not None

    @property
    def path(self) -> str:
        return self.node.path


@attrs.define(eq=False, slots=True)
class Hold:
    """Money held for one call, until it is settled or released."""

    id: int
    lease: Lease
    ask: Ask
    # The output limit that the money pays for: what goes on the wire.
    output_tokens: int
    amount: int
    progress: Progress
    # True once the call slot is taken and the call counted.
    is_dispatched: bool = False
    # True once the request has left. Only then can it cost anything. Set by who sends it.
    is_sent: bool = False
    # Set when a limit on calls struck while this waited for a slot.
    stop: Stop | None = None
    on_slot: Wake | None = None

    @property
    def clamped_from(self) -> int | None:
        return self.ask.output_tokens if self.output_tokens < self.ask.output_tokens else None


@attrs.define(eq=False, slots=True)
class Ticket:
    """A place in a money queue. ``outcome`` is set before ``on_ready`` is called."""

    id: int
    lease: Lease
    ask: Ask
    # The wallet it queues on: its own, or one above that is over its lowered ceiling.
    wallet: Wallet
    outcome: Hold | Stop | None = None
    on_ready: Wake | None = None


@attrs.frozen
class LeaseRequest:
    """What a lease is to be begun with: see ``TreeLedger.admit``."""

    name: str
    kind: Kind
    cap: int | None = None
    min_cap: int | None = None
    set_aside: int = 0
    # How long it may live once it has begun, in clock seconds; its parent's deadline holds too.
    seconds: float | None = None
    tool: str | None = None

    @property
    def needs_money(self) -> bool:
        """Whether it takes something from its parent's wallet to start."""
        return self.cap is not None or self.set_aside > 0


@attrs.define(eq=False, slots=True)
class Entry:
    """A place in line for a lease. ``outcome`` is set before ``on_ready`` is called.

    It stays None where the entry left the line without an answer.
    """

    id: int
    parent: Lease
    request: LeaseRequest
    outcome: Lease | RefusedError | None = None
    on_ready: Wake | None = None
