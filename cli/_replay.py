"""``treewarden replay``: fold a journal, check every state on the way, and show one of them.

A ledger forgets what has ended. A replay keeps it, because who reads a journal after the fact asks
where the money went; the sums of what is shown are still those of the folded state.
"""

from __future__ import annotations

import json as json_
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import attrs
from rich.table import Table
from rich.text import Text

from treewarden.actors import read_journal
from treewarden.ledgers import (
    Admitted,
    Dispatched,
    Ended,
    Event,
    Kind,
    Opened,
    Outcome,
    Settled,
    TreeState,
    Unit,
    amount_of,
)
from treewarden.protocols import UsageError

from ._errors import CommandError, Exit, plain, tell
from ._options import AsJson, Flag
from ._tables import aligned, console, last_name, with_guides


def replay(
    file: str,
    /,
    *,
    at: int | None = None,
    tree: int | None = None,
    json: AsJson = False,
    debug: Flag = False,
) -> int:
    """Check a journal event by event and show the tree at any of them.

    Takes what a run wrote through journal=, also one that was killed: then it says what was
    certainly spent, what is uncertain because its call had left and was not settled, and what was
    only held. Exits with 1 at the first event after which an invariant does not hold.

    Args:
        file: The journal's file: lines of JSON, or a SQLite database.
        at: Show the tree after so many of its events; without it, after the last.
        tree: Which tree of the file, from 1; without it, the last.
        json: Print the tree as JSON.
        debug: Show tracebacks.
    """
    if not __debug__:
        raise CommandError("python -O leaves out the checks. Run the command without it.")
    for option, value in (("--at", at), ("--tree", tree)):
        if value is not None and value < 1:
            raise CommandError(f"{option} is {value}. Events and trees are counted from 1.")
    stories = _replay_all(file, at)
    story = _chosen(stories, file, tree=tree, at=at)
    if json:
        print(json_.dumps({**story.to_json(), "trees": len(stories)}))
    elif story.picture.shown_at:
        _show(story, trees=len(stories))
    problems = [other.problem for other in stories if other.problem is not None]
    for problem in problems:
        tell(f"{file}: {problem}")
    return Exit.FAILED if problems else Exit.OK


# --- folding --------------------------------------------------------------------------------------


@attrs.define
class _Place:
    """One node that ever was, and what its own calls came to."""

    path: str
    kind: Kind
    outcome: Outcome | None = None
    # Calls that were dispatched, without those that are known never to have left.
    calls: int = 0
    usd: int = 0
    tokens: int = 0
    # Held for calls that were dispatched and are not settled: they cost between 0 and this.
    uncertain: int = 0
    # Held for calls that were not dispatched: they cost nothing.
    held: int = 0
    below: list[_Place] = attrs.field(factory=list["_Place"])

    def walk(self) -> Iterator[_Place]:
        yield self
        for place in self.below:
            yield from place.walk()


@attrs.define
class _Picture:
    """Everything that ever was in a tree, up to one of its events."""

    # What was spent before under the same limit.
    carried: int
    unit: Unit
    places: dict[int, _Place] = attrs.field(factory=lambda: {0: _Place("root", Kind.ROOT)})
    # Set by ``take``: how many events it shows, the last of them, and the ceiling then.
    shown_at: int = 0
    last: Event | None = None
    max: int | None = None

    def note(self, event: Event, state: TreeState) -> None:
        """Keep what the state will not. ``state`` is from before the event."""
        places = self.places
        match event:
            case Admitted():
                above = state.nodes[event.parent]
                place = _Place(f"{above.path}/{event.name}#{above.children + 1}", event.kind)
                places[event.node] = place
                places[event.parent].below.append(place)
            case Ended():
                places[event.node].outcome = event.outcome
            case Dispatched():
                places[state.holds[event.hold].node.id].calls += 1
            case Settled():
                place = places[state.holds[event.hold].node.id]
                place.usd += event.usd
                place.tokens += event.tokens
                place.calls -= event.basis == "not_dispatched"
            case _:
                pass

    def take(self, state: TreeState, events: int, last: Event) -> None:
        """Finish it with what is open after ``events`` events."""
        for hold in state.holds.values():
            place = self.places[hold.node.id]
            if hold.is_dispatched:
                place.uncertain += hold.amount
            else:
                place.held += hold.amount
        wallet = state.wallets[0]
        self.max = wallet.max if wallet.is_bounded else None
        self.shown_at, self.last = events, last

    @property
    def root(self) -> _Place:
        return self.places[0]

    def total(self) -> _Place:
        """The sums over all nodes."""
        every = list(self.root.walk())
        return _Place(
            "total",
            Kind.ROOT,
            calls=sum(place.calls for place in every),
            usd=sum(place.usd for place in every),
            tokens=sum(place.tokens for place in every),
            uncertain=sum(place.uncertain for place in every),
            held=sum(place.held for place in every),
        )

    def spent(self, place: _Place) -> Decimal:
        return self.amount(place.usd if self.unit == "usd" else place.tokens)

    def amount(self, amount: int) -> Decimal:
        return amount_of(self.unit, amount)


@attrs.define
class _Story:
    """A tree as its events tell it."""

    number: int
    picture: _Picture
    # The event to show; None: the last.
    at: int | None
    events: int = 0
    # What is wrong at the first event that is wrong. Nothing is folded after it.
    problem: str | None = None
    _state: TreeState = attrs.field(factory=TreeState)
    _last: Event | None = None

    @classmethod
    def begin(cls, number: int, opened: Opened, at: int | None) -> _Story:
        carried = opened.carried_usd if opened.unit == "usd" else opened.carried_tokens
        return cls(number, _Picture(carried, opened.unit), at)

    def read(self, event: Event) -> None:
        """Apply the next event and check what is so then."""
        self.events += 1
        if self.problem is not None:
            return
        is_shown = self.at is None or self.events <= self.at
        try:
            if is_shown:
                self.picture.note(event, self._state)
            self._state.apply(event)
            self._last = event
            self._state.check()
        except Exception as error:  # in a file of unknown origin anything can be wrong
            self._fail(self.events, type(event).__name__, error)
        if self.events == self.at:
            self.finish()

    def break_off(self, error: Exception) -> None:
        """What comes next cannot be read."""
        if self.problem is None:
            self._fail(self.events + 1, "unreadable", error)

    def finish(self) -> None:
        """There are no more events, or none that are to be shown."""
        if not self.picture.shown_at and self._last is not None:
            at = min(self.events, self._state.events)
            self.picture.take(self._state, at, self._last)

    def _fail(self, number: int, what: str, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self.problem = f"tree {self.number}, event {number} ({what}): {why}"

    def to_json(self) -> dict[str, Any]:
        picture, total = self.picture, self.picture.total()
        last, amount = picture.last, picture.amount
        return {
            "tree": self.number,
            "event": picture.shown_at,
            "events": self.events,
            "last_event": None if last is None else type(last).__name__,
            "at": None if last is None else last.at,
            "is_over": picture.root.outcome is not None,
            "problem": self.problem,
            "unit": picture.unit,
            "max": None if picture.max is None else f"{amount(picture.max):f}",
            "carried": f"{amount(picture.carried):f}",
            "spent": f"{picture.spent(total):f}",
            "uncertain": f"{amount(total.uncertain):f}",
            "held": f"{amount(total.held):f}",
            "nodes": [self._node(place) for place in picture.root.walk()],
        }

    def _node(self, place: _Place) -> dict[str, Any]:
        return {
            "path": place.path,
            "kind": place.kind.value,
            "outcome": None if place.outcome is None else place.outcome.value,
            "calls": place.calls,
            "usd": f"{amount_of('usd', place.usd):f}",
            "tokens": place.tokens,
            "uncertain": f"{self.picture.amount(place.uncertain):f}",
            "held": f"{self.picture.amount(place.held):f}",
        }


def _replay_all(file: str, at: int | None) -> list[_Story]:
    """Every tree of the file, each to its end.

    Raises:
        CommandError: It cannot be read, or is no journal.
    """
    stories: list[_Story] = []
    try:
        with console(is_stderr=True).status(f"replaying {plain(file)}"):
            for event in read_journal(file):
                if isinstance(event, Opened):
                    stories.append(_Story.begin(len(stories) + 1, event, at))
                elif not stories:
                    raise CommandError(f"{file} is no journal: it does not begin with a tree.")
                stories[-1].read(event)
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror or error}") from None
    except UsageError as error:
        if not stories:
            raise CommandError(f"{file}: {error}") from None
        stories[-1].break_off(error)
    if not stories:
        raise CommandError(f"{file} holds no events. Give a file that a journal has written.")
    for story in stories:
        story.finish()
    return stories


def _chosen(stories: list[_Story], file: str, *, tree: int | None, at: int | None) -> _Story:
    if tree is not None and tree > len(stories):
        raise CommandError(f"--tree is {tree}, and {file} holds {len(stories)}.")
    story = stories[-1 if tree is None else tree - 1]
    if at is not None and at > story.events:
        raise CommandError(f"--at is {at}, and tree {story.number} has {story.events} events.")
    return story


# --- showing --------------------------------------------------------------------------------------


def _show(story: _Story, *, trees: int) -> None:
    out = console()
    out.print(_heading(story, trees), soft_wrap=not out.is_terminal)
    out.print(_table(story.picture))
    for line in _sums(story.picture):
        out.print(line, soft_wrap=not out.is_terminal)


def _heading(story: _Story, trees: int) -> Text:
    picture = story.picture
    assert picture.last is not None, picture
    of_several = f"tree {story.number} of {trees}, " if trees > 1 else ""
    if picture.root.outcome is not None:
        how = "it is over"
    elif picture.shown_at == story.events:
        how = "the journal ends here and the tree was open"
    else:
        how = "the tree goes on"
    kind = type(picture.last).__name__
    return Text(f"{of_several}event {picture.shown_at} of {story.events} ({kind}): {how}")


def _table(picture: _Picture) -> Table:
    """A row per node that ever was; closed ones keep what they cost."""
    rows = list(with_guides(picture.root, lambda place: place.below))
    places = [*(place for _, place in rows), picture.total()]
    unit = "USD" if picture.unit == "usd" else "tokens"
    columns = [("calls", [f"{place.calls:,}" for place in places])]
    columns.append((f"spent {unit}", _amounts(picture, [picture.spent(p) for p in places])))
    for title in ("uncertain", "held"):
        amounts = [picture.amount(getattr(place, title)) for place in places]
        if any(amounts):
            columns.append((title, _amounts(picture, amounts)))
    table = Table(box=None, pad_edge=False, show_footer=True, header_style="bold")
    table.add_column("node", "total", no_wrap=True, overflow="ellipsis", min_width=8)
    for title, cells in columns:
        table.add_column(title, cells[-1], justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for at, (guide, place) in enumerate(rows):
        name = Text.assemble((guide, "dim"), last_name(place.path))
        table.add_row(name, *(cells[at] for _, cells in columns), _state(place))
    return table


def _amounts(picture: _Picture, amounts: list[Decimal]) -> list[str]:
    return aligned(amounts) if picture.unit == "usd" else [f"{amount:,f}" for amount in amounts]


def _state(place: _Place) -> Text:
    match place.outcome:
        case None:
            return Text("open", style="yellow")
        case Outcome.OK:
            return Text("ok", style="green")
        case outcome:
            return Text(outcome.value, style="red")


def _sums(picture: _Picture) -> Iterator[Text]:
    """What is certain and what is not, in words."""
    total, unit = picture.total(), "USD" if picture.unit == "usd" else "tokens"
    spent, uncertain = picture.spent(total), picture.amount(total.uncertain)
    if picture.carried:
        yield Text(f"spent before under the same limit: {picture.amount(picture.carried):f} {unit}")
    yield Text(f"certainly spent: {spent:f} {unit}")
    if uncertain:
        yield Text(
            f"uncertain: between 0 and {uncertain:f} {unit}, for calls that had left and were not "
            "settled"
        )
    if total.held:
        yield Text(f"held: {picture.amount(total.held):f} {unit}, for calls that had not left")
    if picture.max is not None:
        yield Text(f"limit: {picture.amount(picture.max):f} {unit}")
