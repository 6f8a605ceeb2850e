import pytest

from edge.request import MAX_SHOWN_CHARS, parse_generate
from ledger.errors import CallerError
from ledger.frame import (
    Durability,
    FormatKind,
    Message,
    Open,
    OutputFormat,
    Overflow,
    Priority,
)


def parse(body: bytes) -> Open:
    return parse_generate(body, idempotency_key="key", credit=7)


def refused(body: bytes) -> CallerError:
    with pytest.raises(CallerError) as caught:
        parse(body)
    return caught.value


def test_a_prompt_alone_takes_the_defaults_of_the_wire() -> None:
    assert parse(b'{"model":"demo","prompt":"Once"}') == Open(
        model="demo", prompt="Once", idempotency_key="key", credit=7
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
        temperature=1.0,
        top_k=0,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logprobs=0,
        format=OutputFormat(FormatKind.REGEX, "a+"),
        overflow=Overflow.DROP_OLDEST,
        n=16,
        seed=2**64 - 1,
        stop=("a", "b"),
        ignore_eos=True,
        durability=Durability.POWER,
        priority=Priority.BATCH,
        idempotency_key="key",
        credit=7,
    )


def test_one_stop_sequence_may_be_a_plain_string() -> None:
    assert parse(b'{"model":"demo","stop":"."}').stop == (".",)


def test_null_counts_as_left_out() -> None:
    body = b'{"model":"demo","seed":null,"stop":null,"ignore_eos":null,"durability":null}'
    assert parse(body) == parse(b'{"model":"demo"}')


def test_a_json_schema_is_carried_as_its_text_in_the_order_it_was_written() -> None:
    shape = parse(
        b'{"model":"demo","format":{"json_schema":{"type":"object","a":["\xc3\xa9"]}}}'
    ).format
    assert shape == OutputFormat(FormatKind.JSON_SCHEMA, '{"type":"object","a":["é"]}')


@pytest.mark.parametrize("body", [b"{}", b'{"json_schema":{},"regex":"a"}', b'{"regex":null}'])
def test_a_format_is_one_of_two_things(body: bytes) -> None:
    error = refused(b'{"model":"demo","format":' + body + b"}")
    assert (error.field, error.message) == ("format", "give either json_schema or regex")
    assert error.hint == 'an object such as {"json_schema": {...}} or {"regex": "[0-9]+"}'


@pytest.mark.parametrize(
    ("body", "field", "hint"),
    [
        (b'{"prompt":"x"}', "model", 'a model, such as "demo"'),
        (b'{"model":""}', "model", 'a model, such as "demo"'),
        (b'{"model":"demo","prompt":5}', "prompt", "a string"),
        (b'{"model":"demo","max_tokens":0}', "max_tokens", "an integer of at least 1"),
        (b'{"model":"demo","max_tokens":-1}', "max_tokens", "an integer of at least 1"),
        (b'{"model":"demo","max_tokens":true}', "max_tokens", "an integer of at least 1"),
        (b'{"model":"demo","max_tokens":1.5}', "max_tokens", "an integer of at least 1"),
        (b'{"model":"demo","temperature":-0.1}', "temperature", "a number of at least 0"),
        (b'{"model":"demo","temperature":NaN}', "temperature", "a number of at least 0"),
        (b'{"model":"demo","temperature":1e999}', "temperature", "a number of at least 0"),
        (b'{"model":"demo","seed":18446744073709551616}', "seed", "an integer from 0 to 2^64-1"),
        (b'{"model":"demo","min_p":-1}', "min_p", "a number from 0 to 1; 0 is off"),
        (
            b'{"model":"demo","presence_penalty":"x"}',
            "presence_penalty",
            "a number from -2 to 2; 0 is off",
        ),
        (b'{"model":"demo","n":0}', "n", "an integer from 1 to 16"),
        (b'{"model":"demo","overflow":"cut"}', "overflow", "one of refuse, drop-oldest"),
        (
            b'{"model":"demo","format":"json"}',
            "format",
            'an object such as {"json_schema": {...}} or {"regex": "[0-9]+"}',
        ),
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
        (b'{"model":"demo","stop":["a",3]}', "stop", "a string or a list of strings"),
        (b'{"model":"demo","ignore_eos":1}', "ignore_eos", "true or false"),
        (b'{"model":"demo","durability":"disk"}', "durability", "one of relaxed, process, power"),
        (b'{"model":"demo","durability":""}', "durability", "one of relaxed, process, power"),
        (b'{"model":"demo","priority":2}', "priority", "one of interactive, standard, batch"),
        (b'{"model":"demo","messages":[{"role":"user"}]}', "messages[0].content", "a string"),
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
        (b'{"model":"demo","max_token":3}', "max_token", 'did you mean "max_tokens"?'),
        (
            b'{"model":"demo","format":{"json_shema":{}}}',
            "format.json_shema",
            'did you mean "json_schema"?',
        ),
        (b'{"modle":"demo"}', "modle", 'did you mean "model"?'),
        (
            b'{"model":"demo","messages":[{"role":"user","contents":"x"}]}',
            "messages[0].contents",
            'did you mean "content"?',
        ),
    ],
)
def test_an_unknown_field_gets_the_closest_valid_name(body: bytes, field: str, hint: str) -> None:
    error = refused(body)
    assert (error.code, error.field, error.hint) == ("unknown_field", field, hint)


def test_an_unknown_field_like_no_other_gets_the_list_of_fields() -> None:
    hint = refused(b'{"model":"demo","zzz":1}').hint
    assert hint is not None
    assert hint.startswith("one of model, prompt, messages, max_tokens")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"model":"\\ud800"}', b"[" * 100_000]
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    error = refused(body)
    assert (error.status, error.code, error.field) == (400, "invalid_json", None)


def test_a_refused_value_is_shown_but_not_at_length() -> None:
    message = refused(b'{"model":"demo","seed":"' + b"9" * 10_000 + b'"}').message
    assert len(message) <= MAX_SHOWN_CHARS + len(" is not accepted")
