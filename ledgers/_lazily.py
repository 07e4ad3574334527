"""Names of this part that are loaded at their first use: most runs have no breakers."""

from __future__ import annotations

from importlib import import_module

_HOME = {
    "Breakers": "._breakers",
    "Judge": "._breakers",
    "Seen": "._breakers",
    "Verdict": "._breakers",
}


def __getattr__(name: str) -> object:
    """The name ``treewarden.ledgers`` does not have yet.

    Raises:
        AttributeError: There is no such name.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'treewarden.ledgers' has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __package__), name)
