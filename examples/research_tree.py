"""Survey a Python project with a tree of agents: what is each part for, and where is what?

    python examples/research_tree.py                      # this project, scripted model, no key
    python examples/research_tree.py --root ~/src/thing --model anthropic/claude-haiku-4-5

A surveyor lists the project's parts and sends one reader into each of them, side by side; every
reader gets a wallet of its own, carved from the surveyor's. The tools only read, and they run in
this process (``runs="host"``) with the rights of whoever starts the program.

Without ``--model`` the answers come from a script. Everything else is the same: the tools read real
files, money is held and settled, and the receipt adds up.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path
from typing import Any

import attrs

import treewarden as tw
from treewarden.protocols import RunStarted, SubagentEnded, ToolEnded, ToolResult
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest

SURVEYOR = (
    "You survey Python projects. List the parts, send a reader into each of them (all in one "
    "reply), then write a short report: one paragraph a part, most important first."
)
READER = (
    "You read one part of a Python project. Outline its files, look closer where it helps, and "
    "say in two or three sentences what the part is for and which names matter."
)
SKIPPED = {"build", "dist", "node_modules", "typings", "__pycache__"}
MAX_FILES = 200


@attrs.frozen
class Project:
    """The folder that the tools may look into."""

    root: Path

    def inside(self, path: str) -> Path:
        """The file or folder ``path``, refused if it is outside of the project."""
        found = (self.root / path).resolve()
        if not found.is_relative_to(self.root):
            raise ValueError(f"{path} is outside of the project")
        return found

    def python_files(self, part: str) -> list[Path]:
        found = sorted(self.inside(part).rglob("*.py"))
        return [file for file in found if not SKIPPED.intersection(file.parts)][:MAX_FILES]


@tw.tool(effect="read", runs="host")
def list_parts(ctx: tw.Context[Project]) -> list[dict[str, Any]]:
    """List the project's folders that hold Python files, with file and line counts."""
    project = ctx.deps
    parts: list[dict[str, Any]] = []
    for folder in sorted(project.root.iterdir()):
        if not folder.is_dir() or folder.name in SKIPPED or folder.name.startswith("."):
            continue
        files = project.python_files(folder.name)
        if files:
            lines = sum(len(file.read_text(errors="replace").splitlines()) for file in files)
            parts.append({"part": folder.name, "files": len(files), "lines": lines})
    return parts


@tw.tool(effect="read", runs="host")
def outline(ctx: tw.Context[Project], part: str) -> list[dict[str, Any]]:
    """Outline Python files of a part, at most 40: what each says of itself, and public names.

    Args:
        part: A folder of the project.
    """
    return [_outline_of(file, ctx.deps.root) for file in ctx.deps.python_files(part)[:40]]


@tw.tool(effect="read", runs="host")
def search(ctx: tw.Context[Project], part: str, text: str) -> list[str]:
    """Find lines that contain a text, as ``file:line: content``; at most 40 of them.

    Args:
        part: A folder of the project.
        text: What to look for, word for word.
    """
    found: list[str] = []
    for file in ctx.deps.python_files(part):
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            if text in line:
                found.append(f"{file.relative_to(ctx.deps.root)}:{number}: {line.strip()}")
    return found[:40]


def _outline_of(file: Path, root: Path) -> dict[str, Any]:
    try:
        tree = ast.parse(file.read_text(errors="replace"))
    except SyntaxError as error:
        return {"file": str(file.relative_to(root)), "problem": f"not Python: {error.msg}"}
    names = [
        node.name
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and not node.name.startswith("_")
    ]
    says = (ast.get_docstring(tree) or "").partition("\n")[0]
    return {"file": str(file.relative_to(root)), "says": says, "names": names[:5]}


def build_tree(model: Any) -> tw.Agent:
    """The surveyor, with readers below it."""
    reader = tw.agent(
        id="reader",
        instructions=READER,
        model=model,
        tools=[outline, search],
    )
    read_part = tw.subagent(
        name="read_part",
        description="Send a reader into one part. The task starts with the part's folder name.",
        agent=reader,
        max_usd="0.10",
    )
    return tw.agent(
        id="surveyor",
        instructions=SURVEYOR,
        model=model,
        tools=[list_parts, read_part],
    )


# --- the script: what a model would say, made from what the tools really returned ----------------


def scripted(request: ScriptedRequest) -> Reply:
    if "read_part" in request.agent_path:
        return _read(request)
    return _survey(request)


def _survey(request: ScriptedRequest) -> Reply:
    match request.turn:
        case 0:
            return Reply("First the parts.", tool_calls=[("list_parts", {})], delay=0.2)
        case 1:
            parts = json.loads(request.last_text)
            tasks = [
                ("read_part", {"task": f"{part['part']}: what is it for, and which names matter?"})
                for part in sorted(parts, key=lambda p: -int(p["lines"]))[:6]
            ]
            return Reply("One reader into each.", tool_calls=tasks, delay=0.3)
        case _:
            reports = [_report(result) for result in request.tool_results[1:]]
            return Reply("\n".join(reports), delay=0.4, chunks=8)


def _report(result: ToolResult) -> str:
    if result.is_error:
        return f"not read: {result.content}"
    report = json.loads(result.content)
    stopped = "" if report["stop_reason"] == "complete" else f" [{report['stop_reason']}]"
    return f"{report['text']}{stopped}"


def _read(request: ScriptedRequest) -> Reply:
    part = request.messages[0].text.partition(":")[0]
    if request.turn == 0:
        return Reply(tool_calls=[("outline", {"part": part})], delay=0.2)
    if request.turn == 1:
        return Reply(tool_calls=[("search", {"part": part, "text": "class "})], delay=0.2)
    files = json.loads(request.tool_results[0].content)
    classes = len(json.loads(request.tool_results[1].content))
    says = next((f["says"] for f in files if f.get("says")), "says nothing of itself")
    names = [name for f in files for name in f.get("names", ())][:5]
    known = f"; look at {', '.join(names)}" if names else ""
    return Reply(
        f"{part}: {len(files)} files, {classes}+ classes. {says}{known}.", delay=0.3, chunks=4
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--model", help="provider/name; default: a script, no key needed")
    parser.add_argument("--budget-usd", default="1.00")
    parser.add_argument("question", nargs="?", default="What is in this project?")
    options = parser.parse_args()
    model = ScriptedModel(scripted) if options.model is None else tw.model(options.model)
    result = tw.run_sync(
        build_tree(model),
        options.question,
        deps=Project(options.root.resolve()),
        budget=tw.Budget(max_usd=options.budget_usd),
        limits=tw.Limits(max_concurrent_calls=4, deadline=300),
        on_event=_show,
    )
    print(f"\n{result}\n")
    _show_receipt(result.receipt)
    return 0 if result.complete else 3


class _Raw(argparse.RawDescriptionHelpFormatter):
    pass


def _show(event: object) -> None:
    """One line for what begins and ends."""
    match event:
        case RunStarted():
            print(f"  {event.path}: begins", file=sys.stderr)
        case ToolEnded() if event.name != "read_part":
            print(
                f"  {event.path}: {event.name} {'failed' if event.is_error else 'done'}",
                file=sys.stderr,
            )
        case SubagentEnded():
            spent = event.receipt.total
            print(f"  {event.path}: {event.stop_reason}, ${spent.usd}", file=sys.stderr)
        case _:
            pass


def _show_receipt(receipt: tw.Receipt) -> None:
    print(f"{'who':44} {'calls':>5} {'tokens':>8} {'USD':>12}")
    for part in receipt.walk():
        own = part.own
        print(f"{part.path:44} {own.calls:>5} {own.tokens:>8} {own.usd:>12f}")
    total = receipt.total
    print(f"{'total':44} {total.calls:>5} {total.tokens:>8} {total.usd:>12f}")
    print(f"ceiling ${receipt.max}, spent ${receipt.spent}, overspent ${receipt.overspent}")


if __name__ == "__main__":
    sys.exit(main())
