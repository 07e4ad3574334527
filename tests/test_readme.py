"""What the README shows is what happens."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def _example() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    return names


async def test_the_embedding_example_runs_and_prints_a_receipt_that_adds_up(
    anyio_backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = cast("Callable[[], Awaitable[None]]", _example()["main"])
    await main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("complete")
    assert "Returns within 14 days." in lines[0]
    assert [line.split()[0] for line in lines[1:3]] == [
        "root/support#1",
        "root/support#1/research#1",
    ]


def test_every_document_it_links_to_exists() -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_part_is_on_the_map() -> None:
    for part in ("protocols", "ledgers", "actors", "sandbox_workers", "testing", "cli"):
        assert f"| `{part}/` |" in README
