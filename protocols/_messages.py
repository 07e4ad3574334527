"""What a conversation with a model is made of, whichever provider speaks.

Two rules keep this file simple: everything here is an immutable value, and nothing here knows a
provider. A provider's peculiar content that must be sent back word for word (thinking
signatures, blocks of server-side tools) travels as a part that says whose it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from enum import Enum
from operator import attrgetter
from typing import Literal, TypeAlias

import attrs

JSON: TypeAlias = (
    "bool | int | float | str | list[JSON] | tuple[JSON, ...] | Mapping[str, JSON] | None"
)
"""A value that JSON can carry."""

JSONObject: TypeAlias = Mapping[str, "JSON"]

Role: TypeAlias = Literal["user", "assistant", "tool"]


@attrs.frozen
class Text:
    """Text that the model wrote or is to read."""

    text: str


@attrs.frozen
class Thinking:
    """What a model thought aloud, to be replayed unchanged to the provider that wrote it.

    ``signature`` is the provider's proof that the text is untouched. ``redacted`` holds the
    sealed form: then ``text`` is empty and only the provider can read it.
    """

    text: str = ""
    signature: str | None = None
    redacted: str | None = None


class BadArguments(Enum):
    """Why the arguments of a tool call cannot be used. Such a call is never run."""

    CUT_OFF = "cut_off"  # the output limit ended the reply inside or right after this call
    NOT_JSON = "not_json"
    NOT_AN_OBJECT = "not_an_object"


@attrs.frozen
class ToolCall:
    """One call that the model asks for.

    ``raw_arguments`` is the text as received; ``arguments`` is its value, empty when
    ``bad_arguments`` says why there is none.
    """

    id: str
    name: str
    arguments: JSONObject
    raw_arguments: str = ""
    bad_arguments: BadArguments | None = None


@attrs.frozen
class ToolResult:
    """The one answer that every tool call gets."""

    call_id: str
    name: str
    content: str
    is_error: bool = False


@attrs.frozen
class Opaque:
    """A provider's own block, kept as its JSON so that it can be sent back word for word."""

    provider: str
    value: JSONObject


Part: TypeAlias = Text | Thinking | ToolCall | ToolResult | Opaque


@attrs.frozen
class Message:
    """One entry of a conversation.

    A ``tool`` message holds the results of one reply's calls, in the order of the calls.
    """

    role: Role
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """All text parts, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple([part for part in self.parts if isinstance(part, ToolCall)])


def user(text: str) -> Message:
    """A user message of one text."""
    return Message("user", (Text(text),))


@attrs.frozen(kw_only=True)
class Usage:
    """Tokens of one answer in four disjoint classes: fresh input, cache read, cache write, output.

    ``reasoning`` is inside ``output`` and ``cache_write_1h`` inside ``cache_write``; neither is
    added a second time. ``extra`` holds what the provider reports beside its top-level numbers:
    inner answers of another model or of a server-side compaction, each priced by its own
    ``model`` (None: the model that answered).
    """

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0
    cache_write_1h: int = 0
    model: str | None = None
    extra: tuple[Usage, ...] = ()
    # What the provider itself says the answer cost in USD. It wins over any table.
    reported_cost_usd: Decimal | None = None
    # The numbers are a sum over several inner requests: a price tier chosen by their size is an
    # upper bound, not a measurement.
    is_aggregate: bool = False
    # Server-side tool requests by name (``web_search_requests``), billed beside the tokens.
    server_tool_requests: tuple[tuple[str, int], ...] = ()

    @property
    def context_tokens(self) -> int:
        """What the model read: fresh, cached and written input together."""
        return self.input + self.cache_read + self.cache_write

    @property
    def total(self) -> int:
        """All tokens, ``extra`` included."""
        own = self.input + self.cache_read + self.cache_write + self.output
        return own + sum(inner.total for inner in self.extra) if self.extra else own

    def problem(self) -> str | None:
        """Say what is wrong with these numbers, or None when they can be used."""
        for name, count in zip(_COUNTS, _counts(self), strict=True):
            if type(count) is not int or not 0 <= count < 2**53:
                return f"{name} is {count!r}, not a token count"
        if self.reasoning > self.output:
            return f"reasoning {self.reasoning} is above output {self.output}"
        if self.cache_write_1h > self.cache_write:
            return f"cache_write_1h {self.cache_write_1h} is above cache_write {self.cache_write}"
        if not self.extra:
            return None
        return next((p for inner in self.extra if (p := inner.problem())), None)


_COUNTS = ("input", "output", "cache_read", "cache_write", "reasoning", "cache_write_1h")
_counts = attrgetter(*_COUNTS)


class FinishReason(Enum):
    """Why a model stopped writing."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    REFUSAL = "refusal"  # the provider's or the model's safety rules ended the answer
    PAUSE = "pause"  # the provider asks to be called again with the answer so far
    OTHER = "other"


@attrs.frozen(kw_only=True)
class ToolSpec:
    """A tool as the model sees it. ``parameters`` is a JSON schema of type object."""

    name: str
    description: str
    parameters: JSONObject


@attrs.frozen(kw_only=True)
class ModelRequest:
    """One request to a model, before a codec turns it into bytes.

    ``output_limit`` is always sent. ``settings`` are the provider's own request fields
    (temperature, thinking, …), merged into the body; ``extra_body`` is merged last and wins.
    """

    model: str
    system: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    output_limit: int
    settings: JSONObject = attrs.field(factory=dict[str, JSON])
    extra_body: JSONObject = attrs.field(factory=dict[str, JSON])
    stream: bool = True


@attrs.frozen(kw_only=True)
class Reply:
    """A finished answer. ``usage`` is None when the provider reported none that can be read."""

    message: Message
    finish_reason: FinishReason
    usage: Usage | None
    model: str
    response_id: str | None = None
    # What the provider itself called the finish reason.
    raw_finish_reason: str | None = None


@attrs.frozen
class TextDelta:
    text: str


@attrs.frozen
class ThinkingDelta:
    text: str


@attrs.frozen
class ToolCallDelta:
    """More of the arguments of the call ``index`` (its place in the reply)."""

    index: int
    name: str
    arguments: str


@attrs.frozen
class UsageDelta:
    """The usage reported so far; each one replaces the one before."""

    usage: Usage


Delta: TypeAlias = TextDelta | ThinkingDelta | ToolCallDelta | UsageDelta
