"""Says at the end of a run which mutants of the ledger were caught, and with -v by what."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    mutants = [r for r in reports if "test_a_mutant_is_caught[" in r.nodeid]
    if not mutants:
        return
    caught = [str(v) for r in mutants for name, v in r.user_properties if name == "mutant"]
    terminalreporter.write_line(f"ledger mutants: {len(caught)} of {len(mutants)} caught")
    if terminalreporter.config.get_verbosity() > 0:
        for line in sorted(caught):
            terminalreporter.write_line(f"  {line}")
