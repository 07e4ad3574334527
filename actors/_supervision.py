"""What a supervisor decides, as pure functions that return plans.

The words are OTP's. Nothing here runs a task or reads a clock: the instants of earlier restarts
are handed in.
"""

from __future__ import annotations

from enum import Enum

import attrs

from treewarden.protocols import UsageError


class Strategy(Enum):
    """Who is restarted when one child ends."""

    ONE_FOR_ONE = "one_for_one"
    ONE_FOR_ALL = "one_for_all"
    REST_FOR_ONE = "rest_for_one"


class Restart(Enum):
    """When a child is started again.

    Agents are TEMPORARY: starting one again costs money, and that is not a supervisor's decision.
    """

    PERMANENT = "permanent"  # always
    TRANSIENT = "transient"  # only when it ended with an error
    TEMPORARY = "temporary"  # never


@attrs.frozen
class Intensity:
    """How many restarts are borne: at most ``restarts`` within ``period_seconds``.

    Raises:
        UsageError: One of them cannot be.
    """

    restarts: int = 3
    period_seconds: float = 5.0

    def __attrs_post_init__(self) -> None:
        if type(self.restarts) is not int or self.restarts < 0:
            raise UsageError(
                f"restarts is {self.restarts!r}. Give a whole number from 0.",
                code="cave_option_invalid",
            )
        if type(self.period_seconds) not in (int, float) or not self.period_seconds > 0:
            raise UsageError(
                f"period_seconds is {self.period_seconds!r}. Give a number above 0.",
                code="cave_option_invalid",
            )


@attrs.frozen(kw_only=True)
class Plan:
    """What to do about a child that ended: stop these (last started first), start those.

    ``escalate``: the restarts were too many, so the supervisor stops its children and fails.
    """

    stop: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    escalate: bool = False


def is_wanted_back(restart: Restart, *, failed: bool) -> bool:
    """Say whether a child that ended is to be started again."""
    match restart:
        case Restart.PERMANENT:
            return True
        case Restart.TRANSIENT:
            return failed
        case Restart.TEMPORARY:
            return False


def is_too_intense(intensity: Intensity, restarted_at: list[float], now: float) -> bool:
    """Say whether one more restart at ``now`` would be more than the intensity allows."""
    recent = [at for at in restarted_at if now - at < intensity.period_seconds]
    return len(recent) >= intensity.restarts


def plan_after_end(
    strategy: Strategy,
    children: tuple[str, ...],
    ended: str,
    *,
    restart: Restart,
    failed: bool,
    intensity: Intensity,
    restarted_at: list[float],
    now: float,
    temporary: frozenset[str] = frozenset(),
) -> Plan:
    """Decide what follows from the end of the child ``ended``.

    Args:
        children: All children in start order, ``ended`` among them.
        failed: It ended with an error.
        restarted_at: Instants of this supervisor's earlier restarts, in clock seconds.
        temporary: Children that are never started again, not even when they are stopped for
            another one's sake.
    """
    if not is_wanted_back(restart, failed=failed):
        return Plan()
    if is_too_intense(intensity, restarted_at, now):
        others = tuple(name for name in children if name != ended)
        return Plan(stop=others[::-1], escalate=True)
    at = children.index(ended)
    match strategy:
        case Strategy.ONE_FOR_ONE:
            affected = children[at : at + 1]
        case Strategy.REST_FOR_ONE:
            affected = children[at:]
        case Strategy.ONE_FOR_ALL:
            affected = children
    running = tuple(name for name in affected if name != ended)
    return Plan(stop=running[::-1], start=tuple(name for name in affected if name not in temporary))
