"""An agent's slot, which it gives back while all that goes on in it are its children.

Only where starts wait for slots: a parent that kept its slot while it waits for a child that waits
for a slot would never get an answer. What goes on in an agent are its loop and its running tool
calls. A subagent's call only waits; a tool's call waits while it waits for a run of its own. When
nothing is left but waiting the slot goes to others, and whoever goes on first has to have it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from treewarden.ledgers import Kind

if TYPE_CHECKING:
    from ._actor import Actor


class Slot:
    """The slot of one agent. Not made directly: see ``slot_of``."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        # The tool calls that run, and for how many children each of them waits.
        self._waits_of: dict[object, int] = {}
        # How many of them wait for none.
        self._at_work = 0
        # Whether the loop itself does nothing but wait for them.
        self._loop_waits = False
        # Set while somebody waits to have the slot back.
        self._is_back: anyio.Event | None = None

    def began(self, call: object, *, waits: bool = False) -> None:
        """A tool call runs. ``waits``: all it does is wait for a child."""
        self._waits_of[call] = 1 if waits else 0
        self._at_work += not waits

    def over(self, call: object) -> None:
        """A call has its result. No effect when it has had one."""
        waits = self._waits_of.pop(call, None)
        if waits is None:
            return
        self._at_work -= waits == 0
        if self._loop_waits and not self._waits_of:
            self._ask()  # before the last child's own slot goes to somebody else
        else:
            self._look()

    def rest(self, call: object) -> None:
        """From now on ``call`` waits for a child; the agent's actor stands for its loop."""
        if call is self._actor:
            self._loop_waits = True
            self._waits_of.setdefault(call, 0)
        elif self._waits_of.get(call) == 0:
            self._at_work -= 1
        if call in self._waits_of:
            self._waits_of[call] += 1
            self._look()

    def wake(self, call: object) -> None:
        """``call`` waits for one child less; where that was the last it asks for the slot."""
        if call not in self._waits_of:
            return
        self._waits_of[call] -= 1
        if self._waits_of[call]:
            return
        if call is self._actor:
            del self._waits_of[call]
            self._loop_waits = False
        else:
            self._at_work += 1
        self._ask()

    async def wait(self) -> None:
        """Return when the slot is there, if it was asked for."""
        if self._is_back is not None and self._actor.lease.node.is_parked:
            await self._is_back.wait()

    def let_calls_run(self) -> None:
        """All calls of a reply have begun and the loop waits for them."""
        self._loop_waits = True
        self._look()

    async def take_results(self) -> None:
        """The calls are over: the loop goes on, once it has the slot."""
        self._loop_waits = False
        self._ask()
        await self.wait()

    def _look(self) -> None:
        if self._loop_waits and self._waits_of and not self._at_work:
            root = self._actor.root
            root.ledger.park(self._actor.lease, root.clock.monotonic())

    def _ask(self) -> None:
        root, lease = self._actor.root, self._actor.lease
        if not root.ledger.resume(lease, root.clock.monotonic()) and self._is_back is None:
            self._is_back = anyio.Event()
            lease.on_slot = self._return

    def _return(self) -> None:
        if self._is_back is not None:
            self._is_back.set()
            self._is_back = None


def slot_of(actor: Actor) -> Slot | None:
    """The slot of an agent, or None where it has none to give back."""
    may_park = actor.root.ledger.caps.admission == "wait"
    return Slot(actor) if may_park and actor.lease.node.kind is Kind.AGENT else None
