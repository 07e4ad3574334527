"""What a budget means: the scenarios of the public kit ``agent-budget-semantics``, with us in them.

The kit (MIT licence) is downloaded as its source distribution, once. Each scenario gets a mock
provider of its own, and the kit's own harness runs it: on asyncio and on trio. Compared are the
provider's ledger, what is right, and what our receipt says. Exit code 1: something differs without
a reason in the table; 2: the kit cannot be had.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import _kit_runner
import anyio
import attrs
from _peers import CACHE

VERSION = "0.5.0"
_NAME = "agent-budget-semantics"


@attrs.frozen
class Case:
    """One scenario with one budget, and what is right: the provider's calls and tokens."""

    scenario: str
    budget: int
    calls: int
    tokens: int
    # Calls of the first agent alone, where it delegates.
    direct: int | None = None
    # Why what we do is no other number, where one would expect one.
    reason: str = ""


CASES = (
    Case("S1", 10, 4, 645),
    Case("S2", 3, 3, 525),
    Case("S3", 3, 1, 80, reason="its script begins with an answer, and an answer is the end"),
    Case("S4", 2, 2, 315),
    Case("S5", 2, 2, 225),
    Case("S6", 600, 3, 420),
    Case("S7", 2, 2, 335),
    Case("S8", 2_000, 1, 80),
    Case("S9", 1_500, 2, 1_435),
    Case("S10", 6, 6, 1_265, direct=1),
    Case("S11", 3, 3, 585),
    Case("S12", 2, 4, 1_210, reason="raised to 4 after the first turn"),
)


@attrs.frozen
class Found:
    """What came of a case on one backend."""

    backend: str
    case: Case
    # By the provider's ledger.
    calls: int
    tokens: int
    seen: _kit_runner.Seen

    @property
    def problems(self) -> list[str]:
        case, seen = self.case, self.seen
        told: list[str] = []
        if (self.calls, self.tokens) != (case.calls, case.tokens):
            told.append(f"right is {case.calls} calls, {case.tokens} tokens")
        if (seen.subtree_calls, seen.subtree_tokens) != (self.calls, self.tokens):
            told.append(
                f"the receipt says {seen.subtree_calls} calls, {seen.subtree_tokens} tokens"
            )
        if case.direct is not None and seen.direct_calls != case.direct:
            told.append(f"direct calls are {case.direct}, the receipt says {seen.direct_calls}")
        return told


class KitMissing(Exception):
    """The kit cannot be downloaded or loaded."""


def fetched() -> Path:
    """The kit's folder, downloaded if it is not there yet."""
    folder = CACHE / f"{_NAME.replace('-', '_')}-{VERSION}"
    if (folder / "harness.py").exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        get = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary"]
        wanted = [":all:", "--dest", scratch, f"{_NAME}=={VERSION}"]
        done = subprocess.run([*get, *wanted], check=False, capture_output=True, text=True)
        archives = list(Path(scratch).glob("*.tar.gz"))
        if done.returncode or not archives:
            raise KitMissing(
                f"{_NAME} {VERSION} cannot be downloaded: {done.stderr.strip()[-300:]}"
            )
        with tarfile.open(archives[0]) as archive:
            archive.extractall(CACHE, filter="data")
    return folder


def harness_of(kit: Path) -> Any:
    """The kit's harness, with a runner for us."""
    sys.path.insert(0, str(kit))
    try:
        harness: Any = importlib.import_module("harness")
    except ImportError as error:
        raise KitMissing(f"the kit needs {error.name}: install the project's dev group") from error
    harness.RUNNERS["treewarden"] = _kit_runner.__name__
    harness.FRAMEWORK_PACKAGES["treewarden"] = "treewarden"
    return harness


@contextmanager
def played(harness: Any, scenario: Path) -> Generator[None, None, None]:
    """A mock provider of its own for one scenario, on a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        harness.MOCK_PORT = probe.getsockname()[1]
    harness.MOCK_URL = f"http://127.0.0.1:{harness.MOCK_PORT}"
    server = harness.start_mock_server(str(scenario))
    try:
        yield
    finally:
        server.terminate()
        server.communicate()


def outcome(harness: Any, kit: Path, case: Case, backend: str) -> Found:
    """Run one case through the kit's harness."""
    yaml: Any = importlib.import_module("yaml")
    (original,) = (kit / "scenarios").glob(f"{case.scenario}-*.yaml")
    scenario = yaml.safe_load(original.read_text(encoding="utf-8"))
    scenario["budget_configs"] = {"treewarden": {"values_to_test": [case.budget]}}
    with tempfile.TemporaryDirectory() as scratch:
        ours = Path(scratch) / original.name
        ours.write_text(json.dumps(scenario), encoding="utf-8")  # which is YAML, too
        with played(harness, ours), redirect_stdout(io.StringIO()):
            (said,) = anyio.run(harness.run_scenario, str(ours), ["treewarden"], backend=backend)
    truth = said["ground_truth"]
    return Found(backend, case, truth["llm_calls"], truth["total_tokens"], _kit_runner.last[-1])


def shown(found: Found) -> str:
    case, seen = found.case, found.seen
    verdict = "; ".join(found.problems) or "ok"
    if case.reason:
        verdict = f"{verdict} ({case.reason})"
    return (
        f"{case.scenario:<4} {case.budget:>6} {found.backend:<8} {found.calls:>5} "
        f"{found.tokens:>7} {seen.direct_calls:>7} {seen.subtree_calls:>8} "
        f"{seen.stop_reason:<22} {verdict}"
    )


def main() -> int:
    options = _options()
    try:
        kit = fetched()
        harness = harness_of(kit)
    except KitMissing as missing:
        print(f"semantics_kit: {missing}", file=sys.stderr)
        return 2
    chosen = [c for c in CASES if options.only is None or c.scenario in options.only]
    backends = ["asyncio", "trio"] if options.backend == "both" else [options.backend]
    print(
        f"{'':<4} {'budget':>6} {'':<8} {'calls':>5} {'tokens':>7} {'direct':>7} {'subtree':>8}",
        file=sys.stderr,
    )
    found: list[Found] = []
    for case in chosen:
        for backend in backends:
            found.append(outcome(harness, kit, case, backend))
            print(shown(found[-1]), file=sys.stderr, flush=True)
    wrong = [each for each in found if each.problems]
    rows = [{**attrs.asdict(each), "problems": each.problems} for each in found]
    print(json.dumps({"benchmark": "semantics_kit", "ok": not wrong, "rows": rows}))
    return 1 if wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["asyncio", "trio", "both"], default="both")
    parser.add_argument("--only", nargs="+", metavar="S", help="some scenarios, for example S6 S10")
    parser.add_argument("--quick", action="store_true", help="asyncio only")
    options = parser.parse_args()
    if options.quick:
        options.backend = "asyncio"
    return options


if __name__ == "__main__":
    sys.exit(main())
