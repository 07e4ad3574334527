"""Schemas out of signatures and types, and what becomes of values that do not fit them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypedDict

import attrs
import msgspec
import pytest

import treewarden as tw
from treewarden.protocols import ToolResult
from treewarden.testing import Exchange, ReplayServer, Reply, ScriptedModel, ScriptedRequest

if TYPE_CHECKING:

    class Deps:
        """Known to type checkers only, as many a name is that is imported for them."""


CODE = "cave_tool_definition_invalid"


@attrs.frozen
class Place:
    """Where something is."""

    city: str
    country: str = "NL"


@dataclass
class Order:
    place: Place
    items: list[str]


@attrs.frozen
class Folder:
    name: str
    folders: list[Folder] = attrs.field(factory=list["Folder"])


class Flat(msgspec.Struct):
    rooms: int


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Options(TypedDict, total=False):
    depth: int


def tool(function: Callable[..., Any], **options: Any) -> tw.Tool:
    return tw.tool(function, effect="read", runs="host", **options)


def parameters(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    return dict(tool(function, **options).spec.parameters)


def properties(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    schema = parameters(function, **options)
    assert schema["type"] == "object"
    found: dict[str, Any] = schema["properties"]
    return found


def results(offered: tw.Tool, *calls: dict[str, Any]) -> list[ToolResult]:
    """What a model reads that calls ``offered`` with these arguments, one after the other."""

    def script(request: ScriptedRequest) -> Reply:
        if request.turn == 0:
            return Reply(tool_calls=[(offered.name, call) for call in calls])
        return Reply("done")

    agent = tw.agent(id="a", instructions="", model=ScriptedModel(script), tools=[offered])
    messages = tw.run_sync(agent, "go").messages
    return [p for m in messages for p in m.parts if isinstance(p, ToolResult)]


def result(offered: tw.Tool, **arguments: Any) -> Any:
    """What the tool returns, as JSON."""
    (only,) = results(offered, arguments)
    assert not only.is_error, only
    return json.loads(only.content)


def mismatch(offered: tw.Tool, **arguments: Any) -> str:
    """What the model is told about arguments that do not fit."""
    (only,) = results(offered, arguments)
    assert only.is_error, only
    code, _, why = only.content.partition(": ")
    assert code == f"cave_tool_input_schema_mismatch:{offered.name}"
    return why


# ── from a signature ─────────────────────────────────────────────────────────────────────────────


def test_types_defaults_and_texts_come_from_the_function() -> None:
    async def search(query: str, limit: int = 3, *, exact: bool = False) -> list[str]:
        """Search the archive.

        Slow on Mondays.

        Args:
            query: What to look for.
            limit: How many to return,
                at most.
        """
        return []

    made = tool(search)
    assert made.spec.name == "search"
    assert made.spec.description == "Search the archive.\n\nSlow on Mondays."
    assert made.spec.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for."},
            "limit": {
                "type": "integer",
                "default": 3,
                "description": "How many to return,\nat most.",
            },
            "exact": {"type": "boolean", "default": False},
        },
        "required": ["query"],
        "additionalProperties": False,
    }


def numpy_style(x: int) -> None:
    """Do.

    Parameters
    ----------
    x : int
        How often.
    """


def sphinx_style(x: int) -> None:
    """Do.

    :param x: How often.
    """


@pytest.mark.parametrize("function", [numpy_style, sphinx_style])
def test_the_other_docstring_styles_are_read_as_well(function: Callable[..., Any]) -> None:
    assert tool(function).description == "Do."
    assert properties(function) == {"x": {"type": "integer", "description": "How often."}}


def test_a_function_without_a_docstring_has_no_texts() -> None:
    def bare(x: int) -> None: ...

    assert tool(bare).description == ""
    assert properties(bare) == {"x": {"type": "integer"}}


def test_a_description_can_be_given_instead() -> None:
    assert tool(numpy_style, description="Better.").description == "Better."


def test_choices_and_what_may_be_missing() -> None:
    def f(
        mode: Literal["fast", "slow"],
        colour: Colour = Colour.RED,
        name: Optional[str] = None,  # noqa: UP045  # the old spelling is what is tested
        size: int | None = None,
    ) -> None: ...

    found = properties(f)
    assert found["mode"] == {"enum": ["fast", "slow"]}
    assert (found["colour"]["enum"], found["colour"]["default"]) == (["blue", "red"], "red")
    assert found["name"] == {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    assert found["size"]["anyOf"] == [{"type": "integer"}, {"type": "null"}]
    assert parameters(f)["required"] == ["mode"]


def test_classes_are_written_out_where_they_are_used() -> None:
    def f(order: Order, place: Place, flat: Flat, options: Options) -> None: ...

    found = properties(f)
    assert "$ref" not in json.dumps(found)
    assert found["place"]["description"] == "Where something is."
    assert found["place"]["properties"] == {
        "city": {"type": "string"},
        "country": {"type": "string", "default": "NL"},
    }
    assert found["place"]["required"] == ["city"]
    assert found["order"]["properties"]["place"] == found["place"]
    assert found["flat"]["properties"] == {"rooms": {"type": "integer"}}
    assert found["options"]["properties"] == {"depth": {"type": "integer"}}


def test_a_type_inside_itself_is_written_once_and_checked_all_the_way_down() -> None:
    def walk(folder: Folder) -> str:
        return folder.folders[0].folders[0].name

    schema = properties(walk)["folder"]
    assert "$ref" not in json.dumps(schema)
    assert schema["properties"]["folders"]["items"] == {}
    deep: dict[str, Any] = {"name": "a", "folders": [{"name": "b", "folders": [{"name": "c"}]}]}
    (read,) = results(tool(walk), {"folder": deep})
    assert read.content == "c"
    deep["folders"][0]["folders"][0]["name"] = 3
    assert "$.folder.folders[0].folders[0].name" in mismatch(tool(walk), folder=deep)


def test_a_default_that_can_change_is_fresh_for_each_call() -> None:
    def collect(item: str, into: list[str] = []) -> list[str]:  # noqa: B006  # what is tested
        into.append(item)
        return into

    assert [result(tool(collect), item=x) for x in "ab"] == [["a"], ["b"]]


def test_dates_decimals_and_containers_arrive_as_what_they_are() -> None:
    def f(day: date, price: Decimal, pair: tuple[int, str], tags: set[str]) -> list[str]:
        return [repr(day), repr(price), repr(pair), repr(tags)]

    told = result(tool(f), day="2026-01-31", price="0.10", pair=[1, "a"], tags=["x"])
    assert told == ["datetime.date(2026, 1, 31)", "Decimal('0.10')", "(1, 'a')", "{'x'}"]


def test_classes_arrive_as_their_instances() -> None:
    def ship(order: Order, colour: Colour = Colour.RED) -> str:
        assert isinstance(order, Order)
        assert isinstance(order.place, Place)
        return f"{order.items} {order.place.country} {colour.name}"

    (read,) = results(
        tool(ship), {"order": {"place": {"city": "Delft"}, "items": ["a"]}, "colour": "blue"}
    )
    assert read.content == "['a'] NL BLUE"


def test_a_partial_offers_what_is_left_of_its_function() -> None:
    def scale(value: int, factor: int) -> int:
        """Make it larger.

        Args:
            value: What to scale.
        """
        return value * factor

    made = tool(functools.partial(scale, factor=3), name="triple")
    assert made.description == "Make it larger."
    assert made.spec.parameters["required"] == ["value"]
    assert result(made, value=5) == 15


def test_a_method_and_a_callable_object_are_functions_too() -> None:
    class Shop:
        def price(self, item: str) -> str:
            return f"{item} is free"

        def __call__(self, item: str) -> str:
            return f"{item} is sold"

    assert results(tool(Shop().price), {"item": "a"})[0].content == "a is free"
    assert results(tool(Shop(), name="buy"), {"item": "a"})[0].content == "a is sold"


# ── arguments that do not fit ────────────────────────────────────────────────────────────────────


def book(nights: int, place: Place, tags: list[str] = [], mode: Literal["a", "b"] = "a") -> str:  # noqa: B006
    return "booked"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"nights": "3"}, "Expected `int`, got `str` - at `$.nights`"),
        ({"nights": 3.0}, "Expected `int`, got `float` - at `$.nights`"),
        ({"nights": True}, "Expected `int`, got `bool` - at `$.nights`"),
        ({"nights": None}, "Expected `int`, got `null` - at `$.nights`"),
        ({"place": "Delft"}, "Expected `object`, got `str` - at `$.place`"),
        ({"place": {}}, "Object missing required field `city` - at `$.place`"),
        ({"place": {"city": 1}}, "Expected `str`, got `int` - at `$.place.city`"),
        ({"tags": ["a", 2]}, "Expected `str`, got `int` - at `$.tags[1]`"),
        ({"mode": "c"}, "Invalid enum value 'c' - at `$.mode`"),
        ({"night": 1}, "Object contains unknown field `night`"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place_and_never_converted(
    wrong: dict[str, Any], told: str
) -> None:
    right = {"nights": 3, "place": {"city": "Delft"}}
    assert mismatch(tool(book), **{**right, **wrong}) == told


def test_a_missing_argument_is_named() -> None:
    assert mismatch(tool(book), nights=3) == "Object missing required field `place`"


# ── signatures that make no schema ───────────────────────────────────────────────────────────────


def no_type(x) -> None: ...  # type: ignore[no-untyped-def]  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]


def any_number(*xs: int) -> None: ...


def any_names(**xs: int) -> None: ...


def by_position(x: int, /) -> None: ...


def unknown_name(x: Nonesuch) -> None: ...  # type: ignore[name-defined]  # noqa: F821  # pyright: ignore[reportUndefinedVariable, reportUnknownParameterType]


def unknown_attribute(x: tw.Nonesuch) -> None: ...  # type: ignore[name-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownParameterType, reportUnknownMemberType]


def no_json(x: complex) -> None: ...


def no_json_default(x: int = object()) -> None: ...  # type: ignore[assignment]  # pyright: ignore[reportArgumentType]


REFUSED: list[tuple[Any, str]] = [
    (no_type, "the parameter x has no type. Annotate it, for example `x: str`"),
    (any_number, r"\*xs has no schema. Name each parameter, or give parameters="),
    (any_names, r"\*xs has no schema. Name each parameter, or give parameters="),
    (by_position, "x can only be given by position.*Take the / out of the signature"),
    (unknown_name, "name 'Nonesuch' is not defined.*must be defined at module level"),
    (unknown_attribute, "no attribute 'Nonesuch'.*must be defined at module level"),
    (no_json, "type <class 'complex'> is not supported. Use an attrs class"),
    (no_json_default, "objects of type object is unsupported"),
]


@pytest.mark.parametrize(("function", "advice"), REFUSED)
def test_a_signature_without_a_schema_is_refused_with_the_way_out(
    function: Callable[..., Any], advice: str
) -> None:
    with pytest.raises(tw.UsageError, match=advice) as caught:
        tool(function)
    assert caught.value.code == CODE
    assert f"tool {function.__name__!r}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_that_only_other_annotations_need_may_be_unknown() -> None:
    def look(ctx: tw.Context[Deps], x: int) -> Deps:
        return ctx.deps

    made = tool(look)
    assert made.context_name == "ctx"
    assert properties(look) == {"x": {"type": "integer"}}


# ── the context ──────────────────────────────────────────────────────────────────────────────────


def by_annotation(x: int, context: tw.Context[None]) -> str:
    return context.path


def by_quoted_annotation(x: int, context: "tw.Context[None]") -> str:  # noqa: UP037
    return context.path


def by_bare_annotation(context: tw.Context, x: int) -> str:  # type: ignore[type-arg]  # pyright: ignore[reportMissingTypeArgument, reportUnknownParameterType]
    return context.path


def by_name(ctx, x: int) -> str:  # type: ignore[no-untyped-def]  # pyright: ignore[reportMissingParameterType, reportUnknownParameterType]
    return str(ctx.path)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


Alias = tw.Context


def by_another_name(here: Alias[None], x: int) -> str:
    return here.path


WITH_CONTEXT: list[Any] = [
    by_annotation,
    by_quoted_annotation,
    by_bare_annotation,
    by_name,
    by_another_name,
]


@pytest.mark.parametrize("function", WITH_CONTEXT)
def test_a_context_is_given_by_the_runtime_and_not_shown_to_the_model(
    function: Callable[..., Any],
) -> None:
    made = tool(function)
    assert properties(function) == {"x": {"type": "integer"}}
    assert results(made, {"x": 1})[0].content == f"root/a#1/tool:{made.name}#1"


def test_a_model_cannot_give_a_context_itself() -> None:
    assert mismatch(tool(by_annotation), x=1, context="mine") == (
        "Object contains unknown field `context`"
    )


def test_a_parameter_named_ctx_of_another_type_is_an_ordinary_one() -> None:
    def f(ctx: str) -> str:
        return ctx

    assert tool(f).context_name is None
    assert properties(f) == {"ctx": {"type": "string"}}


# ── a JSON schema instead ────────────────────────────────────────────────────────────────────────

SCHEMA = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "items": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}},
        }
    },
    "required": ["items"],
}


def take(**given: Any) -> dict[str, Any]:
    return given


def test_a_given_schema_is_shown_as_it_is_and_values_stay_plain() -> None:
    made = tool(take, parameters=SCHEMA)
    assert made.spec.parameters == SCHEMA
    assert result(made, items=[{"n": 1}], more="x") == {"items": [{"n": 1}], "more": "x"}


def test_a_given_schema_is_checked_with_the_place() -> None:
    made = tool(take, parameters=SCHEMA)
    assert mismatch(made, items=[{"n": 1}, {"n": 0}]) == (
        "0 is less than the minimum of 1 - at `$.items[1].n`"
    )
    assert mismatch(made) == '"items" is a required property - at `$`'


@pytest.mark.parametrize("type_", ["string", "array", None])
def test_parameters_are_an_object(type_: Any) -> None:
    with pytest.raises(tw.UsageError, match='the schema is of type "object"') as caught:
        tool(take, parameters={"type": type_})
    assert caught.value.code == CODE


def test_a_schema_that_is_none_is_refused() -> None:
    with pytest.raises(tw.UsageError, match="is not a valid JSON schema") as caught:
        tool(take, parameters={"type": "object", "properties": 3})
    assert caught.value.code == CODE


def test_no_schema_is_fetched_from_anywhere() -> None:
    document = Exchange(200, {"content-type": "application/json"}, b'{"type": "string"}')
    with ReplayServer([document]) as server:
        elsewhere = {"a": {"$ref": f"{server.base_url}/schema.json"}}
        with pytest.raises(tw.UsageError, match="no document is fetched"):
            tool(take, parameters={"type": "object", "properties": elsewhere})
        assert server.requests == ()


# ── output types ─────────────────────────────────────────────────────────────────────────────────


def answer(output: Any, text: str) -> tw.Result:
    agent = tw.agent(id="a", instructions="Say.", model=ScriptedModel([Reply(text)]), output=output)
    return tw.run_sync(agent, "go")


@pytest.mark.parametrize(
    ("output", "text", "value"),
    [
        (Place, '{"city": "Delft"}', Place("Delft")),
        (Order, '{"place": {"city": "Ghent"}, "items": []}', Order(Place("Ghent"), [])),
        (Flat, '{"rooms": 3}', Flat(3)),
        (list[Colour], '["red"]', [Colour.RED]),
        (int | None, "null", None),
        (SCHEMA, '{"items": [{"n": 2}]}', {"items": [{"n": 2}]}),
        (Place, '```json\n{"city": "Delft"}\n```', Place("Delft")),
        (None, "any text", None),
    ],
)
def test_an_answer_becomes_what_was_declared(output: Any, text: str, value: Any) -> None:
    result = answer(output, text)
    assert result.complete
    assert result.output == value
    assert type(result.output) is type(value)


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("Delft", "cave_output_schema_invalid_json", "it is not JSON"),
        ('{"city": 1}', "cave_output_schema_mismatch", r"Expected `str`, got `int` - at `\$.city`"),
    ],
)
def test_an_answer_that_does_not_fit_is_an_error_with_the_place(
    text: str, code: str, told: str
) -> None:
    with pytest.raises(tw.RunError, match=told) as caught:
        answer(tw.output(Place, retries=0), text)
    assert caught.value.code == code
    caught.value.receipt.check()


def test_an_output_without_a_schema_is_refused_where_it_is_declared() -> None:
    with pytest.raises(tw.UsageError, match="output has no JSON schema: type <class 'complex'>"):
        tw.output(complex)
    with pytest.raises(tw.UsageError, match="output is not a valid JSON schema"):
        tw.output({"type": 3})


Noted = Annotated[int, msgspec.Meta(description="A number of nights.", ge=1)]


def test_notes_of_a_type_are_kept_and_checked() -> None:
    def stay(nights: Noted) -> int:
        return nights

    assert properties(stay)["nights"] == {
        "type": "integer",
        "description": "A number of nights.",
        "minimum": 1,
    }
    assert mismatch(tool(stay), nights=0) == "Expected `int` >= 1 - at `$.nights`"
