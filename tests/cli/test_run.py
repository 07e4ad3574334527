"""``treewarden run``: the answer, the receipt, the exit code."""

from __future__ import annotations

import io
import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from ..scenarios.loopback import provider
from .conftest import Command

on_each_backend = pytest.mark.parametrize("backend", ["asyncio", "trio"])

ANSWER = "Both have been found.\n"


def chat(text: str) -> list[bytes]:
    """An answer of an OpenAI-compatible provider."""
    said: dict[str, Any] = {"role": "assistant", "content": text}
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": said, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 2}},
    ]
    return [event({"model": "small", **chunk}) for chunk in chunks] + [b"data: [DONE]\n\n"]


def event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


# --- the answer -----------------------------------------------------------------------------------


@on_each_backend
def test_stdout_is_the_answer_and_nothing_else(treewarden: Command, backend: str) -> None:
    said = treewarden("run", "agents.py:support", "trees?", "--backend", backend)
    assert (said.code, said.out) == (0, ANSWER)


def test_what_the_agents_own_code_prints_goes_to_stderr(treewarden: Command) -> None:
    said = treewarden("run", "agents.py:support", "trees?", "-q")
    assert said.err == "looking for trees\n"


def test_the_receipt_on_stderr_has_a_row_per_node_and_their_sum(treewarden: Command) -> None:
    said = treewarden("run", "agents.py:support", "trees?", "--budget-usd", "1")
    table = [line.split() for line in said.err.partition("\n\n")[2].splitlines()]
    assert table[0] == ["node", "calls", "tokens", "USD", "max", "USD", "ended"]
    rows = [[cell for cell in row if cell not in ("├─", "└─")] for row in table[1:]]
    assert [row[0] for row in rows] == ["support#1", "research#2", "research#3", "total"]
    assert sum(Decimal(row[3]) for row in rows[:-1]) == Decimal(rows[-1][3])
    assert [row[4] for row in rows[:-1]] == ["1.00", "0.20", "0.20"]
    assert {row[-1] for row in rows[:-1]} == {"complete"}


def test_without_a_terminal_progress_is_one_line_per_step(treewarden: Command) -> None:
    said = treewarden("run", "agents.py:support", "trees?")
    lines = said.err.partition("\n\n")[0].splitlines()
    assert lines[0] == "support#1: started"
    assert lines[-1] == "support#1: complete"
    assert "support#1: look done" in lines
    assert "support#1/research#3: complete" in lines


def test_the_prompt_may_come_on_stdin_without_its_last_line_feed(treewarden: Command) -> None:
    said = treewarden("run", "agents.py:echo", "--json", stdin="wie groß?\n".encode())
    assert json.loads(said.out)["text"] == "wie groß?"


def test_a_prompt_that_starts_with_a_hyphen_comes_after_two(treewarden: Command) -> None:
    assert treewarden("run", "agents.py:echo", "-q", "--", "-5 degrees").out == "-5 degrees\n"


def test_an_answer_that_stdout_cannot_encode_is_escaped(
    treewarden: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    assert treewarden("run", "agents.py:echo", "größe", "-q").code == 0
    assert raw.getvalue() == rb"gr\xf6\xdfe" + b"\n"


def test_progress_and_receipt_do_not_pass_on_what_steers_a_terminal(
    treewarden: Command, folder: Path
) -> None:
    text = (folder / "agents.py").read_text()
    (folder / "agents.py").write_text(text.replace("error=500", r'error="\x1b]0;evil\x07"'))
    said = treewarden("run", "agents.py:failing", "x")
    assert "evil" in said.err
    assert "\x1b" not in said.err


# --- --json and --receipt -------------------------------------------------------------------------


@on_each_backend
def test_json_is_one_object_with_text_stop_reason_and_receipt(
    treewarden: Command, backend: str
) -> None:
    said = treewarden("run", "agents.py:support", "x", "--json", "-q", "--backend", backend)
    value: dict[str, Any] = json.loads(said.out)
    assert value["text"] + "\n" == ANSWER
    assert (value["stop_reason"], value["stop_detail"], value["error_code"]) == (
        "complete",
        "",
        None,
    )
    assert value["receipt"]["schema"] == "treewarden.run-receipt.v1"


def test_json_has_amounts_as_exact_strings(treewarden: Command) -> None:
    said = treewarden("run", "agents.py:support", "x", "--json", "-q")
    receipt: dict[str, Any] = json.loads(said.out)["receipt"]
    nodes = [receipt, *receipt["subagents"]]
    amounts = [line["usd"] for node in nodes for line in node["lines"]]
    assert all(type(amount) is str for amount in amounts)
    assert sum(map(Decimal, amounts)) == Decimal(receipt["total"]["usd"])


def test_the_receipt_file_has_what_json_has(treewarden: Command, folder: Path) -> None:
    said = treewarden("run", "agents.py:echo", "x", "--json", "-q", "--receipt", "r.json")
    assert json.loads((folder / "r.json").read_text()) == json.loads(said.out)["receipt"]


def test_a_run_that_failed_has_its_receipt_in_the_file_too(
    treewarden: Command, folder: Path
) -> None:
    said = treewarden("run", "agents.py:failing", "x", "--json", "--receipt", "r.json")
    value: dict[str, Any] = json.loads(said.out)
    assert (said.code, value["text"], value["error_code"]) == (1, "a st", "provider-interrupted")
    assert json.loads((folder / "r.json").read_text())["stop_reason"] == "failed"


@pytest.mark.parametrize("place", ["nowhere/r.json", "."])
def test_a_receipt_that_cannot_be_written_is_said_before_anything_runs(
    treewarden: Command, place: str
) -> None:
    said = treewarden("run", "agents.py:support", "x", "--receipt", place)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("treewarden: the receipt cannot be written to")


# --- exit codes -----------------------------------------------------------------------------------


@on_each_backend
def test_a_failed_run_exits_with_1_and_says_why_without_a_traceback(
    treewarden: Command, backend: str
) -> None:
    said = treewarden("run", "agents.py:failing", "x", "--backend", backend)
    last = said.err.splitlines()[-1]
    assert said.code == 1
    assert last == "treewarden: failed (provider-interrupted): scripted status 500"
    assert "Traceback" not in said.err


def test_debug_shows_the_traceback_of_a_failed_run(treewarden: Command) -> None:
    said = treewarden("run", "agents.py:failing", "x", "--debug")
    assert said.code == 1
    assert "Traceback (most recent call last)" in said.err


@on_each_backend
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--budget-usd", "0.0001"), "budget_exhausted"),
        (("--budget-tokens", "1"), "budget_exhausted"),
        (("--deadline", "0.05"), "deadline"),
        (("--deadline", "60", "--min-call-seconds", "61"), "deadline"),
        (("--idle-timeout", "0.05"), "stalled"),
    ],
)
def test_a_limit_exits_with_3_and_says_which(
    treewarden: Command, backend: str, options: tuple[str, ...], reason: str
) -> None:
    said = treewarden("run", "agents.py:slow", "x", "--backend", backend, *options)
    assert said.code == 3
    assert said.err.splitlines()[-1].startswith(f"treewarden: stopped by {reason}: ")


def test_a_limit_on_calls_exits_with_3_and_keeps_the_partial_text(treewarden: Command) -> None:
    said = treewarden("run", "agents.py:support", "x", "--max-model-calls", "1", "--json")
    value: dict[str, Any] = json.loads(said.out)
    assert (said.code, value["stop_reason"]) == (3, "call_budget_exhausted")
    assert value["text"] == "I divide it."


@pytest.mark.parametrize("agent", ["patient", "strict"])
def test_a_run_whose_background_was_waited_for_exits_with_0(
    treewarden: Command, agent: str
) -> None:
    said = treewarden("run", f"agents.py:{agent}", "x")
    assert (said.code, said.out) == (0, "All was found.\n")
    assert "work#1: started in the background" in said.err
    assert "not read" not in said.err


def test_an_answer_that_dropped_its_background_exits_with_3_and_says_who_was_cancelled(
    treewarden: Command,
) -> None:
    said = treewarden("run", "agents.py:hasty", "x")
    assert (said.code, said.out) == (3, "Never mind.\n")
    verdict = said.err.splitlines()[-1]
    assert verdict.startswith("treewarden: stopped by background_dropped: ")
    assert "work#1, work#2 cancelled" in verdict
    (report,) = [line for line in said.err.splitlines() if line.startswith("background: cancel#1")]
    assert report.count("cancelled (not read)") == 2


def test_limits_reach_the_tree(treewarden: Command) -> None:
    said = treewarden("run", "agents.py:support", "x", "--max-subagents", "1")
    assert "refused: cave_subagent_invocation_limit" in said.err


def test_none_lifts_a_limit_that_has_a_default(treewarden: Command) -> None:
    options = ("--max-subagents", "none", "--max-concurrent-subagents", "none")
    assert treewarden("run", "agents.py:support", "x", *options).out == ANSWER


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), 'Command "run" parameter TARGET requires an argument.'),
        (("agents.py:echo", ""), "the prompt is empty"),
        (("agents.py:echo", "x", "y"), "Unused Tokens"),
        (("agents.py:echo", "x", "--frob"), "Unknown option: --frob."),
        (("agents.py:echo", "x", "--max-depth", "9"), "max_depth is 9."),
        (("agents.py:echo", "x", "--max-depth", "deep"), 'unable to convert "deep" into int'),
        (("agents.py:echo", "x", "--max-tool-calls", "0"), "max_tool_calls is 0."),
        (("agents.py:echo", "x", "--deadline", "nan"), "deadline is nan."),
        (("agents.py:echo", "x", "--deadline", "-1"), "deadline is -1.0."),
        (("agents.py:echo", "x", "--idle-timeout", "0"), "idle_timeout is 0.0."),
        (("agents.py:echo", "x", "--min-call-seconds", "-1"), "min_call_seconds is -1.0."),
        (("agents.py:echo", "x", "--budget-usd", "1,5"), "is not a number"),
        (("agents.py:echo", "x", "--budget-usd", "-1"), "is negative"),
        (("agents.py:echo", "x", "--budget-usd", "1", "--budget-tokens", "1"), "not both"),
        (("agents.py:echo", "x", "--budget-tokens", "0"), "max_tokens is 0"),
        (("agents.py:echo", "x", "--backend", "curio"), 'Choose from: "asyncio", "trio"'),
        (("agents.py:echo", "x", "--model", "haiku"), "has no provider"),
        (("agents.py:echo", "x", "--model", "nobody/m"), "the address of nobody is not known"),
        (("agents.py:echo", "x", "--base-url", "http://localhost"), "Give --model provider/name"),
        (("agents.py:is_open", "x"), "auto() found no model"),
        (("agents.py:is_open", "x", "--model", "anthropic/claude-haiku-4-5"), "no key"),
    ],
)
def test_what_cannot_be_used_exits_with_2_and_one_message(
    treewarden: Command, arguments: tuple[str, ...], message: str
) -> None:
    said = treewarden("run", *arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("treewarden: ")
    assert message in said.err
    assert "Traceback" not in said.err


@on_each_backend
def test_an_unpriced_model_under_a_budget_in_usd_exits_with_2_and_advice(
    treewarden: Command, backend: str
) -> None:
    said = treewarden("run", "agents.py:unpriced", "x", "--budget-usd", "1", "--backend", backend)
    assert (said.code, said.out) == (2, "")
    assert "Pin one: tw.model(" in said.err


def test_an_unknown_model_under_a_budget_in_usd_exits_with_2_and_advice(
    treewarden: Command,
) -> None:
    options = ("--model", "nobody/m", "--base-url", "http://localhost:1", "--budget-usd", "1")
    said = treewarden("run", "agents.py:echo", "x", *options)
    assert (said.code, said.out) == (2, "")
    assert "no price is known for 'nobody/m', and none is guessed" in said.err


def test_an_unpriced_model_without_a_budget_runs_and_says_so(treewarden: Command) -> None:
    said = treewarden("run", "agents.py:unpriced", "x")
    assert said.code == 0
    assert "no price: some models have no known price" in said.err


def test_an_estimate_is_shown_with_its_bounds(treewarden: Command) -> None:
    said = treewarden("run", "agents.py:silent", "x")
    assert "USD between" in said.err


# --- stdin ----------------------------------------------------------------------------------------


def test_no_prompt_on_a_terminal_is_an_error(
    treewarden: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    said = treewarden("run", "agents.py:echo")
    assert said.code == 2
    assert said.err.startswith("treewarden: there is no prompt.")


@pytest.mark.parametrize(("stdin", "message"), [(b"", "is empty"), (b"\xff\xfe", "is not text")])
def test_a_stdin_without_a_text_is_an_error(
    treewarden: Command, stdin: bytes, message: str
) -> None:
    said = treewarden("run", "agents.py:echo", stdin=stdin)
    assert said.code == 2
    assert message in said.err


# --- another model --------------------------------------------------------------------------------


@on_each_backend
def test_model_and_base_url_replace_the_root_agents_model(
    treewarden: Command, backend: str
) -> None:
    with provider(chat("from the wire")) as server:
        options = ("--model", "local/small", "--base-url", server.url, "--backend", backend)
        said = treewarden("run", "agents.py:echo", "x", "-q", *options)
    assert said.out == "from the wire\n"
    assert server.requests[0]["model"] == "small"


NESTED = """
import treewarden as tw
from treewarden.testing import Reply, ScriptedModel

pinned = ScriptedModel(lambda r: Reply("ok", tool_calls=[] if r.turn else [("ask", {"task": "t"})]))
leaf = tw.agent(id="leaf", instructions="Leaf.")
middle = tw.agent(
    id="middle",
    instructions="Middle.",
    model=pinned,
    tools=[tw.subagent(name="ask", description="Ask.", agent=lambda: leaf)],
)
top = tw.agent(
    id="top",
    instructions="Top.",
    model=pinned,
    tools=[tw.subagent(name="ask", description="Ask.", agent=middle)],
)
"""


def test_model_replaces_open_models_below_and_leaves_named_ones(
    treewarden: Command, folder: Path
) -> None:
    (folder / "nested.py").write_text(NESTED)
    call = {"index": 0, "id": "c1", "function": {"name": "ask", "arguments": '{"task": "t"}'}}
    asks = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}
    asking = [event({"model": "small", "choices": [asks]}), b"data: [DONE]\n\n"]
    with provider(asking, chat("leaf"), chat("top")) as server:
        options = ("--model", "local/small", "--base-url", server.url, "--json", "-q")
        said = treewarden("run", "nested.py:top", "x", *options)
    top: dict[str, Any] = json.loads(said.out)["receipt"]
    middle = top["subagents"][0]
    leaf = middle["subagents"][0]
    models = [node["lines"][0]["provider"] for node in (top, middle, leaf)]
    assert models == ["local", "scripted", "local"]


def test_base_url_alone_moves_the_agents_own_model(
    treewarden: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAVE_MODEL", "local/named-by-the-environment")
    with provider(chat("moved")) as server:
        said = treewarden("run", "agents.py:is_open", "x", "-q", "--base-url", server.url)
    assert said.out == "moved\n"
    assert server.requests[0]["model"] == "named-by-the-environment"


def test_a_moved_model_keeps_its_settings(treewarden: Command, folder: Path) -> None:
    (folder / "http.agents.py").write_text(
        "import treewarden as tw\n"
        "model = tw.model('local/mine', base_url='http://localhost:1',"
        " settings={'temperature': 0, 'max_tokens': 77})\n"
        "mine = tw.agent(id='mine', instructions='', model=model)\n"
    )
    with provider(chat("moved")) as server:
        said = treewarden("run", "http.agents.py", "x", "-q", "--base-url", server.url)
    assert said.out == "moved\n"
    sent = server.requests[0]
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("mine", 0, 77)


# --- the journal ----------------------------------------------------------------------------------


@on_each_backend
@pytest.mark.parametrize("name", ["run.jsonl", "run.sqlite", "run.db"])
def test_a_journal_has_what_the_run_did_and_its_spend_counts_when_it_is_gone_on_with(
    treewarden: Command, name: str, backend: str
) -> None:
    options = ("--budget-usd", "1", "--json", "-q", "--backend", backend, "--journal", name)
    first = json.loads(treewarden("run", "agents.py:support", "x", *options).out)["receipt"]
    folded = json.loads(treewarden("replay", name, "--json").out)
    assert Decimal(folded["spent"]) == Decimal(first["total"]["usd"])
    said = treewarden("run", "agents.py:support", "x", *options, "--resume-from", name)
    second = json.loads(said.out)["receipt"]
    assert said.code == 0
    assert Decimal(second["carried"]) == Decimal(first["total"]["usd"]) > 0
    # Both trees are in the file, and the second knows of the first.
    said = treewarden("run", "agents.py:support", "x", *options, "--resume-from", name)
    third = json.loads(said.out)["receipt"]
    both = Decimal(first["total"]["usd"]) + Decimal(second["total"]["usd"])
    assert Decimal(third["carried"]) == both


def test_a_run_that_is_gone_on_with_is_stopped_by_what_was_spent_before(
    treewarden: Command,
) -> None:
    treewarden("run", "agents.py:support", "x", "-q", "--journal", "run.jsonl")
    options = ("--budget-usd", "0.0001", "--resume-from", "run.jsonl")
    said = treewarden("run", "agents.py:echo", "x", *options)
    assert said.code == 3
    assert "stopped by budget_exhausted" in said.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--journal", "run.txt"), "the name does not say which kind"),
        (("--journal", "nowhere/run.jsonl"), "the journal cannot be written to"),
        (("--journal", "nowhere/run.db"), "the journal cannot be written to"),
        (("--journal", "agents.jsonl"), "is no journal"),
        (("--resume-from", "run.jsonl"), "Give budget="),
        (("--resume-from", "nowhere.jsonl", "--budget-usd", "1"), "cannot be read"),
        (("--resume-from", "agents.py", "--budget-usd", "1"), "no journal event"),
    ],
)
def test_a_journal_that_cannot_be_used_exits_with_2_and_starts_nothing(
    treewarden: Command, folder: Path, options: tuple[str, ...], message: str
) -> None:
    (folder / "agents.jsonl").write_text("dear diary\n")
    said = treewarden("run", "agents.py:support", "x", *options)
    assert (said.code, said.out) == (2, "")
    assert message in said.err
    assert "looking for" not in said.err


SPOILS = """
import sqlite3
import treewarden as tw
from treewarden.testing import Reply, ScriptedModel


@tw.tool(effect="write", runs="host")
async def spoil() -> str:
    \"\"\"Spoil the journal.\"\"\"
    database = sqlite3.connect("run.db")
    database.execute("DROP TABLE events")
    database.close()
    return "spoilt"


model = ScriptedModel(lambda r: Reply("so", tool_calls=[] if r.turn else [("spoil", {})]))
spoiler = tw.agent(id="spoiler", instructions="Spoil.", model=model, tools=[spoil])
"""


@on_each_backend
def test_a_journal_that_fails_ends_the_run_with_its_receipt_and_exits_with_1(
    treewarden: Command, folder: Path, backend: str
) -> None:
    (folder / "spoils.py").write_text(SPOILS)
    options = ("--journal", "run.db", "--json", "--backend", backend)
    said = treewarden("run", "spoils.py", "x", *options)
    value: dict[str, Any] = json.loads(said.out)
    assert (said.code, value["error_code"]) == (1, "cave_journal_failed")
    # One call was made; the next one was not sent, because it could not be written down.
    bases = [line["basis"] for line in value["receipt"]["lines"]]
    assert bases == ["provider_reported", "not_dispatched"]
    assert "Traceback" not in said.err


# --- E14: a budget that trips inside a subagent ---------------------------------------------------

TRIPS = """
import treewarden as tw
from treewarden.testing import Reply, ScriptedModel

# Every call holds and uses $0.045.
price = tw.Price(input="0", cache_read="0", cache_write="0", output="45")


def script(request):
    name = "ask" if request.agent_path.count("/") == 1 else "look"
    arguments = {"task": "it"} if name == "ask" else {}
    calls = [] if request.turn else [(name, arguments)]
    return Reply("partly", tool_calls=calls, usage=tw.Usage(output=request.output_limit))


@tw.tool(effect="read", runs="host")
async def look() -> str:
    \"\"\"Look.\"\"\"
    return "seen"


model = ScriptedModel(script, price=price, max_output=1_000)
worker = tw.agent(id="worker", instructions="Work.", model=model, tools=[look])
ask = tw.subagent(name="ask", description="Ask.", agent=worker)
boss = tw.agent(id="boss", instructions="Plan.", model=model, tools=[ask])
"""


@on_each_backend
def test_E14_a_budget_that_trips_in_a_subagent_exits_with_3(
    treewarden: Command, folder: Path, backend: str
) -> None:
    (folder / "trips.py").write_text(TRIPS)
    options = ("--budget-usd", "0.10", "--json", "--backend", backend)
    said = treewarden("run", "trips.py:boss", "x", *options)
    value: dict[str, Any] = json.loads(said.out)
    assert (said.code, value["stop_reason"]) == (3, "budget_exhausted")
    (child,) = value["receipt"]["subagents"]
    assert child["stop_reason"] == "budget_exhausted"
    assert Decimal(value["receipt"]["total"]["usd"]) == Decimal("0.09")
