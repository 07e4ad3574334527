"""One value has one spelling: that of ECMAScript with sorted keys (contract, appendix B.1)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewarden.protocols import JSON, UsageError, canonical_json, digest

# Without lone surrogates: the standard library cannot write those as UTF-8.
plain_text = st.text(st.characters(exclude_categories=["Cs"]))
# Beyond 2**53 a float is written without a point, and Python reads that as another int.
small_floats = st.floats(-(2.0**53), 2.0**53)
scalars = st.none() | st.booleans() | st.integers() | small_floats | plain_text
values: st.SearchStrategy[JSON] = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(plain_text, inner), max_leaves=20
)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1.0, "1"),
        (-0.0, "0"),
        (1e21, "1e+21"),
        (1e20, "100000000000000000000"),
        (123456789012345680000.0, "123456789012345680000"),
        (-1.5e300, "-1.5e+300"),
        (1e-6, "0.000001"),
        (1e-7, "1e-7"),
        (1.25e-7, "1.25e-7"),
        (0.1, "0.1"),
        (1234.5678, "1234.5678"),
        (5e-324, "5e-324"),
        (1.7976931348623157e308, "1.7976931348623157e+308"),
    ],
)
def test_a_float_is_written_as_ecmascript_writes_it(number: float, text: str) -> None:
    assert canonical_json(number) == text.encode()


@pytest.mark.parametrize("number", [0, -1, 2**53 + 1, 10**30])
def test_an_int_is_written_with_all_its_digits(number: int) -> None:
    assert canonical_json(number) == str(number).encode()


def test_keys_are_sorted_by_their_utf_16_code_units() -> None:
    # U+1F600 begins with the code unit D83D, which is below U+E000. Python would sort it last.
    assert canonical_json({"\ue000": 1, "\U0001f600": 2, "b": 3, "a": 4}) == (
        '{"a":4,"b":3,"\U0001f600":2,"\ue000":1}'.encode()
    )


def test_text_is_kept_raw_except_for_what_must_be_escaped() -> None:
    assert canonical_json('é\u2028\u2029/\x7f"\\') == '"é\u2028\u2029/\x7f\\"\\\\"'.encode()
    assert canonical_json("\b\t\n\f\r\x00\x1f") == rb'"\b\t\n\f\r\u0000\u001f"'


def test_a_lone_surrogate_is_escaped_in_lower_case() -> None:
    assert canonical_json("\ud83d!\udbff") == rb'"\ud83d!\udbff"'


def test_a_pair_of_surrogates_is_the_character_it_means() -> None:
    assert canonical_json("\ud83d\ude00") == canonical_json("\U0001f600")
    with pytest.raises(UsageError, match=r"two keys of the object at the top are the same"):
        canonical_json({"\ud83d\ude00": 1, "\U0001f600": 2})


def test_blanks_are_nowhere() -> None:
    value: JSON = {"b": [1, 2, {}], "a": {"d": None, "c": [True, False]}, "": []}
    assert canonical_json(value) == b'{"":[],"a":{"c":[true,false],"d":null},"b":[1,2,{}]}'


def test_a_tuple_is_an_array_and_any_mapping_an_object() -> None:
    assert canonical_json(MappingProxyType({"a": (1, 2)})) == b'{"a":[1,2]}'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "nan (float) at the top has no JSON"),
        ({"a": [0, math.inf]}, "inf (float) at a[1] has no JSON"),
        ({"a": {"b": {1, 2}}}, "{1, 2} (set) at a.b is not a JSON value"),
        ([b"bytes"], "b'bytes' (bytes) at [0] is not a JSON value"),
        ({1: "a"}, "1 (int) at the top is the key of an object but not text"),
    ],
)
def test_what_has_no_spelling_is_refused_with_its_place(value: object, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        canonical_json(cast("JSON", value))


def test_a_value_without_end_is_refused() -> None:
    endless: list[JSON] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="nested too deeply"):
        canonical_json(endless)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_reads_back_as_the_same_float(number: float) -> None:
    assert float(canonical_json(number)) == number


@given(values)
def test_the_spelling_reads_back_as_the_same_value(value: JSON) -> None:
    assert json.loads(canonical_json(value)) == value


@given(st.dictionaries(plain_text, values))
def test_the_order_of_keys_does_not_change_the_digest(value: Mapping[str, JSON]) -> None:
    assert digest({key: value[key] for key in reversed(list(value))}) == digest(value)


def test_the_digest_is_the_sha_256_of_the_spelling() -> None:
    assert digest({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
