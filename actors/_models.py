"""What the agent loop asks of a model, and the models that are reached over HTTP.

A ``Model`` is a definition; ``open`` makes a ``ModelSession`` for one agent invocation, which knows
the fixed part of its requests (system text, tools, settings) and measures messages as they will be
sent. Answers are pushed into a ``Sink`` by the call itself, so nothing here is a generator and no
stream outlives its call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import attrs

from treewarden.ledgers import ModelCard, Price, PriceBook, UnknownModel
from treewarden.protocols import (
    CredentialsError,
    JSONObject,
    Message,
    ModelRequest,
    Reply,
    ToolSpec,
    UsageError,
)

from ._definitions import positive_or_none

if TYPE_CHECKING:
    from treewarden.ledgers import Progress
    from treewarden.protocols import Codec

    from ._transport import Transport

DEFAULT_OUTPUT_TOKENS = 8_192
"""What is asked for where nothing is declared. A limit is always on the wire."""


class Sink(Protocol):
    """Where a call reports while it goes on. All methods are synchronous and cheap."""

    progress: Progress

    def sent(self) -> None:
        """The request has left: from here on it may cost money."""
        ...

    def alive(self) -> None:
        """Something came from the provider: text and thoughts, but also any byte of an answer."""
        ...

    def text(self, text: str) -> None: ...

    def thought(self, text: str) -> None: ...


@attrs.frozen(kw_only=True)
class Brief:
    """What one agent invocation's requests have in common."""

    agent_path: str
    system: str
    tools: tuple[ToolSpec, ...]
    # The agent's own output limit, or None.
    output_limit: int | None
    # The tree's HTTP transport, made at its first use.
    transport: Callable[[], Transport]


class ModelSession(Protocol):
    """A model as one agent invocation uses it."""

    # The output limit that goes on the wire where the wallet allows it.
    output_limit: int
    # The wire carries that number whatever is asked: a hold cannot be made smaller.
    is_limit_pinned: bool
    # Bytes of the request without its messages.
    head_bytes: int
    can_write_cache: bool
    # … for an hour, which costs more than the usual five minutes.
    can_write_1h: bool
    reasons_invisibly: bool

    def measure(self, message: Message) -> int:
        """The size of a message as it will be sent, in bytes. Called once per message, in order."""
        ...

    async def call(self, messages: Sequence[Message], output_limit: int, sink: Sink) -> Reply:
        """Send the conversation and return the whole answer.

        Raises:
            ProviderError: With what had arrived kept in ``sink.progress``.
        """
        ...


class Model(Protocol):
    """A model that an agent can be defined with."""

    @property
    def id(self) -> str:
        """``provider/name``."""
        ...

    @property
    def provider(self) -> str: ...

    @property
    def name(self) -> str:
        """The provider's own id of the model."""
        ...

    @property
    def card(self) -> ModelCard:
        """Window, limits and price. Raises UnknownModel where the price is not known."""
        ...

    def price_of(self, answered: str) -> Price | None:
        """The price of another model of the same provider that took part in an answer."""
        ...

    def require_ready(self) -> None:
        """Raise before anything is spent what would make every call fail: no key, no endpoint."""
        ...

    def open(self, brief: Brief) -> ModelSession: ...


@attrs.frozen
class Auto:
    """Take the parent's model; at the root, the one model that the environment names."""


def auto() -> Auto:
    """A model to be found at the start of a run.

    A subagent takes its parent's model. A root takes ``CAVE_MODEL``, else the default model of the
    one provider whose key is set (``ANTHROPIC_API_KEY``, ``OPENAI_API_KEY``). It never chooses
    between models by looking at the task.
    """
    return Auto()


# The model of `auto()` by the key that is set.
_AUTO_MODELS = {
    "ANTHROPIC_API_KEY": "anthropic/claude-haiku-4-5",
    "OPENAI_API_KEY": "openai/gpt-5.4-mini",
}


def resolve_auto(environment: Mapping[str, str] | None = None) -> HttpModel:
    """The model that the environment names.

    Raises:
        UsageError: It names none, or several.
    """
    variables = os.environ if environment is None else environment
    named = variables.get("CAVE_MODEL")
    if named:
        return model(named)
    found = [(key, id_) for key, id_ in _AUTO_MODELS.items() if variables.get(key)]
    if not found:
        raise UsageError(
            "auto() found no model: set CAVE_MODEL to provider/name, or one of "
            f"{', '.join(_AUTO_MODELS)}.",
            code="cave_model_unavailable",
        )
    if len(found) > 1:
        keys = " and ".join(key for key, _ in found)
        raise UsageError(
            f"auto() found {keys}, and does not choose. Set CAVE_MODEL to provider/name.",
            code="cave_model_ambiguous",
        )
    return model(found[0][1])


@cache
def price_book() -> PriceBook:
    """The price snapshot that came with the package."""
    files = resources.files("treewarden.ledgers")
    digest = files.joinpath("prices.sha256").read_text().split()[0]
    return PriceBook.from_json(files.joinpath("prices.json").read_bytes(), digest)


@attrs.frozen(kw_only=True)
class Provider:
    """Where a provider is, how it is spoken to, and which variable holds its key."""

    base_url: str | None
    key_variable: str | None
    wire: str


# Providers with a known address. Any other speaks the compatible wire and needs a base_url.
_PROVIDERS = {
    "anthropic": Provider(
        base_url="https://api.anthropic.com", key_variable="ANTHROPIC_API_KEY", wire="anthropic"
    ),
    "openai": Provider(
        base_url="https://api.openai.com/v1", key_variable="OPENAI_API_KEY", wire="openai"
    ),
}
_COMPATIBLE = Provider(base_url=None, key_variable=None, wire="compatible")

# Where providers of the compatible wire want a model's thoughts back with the next request. Others
# get none: an unknown field may be refused.
_THINKING_FIELDS = {
    "deepseek": "reasoning_content",
    "zai": "reasoning_content",
    "cerebras": "reasoning",
    "groq": "reasoning",
    "ollama": "reasoning",
    "openrouter": "reasoning",
}

# Settings that mean the output limit, whatever a provider calls it.
_LIMIT_SETTINGS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def model(
    id: str,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    price: Price | None = None,
    context_window: int | None = None,
    settings: Mapping[str, Any] | None = None,
    extra_body: Mapping[str, Any] | None = None,
    fallbacks: Any = None,
) -> HttpModel:
    """A model behind an HTTP API.

    Args:
        id: ``provider/name``. ``anthropic/…`` speaks Anthropic Messages; everything else speaks
            OpenAI Chat Completions and what is compatible with it.
        base_url: Where the API is; needed for providers without a known address.
        api_key: The key. None: from the provider's environment variable, where there is one.
        price: Pins the price, for models that the snapshot does not know.
        context_window: Tokens; pins the window.
        settings: The provider's own request fields. An output limit among them, whatever it is
            called, is the limit that is sent.
        extra_body: Fields that are put into the request last, and win.

    Raises:
        UsageError: The id has no provider, or an option cannot be used.
    """
    provider, slash, name = id.partition("/")
    if not (provider and slash and name):
        raise UsageError(
            f"model {id!r} has no provider. Write provider/name, for example "
            '"anthropic/claude-haiku-4-5".',
            code="cave_model_unavailable",
        )
    if fallbacks is not None:
        raise UsageError(
            "fallbacks= is not available yet: a call goes to one model. Leave it out.",
            code="cave_option_unavailable",
        )
    known = _PROVIDERS.get(provider, _COMPATIBLE)
    address = base_url or known.base_url
    if address is None:
        raise UsageError(
            f"model {id!r}: the address of {provider} is not known. Give base_url=, the URL that "
            "/chat/completions comes after.",
            code="cave_model_unavailable",
        )
    _check_address(id, address)
    limit, rest = _limit_of(settings or {})
    made = HttpModel(
        id=id,
        provider=provider,
        name=name,
        base_url=address.rstrip("/"),
        wire="compatible" if base_url and known.wire == "openai" else known.wire,
        key=api_key,
        key_variable=known.key_variable,
        is_own_server=base_url is not None,
        pinned_price=_checked_price(id, price),
        pinned_window=positive_or_none(context_window, f"model {id!r}: context_window"),
        declared_limit=limit,
        settings=rest,
        extra_body=dict(extra_body or {}),
    )
    made.check_settings()
    return made


def _checked_price(id: str, price: Any) -> Price | None:
    if price is not None and not isinstance(price, Price):
        raise UsageError(
            f"model {id!r}: price is {price!r}. Write "
            'tw.Price(input="…", output="…"), in USD per million tokens.'
        )
    return price


def _check_address(id: str, address: str) -> None:
    try:
        parts = urlsplit(address)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # looked at, because it raises where it is no port
    except ValueError:
        is_usable = False
    if not is_usable:
        raise UsageError(
            f"model {id!r}: base_url is {address!r}. Give a URL that starts with http:// or "
            "https://, with a host after it.",
            code="cave_model_unavailable",
        )


def _limit_of(settings: Mapping[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """Take the output limit out of the settings: it is sent under the provider's own name."""
    rest = {key: value for key, value in settings.items() if key not in _LIMIT_SETTINGS}
    limits = [settings[name] for name in _LIMIT_SETTINGS if settings.get(name) is not None]
    for limit in limits:
        if type(limit) is not int or limit < 1:
            raise UsageError(f"an output limit is a positive whole number, not {limit!r}")
    return (min(limits) if limits else None), rest


def as_model(value: Any) -> Any:
    """What an agent's ``model=`` means: a model, its id, or None for ``auto()``.

    Raises:
        UsageError: It is none of these.
    """
    if value is None:
        return Auto()
    if isinstance(value, str):
        return model(value)
    if not isinstance(value, Auto) and not callable(getattr(value, "open", None)):
        raise UsageError(
            f'model is {value!r}. Give tw.model("provider/name"), that text itself, or tw.auto().',
            code="cave_model_unavailable",
        )
    return value


@attrs.frozen(kw_only=True, eq=False)
class HttpModel:
    """A model behind an HTTP API. Made with ``model``. Its key is never shown."""

    id: str
    provider: str
    name: str
    base_url: str
    wire: str
    key: str | None = attrs.field(repr=False)
    key_variable: str | None
    is_own_server: bool
    pinned_price: Price | None
    pinned_window: int | None
    declared_limit: int | None
    settings: JSONObject
    extra_body: JSONObject

    @property
    def card(self) -> ModelCard:
        """Window, limits and price of the model, with what was pinned."""
        try:
            card = price_book().lookup(self.id)
        except UnknownModel:
            if self.pinned_price is None:
                raise
            card = ModelCard(id=self.id, price=None)
        price = self.pinned_price or card.price_with(self._all_settings)
        return attrs.evolve(
            card,
            price=price,
            context_window=self.pinned_window or card.context_window,
            source="pinned" if self.pinned_price else card.source,
        )

    def price_of(self, answered: str) -> Price | None:
        """The price of a model that answered, under the settings of this one's requests.

        A pinned price is that of this model under each of its names: who asks for
        ``claude-haiku-4-5`` is answered by ``claude-haiku-4-5-20251001``.
        """
        other = _known(f"{self.provider}/{answered}")
        if self.pinned_price is not None:
            own = _known(self.id)
            is_alias = own is not None and other is not None and own.id == other.id
            if is_alias or answered == self.name:
                return self.pinned_price
        return None if other is None else other.price_with(self._all_settings)

    def require_ready(self) -> None:
        """Say now that the key cannot be used, not after the first call was paid for.

        Raises:
            CredentialsError: There is none and the provider's own address needs one, or no header
                can carry it.
        """
        key = self.api_key
        if not key and not self.is_own_server:
            raise CredentialsError(
                f"no key for {self.id}: set {self.key_variable} or pass api_key=",
                provider=self.provider,
                was_sent=False,
            )
        # An HTTP library would say so too, and quote the key.
        if not all("!" <= letter <= "~" for letter in key):
            where = f"{self.key_variable} or " if self.key_variable else ""
            raise CredentialsError(
                f"the key for {self.id} holds a space, a line end or a letter that no header can "
                f"carry. Look at {where}api_key=; a key read from a file often ends with a line "
                "end.",
                provider=self.provider,
                was_sent=False,
            )

    def check_settings(self) -> None:
        """Say now what would make every request fail, or leave it without an output limit.

        Raises:
            UsageError: With what is wrong.
        """
        codec, request = self._codec(), self.request(system="", tools=(), output_limit=1)
        if codec.output_limit_on_the_wire(codec.encode_head(request)) is None:
            raise UsageError(
                f"model {self.id!r}: extra_body takes the output limit off the request, and a call "
                "without one cannot be held to a budget. Give it a positive whole number."
            )

    def request(
        self, *, system: str, tools: tuple[ToolSpec, ...], output_limit: int
    ) -> ModelRequest:
        """A request to this model, without its conversation."""
        return ModelRequest(
            model=self.name,
            system=system,
            messages=(),
            tools=tools,
            output_limit=output_limit,
            settings=self.settings,
            extra_body=self.extra_body,
        )

    @property
    def _all_settings(self) -> JSONObject:
        return {**self.settings, **self.extra_body}

    @property
    def api_key(self) -> str:
        if self.key is not None:
            return self.key
        return os.environ.get(self.key_variable, "") if self.key_variable else ""

    def open(self, brief: Brief) -> HttpSession:
        """Encode what the requests of one invocation have in common."""
        return HttpSession(self, brief, self._codec())

    def _codec(self) -> Codec:
        from treewarden.protocols import AnthropicCodec, OpenAIChatCodec

        match self.wire:
            case "anthropic":
                return AnthropicCodec()
            case "openai":
                return OpenAIChatCodec()
            case _:
                field = _THINKING_FIELDS.get(self.provider)
                return OpenAIChatCodec(limit_field="max_tokens", thinking_field=field)


class HttpSession:
    """One agent invocation's use of an HTTP model: everything fixed is encoded once."""

    def __init__(self, model: HttpModel, brief: Brief, codec: Codec) -> None:
        self._model, self._brief, self._codec = model, brief, codec
        self._card = _card_or_blank(model)
        # Encoded messages by identity, in the order they were measured.
        self._encoded: list[tuple[Message, bytes]] = []
        wanted = self._wanted_limit()
        head = self._head(wanted)
        on_the_wire = codec.output_limit_on_the_wire(head)
        assert on_the_wire is not None, "check_settings lets no model through that sends no limit"
        self.output_limit = on_the_wire
        # Settings may fix the limit, or multiply it by asking for several answers. Then every
        # request has the head that was measured here.
        self._fixed_head = head if self._is_deaf(wanted) else None
        self.is_limit_pinned = self._fixed_head is not None
        self.head_bytes = len(head)
        self.can_write_1h = codec.can_write_1h(head)
        self.can_write_cache = codec.can_write_cache(head) or self._card.caches_automatically
        thinks = any("thinking" in part for part in (model.settings, model.extra_body))
        self.reasons_invisibly = self._card.reasons_invisibly or thinks

    def measure(self, message: Message) -> int:
        encoded = self._codec.encode_message(message)
        self._encoded.append((message, encoded))
        return len(encoded)

    async def call(self, messages: Sequence[Message], output_limit: int, sink: Sink) -> Reply:
        """Send the conversation; the answer streams into ``sink``."""
        parts = [self._bytes_of(at, message) for at, message in enumerate(messages)]
        body = self._codec.join(self._fixed_head or self._head(output_limit), parts)
        return await self._brief.transport().call(
            self._codec,
            url=self._model.base_url + self._codec.path(),
            api_key=self._model.api_key,
            body=body,
            provider=self._model.provider,
            sink=sink,
        )

    def _bytes_of(self, at: int, message: Message) -> bytes:
        if at < len(self._encoded) and self._encoded[at][0] is message:
            return self._encoded[at][1]
        return self._codec.encode_message(message)

    def _wanted_limit(self) -> int:
        limits = (
            self._brief.output_limit,
            self._model.declared_limit,
            self._card.max_output,
        )
        declared = self._brief.output_limit or self._model.declared_limit
        start = declared or DEFAULT_OUTPUT_TOKENS
        return min([start, *(limit for limit in limits if limit is not None)])

    def _is_deaf(self, wanted: int) -> bool:
        """Say whether the wire carries something else than what it is told."""
        other = wanted + 1
        return self._codec.output_limit_on_the_wire(self._head(other)) != other

    def _head(self, output_limit: int) -> bytes:
        brief = self._brief
        return self._codec.encode_head(
            self._model.request(system=brief.system, tools=brief.tools, output_limit=output_limit)
        )


def _known(id: str) -> ModelCard | None:
    try:
        return price_book().lookup(id)
    except UnknownModel:
        return None


def _card_or_blank(model: HttpModel) -> ModelCard:
    try:
        return model.card
    except UnknownModel:
        # Allowed where money is not what is counted; then the bytes are the only ceiling.
        return ModelCard(id=model.id, price=None, context_window=model.pinned_window)
