"""What importing costs: CPU of the interpreter that does it, less that of one that does nothing."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys

from _measure import Row, arguments, finish

DOOR = "import treewarden"
TOUCH = "import treewarden as tw; tw.run; tw.agent; tw.Budget"


def cpu_ms(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> int:
    options = arguments(__doc__ or "")
    rounds = 3 if options.quick else 11
    found = [(cpu_ms("pass"), cpu_ms(DOOR), cpu_ms(TOUCH)) for _ in range(rounds)]
    door = statistics.median(b - a for a, b, _ in found)
    touch = statistics.median(c - a for a, _, c in found)
    return finish(
        "imports",
        [
            Row(what="import treewarden, ms CPU", value=door, target=40),
            Row(what="and touching run, agent, Budget, ms CPU", value=touch, target=300),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
