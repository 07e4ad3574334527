"""``python -m treewarden.testing.explore FILE[:NAME]…``: explore the scenarios of a file.

Each ``async def scenario_…()`` is run once undisturbed and then once for each of its instants,
cancelled there; a table says how many there were and how many went wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum

from ._exploration import BACKENDS, KINDS, Exploration, table_of
from ._explorer import explore_cancellations
from ._interruption import Scenario
from ._scenario_files import ScenarioNotFound, load_scenarios


class Exit(IntEnum):
    """What the command's exit codes mean."""

    OK = 0
    VIOLATIONS = 1
    USAGE = 2


_EPILOG = """\
A scenario is an async function without parameters that uses treewarden.run, stream or open_tree
with scripted models; it runs in virtual time. Only functions called scenario_... are taken, unless
one is named: FILE:NAME.

exit codes: 0 nothing went wrong, 1 something did, 2 usage
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Explore what ``argv`` names, print what came of it, and return the exit code."""
    options = _parser().parse_args(argv)
    explored: list[Exploration] = []
    try:
        scenarios = [s for place in options.places for s in load_scenarios(place).values()]
        for scenario in scenarios:
            explored.append(_explore(scenario, options))
    except ScenarioNotFound as error:
        print(f"explore: {error}", file=sys.stderr)
        return Exit.USAGE
    except _Failed as failed:
        print(f"explore: {failed}", file=sys.stderr)
        return Exit.VIOLATIONS
    _print(explored, as_json=options.json)
    return Exit.OK if all(exploration.is_clean for exploration in explored) else Exit.VIOLATIONS


class _Failed(Exception):
    """A scenario that does not even end well undisturbed."""


def _explore(scenario: Scenario, options: argparse.Namespace) -> Exploration:
    name = getattr(scenario, "__name__", "scenario")
    try:
        return explore_cancellations(
            scenario,
            backends=tuple(dict.fromkeys(options.backend or BACKENDS)),
            kinds=tuple(dict.fromkeys(options.kind or KINDS)),
            times=tuple(dict.fromkeys(options.times or (1, 2))),
            instants=options.at,
            every=options.every,
            seed=options.seed,
            on_progress=_progress(name),
        )
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        raise _Failed(f"{name} raised {type(error).__name__}: {error} ({notes})") from error


def _progress(name: str) -> Callable[[int, int], None] | None:
    """Shows how far it is on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\r\x1b[K" if done == total else ""
        print(f"\r{name}: {done} of {total} runs{end}", end="", file=sys.stderr, flush=True)

    return show


def _print(explored: Sequence[Exploration], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([exploration.to_json() for exploration in explored], indent=2))
        return
    print(table_of(explored))
    for exploration in explored:
        if not exploration.is_clean:
            print(f"\n{exploration}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m treewarden.testing.explore",
        description="Cancel scenarios at every instant they have, and see that nothing is left.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("places", nargs="+", metavar="FILE[:NAME]", help="a Python file, or one scenario of it")
    add("--backend", action="append", choices=BACKENDS, help="only this one; may be repeated")
    add("--kind", action="append", choices=KINDS, help="only this kind; may be repeated")
    add(
        "--times",
        action="append",
        type=int,
        choices=(1, 2),
        help="cancel once, or again during the clean-up; may be repeated (default: both)",
    )
    add("--at", action="append", type=_positive, metavar="N", help="only this instant, may repeat")
    add("--every", type=_positive, default=1, metavar="N", help="only each N-th instant")
    add("--seed", type=int, metavar="N", help="the order that tasks run in")
    add("--json", action="store_true", help="the answer as JSON on stdout")
    return parser


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
