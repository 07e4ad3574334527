"""Both backends, always; asyncio first. And at the end of a run: what tests measured."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # A test says record_property("measured", "…"). It travels on the test's report, because what a
    # test prints in a parallel run is seen by nobody.
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    for report in reports:
        for name, value in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(f"measured: {value}")
