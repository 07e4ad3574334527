"""The public names: those in the docs, those at the front door, and where they come from."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import treewarden

ROOT = Path(__file__).parent.parent
SURFACE = ROOT / "docs" / "public-surface.md"
CHECKING = "TYPE_CHECKING"
PARTS = ("protocols", "ledgers", "sandbox_workers", "actors", "testing", "cli")


def documented() -> list[str]:
    """The names of the bullets "- `tw.name` …" in the docs, in their order."""
    return re.findall(r"^\s*[-*] `tw\.(\w+)`", SURFACE.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_front_door_has_exactly_the_documented_names() -> None:
    assert set(dir(treewarden)) == set(documented())


def test_a_name_is_documented_once_only() -> None:
    names = documented()
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", dir(treewarden))
def test_a_public_name_resolves_to_the_same_thing_each_time(name: str) -> None:
    assert getattr(treewarden, name) is getattr(treewarden, name)


def test_an_unknown_name_is_an_attribute_error_that_says_so() -> None:
    with pytest.raises(AttributeError, match="'treewarden' has no attribute 'nonesuch'"):
        _ = treewarden.nonesuch  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


def not_a_re_export(part: str) -> Iterator[str]:
    """What stands in a part's ``__init__`` beside its docstring and ``from ._x import X as X``.

    Names that are loaded at their first use stand under ``TYPE_CHECKING``, for checkers.
    """
    tree = ast.parse((ROOT / part / "__init__.py").read_text(encoding="utf-8"))
    lazy = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == CHECKING)
    for node in [*tree.body, *(inner for n in lazy for inner in (*n.body, *n.orelse))]:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                continue
            case ast.If(test=ast.Name(id=name)) if name == CHECKING:
                continue
            case ast.ImportFrom(module="typing", names=[ast.alias(name=name)]) if name == CHECKING:
                continue
            case ast.ImportFrom(level=1, names=names) if all(n.asname == n.name for n in names):
                continue
            case _:
                yield ast.unparse(node)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_only_re_exports_its_own_names(part: str) -> None:
    assert list(not_a_re_export(part)) == []
