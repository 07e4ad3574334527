"""A fixture for pytest: write ``pytest_plugins = ["treewarden.testing.pytest_plugin"]``.

The line goes into a test file or into the ``conftest.py`` at the root of your tests.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from ._census import Census, census


@pytest.fixture
def leak_census() -> Generator[Census]:
    """The test fails if it leaves something behind: see ``treewarden.testing.census``.

    Ask for it by name, or for every test of a file with
    ``pytestmark = pytest.mark.usefixtures("leak_census")``.
    """
    with census() as seen:
        yield seen
