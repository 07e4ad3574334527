"""Tables: receipts as a tree of nodes, and the trials of a stress test.

Numbers of a column have the same number of decimals and are exact, so a reader can add them up.
Everything that is shown goes through ``plain`` and ``Text``: nothing in a receipt is markup.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from treewarden.protocols import Receipt, Totals

from ._errors import plain

if TYPE_CHECKING:
    from ._trial import Trial

T = TypeVar("T")

_GOOD, _LIMITED, _BAD, _FAINT = "green", "yellow", "red", "dim"

# Characters per line from which on a table has room for everything, and where nobody looks.
_ROOMY = 110
_UNLIMITED = 200


def console(*, is_stderr: bool = False) -> Console:
    """Where tables are printed. In a file or pipe, no terminal's width cuts them."""
    found = Console(stderr=is_stderr)
    if found.is_terminal or "COLUMNS" in os.environ:
        return found
    return Console(stderr=is_stderr, width=_UNLIMITED)


# --- trees as lines -------------------------------------------------------------------------------


def with_guides(root: T, below: Callable[[T], Sequence[T]]) -> Iterator[tuple[str, T]]:
    """``root`` and everything below it, each with the lines that show where it hangs."""
    yield "", root
    yield from _hanging(root, below, "")


def _hanging(item: T, below: Callable[[T], Sequence[T]], prefix: str) -> Iterator[tuple[str, T]]:
    children = below(item)
    for at, child in enumerate(children, 1):
        is_last = at == len(children)
        yield prefix + ("└─ " if is_last else "├─ "), child
        yield from _hanging(child, below, prefix + ("   " if is_last else "│  "))


def last_name(path: str) -> str:
    """``research#2`` of ``root/support#1/research#2``."""
    return plain(path.rpartition("/")[2])


# --- numbers --------------------------------------------------------------------------------------


def aligned(amounts: Iterable[Decimal]) -> list[str]:
    """The amounts with as many decimals as the longest needs, at least two."""
    amounts = list(amounts)
    most = max((_decimals(amount) for amount in amounts), default=0)
    return [f"{amount:.{max(2, most)}f}" for amount in amounts]


def _decimals(amount: Decimal) -> int:
    exponent = amount.normalize().as_tuple().exponent
    return -exponent if isinstance(exponent, int) and exponent < 0 else 0


def short_usd(amount: Decimal) -> str:
    """Dollars as somebody reads them who watches: rounded, and never 0 for what is not."""
    if amount and abs(amount) < Decimal("0.0001"):
        return "<$0.0001"
    return f"${amount:.4f}" if abs(amount) < 1 else f"${amount:.2f}"


def ended_style(stop_reason: str) -> str:
    match stop_reason:
        case "complete":
            return _GOOD
        case "failed" | "cancelled" | "refusal":
            return _BAD
        case _:
            return _LIMITED


# --- receipts -------------------------------------------------------------------------------------


@attrs.frozen
class _ReceiptRow:
    """A line of the table: one node, or several that there was no room for."""

    name: str
    # What the node's own calls cost; with all below them where it stands for several.
    sum: Totals
    max: Decimal | None = None
    ended: str = ""
    below: tuple[_ReceiptRow, ...] = ()


def receipt_table(receipt: Receipt, *, most_rows: int | None = None) -> Table:
    """Who spent what: a row per node, and their sum.

    Args:
        most_rows: About how many rows there is room for. What is left out is summed up in a row
            below its parent, so the rows always add up to the total.
    """
    rows = list(with_guides(_receipt_row(receipt, _shown(receipt, most_rows)), lambda r: r.below))
    columns = _columns(receipt, [row for _, row in rows])
    table = Table(box=None, pad_edge=False, show_footer=True, header_style="bold")
    table.add_column("node", "total", no_wrap=True, overflow="ellipsis", min_width=8)
    for column in columns:
        table.add_column(column.title, column.cells[-1], justify="right", no_wrap=True)
    table.add_column("ended", no_wrap=True)
    for at, (guide, row) in enumerate(rows):
        name = Text.assemble((guide, _FAINT), row.name)
        ended = Text(row.ended, style=ended_style(row.ended))
        table.add_row(name, *(column.cells[at] for column in columns), ended)
    return table


@attrs.frozen
class _Column:
    title: str
    # One for each row, and the footer.
    cells: list[str]


def _columns(receipt: Receipt, rows: list[_ReceiptRow]) -> list[_Column]:
    """The columns of numbers, without those that would be empty."""
    sums = [*(row.sum for row in rows), receipt.total]
    columns = (
        _counts("calls", [s.calls for s in sums]),
        _counts("tokens", [s.tokens for s in sums]),
        _usd(sums),
        _ranges(sums),
        _ceilings(receipt.denomination, [row.max for row in rows]),
    )
    return [column for column in columns if column is not None]


def _counts(title: str, counts: list[int]) -> _Column:
    return _Column(title, [f"{count:,}" for count in counts])


def _usd(sums: list[Totals]) -> _Column:
    amounts = aligned(s.usd for s in sums)
    return _Column(
        "USD",
        [f"≥ {text}" if s.is_unpriced else text for s, text in zip(sums, amounts, strict=True)],
    )


def _ranges(sums: list[Totals]) -> _Column | None:
    """What the true amounts lie between, where something was estimated."""
    if all(s.low_usd == s.high_usd and s.low_tokens == s.high_tokens for s in sums):
        return None
    if any(s.low_usd != s.high_usd for s in sums):
        texts = aligned(chain.from_iterable((s.low_usd, s.high_usd) for s in sums))
        pairs = list(zip(texts[::2], texts[1::2], strict=True))
        title = "USD between"
    else:
        pairs = [(f"{s.low_tokens:,}", f"{s.high_tokens:,}") for s in sums]
        title = "tokens between"
    return _Column(title, ["" if low == high else f"{low} to {high}" for low, high in pairs])


def _ceilings(denomination: str, ceilings: list[Decimal | None]) -> _Column | None:
    if not any(ceilings):
        return None
    unit = "USD" if denomination == "usd" else "tokens"
    if denomination == "usd":
        texts = iter(aligned(c for c in ceilings if c is not None))
    else:
        texts = (f"{c:,f}" for c in ceilings if c is not None)
    return _Column(f"max {unit}", ["" if c is None else next(texts) for c in [*ceilings, None]])


def _shown(receipt: Receipt, most: int | None) -> set[int]:
    """Identities of the receipts there is room for: level by level, so that parents come first."""
    level, shown = [receipt], {id(receipt)}
    while level:
        level = [child for parent in level for child in parent.subagents]
        if most is not None:
            level = level[: max(0, most - len(shown))]
        shown.update(map(id, level))
    return shown


def _receipt_row(receipt: Receipt, shown: set[int]) -> _ReceiptRow:
    below = [_receipt_row(child, shown) for child in receipt.subagents if id(child) in shown]
    hidden = [child for child in receipt.subagents if id(child) not in shown]
    if hidden:
        below.append(_folded(hidden))
    return _ReceiptRow(
        name=last_name(receipt.path),
        sum=receipt.own,
        max=receipt.max,
        ended=plain(receipt.stop_reason),
        below=tuple(below),
    )


def _folded(receipts: list[Receipt]) -> _ReceiptRow:
    every = [r for receipt in receipts for r in receipt.walk()]
    total = Totals()
    for receipt in receipts:
        total += receipt.total
    reasons = Counter(r.stop_reason for r in every)
    if len(reasons) == 1:
        ended = next(iter(reasons))
    else:
        ended = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(3))
    return _ReceiptRow(name=f"… {len(every)} more", sum=total, ended=plain(ended))


def show_receipt(
    screen: Console, receipt: Receipt, *, most_rows: int | None = None, with_root: bool = True
) -> None:
    """Print a receipt's table and what there is to say about it.

    Args:
        with_root: Say why the run itself stopped, too.
    """
    screen.print(receipt_table(receipt, most_rows=most_rows))
    for note in _notes(receipt, with_root=with_root):
        screen.print(note, soft_wrap=not screen.is_terminal)


def _notes(receipt: Receipt, *, with_root: bool) -> Iterator[Text]:
    """What the table has no column for: why it stopped, what was refused, what went wrong."""
    every = list(receipt.walk())
    nodes = every if with_root else every[1:]
    reasons = [(f"{last_name(r.path)} {r.stop_reason}", r) for r in nodes if r.reason]
    for what, times, r in _grouped(reasons, lambda r: r.stop_reason):
        yield _note(what, r.reason, times, ended_style(r.stop_reason))
    refusals = [("refused", refusal) for r in every for refusal in r.refusals]
    for what, times, refusal in _grouped(refusals, lambda refusal: refusal.code):
        yield _note(what, refusal.message, times, _LIMITED)
    reports = [("background", _stop_report(r)) for r in every if r.background]
    for what, times, report in _grouped(reports, lambda report: report):
        if _NOT_READ in report:
            yield _note(what, report, times, _LIMITED)
    faults = [("fault", fault) for r in every for fault in r.faults]
    for what, times, fault in _grouped(faults, lambda fault: fault):
        yield _note(what, fault, times, _BAD)
    if receipt.carried:
        amount = f"{receipt.carried:f} {receipt.denomination}".replace("usd", "USD")
        yield _note("carried", f"{amount} were spent before under the same limit", 1, "")
    if receipt.total.is_unpriced:
        yield _note("no price", "some models have no known price; their USD count 0", 1, "")


_NOT_READ = " (not read)"


def _stop_report(receipt: Receipt) -> str:
    """How the background subagents of one node ended, in that order."""
    ends = (
        f"{last_name(row.path)} {row.stop_reason}{'' if row.was_read else _NOT_READ}"
        for row in receipt.background
    )
    return f"{last_name(receipt.path)}: {', '.join(ends)}"


def _grouped(items: list[tuple[str, T]], kind: Callable[[T], str]) -> Iterator[tuple[str, int, T]]:
    """The first of each kind, and how many there are; a hundred subagents stop for one reason."""
    times = Counter(kind(item) for _, item in items)
    for what, item in items:
        if kind(item) in times:
            yield what, times.pop(kind(item)), item


def _note(what: str, why: str, times: int, style: str) -> Text:
    often = f" (and {times - 1} more)" if times > 1 else ""
    return Text.assemble((plain(f"{what}{often}"), style), f": {plain(why)}")


# --- stress tests ---------------------------------------------------------------------------------


def stress_table(trials: Sequence[Trial], *, width: int) -> Table:
    """A row per configuration; what must be 0 is red where it is not."""
    is_narrow = width < _ROOMY
    table = Table(box=None, pad_edge=False, padding=(0, 1 if is_narrow else 2, 0, 0))
    rows = [_trial_cells(trial) for trial in trials]
    # What a narrow terminal has no room for; --json has everything.
    titles = [t for t in rows[0] if not (is_narrow and t in ("events", "ended"))]
    for title in titles:
        is_text = title in ("backend", "ended")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[title] for title in titles))
    return table


def _trial_cells(trial: Trial) -> dict[str, Text]:
    tried = trial.configuration
    return {
        "fan-out": Text(f"{tried.fan_out:,}"),
        "depth": Text(f"{tried.depth}"),
        "backend": Text(tried.backend),
        "admitted": Text(f"{trial.admitted:,}"),
        "peak": Text(f"{trial.peak:,}"),
        "refused": Text(f"{trial.rejections:,}"),
        "calls": Text(f"{trial.calls:,}"),
        "tokens": Text(f"{trial.tokens:,}"),
        "over": Text("-", _FAINT) if trial.overshoot is None else _zero(trial.overshoot),
        "leaks": _zero(trial.leaks.total),
        "events": Text(f"{trial.events:,}"),
        "wall s": Text(f"{trial.wall_seconds:.2f}"),
        "ended": Text(trial.stop_reason, ended_style(trial.stop_reason)),
    }


def _zero(count: int) -> Text:
    return Text(f"{count:,}", f"bold {_BAD}" if count else _GOOD)
