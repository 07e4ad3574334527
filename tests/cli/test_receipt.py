"""``treewarden receipt``: sums are checked, and what is shown adds up."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treewarden.protocols import JSON, Line, Receipt

from .conftest import Command


def line(usd: str = "0.01", tokens: int = 100, *, off_by: str = "0") -> Line:
    """A call; with ``off_by`` an estimated one."""
    low, high = Decimal(usd) - Decimal(off_by), Decimal(usd) + Decimal(off_by)
    return Line(
        purpose="model",
        provider="scripted",
        model="model",
        input_tokens=tokens,
        tokens=tokens,
        usd=Decimal(usd),
        basis="estimated" if off_by != "0" else "provider_reported",
        low_usd=low,
        high_usd=high,
        low_tokens=tokens,
        high_tokens=tokens,
    )


def receipt(
    name: str = "support#1",
    lines: tuple[Line, ...] = (),
    below: tuple[Receipt, ...] = (),
    *,
    under: str = "root",
    ended: str = "complete",
    reason: str = "",
    max: Decimal | None = None,
) -> Receipt:
    blank = Receipt(
        run_id="r",
        path=f"{under}/{name}",
        agent_id="a",
        stop_reason=ended,
        reason=reason,
        lines=lines,
        subagents=below,
    )
    return Receipt(
        run_id="r",
        path=f"{under}/{name}",
        agent_id="a",
        stop_reason=ended,
        reason=reason,
        denomination="usd",
        max=max,
        released=max,
        spent=blank.total.usd,
        lines=lines,
        subagents=below,
    )


TREE = receipt(
    lines=(line("0.0125"), line("0.5")),
    below=(
        receipt("research#1", (line("0.003"),), under="root/support#1"),
        receipt("research#2", (line("0.1", off_by="0.05"),), under="root/support#1"),
    ),
    max=Decimal(1),
)


def write(file: Path, value: Any) -> str:
    file.write_text(json.dumps(value))
    return str(file)


# --- a good one -----------------------------------------------------------------------------------


def test_the_table_has_every_node_and_its_rows_add_up(treewarden: Command, folder: Path) -> None:
    said = treewarden("receipt", write(folder / "r.json", TREE.to_json()))
    assert said.code == 0
    rows = [line.lstrip("├└─ ").split() for line in said.out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["support#1", "research#1", "research#2", "total"]
    assert [row[3] for row in rows] == ["0.5125", "0.0030", "0.1000", "0.6155"]
    assert [row[1] for row in rows] == ["2", "1", "1", "4"]


def test_an_estimate_has_its_bounds_in_the_table(treewarden: Command, folder: Path) -> None:
    said = treewarden("receipt", write(folder / "r.json", TREE.to_json()))
    assert "0.0500 to 0.1500" in said.out
    assert "0.5655 to 0.6655" in said.out


@pytest.mark.parametrize("wraps", [True, False])
def test_json_is_the_receipt_in_its_normal_form(
    treewarden: Command, folder: Path, wraps: bool
) -> None:
    plain = TREE.to_json()
    said = treewarden(
        "receipt", write(folder / "r.json", {"receipt": plain} if wraps else plain), "--json"
    )
    assert json.loads(said.out) == plain


def test_contract_is_the_public_schema(treewarden: Command, folder: Path) -> None:
    said = treewarden("receipt", write(folder / "r.json", TREE.to_json()), "--contract")
    assert json.loads(said.out) == TREE.to_contract_json()


def test_what_run_prints_as_json_can_be_piped_in(treewarden: Command) -> None:
    printed = treewarden("run", "agents.py:support", "x", "--json", "-q").out
    said = treewarden("receipt", "-", "--json", stdin=printed.encode())
    assert said.code == 0
    assert json.loads(said.out) == json.loads(printed)["receipt"]


def test_what_run_writes_to_a_file_is_accepted(treewarden: Command) -> None:
    treewarden("run", "agents.py:failing", "x", "--receipt", "r.json")
    said = treewarden("receipt", "r.json")
    assert said.code == 0
    assert "failing#1 failed: scripted status 500" in said.out


def test_reasons_and_refusals_that_many_share_are_said_once(
    treewarden: Command, folder: Path
) -> None:
    below = tuple(receipt(f"s#{n}", ended="deadline", reason=f"late {n}") for n in range(3))
    value = receipt(below=below).to_json()
    for message in ("no room", "no room again"):
        value["refusals"].append({"code": "c", "message": message})
    said = treewarden("receipt", write(folder / "r.json", value))
    assert "s#0 deadline (and 2 more): late 0" in said.out
    assert "refused (and 1 more): no room" in said.out


def test_nothing_in_a_receipt_is_markup_or_steers_the_terminal(
    treewarden: Command, folder: Path
) -> None:
    nasty = receipt("[bold]x\x1b[31m#1", ended="[red]\x9bend", reason="[link=x]\x07")
    said = treewarden("receipt", write(folder / "r.json", nasty.to_json()))
    assert "[bold]x�[31m#1" in said.out
    assert "[red]�end" in said.out
    assert "[link=x]�" in said.out


# --- a broken one ---------------------------------------------------------------------------------


def test_a_line_that_was_changed_is_refused_with_the_path_of_its_node(
    treewarden: Command, folder: Path
) -> None:
    value = TREE.to_json()
    value["subagents"][0]["lines"][0].update(usd="0.004", low_usd="0.004", high_usd="0.004")
    said = treewarden("receipt", write(folder / "r.json", value))
    assert (said.code, said.out) == (1, "")
    assert "its sums do not add up at root/support#1" in said.err


@pytest.mark.parametrize("sum_", ["own", "descendants", "total"])
def test_a_sum_that_was_changed_is_refused_with_the_path_of_its_node(
    treewarden: Command, folder: Path, sum_: str
) -> None:
    value = TREE.to_json()
    value["subagents"][1][sum_]["tokens"] += 1
    said = treewarden("receipt", write(folder / "r.json", value), "--json")
    assert (said.code, said.out) == (1, "")
    assert f"root/support#1/research#2: {sum_} says" in said.err


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"not json",
        b"[" * 100_000,
        b"null",
        b"[]",
        b"{}",
        b'{"receipt": null}',
        b'{"receipt": {"receipt": 1}}',
        b'{"schema": "treewarden.run-receipt.v1"}',
        b'{"schema": "treewarden.run-receipt.v1", "lines": 3, "subagents": {"a": 1}}',
        b'{"schema": "caveman.agent.run-receipt.v1"}',
        b"1" * 5000,
        b"NaN",
    ],
)
def test_garbage_is_refused_with_one_message(
    treewarden: Command, folder: Path, content: bytes
) -> None:
    (folder / "r.json").write_bytes(content)
    said = treewarden("receipt", "r.json")
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("treewarden: r.json")
    assert "Traceback" not in said.err


def test_a_receipt_that_lacks_a_part_is_refused(treewarden: Command, folder: Path) -> None:
    for name in TREE.to_json():
        value = TREE.to_json()
        del value[name]
        said = treewarden("receipt", write(folder / "r.json", value))
        assert said.code in (0, 1), name
        assert "Traceback" not in said.err
        assert "unexpected" not in said.err, name


@pytest.mark.parametrize("amount", ["NaN", "Infinity", "-1e999999999", "x", 1, 1.5, None])
def test_an_amount_that_is_none_is_refused(
    treewarden: Command, folder: Path, amount: object
) -> None:
    value = TREE.to_json()
    value["lines"][0]["usd"] = amount
    said = treewarden("receipt", write(folder / "r.json", value))
    assert (said.code, said.out) == (1, "")
    assert "unexpected" not in said.err


def places(value: JSON) -> list[tuple[Any, Any]]:
    """Every place in a JSON value: what holds it, and its key there."""
    match value:
        case dict():
            inner: list[tuple[Any, JSON]] = [*value.items()]
        case list():
            inner = [*enumerate(value)]
        case _:
            inner = []
    return [(value, key) for key, _ in inner] + [p for _, child in inner for p in places(child)]


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_receipt_with_anything_anywhere_never_makes_the_command_stumble(
    treewarden: Command, folder: Path, data: st.DataObject
) -> None:
    value = TREE.to_json()
    at, key = data.draw(st.sampled_from(places(value)))
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    at[key] = data.draw(
        st.recursive(scalars, lambda s: st.lists(s) | st.dictionaries(st.text(), s))
    )
    said = treewarden("receipt", write(folder / "r.json", value))
    assert said.code in (0, 1)
    assert "unexpected" not in said.err


# --- usage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.json",), "nowhere.json cannot be read: No such file or directory"),
        ((".",), ". cannot be read: Is a directory"),
        ((), "requires an argument"),
        (("agents.py", "--json", "--contract"), "exclude each other"),
        (("-x",), "-x cannot be read"),
    ],
)
def test_what_cannot_be_used_exits_with_2(
    treewarden: Command, arguments: tuple[str, ...], message: str
) -> None:
    said = treewarden("receipt", *arguments)
    assert (said.code, said.out) == (2, "")
    assert message in said.err


# --- wide trees -----------------------------------------------------------------------------------


def test_a_wide_tree_is_folded_after_a_run_and_still_adds_up(
    treewarden: Command, folder: Path
) -> None:
    text = (folder / "agents.py").read_text()
    (folder / "agents.py").write_text(text.replace('("oaks", "elms")', "map(str, range(63))"))
    wide = ("--max-subagents", "none", "--max-concurrent-subagents", "none")
    said = treewarden("run", "agents.py:support", "x", "--receipt", "r.json", *wide)
    table = said.err.partition("\n\n")[2].splitlines()
    assert len(table) < 50
    rows = [line.lstrip("├└─ ").split() for line in table[1:]]
    folded = next(row for row in rows if row[0] == "…")
    assert folded[1:3] == ["24", "more"]
    shown = [Decimal(row[3]) for row in rows if "#" in row[0]] + [Decimal(folded[5])]
    total = next(row for row in rows if row[0] == "total")
    assert sum(shown) == Decimal(total[3])
