import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import CallerError
from ledger.streams.json import join_json, split_json

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
indents = st.none() | st.integers(0, 3)


@given(st.lists(values), indents, st.booleans())
def test_the_elements_of_an_array_are_the_messages(
    elements: list[object], indent: int | None, ascii_only: bool
) -> None:
    body = json.dumps(elements, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "replace")
    messages = split_json(body)
    assert [json.loads(message) for message in messages] == json.loads(body)
    assert json.loads(join_json(messages)) == json.loads(body)


@given(values.filter(lambda value: not isinstance(value, list)))
def test_any_other_value_is_one_message(value: object) -> None:
    body = json.dumps(value).encode()
    assert split_json(b" " + body + b"\r\n") == [body]


def test_only_one_level_is_taken_apart() -> None:
    assert split_json(b"[[1,2],[3,4]]") == [b"[1,2]", b"[3,4]"]
    assert split_json(b"[[[1,2,3]]]") == [b"[[1,2,3]]"]


def test_values_stay_as_they_were_written() -> None:
    written = b'{"a": 1.0e0, "a":123456789012345678901234567890, "b":"\\u00e9\\ud800"}'
    assert split_json(b"[" + written + b" ]") == [written]
    assert split_json(b"[" + b"9" * 5000 + b"]") == [b"9" * 5000]


def test_an_empty_array_holds_no_message() -> None:
    assert split_json(b" [ \n] ") == []
    assert join_json([]) == b"[]"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{ invalid json }",
        b"[1,]",
        b"[1 2]",
        b"[,1]",
        b"[1",
        b"1 2",
        b"[1]2",
        b"NaN",
        b"[Infinity]",
        b'"\n"',
        b"'x'",
        b'"\xff"',
        b"\xef\xbb\xbf1",
        b"[" * 200_000,
        b'{"a":' * 200_000,
    ],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(CallerError) as refused:
        split_json(body)
    assert refused.value.status == 400
