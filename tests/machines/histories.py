"""Histories that random choice seldom finds, each with what it is about."""

from __future__ import annotations

from typing import Any

from treewarden.ledgers import Ask, Caps, Ending, Kind, Outcome
from treewarden.protocols import Usage
from treewarden.testing import History


def ask(output: int, *, input: int = 0, **options: Any) -> Ask:
    """On the cheap model a call of ``output`` tokens holds 5 a token, and 3 for each of input."""
    options = {"clamp": False, "output_floor_tokens": 1, **options}
    return Ask(input_tokens=input, output_tokens=output, price=None, **options)


def opened(max: int | None, *actors: tuple[int, bool, Ask], **caps: Any) -> tuple[Any, ...]:
    values = {
        "max": max,
        "staged": None,
        "deadline": None,
        "caps": Caps(**caps),
        "actors": list(actors),
    }
    return "open", values


def funded(which: int, its: Ask) -> tuple[str, dict[str, Any]]:
    return "fund", {"which": which, "ask": its, "model": 0}


def gone_on(which: int, *, usage: Usage | None = None, by: str | None = None) -> tuple[str, Any]:
    """The call is dispatched; then it is answered and settled."""
    return "go_on", {
        "which": which,
        "usage": usage,
        "deltas": 0,
        "bytes": 0,
        "ending": Ending.FINISHED,
        "answered_by": by,
        "is_over": usage is not None,
    }


def changed(which: int, how: str, *, percent: int = 0, more: int = 0) -> tuple[str, Any]:
    values = {"which": which, "how": how, "percent": percent, "more": more, "reason": "why"}
    return "change_a_wallet", values


def ended(which: int, outcome: Outcome = Outcome.OK) -> tuple[str, Any]:
    return "end", {"which": which, "outcome": outcome}


def admitted(below: int, *, cap: int | None = None) -> tuple[str, Any]:
    return "admit", {
        "below": below,
        "kind": Kind.AGENT,
        "cap": cap,
        "least": None,
        "set_aside": 0,
        "deadline": None,
        "attempts": None,
    }


MUCH = Usage(input=6, output=14)
"""190 on the dear model."""

HISTORIES: dict[str, History] = {
    # Two wallets of 60 in a tree of 150. A call of the second waits for its own wallet when the
    # first spends 190: the tree is breached, and nobody below it may go on waiting.
    "a breach beside a queue": [
        opened(150, (0, True, ask(8)), (0, True, ask(8))),
        funded(2, ask(8)),
        gone_on(0),
        gone_on(0, usage=MUCH, by="dear"),
    ],
    # The root is over its target, so a call below waits on the root; then its own wallet is
    # revoked.
    "a revocation below a queue": [
        opened(100, (0, True, ask(2))),
        funded(0, ask(6)),
        changed(0, "lower", percent=50),
        funded(1, ask(2)),
        changed(3, "revoke"),
    ],
    # A lease with three calls in line ends while it is the head of the line.
    "an end at the head of a queue": [
        opened(100, (0, False, ask(16))),
        funded(1, ask(10)),
        funded(1, ask(2)),
        funded(1, ask(3)),
        ended(0, Outcome.CANCELLED),
    ],
    # A hold that a waiter was granted and nobody has taken yet ends with its lease.
    "an end between grant and resume": [
        opened(100, (0, False, ask(16)), (0, False, ask(10))),
        ("release", {"which": 0}),
        ended(1, Outcome.CANCELLED),
        funded(1, ask(20)),
    ],
    "a spawn beside a queue": [
        opened(100, (0, False, ask(12)), (0, False, ask(12)), max_depth=3),
        admitted(1, cap=10),
        ("release", {"which": 0}),
        admitted(1, cap=10),
    ],
    "a slot handed on": [
        opened(None, (0, False, ask(2)), (0, False, ask(2)), max_concurrent_calls=1),
        gone_on(0),
        gone_on(1),
        gone_on(0, usage=MUCH),
    ],
    # 20 are left, which is four tokens.
    "clamps at and below the floor": [
        opened(100, (0, False, ask(16))),
        funded(1, ask(10, clamp=True, output_floor_tokens=5, wait=False)),
        funded(1, ask(10, clamp=True, output_floor_tokens=4, wait=False)),
    ],
    "an answer that breaks off": [
        opened(None, (0, False, ask(12, input=6, can_write_cache=True))),
        gone_on(0),
        (
            "go_on",
            {
                "which": 0,
                "usage": None,
                "deltas": 3,
                "bytes": 37,
                "ending": Ending.BROKEN,
                "answered_by": None,
                "is_over": True,
            },
        ),
    ],
    "a start that failed": [
        opened(100),
        admitted(0, cap=60),
        ended(0, Outcome.FAILED_TO_START),
        admitted(0, cap=100),
    ],
}
