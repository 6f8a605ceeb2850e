"""Bodies of requests to generate."""

from unittest.mock import patch

import pytest

from tailrace.edge.generate.schema import parse_generate
from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import (
    MAX_MESSAGES,
    Durability,
    FormatKind,
    Message,
    Open,
    OutputFormat,
    Overflow,
    Priority,
    Sampling,
    StageSwitch,
    Unread,
)
from tailrace.ledger.validation import MAX_SHOWN_CHARS


def parse(body: bytes) -> Open:
    return parse_generate(body, idempotency_key="key").wanted


def refused(body: bytes) -> CallerError:
    with pytest.raises(CallerError) as caught:
        parse(body)
    return caught.value


def test_a_prompt_alone_takes_the_defaults_of_the_wire() -> None:
    assert parse(b'{"model":"demo","prompt":"Once"}') == Open(
        model="demo", prompt="Once", idempotency_key="key"
    )


def test_every_field_reaches_the_frame() -> None:
    body = b"""{"model": "demo", "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5, "temperature": 1, "top_k": 0, "top_p": 0.5, "seed": 18446744073709551615,
        "stop": ["a", "b"], "ignore_eos": true, "durability": "power", "priority": "batch",
        "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 2,
        "logprobs": 0, "format": {"regex": "a+"}, "overflow": "drop-oldest", "n": 16}"""
    assert parse(body) == Open(
        model="demo",
        messages=(Message("user", "Hi"),),
        max_tokens=5,
        logprobs=0,
        format=OutputFormat(FormatKind.REGEX, "a+"),
        overflow=Overflow.DROP_OLDEST,
        n=16,
        stop=("a", "b"),
        ignore_eos=True,
        durability=Durability.POWER,
        priority=Priority.BATCH,
        idempotency_key="key",
        sampling=Sampling(
            temperature=1.0,
            top_k=0,
            top_p=0.5,
            min_p=0.1,
            repetition_penalty=1.5,
            presence_penalty=-1.0,
            frequency_penalty=2.0,
            seed=2**64 - 1,
        ),
    )


def test_one_stop_sequence_may_be_a_plain_string() -> None:
    assert parse(b'{"model":"demo","stop":"."}').stop == (".",)


def test_a_json_schema_is_carried_as_its_text_in_the_order_it_was_written() -> None:
    shape = parse(
        b'{"model":"demo","format":{"json_schema":{"type":"object","a":["\xc3\xa9"]}}}'
    ).format
    assert shape == OutputFormat(FormatKind.JSON_SCHEMA, '{"type":"object","a":["é"]}')


# More of them are in tests/vectors/http_cases.json.
@pytest.mark.parametrize(
    ("body", "field", "hint"),
    [
        (b'{"model":"demo","temperature":1e999}', "temperature", "a number from 0 to 2"),
        (b'{"model":"demo","min_p":-1}', "min_p", "a number from 0 to 1; 0 is off"),
        (
            b'{"model":"demo","format":{"json_schema":true}}',
            "format.json_schema",
            "a JSON schema, an object",
        ),
        (
            b'{"model":"demo","format":{"regex":5}}',
            "format.regex",
            "a regular expression, a string",
        ),
    ],
)
def test_a_value_that_the_wire_cannot_carry_names_the_field_and_what_would_be_right(
    body: bytes, field: str, hint: str
) -> None:
    error = refused(body)
    assert (error.status, error.code) == (400, "invalid_request")
    assert (error.field, error.hint) == (field, hint)


@pytest.mark.parametrize(
    ("body", "field", "hint"),
    [
        (
            b'{"model":"demo","format":{"json_shema":{}}}',
            "format.json_shema",
            'did you mean "json_schema"?',
        ),
        (b'{"modle":"demo"}', "modle", 'did you mean "model"?'),
    ],
)
def test_an_unknown_field_gets_the_closest_valid_name(body: bytes, field: str, hint: str) -> None:
    error = refused(body)
    assert (error.code, error.field, error.hint) == ("unknown_field", field, hint)


def test_an_unknown_field_like_no_other_gets_the_list_of_fields() -> None:
    hint = refused(b'{"model":"demo","zzz":1}').hint
    assert hint is not None
    assert hint.startswith("one of model, ")
    assert {"prompt", "messages", "max_tokens"} <= set(hint.removeprefix("one of ").split(", "))


def test_a_refused_value_is_shown_but_not_at_length() -> None:
    message = refused(b'{"model":"demo","seed":"' + b"9" * 10_000 + b'"}').message
    assert len(message) <= MAX_SHOWN_CHARS + len(" is not valid")


def test_stages_are_switched_by_name() -> None:
    body = b'{"model":"demo","prompt":"x","stages":{"punctuate":false,"group":true}}'
    assert parse(body).stages == (StageSwitch("punctuate", False), StageSwitch("group", True))
    body = b'{"model":"demo","prompt":"x","stages":null}'
    assert parse(body).stages == ()


@pytest.mark.parametrize(
    ("stages", "field"),
    [
        (b'{"group":true,"punctuate":"off"}', "stages.punctuate"),
        (b'{"punctuate":0}', "stages.punctuate"),
        (b'{"punctuate":null}', "stages.punctuate"),
        (b'["punctuate"]', "stages"),
        (b"{" + b",".join(b'"%d":true' % nth for nth in range(17)) + b"}", "stages"),
    ],
)
def test_a_switch_that_is_not_true_or_false_is_refused_by_name(stages: bytes, field: str) -> None:
    error = refused(b'{"model":"demo","prompt":"x","stages":' + stages + b"}")
    assert error.field == field
    assert '{"punctuate": false}' in (error.hint or "")


@pytest.mark.parametrize(
    ("unread", "then", "after_s"),
    [
        (b"null", Unread.RUN, None),
        (b'"pause"', Unread.PAUSE, None),
        (b'"run"', Unread.RUN, 30),  # said, so that no edge's default takes its place
        (b'{"then":"cancel","after_s":5}', Unread.CANCEL, 5),
    ],
)
def test_what_becomes_of_an_unread_stream_is_a_word_or_a_word_and_a_time(
    unread: bytes, then: Unread, after_s: int | None
) -> None:
    body = b'{"model":"demo","unread":' + unread + b"}"
    request = parse_generate(body, idempotency_key="k").wanted
    assert (request.unread, request.unread_after_s) == (then, after_s)


@pytest.mark.parametrize(
    ("unread", "field", "hint"),
    [
        (b'"stop"', "unread", "one of run, pause, cancel"),
        (
            b"3",
            "unread",
            '"run", "pause" or "cancel", or an object such as {"then": "pause", "after_s": 30}',
        ),
        (b'{"after_s":3}', "unread.then", "one of run, pause, cancel"),
        (
            b'{"then":"run","after_s":"3"}',
            "unread.after_s",
            "an integer of at least 1: seconds without a reader after which `then` applies",
        ),
        (b'{"then":"run","after":3}', "unread.after", 'did you mean "after_s"?'),
    ],
)
def test_another_answer_for_unread_streams_is_refused(unread: bytes, field: str, hint: str) -> None:
    error = refused(b'{"model":"demo","unread":' + unread + b"}")
    assert (error.field, error.hint) == (field, hint)


def test_a_conversation_may_have_so_many_messages() -> None:
    message = b'{"role":"user","content":""}'
    for count in (MAX_MESSAGES, MAX_MESSAGES + 1):
        body = b'{"model":"demo","messages":[' + b",".join([message] * count) + b"]}"
        if count <= MAX_MESSAGES:
            assert len(parse_generate(body, idempotency_key="k").wanted.messages) == count
        else:
            error = refused(body)
            assert (error.field, error.hint) == ("messages", "at most 1024 items")


@pytest.mark.parametrize("name", ["messages", "stop", "prompt", "x"])
def test_a_megabyte_of_small_values_is_not_even_parsed(name: str) -> None:
    with patch("tailrace.edge.generate.schema.from_json", side_effect=AssertionError):
        error = refused(f'{{"model":"demo","{name}":['.encode() + b"1," * 500_000 + b"1]}")
    assert error.code == "invalid_json"
    with patch("tailrace.edge.generate.schema.from_json", side_effect=AssertionError):
        error = refused(f'{{"model":"demo","{name}":['.encode() + b"9" * 500_000 + b"]}")
    assert error.code == "invalid_json"
    text = rb"a, [b], {c}, \"d\", 99" * 40_000
    assert parse(b'{"model":"demo","prompt":"' + text + b'"}').prompt is not None
