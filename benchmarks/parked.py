"""Parked slots: 1,000 parents of two children each under a cap of 8, through the front door.

With ``admission="wait"`` a parent lends its slot while it waits for its children. So the tree works
its way through depth first: it never has more live parents than slots, and its first results come
when only a few have begun. Rejecting, the same tree would refuse all but a few; with room for all,
every parent would be alive at once. Everything here is counted, in virtual time, so it is exact.
"""

from __future__ import annotations

import sys
from typing import Literal, TypeAlias, cast

import attrs
from _measure import Row, arguments, backends, finish

import treewarden as tw
from treewarden.ledgers import Admitted, Ended, Event
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

Backend: TypeAlias = Literal["asyncio", "trio"]

CAP = 8
CHILDREN = 2


@attrs.define
class Counted:
    """What the journal of one tree tells."""

    live: set[int] = attrs.field(factory=set[int])
    most_live: int = 0
    admitted: int = 0
    # How many agents had begun, and how many seconds had passed, at a parent's first result.
    begun_at_first: int | None = None
    seconds_to_first: float = 0.0
    seconds: float = 0.0

    def write(self, event: Event) -> None:
        self.seconds = event.at
        if type(event) is Admitted:
            self.admitted += event.name in ("parent", "child")
            if event.name == "parent":
                self.live.add(event.node)
                self.most_live = max(self.most_live, len(self.live))
        elif type(event) is Ended and event.node in self.live:
            self.live.remove(event.node)
            if self.begun_at_first is None:
                self.begun_at_first, self.seconds_to_first = self.admitted, event.at


def script(parents: int) -> ScriptedModel:
    def answer(request: ScriptedRequest) -> Reply:
        level = request.agent_path.count("/")
        if level < 3 and request.turn == 0:
            name, count = ("parent", parents) if level == 1 else ("child", CHILDREN)
            return Reply(tool_calls=[(name, {"task": "go"})] * count, delay=1)
        return Reply("done", delay=1)

    return ScriptedModel(answer)


async def tree(parents: int) -> Counted:
    model, counted = script(parents), Counted()
    leaf = tw.agent(id="leaf", instructions="Work.", model=model)
    child = tw.subagent(name="child", description="Works.", agent=leaf)
    middle = tw.agent(id="middle", instructions="Split.", model=model, tools=[child])
    parent = tw.subagent(name="parent", description="Splits.", agent=middle)
    top = tw.agent(
        id="top", instructions="Plan.", model=model, tools=[parent], max_tool_calls=parents
    )
    limits = tw.Limits(max_subagents=None, max_concurrent_subagents=CAP, admission="wait")
    clock = VirtualClock.running()
    result = await tw.run(top, "go", limits=limits, journal=counted.write, clock=clock, seed=1)
    receipts = list(result.receipt.walk())
    assert len(receipts) == 1 + parents * (1 + CHILDREN), len(receipts)
    assert all(receipt.stop_reason == "complete" for receipt in receipts)
    return counted


def main() -> int:
    options = arguments(__doc__ or "")
    parents = 100 if options.quick else 1_000
    rows: list[Row] = []
    for backend in backends(options):
        counted = VirtualClock().run(tree, parents, backend=cast(Backend, backend))
        begun = counted.begun_at_first or counted.admitted
        share = counted.seconds_to_first / counted.seconds
        rows += [
            Row(what=f"{backend}: most live parents", value=counted.most_live, target=CAP),
            Row(
                what=f"{backend}: agents begun at the first result of {parents:,} parents",
                value=begun,
                target=CAP * (1 + CHILDREN),
            ),
            Row(
                what=f"{backend}: first result / whole time, virtual",
                value=share,
                target=CAP / parents,
            ),
        ]
    return finish("parked", rows)


if __name__ == "__main__":
    sys.exit(main())
