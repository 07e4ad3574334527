"""What users define: tools, subagents and agents. Immutable, and checked when they are made.

Nothing here runs anything. Every mistake that can be seen in a definition is an error at the line
that makes it, with the way out in its text.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, overload

import attrs

from treewarden.ledgers import Money, usd
from treewarden.protocols import JSONObject, ToolSpec, UsageError

from ._oversight import OVERSIGHT
from ._schemas import (
    Shape,
    UnknownHint,
    hint_of,
    shape_of_parameters,
    shape_of_schema,
    shape_of_type,
    without_partials,
)

if TYPE_CHECKING:
    from ._models import Auto, Model

Effect: TypeAlias = Literal["read", "write", "idempotent", "external"]
EFFECTS = ("read", "write", "idempotent", "external")

BackgroundPolicy: TypeAlias = Literal["wait", "cancel", "forbid"]
BACKGROUND_POLICIES = ("wait", "cancel", "forbid")

SiblingPolicy: TypeAlias = Literal["collect", "cancel_siblings"]
SIBLING_POLICIES = ("collect", "cancel_siblings")

DepsT = TypeVar("DepsT")

_AGENT_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,95}")
_TOOL_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,127}")
_RESERVED_PREFIX = "cave_"

DEFAULT_TOOL_SECONDS = 30.0
DEFAULT_RESULT_BYTES = 32_768
DEFAULT_INPUT_CHARS = 32_768
MAX_DEPTH = 8


class Context(Generic[DepsT]):
    """What a tool may ask about the run it serves. Give a tool a ``ctx`` parameter to get one.

    Attributes:
        deps: What the caller of ``run`` passed as ``deps=``.
        path: The tool call's place in the tree, ``root/support#1/tool:search#2``.
    """

    __slots__ = ("_deadline", "_remaining", "deps", "path")

    def __init__(
        self,
        deps: DepsT,
        path: str,
        remaining: Callable[[], Decimal | None],
        deadline: float | None,
    ) -> None:
        self.deps = deps
        self.path = path
        self._remaining = remaining
        self._deadline = deadline

    @property
    def remaining(self) -> Decimal | None:
        """What the wallet this tool draws on has left, in USD or tokens. None: no ceiling."""
        return self._remaining()

    @property
    def deadline(self) -> float | None:
        """The instant on the event loop's clock at which this call must be over, or None."""
        return self._deadline

    @property
    def log(self) -> Any:
        """A structlog logger bound to this call's path."""
        import structlog

        return structlog.get_logger("treewarden.tool").bind(path=self.path)


@attrs.frozen(kw_only=True, eq=False)
class Tool:
    """A tool that a model may call. Made with ``tool``; still callable as the plain function."""

    name: str
    description: str
    effect: Effect
    runs: Literal["host"]
    shape: Shape
    function: Callable[..., Any]
    # The parameter that takes the Context, or None.
    context_name: str | None
    # An async function runs in the tool's task, any other in a thread.
    is_async: bool
    timeout_seconds: float | None
    max_result_bytes: int
    # The same call with the same result is no loop.
    allow_repeat: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec(name=self.name, description=self.description, parameters=self.shape.schema)


@attrs.frozen(kw_only=True, eq=False)
class Subagent:
    """An agent offered to another one as a tool that takes a ``task``."""

    name: str
    description: str
    target: Agent | Callable[[], Agent]
    max_usd: Money | None
    min_usd: Money | None
    max_tokens: int | None
    min_tokens: int | None
    max_calls: int | None
    max_input_chars: int
    timeout_seconds: float | None
    # A call of it has its result when the subagent has started, and does not wait for its end.
    background: bool

    effect: typing.ClassVar[Effect] = "read"

    @property
    def agent(self) -> Agent:
        return self.target if isinstance(self.target, Agent) else self.target()

    @property
    def spec(self) -> ToolSpec:
        parameters = _BACKGROUND_PARAMETERS if self.background else _TASK_PARAMETERS
        return ToolSpec(name=self.name, description=self.description, parameters=parameters)


_TASK: JSONObject = {"type": "string", "description": "What to do, in full."}

_TASK_PARAMETERS: JSONObject = {
    "type": "object",
    "properties": {"task": _TASK},
    "required": ["task"],
    "additionalProperties": False,
}

_BACKGROUND_PARAMETERS: JSONObject = {
    "type": "object",
    "properties": {
        "task": _TASK,
        "resume": {
            "type": "string",
            "description": "The id of one that has ended, to go on with what was said in it.",
        },
    },
    "required": ["task"],
    "additionalProperties": False,
}


@attrs.frozen(kw_only=True, eq=False)
class Output:
    """What an agent's final answer must be. Made with ``output``."""

    shape: Shape | None
    max_tokens: int | None
    retries: int


@attrs.frozen(kw_only=True, eq=False)
class Agent:
    """An agent's definition. Made with ``agent``; run it with ``run``."""

    id: str
    instructions: str
    model: Model | Auto
    tools: tuple[Tool | Subagent, ...]
    output: Output | None
    sandbox: Literal["host", "fixture"]
    max_model_calls: int | None
    max_tool_calls: int | None
    # What its final answer means for background subagents that run or were not read.
    background: BackgroundPolicy
    # What a failed tool call means for the other calls of the same reply.
    on_sibling_failure: SiblingPolicy

    @property
    def has_background(self) -> bool:
        return any(isinstance(item, Subagent) and item.background for item in self.tools)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """What its model is offered: its tools, and the framework tools that go with them."""
        own = tuple(item.spec for item in self.tools)
        return (*own, *OVERSIGHT.values()) if self.has_background else own


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


_MISSING: Any = _Missing()

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@overload
def tool(
    function: Callable[..., Any],
    /,
    *,
    effect: Effect = ...,
    runs: Literal["host"] = ...,
    name: str | None = None,
    description: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    timeout_seconds: float | timedelta | None = DEFAULT_TOOL_SECONDS,
    max_result_bytes: int = DEFAULT_RESULT_BYTES,
    allow_repeat: bool = False,
) -> Tool: ...


@overload
def tool(
    *,
    effect: Effect = ...,
    runs: Literal["host"] = ...,
    name: str | None = None,
    description: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    timeout_seconds: float | timedelta | None = DEFAULT_TOOL_SECONDS,
    max_result_bytes: int = DEFAULT_RESULT_BYTES,
    allow_repeat: bool = False,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    effect: Effect = _MISSING,
    runs: Literal["host"] = _MISSING,
    name: str | None = None,
    description: str | None = None,
    parameters: Mapping[str, Any] | None = None,
    timeout_seconds: float | timedelta | None = DEFAULT_TOOL_SECONDS,
    max_result_bytes: int = DEFAULT_RESULT_BYTES,
    allow_repeat: bool = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool out of a function.

    The schema comes from the signature, the texts from the docstring (Google, NumPy or Sphinx
    form). A parameter annotated ``Context`` (or named ``ctx``) is given by the runtime and not
    shown to the model. An async function runs in the tool's task, a plain one in a thread.

    Args:
        effect: "read" (calls of one reply may run side by side), "write", "idempotent" or
            "external" (one after the other, in order).
        runs: "host": in this process, with everything this process may do.
        parameters: A JSON schema of type object instead of the signature.
        timeout_seconds: How long one call may take. None: as long as its run.
        max_result_bytes: A larger result is an error for the model, never cut silently.
        allow_repeat: The same call with the same result is no loop to ``Breakers``.

    Raises:
        UsageError: With what is wrong and how to write it.
    """
    if function is None:

        def decorate(decorated: Callable[..., Any]) -> Tool:
            return tool(
                decorated,
                effect=effect,
                runs=runs,
                name=name,
                description=description,
                parameters=parameters,
                timeout_seconds=timeout_seconds,
                max_result_bytes=max_result_bytes,
                allow_repeat=allow_repeat,
            )

        return decorate
    named = name or str(getattr(function, "__name__", ""))
    what = f"tool {named!r}"
    _check_tool_name(named)
    _check_effect(what, effect)
    _check_runs(what, runs)
    if type(allow_repeat) is not bool:
        raise UsageError(f"{what}: allow_repeat is {allow_repeat!r}. Use True or False.")
    summary, docs = _texts(function)
    context_name = _context_parameter(function)
    if parameters is None:
        shape = shape_of_parameters(function, skip=context_name, docs=docs, what=what)
    else:
        _check_parameters(what, parameters)
        shape = shape_of_schema(parameters, what=what)
    return Tool(
        name=named,
        description=description or summary,
        effect=effect,
        runs=runs,
        shape=shape,
        function=function,
        context_name=context_name,
        is_async=inspect.iscoroutinefunction(function),
        timeout_seconds=seconds(timeout_seconds, f"{what}: timeout_seconds"),
        max_result_bytes=positive(max_result_bytes, f"{what}: max_result_bytes"),
        allow_repeat=allow_repeat,
    )


def subagent(
    *,
    name: str,
    description: str,
    agent: Agent | Callable[[], Agent],
    max_usd: str | int | Decimal | None = None,
    min_usd: str | int | Decimal | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    max_calls: int | None = None,
    max_input_chars: int = DEFAULT_INPUT_CHARS,
    timeout_seconds: float | timedelta | None = None,
    background: bool = False,
) -> Subagent:
    """Offer ``agent`` to another agent as a tool named ``name``.

    With ``max_usd`` (or ``max_tokens`` in a token tree) each call carves a wallet of that much, or
    of what is left if that is at least ``min_usd``; unspent money goes back when it ends. Without
    a cap the subagent draws on its parent's wallet, whose ceiling holds just the same.

    Args:
        agent: The agent, or a function that gives it where it is defined later.
        max_calls: How often one parent run may call it, refused attempts included.
        max_input_chars: Longest task, in UTF-16 units.
        timeout_seconds: How long one call may take. None: as long as the parent's deadline.
        background: A call returns at once with the id of the subagent, which goes on beside its
            parent; the parent's model is offered ``cave_wait``, ``cave_status`` and
            ``cave_cancel`` for it (see docs/background.md).

    Raises:
        UsageError: With what is wrong and how to write it.
    """
    what = f"subagent {name!r}"
    _check_tool_name(name)
    if not isinstance(agent, Agent) and not callable(agent):
        raise UsageError(f"{what}: agent= is {agent!r}, not an agent. Make one with tw.agent(...).")
    if type(background) is not bool:
        raise UsageError(f"{what}: background is {background!r}. Use True or False.")
    most_usd, least_usd = _cap(what, "usd", max_usd, min_usd)
    if max_tokens is not None and max_usd is not None:
        raise UsageError(
            f"{what}: max_usd and max_tokens exclude each other; a tree has one denomination.",
            code="cave_budget_denomination_ambiguous",
        )
    most_tokens, least_tokens = _token_cap(what, max_tokens, min_tokens)
    return Subagent(
        name=name,
        description=description,
        target=agent,
        max_usd=most_usd,
        min_usd=least_usd,
        max_tokens=most_tokens,
        min_tokens=least_tokens,
        max_calls=positive_or_none(max_calls, f"{what}: max_calls"),
        max_input_chars=positive(max_input_chars, f"{what}: max_input_chars"),
        timeout_seconds=seconds(timeout_seconds, f"{what}: timeout_seconds"),
        background=background,
    )


def output(schema: Any = None, *, max_tokens: int | None = None, retries: int = 1) -> Output:
    """Say what an agent's final answer must be.

    Args:
        schema: An attrs class, dataclass, msgspec Struct, another type, or a JSON schema. None:
            any text.
        max_tokens: The output limit of each of the agent's calls.
        retries: How often an answer that does not fit is sent back to be repaired.
    """
    if type(retries) is not int or not 0 <= retries <= 10:
        raise UsageError(f"output: retries is {retries!r}, not a whole number from 0 to 10")
    return Output(
        shape=None if schema is None else _output_shape(schema),
        max_tokens=positive_or_none(max_tokens, "output: max_tokens"),
        retries=retries,
    )


def agent(
    *,
    id: str,
    instructions: str,
    model: Model | Auto | str | None = None,
    tools: Iterable[Tool | Subagent] = (),
    output: Any = None,
    sandbox: Literal["host", "fixture"] = "host",
    max_model_calls: int | None = None,
    max_tool_calls: int | None = None,
    background: BackgroundPolicy = "wait",
    on_sibling_failure: SiblingPolicy = "collect",
) -> Agent:
    """Define an agent.

    Args:
        id: At most 96 of a-z 0-9 _ -, starting with a letter or digit.
        model: ``model("provider/name")``, that text itself, or ``auto()`` (the default): a
            subagent then takes its parent's model.
        tools: Tools and subagents; their names must differ.
        output: What the final answer must be: a type, a JSON schema, or ``output(...)``.
        sandbox: "host": tools run as they say. "fixture": only tools with effect "read" run, here
            and below.
        max_model_calls: Calls of one invocation; default 64, or what the tree allows.
        max_tool_calls: The same for tool calls.
        background: What its final answer means while background subagents run or have results
            that nobody read. "wait": the run waits for them, hands the results over, and lets the
            model answer again. "cancel": they are cancelled, and the run is not ``complete``.
            "forbid": the answer is not accepted while one runs.
        on_sibling_failure: What a failed tool call means for the other calls of the same reply.
            "collect": nothing, each has its own result. "cancel_siblings": those that still run
            are stopped and waited for, and those that have not begun are not run.

    Raises:
        UsageError: With what is wrong and how to write it.
    """
    from ._models import as_model  # models know agents' settings; the import is one-way at start

    what = f"agent {id!r}"
    if not _AGENT_ID.fullmatch(id):
        raise UsageError(
            f"{what}: an id is at most 96 of a-z, 0-9, _ and -, and starts with a letter or digit"
        )
    if sandbox not in ("host", "fixture"):
        raise UsageError(
            f'{what}: sandbox is {sandbox!r}. Use "host" or "fixture"; confined workers '
            '("required") do not exist yet.'
        )
    _check_policy(what, "background", background, BACKGROUND_POLICIES)
    _check_policy(what, "on_sibling_failure", on_sibling_failure, SIBLING_POLICIES)
    offered = _checked_tools(what, tools)
    declared = output if isinstance(output, Output) or output is None else _output(output)
    return Agent(
        id=id,
        instructions=instructions,
        model=as_model(model),
        tools=offered,
        output=declared,
        sandbox=sandbox,
        max_model_calls=_calls(max_model_calls, "max_model_calls"),
        max_tool_calls=_calls(max_tool_calls, "max_tool_calls"),
        background=background,
        on_sibling_failure=on_sibling_failure,
    )


def _output(schema: Any) -> Output:
    return Output(shape=_output_shape(schema), max_tokens=None, retries=1)


def _output_shape(schema: Any) -> Shape:
    if isinstance(schema, Mapping):
        return shape_of_schema(typing.cast("Mapping[str, Any]", schema), what="output")
    return shape_of_type(schema, what="output")


def check_graph(root: Agent) -> list[Agent]:
    """Every agent below ``root``, itself first; refuses what can never run.

    Raises:
        UsageError: The graph has a cycle, is deeper than 8, or holds something else than agents.
    """
    found: dict[int, Agent] = {}
    _walk(root, (), found)
    return list(found.values())


def _walk(node: Any, above: tuple[Agent, ...], found: dict[int, Agent]) -> None:
    path = " -> ".join(a.id for a in above)
    if not isinstance(node, Agent):
        raise UsageError(
            f"{node!r} below {path or 'the run'} is not an agent. Make one with tw.agent(...)."
        )
    if any(node is ancestor for ancestor in above):
        raise UsageError(
            f"{path} -> {node.id} is a cycle: an agent cannot be its own subagent. Break it, or "
            "pass what the inner one needs as a tool.",
            code="cave_subagent_definition_cycle",
        )
    if len(above) > MAX_DEPTH:
        raise UsageError(
            f"{path} -> {node.id} is more than {MAX_DEPTH} levels deep",
            code="cave_subagent_depth_limit",
        )
    found.setdefault(id(node), node)
    for item in node.tools:
        if isinstance(item, Subagent):
            _walk(item.agent, (*above, node), found)


# --- checks -----------------------------------------------------------------------------------


def _checked_tools(what: str, tools: Any) -> tuple[Tool | Subagent, ...]:
    if not isinstance(tools, Iterable):
        raise UsageError(
            f"{what}: tools is a {type(tools).__name__}, not a list. Write tools=[…], with one "
            "tool as well."
        )
    offered: tuple[Any, ...] = tuple(tools)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    names: set[str] = set()
    for item in offered:
        if not isinstance(item, (Tool, Subagent)):
            raise UsageError(
                f"{what}: {item!r} is not a tool. Decorate the function with "
                '@tw.tool(effect="read", runs="host"), or use tw.subagent(...).',
                code="cave_tool_definition_invalid",
            )
        if item.name in names:
            raise UsageError(
                f"{what}: two tools are named {item.name!r}. Give one another name=.",
                code="cave_duplicate_tool_name",
            )
        names.add(item.name)
    return offered


def _check_tool_name(name: str) -> None:
    if not _TOOL_NAME.fullmatch(name):
        raise UsageError(
            f"tool name {name!r}: at most 128 letters, digits, _ and -, starting with a letter. "
            "Pass name= to choose one.",
            code="cave_tool_definition_invalid",
        )
    if name.startswith(_RESERVED_PREFIX):
        raise UsageError(
            f"tool {name!r}: names that start with {_RESERVED_PREFIX} are the runtime's own",
            code=f"cave_reserved_tool_name:{name}",
        )


def _check_effect(what: str, effect: Any) -> None:
    if effect not in EFFECTS:
        said = "no effect=" if effect is _MISSING else f"effect={effect!r}"
        raise UsageError(
            f'{what} has {said}. Say what it does to the world: effect="read", "write", '
            '"idempotent" or "external".',
            code="cave_tool_definition_invalid",
        )


def _check_policy(what: str, name: str, policy: Any, policies: tuple[str, ...]) -> None:
    if policy not in policies:
        known = ", ".join(f'"{each}"' for each in policies)
        raise UsageError(f"{what}: {name} is {policy!r}. Use one of {known}.")


def _check_parameters(what: str, parameters: Mapping[str, Any]) -> None:
    if parameters.get("type") != "object":
        raise UsageError(
            f"{what}: parameters has type {parameters.get('type')!r}. A model gives arguments by "
            'name, so the schema is of type "object".',
            code="cave_tool_definition_invalid",
        )


def _check_runs(what: str, runs: Any) -> None:
    if runs != "host":
        said = "no runs=" if runs is _MISSING else f"runs={runs!r}"
        raise UsageError(
            f'{what} has {said}. Write runs="host" to run it in this process with all this '
            "process may do; confined workers do not exist yet.",
            code="cave_tool_definition_invalid",
        )


def _cap(
    what: str, unit: str, most: str | int | Decimal | None, least: str | int | Decimal | None
) -> tuple[Money | None, Money | None]:
    if most is None:
        if least is not None:
            raise UsageError(f"{what}: min_{unit} goes with max_{unit}")
        return None, None
    cap = usd(most, what=f"{what}: max_{unit}")
    if cap <= 0:
        raise UsageError(f"{what}: max_{unit} is 0", code="cave_budget_max_invalid")
    if least is None:
        return cap, None
    floor = usd(least, what=f"{what}: min_{unit}")
    if floor > cap:
        raise UsageError(f"{what}: min_{unit} {least} is above max_{unit} {most}")
    return cap, floor


def _token_cap(what: str, most: Any, least: Any) -> tuple[int | None, int | None]:
    if most is None:
        if least is not None:
            raise UsageError(f"{what}: min_tokens goes with max_tokens")
        return None, None
    code = "cave_budget_max_invalid"
    cap = positive(most, f"{what}: max_tokens", code=code)
    if least is None:
        return cap, None
    floor = positive(least, f"{what}: min_tokens", code=code)
    if floor > cap:
        raise UsageError(f"{what}: min_tokens {floor} is above max_tokens {cap}")
    return cap, floor


def positive(value: Any, what: str, *, code: str = "cave_agent_definition_invalid") -> int:
    """``value``, if it is a positive int."""
    if type(value) is not int or not 0 < value < 2**53:
        raise UsageError(f"{what} is {value!r}, not a positive whole number", code=code)
    return value


def positive_or_none(value: Any, what: str) -> int | None:
    return None if value is None else positive(value, what)


def _calls(value: Any, name: str) -> int | None:
    if value is not None and (type(value) is not int or not 0 < value < 2**53):
        raise UsageError(
            f"{name} is {value!r}, not a positive whole number", code=f"cave_{name}_invalid"
        )
    return value


def seconds(value: Any, what: str, *, code: str = "cave_run_deadline_invalid") -> float | None:
    """A span of time as seconds; None stays None."""
    if value is None:
        return None
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
        raise UsageError(
            f"{what} is {value!r}. Give a positive number of seconds or a timedelta.", code=code
        )
    return float(value)


def _texts(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Description and parameter texts out of a docstring."""
    raw = inspect.getdoc(without_partials(function))
    if not raw:
        return "", {}
    import docstring_parser

    parsed = docstring_parser.parse(raw)
    parts = [p for p in (parsed.short_description, parsed.long_description) if p]
    docs = {p.arg_name: p.description for p in parsed.params if p.description}
    return "\n\n".join(parts), docs


def _context_parameter(function: Callable[..., Any]) -> str | None:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.annotation is parameter.empty:
            if parameter.name == "ctx":
                return parameter.name
        elif _is_context(function, parameter):
            return parameter.name
    return None


def _is_context(function: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    try:
        hint = hint_of(function, parameter)
    except UnknownHint:
        # Deps is often imported for type checkers only. Then the words have to do.
        words = str(parameter.annotation).strip("'\"")
        return re.fullmatch(r"(\w+\.)*Context(\[.*\])?", words) is not None
    return hint is Context or typing.get_origin(hint) is Context


# Called with each ToolCall before it runs: True or None lets it run, False or a text does not.
ToolCallback: TypeAlias = Callable[..., "bool | str | Awaitable[bool | str | None] | None"]
