"""Run trees of LLM agents inside their limits.

The front door: every public name, loaded on first use. The names live in the parts
(``treewarden.actors``, ``treewarden.ledgers``, …) and are listed once, here. The type stub
``typings/treewarden/__init__.pyi`` repeats the list for checkers; a test keeps the two the same.
"""

from importlib import import_module

_HOME = {
    "Actor": "actors",
    "ActorStopped": "protocols",
    "Agent": "actors",
    "Breakers": "ledgers",
    "Budget": "actors",
    "ChildSpec": "actors",
    "Clock": "actors",
    "Context": "actors",
    "Conversation": "actors",
    "CredentialsError": "protocols",
    "Intensity": "actors",
    "JsonLinesJournal": "actors",
    "Letter": "actors",
    "Limits": "actors",
    "MailboxFull": "protocols",
    "Message": "protocols",
    "ModelCard": "ledgers",
    "Price": "ledgers",
    "PriceBook": "ledgers",
    "ProviderError": "protocols",
    "ProviderInterrupted": "protocols",
    "Receipt": "protocols",
    "RefusedError": "protocols",
    "Result": "actors",
    "Retry": "actors",
    "RetryBudgetSpent": "protocols",
    "RunCancelled": "protocols",
    "RunError": "protocols",
    "RunStopped": "protocols",
    "RunStream": "actors",
    "SQLiteJournal": "actors",
    "Service": "actors",
    "ServiceFailed": "protocols",
    "Supervisor": "actors",
    "SupervisorCancelled": "protocols",
    "Tier": "ledgers",
    "Tool": "actors",
    "ToolCall": "protocols",
    "ToolFailed": "protocols",
    "ToolUnavailable": "protocols",
    "Tree": "actors",
    "TreeLedger": "ledgers",
    "TreewardenError": "protocols",
    "Usage": "protocols",
    "UsageError": "protocols",
    "agent": "actors",
    "auto": "actors",
    "model": "actors",
    "open_tree": "actors",
    "output": "actors",
    "run": "actors",
    "run_sync": "actors",
    "stream": "actors",
    "subagent": "actors",
    "tool": "actors",
}


def __getattr__(name: str) -> object:
    if name == "testing":  # tw.testing.ScriptedModel without an import of its own
        return import_module("treewarden.testing")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOME)
