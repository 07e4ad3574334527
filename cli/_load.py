"""Find the agent that ``FILE:NAME`` or ``MODULE:NAME`` means.

A file is loaded as ``python FILE`` would run it: its directory comes first on ``sys.path``. A
module is loaded as ``python -m`` would: the working directory comes first. Neither leaves bytecode
behind, and a file never takes the place of a module that is loaded already.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from treewarden.actors import Agent

from ._errors import CommandError


def load_agent(target: str) -> Agent:
    """The agent that ``target`` names.

    Raises:
        CommandError: There is no such file, module or agent, or it cannot be loaded.
    """
    place, name = _split(target)
    module = _load_file(Path(place)) if _is_file(place) else _load_module(place)
    return _pick(module, name, place)


def _split(target: str) -> tuple[str, str | None]:
    """``place:name`` or ``place``. A colon in a path is part of the path."""
    place, colon, name = target.rpartition(":")
    if not colon or Path(target).is_file():
        return target, None
    if not name.isidentifier():
        raise CommandError(
            f"{target!r}: {name!r} is not a name. Write FILE:AGENT, for example "
            "agents.py:support, with the name that the agent is bound to."
        )
    return place, name


def _is_file(place: str) -> bool:
    return place.endswith(".py") or os.sep in place or Path(place).is_file()


# --- loading --------------------------------------------------------------------------------------


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        why = "is a directory" if path.is_dir() else "does not exist"
        raise CommandError(f"{path} {why}. Give the Python file that defines the agent.")
    sys.path.insert(0, str(path.resolve().parent))
    name = _module_name(path)
    loader = SourceFileLoader(name, str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, loader.path, loader=loader)
    assert spec is not None, path
    module = importlib.util.module_from_spec(spec)
    # Dataclasses, type hints and pickles look a class's module up by its name.
    sys.modules[name] = module
    with _loading(str(path), loader.path):
        loader.exec_module(module)
    return module


def _module_name(path: Path) -> str:
    """The name that a neighbour would import the file by, unless that means something else."""
    stem = path.stem
    is_taken = stem in sys.modules or stem in sys.stdlib_module_names
    return stem if stem.isidentifier() and not is_taken else f"treewarden_file_{stem}"


def _load_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise CommandError(
            f"{name!r} is neither a file nor the name of a module. Write agents.py:support or "
            "package.agents:support."
        )
    sys.path.insert(0, os.getcwd())
    with _loading(name, None):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise CommandError(_no_module(name, error.name)) from None


def _no_module(name: str, missing: str) -> str:
    file = Path(*name.split(".")).with_suffix(".py")
    hint = f" Do you mean the file {file}?" if file.is_file() else ""
    return f"there is no module {missing!r}, neither in {os.getcwd()} nor installed.{hint}"


@contextmanager
def _loading(place: str, file: str | None) -> Generator[None]:
    """Turn whatever a user's module raises into one message that says where."""
    wrote_bytecode = not sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    except CommandError:
        raise
    except (Exception, SystemExit) as error:
        raise CommandError(f"{place} cannot be loaded: {_what(error, file)}") from error
    finally:
        sys.dont_write_bytecode = not wrote_bytecode


def _what(error: BaseException, file: str | None) -> str:
    if isinstance(error, SystemExit):
        return (
            "it ends the program while it is being loaded. Put what runs it under "
            'if __name__ == "__main__":'
        )
    if isinstance(error, SyntaxError):
        where = f"{error.filename}, line {error.lineno}" if error.lineno else error.filename
        return f"{type(error).__name__}: {error.msg} ({where})"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"


# --- choosing -------------------------------------------------------------------------------------


def _pick(module: ModuleType, name: str | None, place: str) -> Agent:
    agents = {key: value for key, value in vars(module).items() if isinstance(value, Agent)}
    if name is None:
        return _only_agent(agents, place)
    if name in agents:
        return agents[name]
    if hasattr(module, name):
        kind = type(getattr(module, name)).__name__
        raise CommandError(f"{name} in {place} is no agent but a {kind}. {_listing(agents, place)}")
    close = difflib.get_close_matches(name, agents, n=1)
    hint = f" Do you mean {place}:{close[0]}?" if close else ""
    raise CommandError(f"{place} has no agent {name!r}.{hint} {_listing(agents, place)}")


def _only_agent(agents: dict[str, Agent], place: str) -> Agent:
    different = {id(agent): agent for agent in agents.values()}
    if len(different) == 1:
        return next(iter(different.values()))
    if not agents:
        raise CommandError(_listing(agents, place))
    last = next(reversed(agents))  # who has subagents is defined after them
    raise CommandError(
        f"{place} has several agents; say which, as in {place}:{last}. {_listing(agents, place)}"
    )


def _listing(agents: dict[str, Agent], place: str) -> str:
    if not agents:
        return (
            f"{place} has no agent at its top level. Bind one to a name: "
            "support = tw.agent(id=..., instructions=...)."
        )
    return f"The agents in it: {', '.join(agents)}."
