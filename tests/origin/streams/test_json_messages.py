"""Streams of JSON messages: splitting and joining."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import CallerError
from tailrace.origin.streams.json_messages import (
    MAX_DEPTH,
    MESSAGE_BYTES,
    RUN,
    first_values,
    join_json,
    split_json,
)
from tests.origin.streams.stream_world import done

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
indents = st.none() | st.integers(0, 3)


def split(body: bytes) -> list[bytes]:
    """Return the messages of a body, whether it is read at once or, as a large one is, in steps."""
    padded = body + b" " * MESSAGE_BYTES
    try:
        messages = done(split_json(body))
    except CallerError:
        with pytest.raises(CallerError):
            done(split_json(padded))
        raise
    assert done(split_json(padded)) == messages
    return messages


@given(st.lists(values), indents, st.booleans())
def test_the_elements_of_an_array_are_kept(
    elements: list[object], indent: int | None, ascii_only: bool
) -> None:
    body = json.dumps(elements, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "replace")
    assert json.loads(join_json(split(body))) == json.loads(body)


@given(values.filter(lambda value: not isinstance(value, list)))
def test_any_other_value_is_one_message(value: object) -> None:
    body = json.dumps(value).encode()
    assert split(b" " + body + b"\r\n") == [body]


parts = st.sampled_from(
    [
        *b'[ ] { } , : " \\ \\" \\u00e9 \\ud8 \\x 0 -1 01 1.5 1. 2e9 2e NaN'.split(),
        *(
            b"-",
            b"true",
            b"tru",
            b"null",
            b" ",
            b"\n",
            b"\x0b",
            b"\x00",
            "é".encode(),
            b"\xff",
            b'"k"',
            b'"k":',
            b"1," * 300,
        ),
    ]
)


@given(st.lists(parts, max_size=12).map(b"".join))
def test_what_is_taken_is_what_a_parser_takes(body: bytes) -> None:
    try:
        parsed = json.loads(body.decode(), parse_constant=pytest.fail)
    except (ValueError, pytest.fail.Exception):
        with pytest.raises(CallerError) as refused:
            split(body)
        assert refused.value.status == 400
    else:
        messages = json.loads(join_json(split(body)))
        assert messages == (parsed if isinstance(parsed, list) else [parsed])


@given(st.lists(values, min_size=1, max_size=8), st.integers(1, 9))
def test_the_values_of_a_message_are_found_again(elements: list[object], count: int) -> None:
    written = [json.dumps(element).encode() for element in elements]
    found, end = done(first_values(b", ".join(written), count))
    assert found == min(count, len(written))
    assert b", ".join(written)[:end] == b", ".join(written[:found])


def test_small_values_share_a_message_and_a_large_one_ends_it() -> None:
    large = b'"' + b"x" * MESSAGE_BYTES + b'"'
    body = b"[1,2," + large + b"," + large + b",3]"
    assert split(body) == [b"1,2," + large, large, b"3"]
    small = split(b"[" + b"1," * 100_000 + b"1]")
    assert len(small) == -(-200_001 // MESSAGE_BYTES)
    assert max(map(len, small)) <= MESSAGE_BYTES + 2 * RUN


def test_a_step_takes_no_more_than_a_run_of_values() -> None:
    for body in (b"1," * 100_000, b"[1]," * 100_000, b'"' + b"\\n" * 100_000 + b'",'):
        steps = split_json(b"[" + body + b"1]")
        assert sum(1 for _ in steps) >= 100_000 // RUN


def test_only_one_level_is_taken_apart() -> None:
    assert split(b"[[1,2],[3,4]]") == [b"[1,2],[3,4]"]
    assert split(b"[[[1,2,3]]]") == [b"[[1,2,3]]"]


def test_values_stay_as_they_were_written() -> None:
    written = b'{"a": 1.0e0, "a":123456789012345678901234567890, "b":"\\u00e9\\ud800"}'
    assert split(b"[" + written + b" ]") == [written]
    assert split(b"[" + b"9" * 5000 + b"]") == [b"9" * 5000]


def test_an_empty_array_holds_no_message() -> None:
    assert split(b" [ \n] ") == []
    assert join_json([]) == b"[]"


def test_values_lie_within_one_another_to_a_depth() -> None:
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert split(b'{"a":' + deep[1:-1] + b"}")
    for body in (b"[[" + deep + b"]]", b'{"a":' * 200_000, b"[" * 200_000):
        with pytest.raises(CallerError):
            split(body)


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
        b'{"a":1,}',
        b'{"a":1,2}',
        b'{"a" 1}',
    ],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(CallerError) as refused:
        split(body)
    assert refused.value.status == 400
