"""E60: half a character in a history bricks every later request. None is made, none is kept."""

from __future__ import annotations

import json
from typing import Any, Literal, TypeAlias

import pytest

import treewarden as tw
from treewarden.protocols import (
    Message,
    Text,
    ToolCall,
    ToolResult,
    cut_text,
    mend_message,
    user,
)
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest, VirtualClock

from ..wire._streams import DONE, USAGE, chunk, fragment, sse, usage_only
from .kit import Backend, Witness, both_backends, check_books
from .loopback import Loopback, serve

CAPS = range(1, 65)
CutUnit: TypeAlias = Literal["chars", "bytes"]
Keep: TypeAlias = Literal["head", "tail", "ends"]

PARTY = "\N{PARTY POPPER}"  # four bytes, and two UTF-16 units
TWO_BYTES = "\N{LATIN SMALL LETTER E WITH ACUTE}"
# Half of a character, as it is left when somebody cuts a text by UTF-16 units.
HALF = "\ud92c"


def size(text: str, unit: CutUnit) -> int:
    return len(text) if unit == "chars" else len(text.encode())


@pytest.mark.parametrize("unit", ["chars", "bytes"])
@pytest.mark.parametrize("keep", ["head", "tail", "ends"])
@pytest.mark.parametrize("cap", CAPS)
def test_E60_a_cut_text_is_whole_characters_and_no_longer_than_its_cap(
    cap: int, keep: Keep, unit: CutUnit
) -> None:
    for tail in (PARTY * 40, PARTY + "b" * 80, HALF + PARTY * 40, TWO_BYTES * 70):
        text = "a" * (cap - 1) + tail
        for whole in (text, text[::-1]):
            cut = cut_text(whole, cap, unit=unit, keep=keep)
            assert cut.encode().decode() == cut  # strictly: no lone surrogate is in it
            assert json.loads(json.dumps(cut, ensure_ascii=False).encode()) == cut
            assert size(cut, unit) <= cap
            # And no shorter than whole characters make it, an ellipsis in the middle included.
            assert size(cut, unit) > cap - (1 if unit == "chars" else 7)


@pytest.mark.parametrize("cap", CAPS)
def test_E60_head_tail_and_ends_keep_what_they_say(cap: int) -> None:
    text = "".join(chr(0x1F300 + n) for n in range(100))
    assert cut_text(text, cap) == text[:cap]
    assert cut_text(text, cap, keep="tail") == text[-cap:]
    ends = cut_text(text, cap, keep="ends")
    head, ellipsis, tail = ends.partition("\N{HORIZONTAL ELLIPSIS}")
    assert ellipsis
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) - len(tail) in (0, 1)


@pytest.mark.parametrize("keep", ["head", "tail", "ends"])
def test_E60_a_text_that_fits_is_left_alone_and_no_room_is_no_text(keep: Keep) -> None:
    assert cut_text("a" + PARTY, 2, keep=keep) == "a" + PARTY
    assert cut_text("a" + PARTY, 5, unit="bytes", keep=keep) == "a" + PARTY
    assert cut_text("a" + PARTY, 0, keep=keep) == ""
    assert cut_text(PARTY, 3, unit="bytes", keep=keep) in ("", "\N{HORIZONTAL ELLIPSIS}")


# --- on the way in -------------------------------------------------------------------------------


def sound(messages: tuple[Message, ...]) -> bool:
    return all(mend_message(message) is message for message in messages)


@both_backends
def test_E60_a_tools_output_is_whole_characters_at_every_cap(backend: Backend) -> None:
    async def scenario() -> None:
        for cap in CAPS:
            output = "a" * (cap - 1) + PARTY + HALF + "tail"

            @tw.tool(effect="read", runs="host", max_result_bytes=cap)
            async def fetch(output: str = output) -> str:
                """Fetch."""
                return output

            calls: list[tuple[str, dict[str, Any]]] = [
                ("fetch", {}),
                ("fetch", {"output": "a" * (cap - 4) + PARTY if cap >= 4 else ""}),
            ]

            def script(request: ScriptedRequest, calls: Any = calls) -> Reply:
                return Reply("done") if request.turn else Reply(tool_calls=calls)

            model = ScriptedModel(script)
            agent = tw.agent(id="one", instructions="Fetch.", model=model, tools=[fetch])
            witness = Witness()
            result = await tw.run(agent, "go", budget=tw.Budget(max_usd="1.00"), **witness.options)
            assert result.complete
            assert sound(result.messages)
            too_large, fits = model.requests[1].tool_results
            # What is too large is refused and says so; it is never cut silently.
            assert too_large.is_error
            assert f"{cap} are allowed" in too_large.content
            assert not fits.is_error
            assert len(fits.content.encode()) <= cap
            check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E60_half_a_character_becomes_a_replacement_wherever_it_comes_in(
    backend: Backend,
) -> None:
    heard: list[Any] = []

    @tw.tool(effect="read", runs="host")
    async def note(text: str) -> str:
        """Note.

        Args:
            text: What.
        """
        heard.append(text)
        return f"noted {text} {HALF}"

    @tw.tool(effect="read", runs="host")
    async def fail() -> str:
        """Fail."""
        raise ValueError(f"no {HALF}")

    def script(request: ScriptedRequest) -> Reply:
        if request.turn:
            return Reply("done")
        return Reply(tool_calls=[("note", {"text": f"x{HALF}y"}), ("fail", {})])

    async def scenario() -> None:
        model = ScriptedModel(script)
        agent = tw.agent(id="one", instructions="Note.", model=model, tools=[note, fail])
        talk = tw.Conversation()
        witness = Witness()
        result = await tw.run(agent, f"go {HALF}", conversation=talk, **witness.options)
        assert heard == ["x\ufffdy"]
        assert sound(result.messages)
        assert sound(talk.messages)
        assert [r.content for r in model.requests[1].tool_results] == [
            "noted x\ufffdy \ufffd",
            "ValueError: no \ufffd",
        ]
        # What was kept can be asked about again.
        json.dumps([str(m) for m in talk.messages], ensure_ascii=False).encode()
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E60_what_is_said_to_a_running_agent_is_mended_too(backend: Backend) -> None:
    async def scenario() -> None:
        model = ScriptedModel([Reply("one", delay=1), Reply("two")])
        agent = tw.agent(id="one", instructions="Listen.", model=model)
        witness = Witness()
        async with tw.stream(agent, "go", **witness.tree_options) as run:
            run.send(f"and {HALF}")
            result = await run.result()
        assert sound(result.messages)
        assert "and \ufffd" in [message.text for message in result.messages]
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E60_an_old_and_bad_history_can_be_gone_on_with(backend: Backend) -> None:
    call = ToolCall("c1", "note", {"text": [HALF]}, f'{{"text": ["{HALF}"]}}')
    history = [
        user(f"go {HALF}"),
        Message("assistant", (call,)),
        Message("tool", (ToolResult("c1", "note", f"cut off here {HALF}"),)),
        Message("assistant", (Text(f"so {HALF}"),)),
    ]
    assert not sound(tuple(history))

    async def scenario() -> None:
        talk = tw.Conversation(history)
        assert len(talk.repairs) == 4
        assert all("lone surrogates" in repair for repair in talk.repairs)
        model = ScriptedModel([Reply("as I said")])
        agent = tw.agent(id="one", instructions="Go on.", model=model)
        witness = Witness()
        result = await tw.run(agent, "and?", conversation=talk, **witness.options)
        assert result.text == "as I said"
        assert sound(model.requests[0].messages)
        check_books(witness, result.receipt, model)

    VirtualClock().run(scenario, backend=backend)


@both_backends
def test_E60_arguments_with_half_a_character_off_the_wire_can_be_sent_back(
    backend: Backend,
) -> None:
    heard: list[str] = []

    @tw.tool(effect="read", runs="host")
    async def note(text: str) -> str:
        """Note.

        Args:
            text: What.
        """
        heard.append(text)
        return "noted"

    # On the wire it is an escape inside the text of the arguments, which is itself JSON.
    call = fragment(0, "A", "note", r'{"text": "x\ud92cy"}')
    asks = sse(chunk(calls=[call]), chunk(finish="tool_calls"), usage_only(USAGE), DONE)
    answers = sse(chunk("done"), chunk(finish="stop"), usage_only(USAGE), DONE)

    async def scenario(server: Loopback) -> None:
        model = tw.model("local/gpt", base_url=server.url, price=tw.Price(input="3", output="15"))
        agent = tw.agent(id="one", instructions="Note.", model=model, tools=[note])
        result = await tw.run(agent, "go", budget=tw.Budget(max_usd="1.00"))
        assert result.text == "done"
        assert heard == ["x\ufffdy"]
        (sent_back,) = [m for m in server.requests[1]["messages"] if m["role"] == "assistant"]
        arguments = sent_back["tool_calls"][0]["function"]["arguments"]
        assert "\\ud92c" not in arguments
        assert json.loads(arguments) == {"text": "x\ufffdy"}
        result.receipt.check()

    serve(backend, scenario, [asks], [answers])
