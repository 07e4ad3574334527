"""Print what tests measured at the end of a run.

A test says ``record_property("measured", "…")``. That travels on its report, so it is printed in a
parallel run as well, where what a test prints is not.
"""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    for report in reports:
        for name, value in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(f"measured: {value}")
