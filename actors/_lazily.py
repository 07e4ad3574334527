"""Names of this part that are loaded at their first use: most trees supervise no services."""

from __future__ import annotations

from importlib import import_module

_HOME = {
    "ChildSpec": "._supervisor",
    "Intensity": "._supervision",
    "Plan": "._supervision",
    "Restart": "._supervision",
    "Service": "._service",
    "Strategy": "._supervision",
    "Supervisor": "._supervisor",
    "plan_after_end": "._supervision",
}


def __getattr__(name: str) -> object:
    """The name ``treewarden.actors`` does not have yet.

    Raises:
        AttributeError: There is no such name.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'treewarden.actors' has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __package__), name)
