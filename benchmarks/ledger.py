"""What the ledger alone costs, and that it does not cost more when the tree is large.

One operation is a lease begun with a wallet of its own and ended again: two events.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import anyio
from _measure import Row, arguments, finish, interleaved, ratio_row

from treewarden.ledgers import Caps, Kind, Lease, Outcome, TreeLedger

UNLIMITED = Caps(max_depth=16, max_subagents=None, max_concurrent_subagents=None)


def new_tree() -> tuple[TreeLedger, Lease]:
    ledger = TreeLedger(unit="tokens", max=10**15, caps=UNLIMITED)
    return ledger, ledger.admit(ledger.root, "run", kind=Kind.RUN, at=0.0)


def widened(count: int) -> tuple[TreeLedger, Lease]:
    """A run with ``count`` live children."""
    ledger, run = new_tree()
    for _ in range(count):
        ledger.admit(run, "a", kind=Kind.AGENT, at=0.0, cap=10)
    return ledger, run


def deepened(ledger: TreeLedger, run: Lease, depth: int) -> Lease:
    lease = run
    for _ in range(depth):
        lease = ledger.admit(lease, "d", kind=Kind.AGENT, at=0.0, cap=10**9 // (lease.id + 1))
    return lease


def cycle(ledger: TreeLedger, parent: Lease, count: int) -> float:
    """CPU seconds of one lease, begun and ended."""
    began = time.process_time()
    for _ in range(count):
        lease = ledger.admit(parent, "x", kind=Kind.AGENT, at=0.0, cap=10)
        ledger.end(lease, Outcome.OK, 0.0)
    return (time.process_time() - began) / count


def bare_task(count: int, at_once: int, backend: str = "asyncio") -> float:
    async def noop() -> None:
        pass

    async def main() -> float:
        began = time.process_time()
        for _ in range(count // at_once):
            async with anyio.create_task_group() as group:
                for _ in range(at_once):
                    group.start_soon(noop)
        return (time.process_time() - began) / count

    return anyio.run(main, backend=backend)


def by_anchor(narrow: tuple[TreeLedger, Lease], *, count: int, rounds: int) -> dict[str, float]:
    """The ledger alone beside bare tasks of every shape: how many are alive at once decides much
    of what a task costs, and nothing of what the ledger does."""
    anchors = [(b, n) for b in ("asyncio", "trio") for n in (1, 100, 1_000) if n <= count]
    cases: dict[str, Callable[[], float]] = {"ledger": partial(cycle, *narrow, count)}
    for backend, at_once in anchors:
        cases[f"{backend}, {at_once} at once"] = partial(bare_task, count, at_once, backend)
    found = interleaved(cases, rounds=rounds)
    ledger = found.pop("ledger")
    return {
        name: round(statistics.median(a / b for a, b in zip(ledger, times, strict=True)), 3)
        for name, times in found.items()
    }


def main() -> int:
    options = arguments(__doc__ or "")
    count, rounds = (300, 3) if options.quick else (10_000, 15)
    nodes = 2_000 if options.quick else 1_000_000
    narrow, wide = widened(10), widened(500 if options.quick else 100_000)
    found = interleaved(
        {
            "bare": lambda: bare_task(count, count),
            "narrow": lambda: cycle(*narrow, count),
            "wide": lambda: cycle(*wide, count),
        },
        rounds=rounds,
    )
    rows: list[Row] = [
        ratio_row("ledger alone / bare task, 10 siblings", found, "narrow", "bare", 0.25),
        ratio_row("ledger alone / bare task, 100,000 siblings", found, "wide", "bare", 0.25),
    ]
    small, large = widened(10), widened(nodes)
    deep_small, deep_large = deepened(*small, 8), deepened(*large, 8)
    # The journal's tail grows with the tree until it is cut for the first time. Until then each
    # event takes fresh memory; a tree that has run for a while does not.
    for ledger, parent in ((small[0], deep_small), (large[0], deep_large)):
        while ledger.journal.is_whole:
            cycle(ledger, parent, 1_000)
    found = interleaved(
        {
            "small": lambda: cycle(small[0], deep_small, count),
            "large": lambda: cycle(large[0], deep_large, count),
        },
        rounds=rounds,
    )
    rows.append(ratio_row(f"at depth 8: {nodes:,} nodes / 10 nodes", found, "large", "small", 1.2))
    beside = by_anchor(narrow, count=min(count, 5_000), rounds=rounds)
    return finish("ledger", rows, {"ratio_by_anchor": beside})


if __name__ == "__main__":
    sys.exit(main())
