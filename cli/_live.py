"""What a run looks like while it goes on: a live tree on a terminal, plain lines elsewhere.

The ledger's journal is folded into a state of its own here, so what is shown is what the ledger
knows, and nothing that shows it can touch the ledger. The run's events add what the ledger does not
know: what is being written, and why something ended.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, TypeAlias

import anyio
import attrs
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from treewarden.ledgers import Event, Kind, Node, TreeState, Unit, Wallet, amount_of
from treewarden.protocols import (
    CallEnded,
    CallStarted,
    RunEnded,
    RunEvent,
    RunFailed,
    RunStarted,
    SubagentEnded,
    TextWritten,
    ToolEnded,
    cut_text,
)

from ._errors import plain
from ._tables import ended_style, last_name, short_usd, with_guides

_SECONDS_PER_FRAME = 0.1
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
# Of what a model writes, the end is kept; no terminal needs more than this. How much of it is shown
# depends on what the other columns leave.
_TAIL_CHARS = 300
_SHORTEST_TAIL = 16
_NUMBERS_WIDTH = 54

_FRAMEWORK_TOOLS = {"cave_wait": "waits", "cave_cancel": "cancels one"}


class Progress(Protocol):
    """Somebody who watches a run. Open while it goes on."""

    def __enter__(self) -> Progress: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def note(self, event: Event) -> None:
        """The ledger did this."""
        ...

    def hear(self, event: RunEvent) -> None:
        """The run told this."""
        ...

    async def keep_drawing(self) -> None:
        """Draw until cancelled."""
        ...


def progress_on(console: Console, *, quiet: bool) -> Progress:
    """Whoever suits the place where it is shown."""
    if quiet:
        return Quiet()
    return LiveTree(console) if console.is_terminal else Lines()


class Quiet:
    """Shows nothing."""

    def __enter__(self) -> Quiet:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def note(self, event: Event) -> None: ...

    def hear(self, event: RunEvent) -> None: ...

    async def keep_drawing(self) -> None:
        await anyio.sleep_forever()


class Lines(Quiet):
    """One line per step on stderr, for logs."""

    def hear(self, event: RunEvent) -> None:
        said = _line(event)
        if said is not None:
            name = event.path.removeprefix("root/")
            print(plain(f"{name}: {said}"), file=sys.stderr, flush=True)


def _line(event: RunEvent) -> str | None:
    match event:
        case RunStarted(is_in_background=is_in_background):
            return "started in the background" if is_in_background else "started"
        case CallEnded(line=line):
            came_in = line.tokens - line.output_tokens
            money = "no price" if line.is_unpriced else f"${line.usd:f}"
            return f"{line.model}: {came_in:,} tokens in, {line.output_tokens:,} out, {money}"
        case ToolEnded(name=name, is_error=is_error):
            return f"{name} {'failed' if is_error else 'done'}"
        case SubagentEnded(stop_reason=reason) | RunEnded(stop_reason=reason):
            return reason
        case RunFailed(receipt=receipt):
            return receipt.stop_reason
        case _:
            return None


# --- what is so -----------------------------------------------------------------------------------


@attrs.define(eq=False)
class Row:
    """One run or subagent, alive or over."""

    # Its node in the folded state. The totals stay readable when the state has forgotten it.
    node: Node
    parent: Row | None
    children: list[Row] = attrs.field(factory=list["Row"])
    # Names of its tool calls by node, those that are over included until somebody looks.
    tools: dict[int, str] = attrs.field(factory=dict[int, str])
    # It goes on beside the one that started it.
    is_in_background: bool = False
    # The model it asks, and the end of what that is writing.
    model: str = ""
    tail: str = ""
    # Empty while it goes on, and for runs that a tool started: they tell somebody else.
    stop_reason: str = ""

    @property
    def own_wallet(self) -> Wallet | None:
        """The wallet with a ceiling of its own, or None: it draws on the one above."""
        is_own = self.node.owns_wallet or self.parent is None
        return self.node.wallet if is_own and self.node.wallet.is_bounded else None


class Picture:
    """All rows of a run. Knows what is so, and draws nothing."""

    def __init__(self) -> None:
        self.state = TreeState()
        # In the order they started, so parents come before what is below them.
        self.rows: dict[str, Row] = {}
        # Ids only grow, and an event admits one node at most.
        self._newest = 0

    def note(self, event: Event) -> None:
        """Fold one event of the ledger."""
        self.state.apply(event)
        newest = next(reversed(self.state.nodes), 0)
        if newest > self._newest:
            self._newest = newest
            self._admitted(self.state.nodes[newest])

    def _admitted(self, node: Node) -> None:
        above = self._row_above(node)
        if node.kind in (Kind.RUN, Kind.AGENT):
            row = self.rows[node.path] = Row(node, above)
            if above is not None:
                above.children.append(row)
        elif above is not None:
            name = last_name(node.path).removeprefix("tool:")
            above.tools[node.id] = name.rpartition("#")[0]

    def _row_above(self, node: Node) -> Row | None:
        """The row below which ``node`` hangs, over the tool calls in between."""
        up = node.parent
        while up is not None and up.path not in self.rows:
            up = up.parent
        return None if up is None else self.rows[up.path]

    def hear(self, event: RunEvent) -> None:
        """Keep what a run's event says beyond the ledger."""
        row = self.rows.get(event.path)
        if row is None:
            return
        match event:
            case RunStarted(is_in_background=is_in_background):
                row.is_in_background = is_in_background
            case CallStarted(model=model):
                row.model, row.tail = model, ""
            case TextWritten(text=text):
                row.tail = cut_text(row.tail + text, _TAIL_CHARS, keep="tail")
            case SubagentEnded(stop_reason=reason) | RunEnded(stop_reason=reason):
                row.stop_reason = reason
            case RunFailed(receipt=receipt):
                row.stop_reason = receipt.stop_reason
            case _:
                pass

    def is_alive(self, row: Row) -> bool:
        return row.node.id in self.state.nodes

    def doing(self, row: Row) -> str:
        """What a live row is at."""
        row.tools = {id_: name for id_, name in row.tools.items() if id_ in self.state.nodes}
        holds = [self.state.holds[id_] for id_ in row.node.holds or ()]
        if row.node.tickets:
            return "waits for money"
        if any(hold.waits_for_slot for hold in holds):
            return "waits for a call slot"
        if holds:
            return " ".join(plain(row.tail).split()) or f"asks {row.model}"
        if not row.tools:
            return "waits" if row.node.live_children else ""
        # What it does for its background subagents is no tool of the user's.
        return ", ".join(_FRAMEWORK_TOOLS.get(name, name) for name in row.tools.values())


# --- drawing it -----------------------------------------------------------------------------------


class LiveTree:
    """The tree on a terminal, redrawn some ten times a second while the run goes on."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._picture = Picture()
        self._began = time.monotonic()
        # What the program prints meanwhile is put above the tree.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self.note, self.hear = self._picture.note, self._picture.hear

    def __enter__(self) -> LiveTree:
        self._live.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    async def keep_drawing(self) -> None:
        """Draw until cancelled. In the run's own loop, so that nothing changes meanwhile."""
        while True:
            elapsed = time.monotonic() - self._began
            width, height = self._console.size
            drawn = draw(self._picture, elapsed=elapsed, width=width, height=height)
            self._live.update(drawn, refresh=True)
            await anyio.sleep(_SECONDS_PER_FRAME)


@attrs.frozen
class Hidden:
    """Children of a row that there is no room for."""

    running: int
    over: int


Shown: TypeAlias = Row | Hidden


def draw(picture: Picture, *, elapsed: float, width: int, height: int) -> RenderableType:
    """The whole picture, in at most about ``height`` lines."""
    tail = max(_SHORTEST_TAIL, width - _NUMBERS_WIDTH)
    shown = _choose(picture, room=max(4, height - 4))
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("node", no_wrap=True, overflow="ellipsis", min_width=12)
    table.add_column("", width=1)
    for title in ("calls", "tokens", "spent", "left"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for guide, item in _hung_up(picture, shown):
        table.add_row(*_cells(picture, guide, item, elapsed, tail))
    return Group(table, _footer(picture, elapsed))


def _hung_up(picture: Picture, shown: dict[int, Row]) -> Iterator[tuple[str, Shown]]:
    """What is drawn, each with the lines that show where it hangs."""
    roots: list[Shown] = [row for row in shown.values() if row.parent is None]
    for root in roots:
        yield from with_guides(root, lambda item: _below(picture, shown, item))


def _choose(picture: Picture, *, room: int) -> dict[int, Row]:
    """The rows to draw, by node: what is alive first, then what ended last.

    A live row's parents are alive and started before it, so they are chosen with it.
    """
    rows = list(picture.rows.values())
    if len(rows) > room:
        # Each parent that has something to hide takes a line for saying so.
        room = max(room - sum(bool(row.children) for row in rows), room // 2)
        live = [row for row in rows if picture.is_alive(row)]
        over = [row for row in reversed(rows) if not picture.is_alive(row)]
        rows = [*live, *over][:room]
    return {row.node.id: row for row in rows}


def _below(picture: Picture, shown: dict[int, Row], item: Shown) -> Sequence[Shown]:
    if isinstance(item, Hidden):
        return ()
    below: list[Shown] = [row for row in item.children if row.node.id in shown]
    hidden = [row for row in item.children if row.node.id not in shown]
    if hidden:
        running = sum(picture.is_alive(row) for row in hidden)
        below.append(Hidden(running=running, over=len(hidden) - running))
    return below


def _cells(picture: Picture, guide: str, item: Shown, elapsed: float, tail: int) -> Iterator[Text]:
    if isinstance(item, Hidden):
        yield Text(f"{guide}… {item.running + item.over} more", "dim")
        yield from [Text()] * 5
        yield Text(f"{item.running} running, {item.over} ended", "dim")
        return
    node, wallet, is_alive = item.node, item.own_wallet, picture.is_alive(item)
    yield Text.assemble((guide, "dim"), last_name(node.path), (_aside(item), "dim"))
    yield _mark(picture, item, elapsed)
    yield Text(f"{node.model_calls:,}")
    yield Text(f"{node.tokens:,}")
    yield Text(short_usd(amount_of("usd", node.usd)))
    left = "" if wallet is None or not is_alive else _amount(picture.state.unit, wallet.free)
    yield Text(left)
    if is_alive:
        yield _end_of(picture.doing(item), tail)
    else:
        reason = item.stop_reason or "ended"
        yield Text(plain(reason), ended_style(reason))


def _aside(row: Row) -> str:
    """What marks a subagent that nobody waits for, as a shell would."""
    return " &" if row.is_in_background else ""


def _mark(picture: Picture, row: Row, elapsed: float) -> Text:
    if picture.is_alive(row):
        return Text(_SPINNER[int(elapsed / _SECONDS_PER_FRAME) % len(_SPINNER)], "cyan")
    reason = row.stop_reason or "ended"
    return Text("✓" if reason == "complete" else "■", ended_style(reason))


def _end_of(doing: str, most: int) -> Text:
    """What is being written is read at its end, where it grows."""
    return Text(doing if len(doing) <= most else f"…{doing[1 - most :]}", "dim")


def _amount(unit: Unit, amount: int) -> str:
    value = amount_of(unit, amount)
    return short_usd(value) if unit == "usd" else f"{value:,f}"


def _footer(picture: Picture, elapsed: float) -> Text:
    state = picture.state
    if 0 not in state.wallets:
        return Text("starts …", "dim")
    wallet, unit = state.wallets[0], state.unit
    parts = [f"{_amount(unit, wallet.settled)} spent"]
    if wallet.is_bounded:
        parts.append(f"{_amount(unit, wallet.free)} left of {_amount(unit, wallet.max)}")
        parts.append(f"{_amount(unit, wallet.held + wallet.carved)} held")
    running = sum(picture.is_alive(row) for row in picture.rows.values())
    parts.append(f"{running} running")
    if wallet.queued:
        parts.append(f"{wallet.queued} waiting for money")
    parts.append(f"{elapsed:.0f} s")
    return Text(" · ".join(parts), "dim", no_wrap=True, overflow="ellipsis")
