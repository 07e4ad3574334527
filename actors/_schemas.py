"""JSON schemas out of Python types, and values back out of JSON.

msgspec and jsonschema-rs do the work; both are imported at the first use, because defining agents
must stay cheap to import.
"""

from __future__ import annotations

import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, cast

import attrs

from treewarden.protocols import JSONObject, UsageError


@attrs.frozen
class Mismatch(Exception):
    """A value does not fit its schema. ``where`` is a path like ``$.items[2].name``."""

    message: str

    def __str__(self) -> str:
        return self.message


@attrs.frozen(kw_only=True)
class Shape:
    """A JSON schema and the function that turns fitting JSON into what Python code wants."""

    schema: JSONObject
    # Raises Mismatch.
    convert: Callable[[Any], Any]


def shape_of_type(type_: Any, *, what: str) -> Shape:
    """The shape of an attrs class, a dataclass, a msgspec Struct or any other typed value."""
    import msgspec

    try:
        (schema,), components = msgspec.json.schema_components(
            [type_], ref_template="#/$defs/{name}"
        )
    except TypeError as error:
        # The lines before the last speak of msgspec's own options.
        why = str(error).rpartition("\n")[2].removesuffix(".")
        raise UsageError(
            f"{what} has no JSON schema: {why}. Use an attrs class, a dataclass, a msgspec "
            "Struct, plain types, or give a JSON schema.",
            code="cave_tool_definition_invalid",
        ) from None

    def convert(value: Any) -> Any:
        try:
            return msgspec.convert(value, type_, strict=True)
        except msgspec.ValidationError as error:
            raise Mismatch(str(error)) from None

    return Shape(schema=_inline(schema, components, ()), convert=convert)


def shape_of_schema(schema: Mapping[str, Any], *, what: str) -> Shape:
    """The shape of a JSON schema (draft 2020-12); values stay plain JSON."""
    import jsonschema_rs

    try:
        validator = jsonschema_rs.validator_for(dict(schema), retriever=_retrieve_nothing)
    except Exception as error:  # its errors share no public base; none of them is a cancellation
        why = str(error).partition("\n")[0]
        raise UsageError(
            f"{what} is not a valid JSON schema: {why}", code="cave_tool_definition_invalid"
        ) from None

    def convert(value: Any) -> Any:
        for error in validator.iter_errors(value):
            path = error.instance_path
            where = "".join(f".{p}" if isinstance(p, str) else f"[{p}]" for p in path)
            raise Mismatch(f"{error.message} - at `${where}`")
        return value

    return Shape(schema=dict(schema), convert=convert)


def _retrieve_nothing(uri: str) -> Any:
    raise ValueError(f"it refers to {uri}, and no document is fetched")


def shape_of_parameters(
    function: Callable[..., Any], *, skip: str | None, docs: Mapping[str, str], what: str
) -> Shape:
    """The shape of a function's parameters, as an object. Converts to keyword arguments."""
    import msgspec

    fields = [
        _field(function, parameter, docs, what)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != skip
    ]
    struct: Any = msgspec.defstruct("arguments", fields, kw_only=True, forbid_unknown_fields=True)
    shape = shape_of_type(struct, what=what)
    names = struct.__struct_fields__

    def convert(value: Any) -> dict[str, Any]:
        filled = shape.convert(value)
        return {name: getattr(filled, name) for name in names}

    schema = {key: part for key, part in shape.schema.items() if key != "title"}
    return Shape(schema=schema, convert=convert)


# What an annotation that cannot be looked up raises: an unknown name, an unknown attribute of a
# module, text that is no expression, an expression that is no type.
UnknownHint = (NameError, AttributeError, SyntaxError, TypeError)


def hint_of(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """What a parameter is annotated with, its names looked up where the function was defined.

    One parameter at a time: a name that only another annotation needs may be unknown at run time.

    Raises:
        UnknownHint: It cannot be looked up.
    """
    annotations = {parameter.name: parameter.annotation}
    holder = types.SimpleNamespace(__annotations__=annotations)
    defined_in = _globals_of(function)
    return typing.get_type_hints(holder, defined_in, include_extras=True)[parameter.name]


def without_partials(function: Any) -> Any:
    """The function that ``functools.partial`` was made of, or the function itself."""
    while isinstance(function, functools.partial):
        function = function.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return function  # pyright: ignore[reportUnknownVariableType]


def _globals_of(function: Callable[..., Any]) -> dict[str, Any]:
    defined: Any = inspect.unwrap(without_partials(function))
    if not hasattr(defined, "__globals__"):
        defined = type(defined).__call__  # an object that can be called
    return getattr(defined, "__globals__", {})


def _looked_up(function: Callable[..., Any], parameter: inspect.Parameter, what: str) -> Any:
    try:
        return hint_of(function, parameter)
    except UnknownHint as error:
        raise UsageError(
            f"{what}: {error}. Types of a tool's parameters must be defined at module level, so "
            "that their names can be looked up.",
            code="cave_tool_definition_invalid",
        ) from None


def _field(
    function: Callable[..., Any], parameter: inspect.Parameter, docs: Mapping[str, str], what: str
) -> Any:
    import msgspec

    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise UsageError(
            f"{what}: {parameter.name} can only be given by position, and a model gives arguments "
            "by name. Take the / out of the signature.",
            code="cave_tool_definition_invalid",
        )
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise UsageError(
            f"{what}: *{parameter.name} has no schema. Name each parameter, or give parameters= "
            "as a JSON schema.",
            code="cave_tool_definition_invalid",
        )
    if parameter.annotation is parameter.empty:
        raise UsageError(
            f"{what}: the parameter {parameter.name} has no type. Annotate it, for example "
            f"`{parameter.name}: str`.",
            code="cave_tool_definition_invalid",
        )
    hint = _looked_up(function, parameter, what)
    if parameter.name in docs:
        hint = typing.Annotated[hint, msgspec.Meta(description=docs[parameter.name])]
    if parameter.default is parameter.empty:
        return (parameter.name, hint)
    default = parameter.default
    if isinstance(default, (list, dict, set)):
        return (parameter.name, hint, msgspec.field(default_factory=default.copy))  # pyright: ignore[reportUnknownMemberType,reportUnknownArgumentType]
    return (parameter.name, hint, default)


def _inline(schema: Any, components: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    """Put definitions where they are referred to: not every provider follows ``$ref``."""
    if isinstance(schema, list):
        return [_inline(item, components, inside) for item in schema]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(schema, dict):
        return schema
    fields = cast("dict[str, Any]", schema)
    name = str(fields.get("$ref", "")).removeprefix("#/$defs/")
    if name not in components:
        return {key: _inline(part, components, inside) for key, part in fields.items()}
    if name in inside:
        # A type inside itself cannot be written out; anything is allowed there, and conversion
        # still checks it.
        return {}
    rest = {key: part for key, part in fields.items() if key != "$ref"}
    return {**_inline(components[name], components, (*inside, name)), **rest}


_PLAIN = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def plain_json(value: Any) -> str:
    """A tool's result as the text a model reads: strings unchanged, all else as JSON.

    Raises:
        TypeError: The value has no JSON form.
    """
    if isinstance(value, str):
        return value
    if type(value) is int:
        return str(value)
    if isinstance(value, (dict, list, int, float, bool)) or value is None:
        try:
            return _PLAIN.encode(value)
        except (TypeError, ValueError):
            pass  # something inside is no plain JSON; msgspec knows more types
    import msgspec

    return msgspec.json.encode(value).decode()
