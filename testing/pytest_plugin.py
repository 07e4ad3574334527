"""A fixture for pytest: write ``pytest_plugins = ["treewarden.testing.pytest_plugin"]``.

The line goes into a test file or into the ``conftest.py`` at the root of your tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator
from functools import wraps
from typing import Any

import pytest

from ._census import Census, census


@pytest.fixture
def leak_census(request: pytest.FixtureRequest) -> Generator[Census]:
    """The test fails if it leaves something behind: see ``treewarden.testing.census``.

    Ask for it by name, or for every test of a file with
    ``pytestmark = pytest.mark.usefixtures("leak_census")``. An asynchronous test is looked at while
    its loop still runs.
    """
    item: Any = request.node
    if inspect.iscoroutinefunction(getattr(item, "obj", None)):
        # When the fixture ends, the loop is mostly gone, and with it what the test left in it.
        item.obj = _looked_at_in_its_loop(item.obj)
    with census() as seen:
        yield seen


def _looked_at_in_its_loop(test: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(test)
    async def looked_at(*args: Any, **options: Any) -> Any:
        async with census():
            return await test(*args, **options)

    return looked_at
