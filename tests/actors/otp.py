"""A naive model of what OTP's supervisors do, to hold ours against.

It knows nothing of tasks: it steps from one end to the next, in whole ticks, and writes down what
happens. Where two things would happen at the same tick it gives up, because their order is free.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

How = Literal["returns", "raises", "is killed"]
# (tick, what, child)
Trace: TypeAlias = list[tuple[int, str, str]]


class Tie(Exception):
    """Two things happen at once."""


@attrs.frozen
class Script:
    """One child: its lives one after the other, and the last one goes on for ever."""

    name: str
    restart: Literal["permanent", "transient", "temporary"]
    lives: tuple[tuple[int, How], ...]
    # How long it cleans up when it is stopped.
    clean_up: int


@attrs.define
class Otp:
    """A supervisor of ``scripts``, stopped from outside at the tick ``until``."""

    scripts: tuple[Script, ...]
    strategy: str
    max_restarts: int
    period: int
    until: int
    trace: Trace = attrs.field(factory=Trace)
    restarts: int = 0
    outcome: str = "over"
    now: int = 0
    # When each living child ends by itself, and how; None: never.
    alive: dict[str, tuple[int, How] | None] = attrs.field(
        factory=dict[str, "tuple[int, How] | None"]
    )
    # Ended, and not looked at yet.
    unseen: list[tuple[str, How]] = attrs.field(factory=list[tuple[str, How]])
    failed_at: list[int] = attrs.field(factory=list[int])

    def run(self) -> Trace:
        self.start([script.name for script in self.scripts])
        while self.alive:
            at = min((end[0] for end in self.alive.values() if end), default=self.until + 1)
            if at == self.until:
                raise Tie
            if at > self.until:
                self.let_pass(self.until)
                self.stop_all("stopped")
                break
            self.let_pass(at, is_end=True)
            while self.unseen:
                self.see(*self.unseen.pop(0))
        return self.trace

    def see(self, name: str, how: How) -> None:
        if name in self.alive:
            return  # it was started again meanwhile
        script = next(script for script in self.scripts if script.name == name)
        is_wanted = {"permanent": True, "transient": how != "returns", "temporary": False}
        if not is_wanted[script.restart]:
            return
        self.failed_at = [at for at in self.failed_at if at > self.now - self.period]
        if len(self.failed_at) >= self.max_restarts:
            self.stop_all("failed")
            return
        self.failed_at.append(self.now)
        names = [script.name for script in self.scripts]
        affected = {
            "one_for_one": [name],
            "one_for_all": names,
            "rest_for_one": names[names.index(name) :],
        }[self.strategy]
        self.stop([other for other in reversed(affected) if other != name])
        self.restarts += self.start([other for other in affected if self.may_start(other)])

    def may_start(self, name: str) -> bool:
        return next(s for s in self.scripts if s.name == name).restart != "temporary"

    def start(self, names: list[str]) -> int:
        for name in names:
            script = next(script for script in self.scripts if script.name == name)
            life = sum(who == name and what == "starts" for _, what, who in self.trace)
            ends = None
            if life < len(script.lives):
                ticks, how = script.lives[life]
                ends = (self.now + ticks, how)
            self.alive[name] = ends
            self.trace.append((self.now, "starts", name))
        return len(names)

    def stop(self, names: list[str]) -> None:
        for name in names:
            if name in self.alive:
                del self.alive[name]
                script = next(script for script in self.scripts if script.name == name)
                down = self.now + script.clean_up
                if down >= self.until and self.outcome != "stopped":
                    raise Tie
                self.let_pass(down)
                self.trace.append((self.now, "is stopped", name))

    def stop_all(self, outcome: str) -> None:
        self.outcome = outcome
        self.stop([script.name for script in reversed(self.scripts)])
        self.unseen.clear()
        self.alive.clear()

    def let_pass(self, until: int, *, is_end: bool = False) -> None:
        """Time passes, and whoever ends in it ends. ``is_end``: somebody does at its last tick."""
        due: list[tuple[int, str, How]] = []
        for name, end in self.alive.items():
            if end is not None and end[0] <= until:
                due.append((end[0], name, end[1]))
        due.sort()
        ticks = {at for at, _, _ in due}
        if len(ticks) < len(due) or (until in ticks and not is_end):
            raise Tie
        for at, name, how in due:
            del self.alive[name]
            self.trace.append((at, how, name))
            self.unseen.append((name, how))
        self.now = until
