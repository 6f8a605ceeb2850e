"""Priority classes that API keys are bound to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tailrace.edge.access.key_class import bound_class, class_for, with_class
from tailrace.edge.access.keys import KeyFile
from tailrace.edge.ai_sdk import ChatBody
from tailrace.edge.ai_sdk import to_open as ai_sdk_open
from tailrace.edge.generate.schema import parse_generate, parse_open
from tailrace.edge.openai.chat import ChatBody as OpenAiChat
from tailrace.ledger.errors import Forbidden
from tailrace.ledger.frame import Open, Priority, encode
from tests.edge.access.test_authenticator import KEY, House, api_key, asked

INTERACTIVE, STANDARD, BATCH = Priority


@pytest.mark.parametrize(
    ("wanted", "bound", "given"),
    [
        (None, None, STANDARD),
        (INTERACTIVE, None, INTERACTIVE),
        (None, INTERACTIVE, INTERACTIVE),
        (None, BATCH, BATCH),
        (STANDARD, INTERACTIVE, STANDARD),
        (BATCH, STANDARD, BATCH),
        (STANDARD, STANDARD, STANDARD),
    ],
)
def test_a_key_has_its_class_as_default_and_allows_less_urgent_ones(
    wanted: Priority | None, bound: Priority | None, given: Priority
) -> None:
    assert class_for(wanted, bound) is given


@pytest.mark.parametrize(
    ("wanted", "bound"), [(INTERACTIVE, STANDARD), (INTERACTIVE, BATCH), (STANDARD, BATCH)]
)
def test_a_more_urgent_class_is_refused(wanted: Priority, bound: Priority) -> None:
    with pytest.raises(Forbidden) as caught:
        class_for(wanted, bound)
    error = caught.value
    assert (error.code, error.status, error.field) == ("class_not_allowed", 403, "priority")
    assert repr(bound.word) in error.message
    assert repr(wanted.word) in error.message
    assert error.hint is not None
    assert repr(bound.word) in error.hint


def test_the_default_class_of_a_frame_counts_as_none() -> None:
    frame = Open("demo", prompt="Once")
    assert with_class(frame, None) is frame
    assert with_class(frame, BATCH).priority is BATCH
    assert with_class(frame, INTERACTIVE).priority is INTERACTIVE
    assert with_class(replace(frame, priority=BATCH), INTERACTIVE).priority is BATCH
    with pytest.raises(Forbidden):
        with_class(replace(frame, priority=INTERACTIVE), BATCH)


@pytest.fixture
def batch_key() -> Iterator[None]:
    """Let the running request have a key that is bound to the class batch."""
    token = bound_class.set(BATCH)
    yield
    bound_class.reset(token)


@pytest.mark.usefixtures("batch_key")
def test_every_kind_of_request_gets_the_class_of_its_key() -> None:
    said = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    parts = {"id": "1", "role": "user", "parts": [{"type": "text", "text": "Hi"}]}
    opens = [
        parse_generate(json.dumps(said).encode(), idempotency_key="key").wanted,
        parse_open(encode(Open("demo", prompt="Hi"))),
        *OpenAiChat.model_validate(said).opens(None, None),
        ai_sdk_open(ChatBody.model_validate({"model": "demo", "messages": [parts]}), None, None),
    ]
    assert {each.priority for each in opens} == {BATCH}
    with pytest.raises(Forbidden):
        parse_generate(json.dumps(said | {"priority": "standard"}).encode(), idempotency_key="k")
    with pytest.raises(Forbidden):
        parse_open(encode(Open("demo", prompt="Hi", priority=INTERACTIVE)))


def test_the_key_file_has_the_class_as_a_word() -> None:
    key = api_key(**{"class": "batch"})
    assert key.priority is BATCH
    file = KeyFile(keys=[key])
    text = file.model_dump_json(by_alias=True, exclude_none=True)
    assert json.loads(text)["keys"][0]["class"] == "batch"
    assert KeyFile.model_validate_json(text) == file
    grant = House(key=key).authenticator.admit(
        asked("/v1/generate", ("authorization", f"Bearer {KEY}"))
    )
    assert grant.priority is BATCH


def test_an_unknown_class_in_the_key_file_is_named() -> None:
    with pytest.raises(ValueError, match="'urgent' is not a priority class: use one of"):
        api_key(**{"class": "urgent"})
