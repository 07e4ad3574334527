"""Says at the end of a run which mutants were caught; of the actors by what, with -v of all."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    _write_actor_mutants(terminalreporter, reports)
    mutants = [r for r in reports if "test_a_mutant_is_caught[" in r.nodeid]
    if not mutants:
        return
    caught = [str(v) for r in mutants for name, v in r.user_properties if name == "mutant"]
    terminalreporter.write_line(f"ledger mutants: {len(caught)} of {len(mutants)} caught")
    if terminalreporter.config.get_verbosity() > 0:
        for line in sorted(caught):
            terminalreporter.write_line(f"  {line}")


def _write_actor_mutants(
    terminalreporter: pytest.TerminalReporter, reports: list[pytest.TestReport]
) -> None:
    found = [
        tuple(str(value).split("|"))  # text is what comes through from another process
        for report in reports
        for name, value in report.user_properties
        if name == "actor mutant"
    ]
    if found:
        rows = [("mutant", "explorer", "seeded schedules", "ledger machine"), *sorted(found)]
        terminalreporter.write_line("mutants of the actors, and what catches each:")
        for mutant, explorer, schedules, machine in rows:
            terminalreporter.write_line(f"  {mutant:<38}{explorer:<24}{schedules:<18}{machine}")
