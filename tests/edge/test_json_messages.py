"""Frames as JSON messages: what a person sends with a WebSocket tool, and what comes back."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.edge.json_messages import MalformedFrame, MalformedMessage, message_of, parse
from tailrace.edge.session import Close, CloseCode, Session
from tailrace.ledger.frame import (
    CLIENT,
    FRAMES,
    SCHEMA_HASH,
    Credit,
    Frame,
    Open,
    Opened,
    Priority,
    Resume,
    Sampling,
    StreamError,
    Token,
    encode,
    split,
)
from tests.frame_strategies import CORRS, any_frame

ID = "000102030405060708090a0b0c0d0e0f"
STREAM = bytes.fromhex(ID)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(any_frame({tag: cls for tag, cls in FRAMES.items() if tag in CLIENT}), CORRS)
def test_a_client_frame_is_what_its_json_says(frame: Frame, corr: int) -> None:
    if isinstance(frame, Open):  # JSON has no infinities: they become null
        numbers = asdict(frame.sampling)
        kept = {name: None if value in (inf, -inf) else value for name, value in numbers.items()}
        frame = replace(frame, sampling=Sampling(**kept))
    assert parse(message_of(encode(frame, corr))) == (corr, frame)


@given(any_frame(FRAMES), CORRS)
def test_every_frame_has_a_message(frame: Frame, corr: int) -> None:
    message = json.loads(message_of(encode(frame, corr)))
    assert (message["type"], message["corr"]) == (type(frame).__name__, corr)


def test_fields_with_a_default_may_be_left_out() -> None:
    assert parse(f'{{"type": "Resume", "corr": 2, "stream": "{ID}"}}') == (2, Resume(STREAM))
    opened = parse(
        '{"type": "Open", "corr": 1, "model": "demo", "prompt": "Hi", "sampling": {"seed": 4},'
        ' "priority": "batch", "messages": [], "credit": 5}'
    )
    sampling = Sampling(seed=4)
    assert opened == (1, Open("demo", "Hi", sampling=sampling, priority=Priority.BATCH, credit=5))


@pytest.mark.parametrize(
    "message",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 5000,
        '{"type": "Credit", "corr": 1, "limit": NaN}',
        "{}",
        '{"type": "Token", "text": "x", "index": 0}',
        '{"type": ["Resume"]}',
        '{"type": "Detach", "corr": -1}',
        '{"type": "Detach", "corr": 4294967296}',
        '{"type": "Detach", "corr": true}',
        '{"type": "Detach", "corr": "1"}',
    ],
)
def test_what_is_no_message_ends_the_connection(message: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        parse(message)
    assert caught.value.code == "invalid_json"
    session = Session(speaks_json=True)
    assert session.receive(message) == []
    assert session.close == Close(CloseCode.INVALID_DATA, "invalid_json")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "Resume.stream"),
        ({"stream": ID[2:]}, "Resume.stream"),
        ({"stream": "x" * 32}, "Resume.stream"),
        ({"stream": 7}, "Resume.stream"),
        ({"stream": ID, "after": "7"}, "Resume.after"),
        ({"stream": ID, "after": 1.5}, "Resume.after"),
        ({"stream": ID, "after": -1}, "Resume.after"),
        ({"stream": ID, "follow": 1}, "Resume.follow"),
        ({"stream": ID, "credits": 1}, "Resume.credits"),
    ],
)
def test_a_malformed_frame_ends_its_channel_only(fields: dict[str, Any], field: str) -> None:
    message = json.dumps({"type": "Resume", "corr": 3, **fields})
    with pytest.raises(MalformedFrame) as caught:
        parse(message)
    assert (caught.value.code, caught.value.field, caught.value.corr) == ("bad_frame", field, 3)
    assert "at byte" not in caught.value.message
    session = Session(speaks_json=True)
    session.receive(message)
    assert session.close is None
    assert [one.field for one in errors(session)] == [field]
    assert len(session.receive(json.dumps({"type": "Resume", "corr": 3, "stream": ID}))) == 1


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"messages": {}}, "Open.messages"),
        ({"messages": [{"role": "user"}]}, "Open.messages[0].content"),
        ({"messages": [3]}, "Open.messages[0]"),
        ({"sampling": {"temperature": "hot"}}, "Open.sampling.temperature"),
        ({"sampling": {"seed": 1 << 64}}, "Open.sampling.seed"),
        ({"durability": "forever"}, "Open.durability"),
    ],
)
def test_an_error_names_the_place_in_the_frame(message: dict[str, Any], field: str) -> None:
    with pytest.raises(MalformedFrame) as caught:
        parse(json.dumps({"type": "Open", "corr": 1, "model": "demo", **message}))
    assert caught.value.field == field


def lists(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)


def errors(session: Session) -> list[StreamError]:
    found = []
    while (message := session.next_message()) is not None:
        for raw in split(message):
            fields = json.loads(message_of(raw))
            if fields["type"] == "StreamError":
                del fields["type"], fields["corr"]
                found.append(StreamError(**fields))
    return found


def test_a_client_of_json_needs_no_hello_but_may_send_one() -> None:
    session = Session(speaks_json=True)
    session.time_out()
    assert session.close is None
    hello = {"type": "Hello", "schema": SCHEMA_HASH.hex(), "software": "test"}
    assert session.receive(json.dumps(hello)) == []
    [(corr, frame)] = session.receive(f'{{"type": "Resume", "corr": 9, "stream": "{ID}"}}')
    assert (corr, type(frame)) == (9, Resume)
    assert session.close is None
    other = Session(speaks_json=True)
    other.receive(json.dumps(hello | {"schema": "00" * 8}))
    assert other.close == Close(CloseCode.PROTOCOL_ERROR, "schema_mismatch")


def test_binary_messages_are_not_json_nor_the_other_way_round() -> None:
    session = Session(speaks_json=True)
    session.receive(encode(Credit(3), 1))
    assert session.close == Close(CloseCode.UNSUPPORTED_DATA, "bad_frame")
    [error] = errors(session)
    assert "text messages" in error.message
    binary = Session()
    binary.receive("{}")
    assert binary.close == Close(CloseCode.UNSUPPORTED_DATA, "bad_frame")


@given(st.recursive(st.none() | st.booleans() | st.integers() | FINITE | st.text(), lists))
def test_any_json_is_answered_by_an_error_or_is_a_frame(fields: object) -> None:
    for cls in (Open, Resume, Credit):
        given = dict.fromkeys(cls.__dataclass_fields__, fields)
        with suppress(MalformedFrame):
            assert encode(parse(json.dumps({"type": cls.__name__, "corr": 1, **given}))[1])


def test_a_stream_is_read_as_json() -> None:
    session = Session(speaks_json=True)
    session.receive(f'{{"type": "Resume", "corr": 9, "stream": "{ID}", "credit": 4}}')
    session.deliver(encode(Opened(STREAM, 1, "", "demo", 1), 9))
    session.deliver(encode(Token(' "the"', 0), 9))
    told = []
    while (message := session.next_message()) is not None:
        told += [json.loads(message_of(raw)) for raw in split(message)]
    assert [each["type"] for each in told] == ["Hello", "Opened", "Token"]
    assert told[2] == {"type": "Token", "corr": 9, "text": ' "the"', "index": 0}
