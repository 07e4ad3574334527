"""Several runs in one conversation: one at a time, all or nothing."""

from __future__ import annotations

import pickle

import pytest

import treewarden as tw
from treewarden.protocols import (
    Message,
    Text,
    TextWritten,
    ToolCall,
    ToolResult,
    user,
)
from treewarden.testing import Reply, ScriptedModel, ScriptedRequest


def chatter(model: ScriptedModel, instructions: str = "Talk.") -> tw.Agent:
    return tw.agent(id="chatter", instructions=instructions, model=model)


async def test_the_second_run_knows_what_the_first_one_said(anyio_backend: str) -> None:
    model = ScriptedModel([Reply("I am Oak."), Reply("Oak, as I said.")])
    talk = tw.Conversation()
    await tw.run(chatter(model), "Who are you?", conversation=talk)
    await tw.run(chatter(model), "Again?", conversation=talk)
    assert [m.text for m in model.requests[1].messages] == ["Who are you?", "I am Oak.", "Again?"]
    assert len(talk.messages) == 4


async def test_a_failed_run_leaves_the_conversation_as_it_was(anyio_backend: str) -> None:
    talk = tw.Conversation()
    await tw.run(chatter(ScriptedModel([Reply("hello")])), "hi", conversation=talk)
    before = talk.messages
    with pytest.raises(tw.RunError):
        await tw.run(chatter(ScriptedModel([Reply(error=500)])), "more", conversation=talk)
    assert talk.messages == before
    assert not talk.is_busy


async def test_a_cancelled_run_leaves_the_conversation_as_it_was_and_free(
    anyio_backend: str,
) -> None:
    talk = tw.Conversation()
    model = ScriptedModel([Reply("a b", chunks=2, chunk_delay=3_600)])
    async with tw.stream(chatter(model), "go", conversation=talk) as run:
        async for event in run:
            if isinstance(event, TextWritten):
                break
        assert talk.is_busy
    assert not talk.is_busy
    assert talk.messages == ()


async def test_a_planned_stop_is_kept(anyio_backend: str) -> None:
    talk = tw.Conversation()
    agent = chatter(ScriptedModel([]))
    await tw.run(agent, "hello?", budget=tw.Budget(max_tokens=30), conversation=talk)
    assert [m.text for m in talk.messages] == ["hello?"]


async def test_a_busy_conversation_is_refused_before_anything_is_spent(anyio_backend: str) -> None:
    talk = tw.Conversation()
    model = ScriptedModel([Reply("slow", delay=3_600), Reply("never")])
    async with tw.stream(chatter(model), "one", conversation=talk):
        with pytest.raises(tw.UsageError, match="cave_conversation_in_use"):
            await tw.run(chatter(model), "two", conversation=talk)
    assert len(model.requests) <= 1


async def test_something_else_than_a_conversation_is_refused(anyio_backend: str) -> None:
    with pytest.raises(tw.UsageError, match="cave_conversation_invalid"):
        await tw.run(chatter(ScriptedModel([])), "x", conversation="history")  # type: ignore[arg-type]


async def test_a_start_that_is_refused_gives_the_conversation_back(anyio_backend: str) -> None:
    talk = tw.Conversation()
    async with tw.open_tree(limits=tw.Limits(max_runs=1)) as tree:
        await tree.run(chatter(ScriptedModel([Reply("x")])), "x", conversation=talk)
        with pytest.raises(tw.RefusedError, match="cave_run_limit"):
            await tree.run(chatter(ScriptedModel([])), "y", conversation=talk)
    assert not talk.is_busy


async def test_other_instructions_begin_another_cache_epoch_and_keep_the_history(
    anyio_backend: str,
) -> None:
    talk = tw.Conversation()
    model = ScriptedModel(lambda _: Reply("yes"))
    await tw.run(chatter(model), "1", conversation=talk)
    await tw.run(chatter(model), "2", conversation=talk)
    assert talk.epoch == 0
    await tw.run(chatter(model, "Whisper."), "3", conversation=talk)
    assert talk.epoch == 1
    assert len(talk.messages) == 6


async def test_a_deadline_in_the_middle_of_a_tool_leaves_a_history_that_can_go_on(
    anyio_backend: str,
) -> None:
    import anyio

    @tw.tool(effect="read", runs="host")
    async def wait() -> str:
        await anyio.sleep_forever()
        return "never"

    def script(request: ScriptedRequest) -> Reply:
        if request.last_text == "again":
            return Reply("fine")
        return Reply(tool_calls=[("wait", {})])

    talk = tw.Conversation()
    agent = tw.agent(id="a", instructions="", model=ScriptedModel(script), tools=[wait])
    limits = tw.Limits(deadline=0.02, min_call_seconds=0)
    result = await tw.run(agent, "go", limits=limits, conversation=talk)
    assert result.stop_reason == "deadline"
    assert [m.role for m in talk.messages] == ["user", "assistant", "tool"]
    assert (await tw.run(agent, "again", conversation=talk)).text == "fine"


def call(id_: str) -> ToolCall:
    return ToolCall(id_, "look", {})


def test_a_broken_history_is_repaired_and_says_so() -> None:
    broken = [
        user("hi"),
        Message("tool", (ToolResult("lost", "look", "x"),)),
        Message("assistant", (call("a"), call("b"))),
        Message("tool", (ToolResult("b", "look", "B"), ToolResult("c", "look", "C"))),
        Message("assistant", (Text("half \ud92c"), call("d"))),
    ]
    talk = tw.Conversation(broken)
    roles = [m.role for m in talk.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]
    first, second = (m for m in talk.messages if m.role == "tool")
    assert [p.call_id for p in first.parts if isinstance(p, ToolResult)] == ["a", "b"]
    assert second.parts[0].is_error  # type: ignore[union-attr]
    assert talk.messages[3].text == "half \ufffd"
    assert talk.repairs == (
        "dropped results without a call: lost",
        "dropped a result without a call: c",
        "answered a call without a result: a",
        "replaced lone surrogates in a message (assistant)",
        "answered a call without a result: d",
    )


def test_a_sound_history_is_left_alone() -> None:
    sound = [user("hi"), Message("assistant", (Text("hello"),))]
    talk = tw.Conversation(sound)
    assert talk.repairs == ()
    assert talk.messages == tuple(sound)


def test_a_conversation_stays_in_its_process() -> None:
    with pytest.raises(TypeError, match="belongs to this process"):
        pickle.dumps(tw.Conversation())
