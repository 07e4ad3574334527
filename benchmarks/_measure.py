"""What the benchmarks share: CPU time in interleaved rounds, ratios, one line out.

Single absolute times say little on a shared machine, so every figure is a ratio against an anchor
that was measured in the same run, and the median of several rounds that alternate between the two.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Row:
    """One figure and its target. ``at_most`` False: the figure is to be at least the target."""

    what: str
    value: float
    target: float
    at_most: bool = True
    # Lowest and highest round, where there were several.
    spread: tuple[float, float] | None = None

    @property
    def ok(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes, for a smoke test")
    parser.add_argument("--backend", choices=["asyncio", "trio", "both"], default="both")
    return parser.parse_args()


def backends(options: argparse.Namespace) -> list[str]:
    return ["asyncio", "trio"] if options.backend == "both" else [options.backend]


def cpu_seconds(function: Callable[[], Any]) -> float:
    """CPU time that ``function`` takes in this process."""
    began = time.process_time()
    function()
    return time.process_time() - began


def interleaved(cases: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """Measure each case ``rounds`` times, one after the other in turn.

    Garbage of one case is not collected at the cost of the next, and what was imported is not
    looked through again in every collection: in a service that is done once, too.
    """
    for case in cases.values():
        case()  # warm
    gc.collect()
    gc.freeze()
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            gc.collect()
            found[name].append(case())
    return found


def ratio_row(
    what: str, found: Mapping[str, list[float]], case: str, anchor: str, target: float
) -> Row:
    """The median of a case's ratios against an anchor, round by round."""
    ratios = [a / b for a, b in zip(found[case], found[anchor], strict=True)]
    return Row(
        what=what,
        value=statistics.median(ratios),
        target=target,
        spread=(min(ratios), max(ratios)),
    )


def resident_bytes() -> int:
    """Memory of this process that is really there."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def finish(name: str, rows: list[Row], extra: Mapping[str, Any] | None = None) -> int:
    """Print a table for people on stderr and one JSON line on stdout; the exit code."""
    for row in rows:
        sign = "<=" if row.at_most else ">="
        spread = f"  [{row.spread[0]:.2f} to {row.spread[1]:.2f}]" if row.spread else ""
        mark = "ok" if row.ok else "MISSED"
        print(
            f"{row.what:58} {row.value:10.3f} {sign} {row.target:<9g} {mark}{spread}",
            file=sys.stderr,
        )
    ok = all(row.ok for row in rows)
    line = {
        "benchmark": name,
        "ok": ok,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rows": [
            {
                "what": row.what,
                "value": round(row.value, 4),
                "target": row.target,
                "ok": row.ok,
                "spread": None if row.spread is None else [round(x, 4) for x in row.spread],
            }
            for row in rows
        ],
        **(extra or {}),
    }
    print(json.dumps(line))
    return 0 if ok else 1
