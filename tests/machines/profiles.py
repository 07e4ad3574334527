"""How long machines run. ``deadline=None`` everywhere: shared machines pause at will."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ledger",
    deadline=None,
    # A history is long and its steps are many; that is the point.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

LEDGER = settings.get_profile("ledger")
QUICK = settings(LEDGER, max_examples=120, stateful_step_count=40)
# Every history is kept in full and folded from every prefix, so these are short.
SHORT = settings(LEDGER, max_examples=40, stateful_step_count=25)
# Repeated until the time is up, so one round is short.
SOAK = settings(LEDGER, max_examples=50, stateful_step_count=80)
