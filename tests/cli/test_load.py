"""Which agent ``FILE:NAME`` and ``MODULE:NAME`` mean, and what loading leaves behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .conftest import Command

ONE = """
import treewarden as tw
from treewarden.testing import Reply, ScriptedModel
{before}
only = tw.agent(id="only", instructions="", model=ScriptedModel([Reply(__name__)]))
{after}
"""


def write(file: Path, *, before: str = "", after: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(ONE.format(before=before, after=after))


# --- choosing -------------------------------------------------------------------------------------


def test_the_only_agent_needs_no_name(treewarden: Command, folder: Path) -> None:
    write(folder / "one.py", after="the_same = only")
    assert treewarden("run", "one.py", "x", "-q").out == "one\n"


def test_several_agents_need_one(treewarden: Command) -> None:
    said = treewarden("run", "agents.py", "x")
    assert said.code == 2
    assert "agents.py has several agents; say which" in said.err
    assert "The agents in it: researcher, support, echo, failing" in said.err


def test_a_wrong_name_lists_the_right_ones(treewarden: Command) -> None:
    said = treewarden("run", "agents.py:suport", "x")
    assert said.code == 2
    assert "has no agent 'suport'. Do you mean agents.py:support? The agents in it: re" in said.err


def test_a_name_of_something_else_says_what_it_is(treewarden: Command) -> None:
    said = treewarden("run", "agents.py:look", "x")
    assert said.code == 2
    assert "look in agents.py is no agent but a Tool. The agents in it: " in said.err


def test_a_file_without_agents_says_how_to_make_one(treewarden: Command, folder: Path) -> None:
    (folder / "none.py").write_text("x = 1\n")
    for target in ("none.py", "none.py:x", "none.py:y"):
        said = treewarden("run", target, "x")
        assert said.code == 2
        assert "none.py has no agent at its top level." in said.err


def test_a_module_is_found_in_the_working_directory(treewarden: Command, folder: Path) -> None:
    write(folder / "deep" / "er" / "one.py")
    assert treewarden("run", "deep.er.one:only", "x", "-q").out == "deep.er.one\n"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nope.py:a", "nope.py does not exist."),
        ("no/such/file:a", "no/such/file does not exist."),
        ("folder.py", "folder.py is a directory."),
        ("nope", "there is no module 'nope', neither in "),
        ("sub.nope:a", "Do you mean the file sub/nope.py?"),
        (".agents:a", "'.agents' is neither a file nor the name of a module."),
        ("", "'' is neither a file nor the name of a module."),
        (":a", "'' is neither a file nor the name of a module."),
        ("agents.py:", "'' is not a name. Write FILE:AGENT"),
        ("agents.py:a b", "'a b' is not a name. Write FILE:AGENT"),
    ],
)
def test_a_target_that_is_not_there_says_what_was_looked_for(
    treewarden: Command, folder: Path, target: str, message: str
) -> None:
    (folder / "folder.py").mkdir()
    (folder / "sub").mkdir()
    if target.startswith("sub."):
        # A file that Python would look for under another name.
        (folder / "sub" / "__init__.py").write_text("raise ModuleNotFoundError(name='sub')")
        (folder / "sub" / "nope.py").write_text("")
    said = treewarden("run", target, "x")
    assert (said.code, said.out) == (2, "")
    assert message in said.err


# --- what goes wrong in it ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"x = 1\nx.y.z\n", "AttributeError: 'int' object has no attribute 'y' (line 2)"),
        (b"x = 1\nif x\n", "SyntaxError: expected ':' ("),
        (b"import nonesuch\n", "No module named 'nonesuch' (line 1)"),
        (b"raise SystemExit\n", "it ends the program while it is being loaded"),
        (b"import treewarden as tw\ntw.agent(id='A b', instructions='')\n", "an id is at most 96"),
        (b"\x00\x00", "null bytes"),
        (b"x = '\xff'\n", "SyntaxError"),
        (b"\x7fELF\x02\x01\x01", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_loaded_says_where_it_fails(
    treewarden: Command, folder: Path, source: bytes, message: str
) -> None:
    (folder / "bad.py").write_bytes(source)
    said = treewarden("run", "bad.py", "x")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("treewarden: bad.py cannot be loaded: ")
    assert message in said.err
    assert "Traceback" not in said.err


def test_debug_shows_the_traceback_of_a_file_that_cannot_be_loaded(
    treewarden: Command, folder: Path
) -> None:
    (folder / "bad.py").write_text("1 / 0\n")
    assert "ZeroDivisionError" in treewarden("run", "bad.py", "x", "--debug").err


# --- what it leaves behind ------------------------------------------------------------------------


def test_a_file_finds_its_neighbours_as_under_python(treewarden: Command, folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "neighbour.py").write_text("here = True\n")
    write(folder / "elsewhere" / "one.py", before="import neighbour")
    assert treewarden("run", "elsewhere/one.py", "x", "-q").code == 0
    assert sys.path[0] == str(folder / "elsewhere")


def test_loading_leaves_no_bytecode(
    treewarden: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (folder / "neighbour.py").write_text("here = True\n")
    write(folder / "one.py", before="import neighbour")
    treewarden("run", "one.py", "x")
    assert list(folder.rglob("__pycache__")) == []
    assert sys.dont_write_bytecode is False


@pytest.mark.parametrize("stem", ["json", "treewarden", "antigravity", "my-agents"])
def test_a_file_never_takes_the_place_of_another_module(
    treewarden: Command, folder: Path, stem: str
) -> None:
    before = sys.modules.get(stem)
    write(folder / "sub" / f"{stem}.py")
    said = treewarden("run", f"sub/{stem}.py", "x", "-q")
    assert said.out == f"treewarden_file_{stem}\n"
    assert sys.modules.get(stem) is before


def test_types_of_a_file_can_be_looked_up_by_their_module(
    treewarden: Command, folder: Path
) -> None:
    write(
        folder / "one.py",
        before="""
import dataclasses, typing
@dataclasses.dataclass
class Point:
    x: "Number"
Number = int
assert typing.get_type_hints(Point) == {"x": int}
""",
    )
    assert treewarden("run", "one.py", "x").code == 0
