"""Says at the end of a run how many recorded files it used."""

from __future__ import annotations

import pytest

from ._recordings import TRAFFIC, Exchange

PROPERTY = "recording"


def pytest_runtest_setup(item: pytest.Item) -> None:
    # On the report rather than in a variable: reports come back from the workers of a parallel run.
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        for value in item.callspec.params.values():
            if isinstance(value, Exchange):
                item.user_properties.append((PROPERTY, value.file))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    used = {
        value for report in reports for name, value in report.user_properties if name == PROPERTY
    }
    where = TRAFFIC if TRAFFIC.is_dir() else "absent, tests skipped"
    terminalreporter.write_line(f"recorded traffic: {len(used)} files used ({where})")
