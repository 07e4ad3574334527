"""How long a soak takes: ``SOAK_SECONDS``, ten minutes at most, shared by everything that soaks."""

from __future__ import annotations

import os

TREES, LEDGER_MACHINES, EXPLORER = 0.6, 0.2, 0.2
"""The shares of random trees, of the ledger's state machines and of the cancellation explorer."""

_LONGEST = 600.0


def soak_seconds(share: float) -> float:
    """The time of one share."""
    return share * min(float(os.environ.get("SOAK_SECONDS", "300")), _LONGEST)
