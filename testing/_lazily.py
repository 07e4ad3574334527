"""Names of this part that are loaded at their first use, because they need Hypothesis."""

from __future__ import annotations

from importlib import import_module

_HOME = {
    "History": "._ledger_machine",
    "LedgerMachine": "._ledger_machine",
    "TokenMachine": "._ledger_machine",
    "UsdMachine": "._ledger_machine",
}


def __getattr__(name: str) -> object:
    """The name ``treewarden.testing`` does not have yet.

    Raises:
        ImportError: It needs a library that is not installed.
        AttributeError: There is no such name.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'treewarden.testing' has no attribute {name!r}")
    try:
        module = import_module(_HOME[name], __package__)
    except ModuleNotFoundError as missing:
        if missing.name != "hypothesis":
            raise
        raise ImportError(
            f"treewarden.testing.{name} needs Hypothesis, which is not installed. "
            "Write: pip install 'treewarden[testing]'",
            name="hypothesis",
        ) from missing
    return getattr(module, name)
