"""What an exploration found: how many instants, and what went wrong at which of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import attrs

Backend = Literal["asyncio", "trio"]
Kind = Literal["scope", "native"]
Aim = Literal["caller", "stepping", "other"]

BACKENDS: tuple[Backend, ...] = ("asyncio", "trio")
KINDS: tuple[Kind, ...] = ("scope", "native")

_SHOWN = 5
"""How many violations a report shows in full; the rest is counted."""


@attrs.frozen
class Attempt:
    """One run of the scenario: where it is cancelled, and how.

    Attributes:
        times: How often: the second time comes while it cleans up after the first.
        instant: Right before which step of the scenario's tasks, counted from 1. 0: undisturbed.
        aim: Who is cancelled natively: the caller's task, the one about to step, or another
            actor's. A scope is always the one around the scenario, and its aim is "caller".
    """

    backend: Backend
    kind: Kind
    times: int
    instant: int
    aim: Aim = "caller"


@attrs.frozen
class Violation:
    """Something that must hold and did not.

    Attributes:
        attempt: The run in which it did not hold.
        task: The task that was about to make its step, and where it stood.
        hit: Whom the cancellation hit.
        at: The virtual time.
        broken: What did not hold, one line for each thing.
    """

    attempt: Attempt
    task: str
    hit: str
    at: float
    broken: tuple[str, ...]
    # What the scenario is called, and its seed, to say how to repeat it.
    scenario: str
    seed: int | None = None

    @property
    def repeat(self) -> str:
        """The call that does this again."""
        a = self.attempt
        seed = "" if self.seed is None else f", seed={self.seed}"
        return (
            f"explore_cancellations({self.scenario}, backends=({a.backend!r},), "
            f"kinds=({a.kind!r},), times=({a.times},), instants=({a.instant},){seed})"
        )

    def __str__(self) -> str:
        a = self.attempt
        often = "" if a.times == 1 else f", {a.times} times"
        how = "undisturbed" if not a.instant else f"{a.kind} cancel of {self.hit}{often}"
        lines = "".join(f"\n    {line}" for line in self.broken)
        return (
            f"{self.scenario} on {a.backend}, {how}\n"
            f"  at instant {a.instant} (virtual time {self.at:g}), before the step of {self.task}:"
            f"{lines}\n  to repeat it: {self.repeat}"
        )

    def to_json(self) -> dict[str, Any]:
        """The same as values for JSON."""
        return {
            **attrs.asdict(self.attempt),
            "scenario": self.scenario,
            "task": self.task,
            "hit": self.hit,
            "at": self.at,
            "broken": list(self.broken),
            "repeat": self.repeat,
        }


class CancellationViolated(AssertionError):
    """A scenario did not stay clean at every instant.

    Attributes:
        exploration: What was explored, with all violations.
    """

    def __init__(self, exploration: Exploration) -> None:
        super().__init__(str(exploration))
        self.exploration = exploration


@attrs.define
class Exploration:
    """What came of exploring one scenario.

    Attributes:
        checkpoints: How many instants the undisturbed scenario has on each backend: the steps that
            its tasks and those of its trees make.
        runs: How often it was run and cancelled, by backend, kind and times.
        violations: What went wrong, in the order it was found.
    """

    scenario: str
    checkpoints: dict[Backend, int] = attrs.field(factory=dict["Backend", int])
    explored: dict[tuple[Backend, Kind], set[int]] = attrs.field(
        factory=dict["tuple[Backend, Kind]", "set[int]"], repr=False
    )
    runs: Counter[tuple[Backend, Kind, int]] = attrs.field(
        factory=Counter["tuple[Backend, Kind, int]"]
    )
    violations: list[Violation] = attrs.field(factory=list[Violation])

    def count(self, attempt: Attempt) -> None:
        """One more run has been made."""
        self.runs[attempt.backend, attempt.kind, attempt.times] += 1
        explored = self.explored.setdefault((attempt.backend, attempt.kind), set())
        explored.add(attempt.instant)

    @property
    def is_clean(self) -> bool:
        return not self.violations

    def check(self) -> Exploration:
        """Return this exploration if everything held.

        Raises:
            CancellationViolated: Something did not; the error shows at which instants.
        """
        if self.violations:
            raise CancellationViolated(self)
        return self

    @property
    def summary(self) -> str:
        """One line with the counts."""
        parts = (
            f"{backend}/{kind} {len(self.explored[backend, kind])} checkpoints in {runs} runs"
            for (backend, kind), runs in self._runs_by_kind().items()
        )
        return f"{self.scenario}: {'; '.join(parts)}; {len(self.violations)} violations"

    def _runs_by_kind(self) -> dict[tuple[Backend, Kind], int]:
        found: dict[tuple[Backend, Kind], int] = {}
        for (backend, kind, _), runs in self.runs.items():
            found[backend, kind] = found.get((backend, kind), 0) + runs
        return found

    def __str__(self) -> str:
        shown = [str(violation) for violation in self.violations[:_SHOWN]]
        if len(self.violations) > _SHOWN:
            shown.append(f"… and {len(self.violations) - _SHOWN} more")
        return "\n\n".join([self.summary, *shown])

    def to_json(self) -> dict[str, Any]:
        """The same as values for JSON."""
        return {
            "scenario": self.scenario,
            "checkpoints": dict(self.checkpoints),
            "runs": [
                {"backend": backend, "kind": kind, "times": times, "runs": runs}
                for (backend, kind, times), runs in self.runs.items()
            ],
            "violations": [violation.to_json() for violation in self.violations],
        }


def table_of(explorations: Sequence[Exploration]) -> str:
    """One line for each scenario, backend and kind, with the counts in columns."""
    rows = [("scenario", "backend", "kind", "checkpoints", "runs", "violations")]
    for exploration in explorations:
        for (backend, kind), runs in exploration._runs_by_kind().items():  # pyright: ignore[reportPrivateUsage]
            bad = [
                v
                for v in exploration.violations
                if (v.attempt.backend, v.attempt.kind) == (backend, kind)
            ]
            seen = len(exploration.explored[backend, kind])
            rows.append((exploration.scenario, backend, kind, str(seen), str(runs), str(len(bad))))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_aligned(row, widths) for row in rows)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    texts = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
    numbers = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
    return "  ".join([*texts, *numbers]).rstrip()
