"""Finds the scenarios that a Python file defines: its ``async def scenario_…()`` functions."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

from ._interruption import Scenario

PREFIX = "scenario_"


class ScenarioNotFound(ValueError):
    """A place names no scenario that can be run. Nothing was run."""


def load_scenarios(place: str | Path) -> dict[str, Scenario]:
    """The scenarios of ``FILE`` or ``FILE:NAME``, by name, in the order they are defined.

    A scenario is an ``async def`` without required parameters whose name begins with
    ``scenario_``; one that is named after the colon may be called anything. The file is run as
    ``python FILE`` would run it, with its folder first on ``sys.path``.

    Raises:
        ScenarioNotFound: There is no such file or function, or the file cannot be loaded.
    """
    path, name = _split(str(place))
    module = _load(path)
    if name is not None:
        return {name: _named(module, name, path)}
    found = {
        key: value
        for key, value in vars(module).items()
        if key.startswith(PREFIX) and _is_scenario(value) and value.__module__ == module.__name__
    }
    if not found:
        raise ScenarioNotFound(
            f"{path} has no scenario. Write one as `async def {PREFIX}something() -> None:` at the "
            "top level of the file, without parameters."
        )
    return found


def _split(place: str) -> tuple[Path, str | None]:
    file, colon, name = place.rpartition(":")
    if colon and not Path(place).is_file():
        if not name.isidentifier():
            raise ScenarioNotFound(f"{place!r}: {name!r} is not a name. Write FILE or FILE:NAME.")
        return Path(file), name
    return Path(place), None


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        why = "is a folder" if path.is_dir() else "does not exist"
        raise ScenarioNotFound(f"{path} {why}. Give the Python file that has the scenarios.")
    stem = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else ""
    spec = importlib.util.spec_from_file_location(stem or f"treewarden_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ScenarioNotFound(f"{path} is no Python file; its name has to end in .py.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and type hints look a class's module up by its name.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise ScenarioNotFound(
            f"{path} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return module


def _named(module: ModuleType, name: str, path: Path) -> Scenario:
    value: object = getattr(module, name, None)
    if value is None:
        known = ", ".join(key for key in vars(module) if key.startswith(PREFIX)) or "none"
        raise ScenarioNotFound(f"{path} has no {name!r}. Its scenarios: {known}.")
    if not _is_scenario(value):
        raise ScenarioNotFound(
            f"{name} in {path} is no scenario: it has to be an async function without parameters."
        )
    return value


def _is_scenario(value: object) -> TypeGuard[Scenario]:
    if not inspect.iscoroutinefunction(value):
        return False
    parameters = inspect.signature(value).parameters.values()
    return all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters
    )
