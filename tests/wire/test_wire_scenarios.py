"""What went wrong elsewhere, told to our decoders: the public reports E98 to E102."""

from __future__ import annotations

from typing import Any

import pytest

from treewarden.protocols import (
    BadArguments,
    CredentialsError,
    FinishReason,
    ProviderError,
    ProviderInterrupted,
    Text,
    TextDelta,
    Usage,
    UsageDelta,
)

from ._streams import (
    ANTHROPIC,
    CHAT,
    DONE,
    USAGE,
    chunk,
    decoded,
    ended,
    fed,
    fragment,
    sse,
    started,
    text_block,
    tool_block,
    usage_only,
)

TRUTH = Usage(input=12, output=7)
ZERO = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}


def test_E98_usage_after_the_finish_reason_is_counted_once() -> None:
    reply = decoded(CHAT, chunk("Hi"), chunk(finish="stop"), usage_only(USAGE), DONE)
    assert reply.usage == TRUTH


def test_E98_usage_of_zero_in_every_chunk_gives_way_to_the_true_one() -> None:
    chunks = [chunk("H", usage=ZERO), chunk("i", usage=ZERO), chunk(finish="stop", usage=USAGE)]
    assert decoded(CHAT, *chunks, DONE).usage == TRUTH


def test_E98_usage_on_the_finish_chunk_and_again_after_it_is_counted_once() -> None:
    decoder = CHAT.stream_decoder()
    stream = sse(chunk("Hi"), chunk(finish="stop", usage=USAGE), usage_only(USAGE), DONE)
    assert decoder.feed(stream) == [TextDelta("Hi"), UsageDelta(TRUTH), UsageDelta(TRUTH)]
    assert decoder.finish().usage == TRUTH


def test_E98_no_usage_at_all_is_none_and_never_zero() -> None:
    assert decoded(CHAT, chunk("Hi"), chunk(finish="stop"), DONE).usage is None
    assert decoded(CHAT, chunk("Hi", usage=ZERO), chunk(finish="stop", usage=ZERO)).usage is None


def test_E98_usage_that_is_null_until_the_end_is_read_at_the_end() -> None:
    chunks = [chunk("Hi", usage=None), chunk(finish="stop", usage=None)]
    assert decoded(CHAT, *chunks, usage_only(USAGE)).usage == TRUTH


@pytest.mark.parametrize("place", ["choice", "x_groq"])
def test_E98_usage_is_found_wherever_a_server_puts_it(place: str) -> None:
    last = chunk(finish="stop")
    if place == "choice":
        last["choices"][0]["usage"] = USAGE
    else:
        last["x_groq"] = {"usage": USAGE}
    assert decoded(CHAT, chunk("Hi"), last, DONE).usage == TRUTH


def test_E98_zeros_after_the_true_usage_do_not_replace_it() -> None:
    chunks = [chunk("Hi"), chunk(finish="stop", usage=USAGE), usage_only(ZERO)]
    assert decoded(CHAT, *chunks).usage == TRUTH


def test_E98_usage_that_more_output_followed_is_a_lower_bound_and_not_the_usage() -> None:
    early = {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}
    decoder = fed(CHAT, chunk("H", usage=early), chunk("i"), chunk(finish="stop"), DONE)
    assert decoder.finish().usage is None
    assert decoder.usage == Usage(input=12, output=1)


def test_E98_an_anthropic_answer_that_reports_no_output_at_its_end_has_no_usage() -> None:
    end = [{"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, ended()[1]]
    decoder = fed(ANTHROPIC, started(), *text_block(0, "Hi"), *end)
    assert decoder.finish().usage is None
    assert decoder.usage == Usage(input=12, output=1)


@pytest.mark.parametrize("codec", [ANTHROPIC, CHAT], ids=lambda codec: codec.name)
def test_E99_text_split_inside_a_character_is_whole_again(codec: Any) -> None:
    text = "日本🎉"
    events = {
        "anthropic": [started(), *text_block(0, text), *ended()],
        "openai_chat": [chunk(text), chunk(finish="stop")],
    }[codec.name]
    stream = sse(*events)
    assert text.encode() in stream
    for pieces in ([stream], [stream[i : i + 1] for i in range(len(stream))]):
        decoder = codec.stream_decoder()
        for piece in pieces:
            decoder.feed(piece)
        assert decoder.finish().message.text == text
        assert (decoder.output_deltas, decoder.output_bytes) == (1, len(text.encode()))


def test_E100_overloaded_before_any_output_is_an_error_that_may_be_tried_again() -> None:
    with pytest.raises(ProviderError) as caught:
        fed(ANTHROPIC, started(), OVERLOADED)
    assert type(caught.value) is ProviderError
    assert (caught.value.status, caught.value.kind) == (529, "overloaded_error")
    assert caught.value.usage == Usage(input=12, output=1)


def test_E100_overloaded_after_some_text_is_an_interruption_that_keeps_the_text() -> None:
    decoder = fed(ANTHROPIC, started(), *text_block(0, *["word "] * 40))
    with pytest.raises(ProviderInterrupted, match="529 overloaded_error: Overloaded") as caught:
        decoder.feed(sse(OVERLOADED))
    assert decoder.partial().text == "word " * 40
    assert decoder.output_deltas == 40
    assert caught.value.usage == decoder.usage == Usage(input=12, output=1)


def test_E100_half_a_tool_call_is_kept_as_one_that_must_not_run() -> None:
    half = tool_block(0, '{"path":"/tm')[:-1]
    decoder = fed(ANTHROPIC, started(), *half)
    with pytest.raises(ProviderInterrupted):
        decoder.feed(sse(OVERLOADED))
    (call,) = decoder.partial().tool_calls
    assert (call.raw_arguments, call.bad_arguments) == ('{"path":"/tm', BadArguments.CUT_OFF)


def test_E100_a_call_that_has_only_begun_is_output_already() -> None:
    with pytest.raises(ProviderInterrupted):
        fed(ANTHROPIC, started(), *tool_block(0)[:1], OVERLOADED)
    with pytest.raises(ProviderInterrupted):
        fed(CHAT, chunk(calls=[fragment(0, "a", "f")]), {"error": {"message": "no"}})


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        ({"code": 502, "message": "no"}, 502, None),
        ({"code": "429", "message": "no"}, 429, None),
        ({"type": "server_error", "message": "no"}, 500, "server_error"),
        (
            {"code": "rate_limit_exceeded", "type": "tokens", "message": "no"},
            429,
            "rate_limit_exceeded",
        ),
        ({"type": "Invented", "message": "no"}, 200, "Invented"),
        ("no", 200, None),
    ],
)
def test_E100_an_error_chunk_is_an_error_and_not_an_empty_success(
    error: Any, status: int, kind: str | None
) -> None:
    with pytest.raises(ProviderError) as caught:
        fed(CHAT, chunk(""), chunk(finish="error", error=error), DONE)
    assert type(caught.value) is ProviderError
    assert caught.value.message == "no"
    assert (caught.value.status, caught.value.kind) == (status, kind)


def test_E100_an_error_event_is_an_error_even_if_it_is_no_json() -> None:
    decoder = fed(CHAT, chunk("Hi"))
    with pytest.raises(ProviderInterrupted, match="upstream went away"):
        decoder.feed(b"event: error\ndata: upstream went away\n\n")
    assert decoder.partial().text == "Hi"


def test_E100_an_error_event_may_bring_usage() -> None:
    decoder = fed(CHAT, chunk("Hi"))
    with pytest.raises(ProviderInterrupted) as caught:
        decoder.feed(b"event: error\n" + sse({"error": {"message": "no"}, "usage": USAGE}))
    assert caught.value.usage == TRUTH


@pytest.mark.parametrize("finish", ["error", "network_error", "insufficient_system_resource"])
def test_E100_a_finish_reason_that_means_a_broken_answer_is_an_interruption(finish: str) -> None:
    decoder = fed(CHAT, chunk("Hi"), chunk(finish=finish), usage_only(USAGE), DONE)
    with pytest.raises(ProviderInterrupted, match=finish) as caught:
        decoder.finish()
    assert caught.value.usage == TRUTH


def test_E100_a_refused_key_inside_a_stream_is_a_matter_of_credentials() -> None:
    error = {"type": "error", "error": {"type": "authentication_error", "message": "no"}}
    with pytest.raises(CredentialsError):
        fed(ANTHROPIC, error)


@pytest.mark.parametrize("codec", [ANTHROPIC, CHAT], ids=lambda codec: codec.name)
def test_E100_a_stream_that_just_ends_is_an_interruption(codec: Any) -> None:
    first = {"anthropic": [started(), *text_block(0, "Hi")], "openai_chat": [chunk("Hi")]}
    decoder = fed(codec, *first[codec.name])
    with pytest.raises(ProviderInterrupted):
        decoder.finish()
    assert decoder.partial().parts == (Text("Hi"),)
    with pytest.raises(ProviderInterrupted):
        codec.stream_decoder().finish()


def test_E101_argument_fragments_go_to_the_call_with_their_index() -> None:
    a, b = decoded(
        CHAT,
        chunk(calls=[fragment(0, "A", "f", "")]),
        chunk(calls=[fragment(1, "B", "f", "")]),
        chunk(calls=[fragment(0, arguments='{"target":"A_ONLY"}')]),
        chunk(calls=[fragment(1, arguments='{"target":"B_ONLY"}')]),
        chunk(finish="tool_calls"),
    ).message.tool_calls
    assert (a.id, a.arguments) == ("A", {"target": "A_ONLY"})
    assert (b.id, b.arguments) == ("B", {"target": "B_ONLY"})


def test_E101_anthropic_fragments_go_to_the_block_with_their_index() -> None:
    starts = [tool_block(i, id=id)[0] for i, id in enumerate("AB")]
    fragments = [tool_block(i, f'{{"target":{i}}}')[1] for i in (1, 0)]
    reply = decoded(ANTHROPIC, started(), *starts, *fragments, *ended("tool_use"))
    assert [(c.id, c.arguments) for c in reply.message.tool_calls] == [
        ("A", {"target": 0}),
        ("B", {"target": 1}),
    ]


@pytest.mark.parametrize("arguments", ['{"path":"/tmp/x","mode":"del', '{"path":"/"}', ""])
def test_E102_no_call_of_a_reply_that_the_limit_ended_can_be_run(arguments: str) -> None:
    whole = '{"path":"/home"}'
    by_chat = decoded(
        CHAT,
        chunk(calls=[fragment(0, "A", "f", whole), fragment(1, "B", "f", arguments)]),
        chunk(finish="length"),
    )
    by_anthropic = decoded(
        ANTHROPIC,
        started(),
        *tool_block(0, whole, id="A"),
        *tool_block(1, arguments, id="B"),
        *ended("max_tokens"),
    )
    for reply in (by_chat, by_anthropic):
        assert reply.finish_reason is FinishReason.LENGTH
        assert [c.raw_arguments for c in reply.message.tool_calls] == [whole, arguments]
        for call in reply.message.tool_calls:
            assert (call.arguments, call.bad_arguments) == ({}, BadArguments.CUT_OFF)


def test_E102_a_call_that_was_cut_off_goes_back_as_the_model_wrote_it_if_it_is_whole() -> None:
    reply = decoded(
        ANTHROPIC,
        started(),
        *tool_block(0, '{"path":"/"}', id="A"),
        *tool_block(1, '{"pa', id="B"),
        *ended("max_tokens"),
    )
    assert b'"input":{"path":"/"}' in ANTHROPIC.encode_message(reply.message)
    assert b'"input":{}' in ANTHROPIC.encode_message(reply.message)
    assert rb'"arguments":"{\"path\":\"/\"}"' in CHAT.encode_message(reply.message)
    assert b'"arguments":"{}"' in CHAT.encode_message(reply.message)
