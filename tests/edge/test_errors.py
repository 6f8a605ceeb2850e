"""Error responses of an edge, in our format and in OpenAI's."""

import json
from typing import Any

import pytest

from tailrace.client import http_error
from tailrace.edge.errors import CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH, error_response
from tailrace.ledger.errors import (
    BeyondEnd,
    CallerError,
    Conflict,
    LedgerFull,
    NotFound,
    Overloaded,
    TailraceError,
    Unauthorized,
)


def test_an_error_says_what_is_wrong_and_what_would_be_right() -> None:
    answer = error_response(BeyondEnd("index 9 is beyond the end", field="after", hint="at most 8"))
    assert answer.status_code == 416
    assert json.loads(bytes(answer.body)) == {
        "error": {
            "code": "beyond_end",
            "message": "index 9 is beyond the end",
            "field": "after",
            "hint": "at most 8",
            "retryable": False,
        }
    }


def test_a_wait_is_rounded_up_to_whole_seconds() -> None:
    assert error_response(Overloaded("full", retry_after_ms=1001)).headers["Retry-After"] == "2"
    assert "Retry-After" not in error_response(Conflict("full")).headers


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/chat/completions"])
def test_each_client_that_is_refused_with_one_error_is_told_a_wait_of_its_own(path: str) -> None:
    error = LedgerFull("full")
    waits = {error_response(error, path).headers["Retry-After"] for _ in range(100)}
    assert waits <= set(map(str, range(5, 26)))
    assert len(waits) > 1, "all would come back at once"


def test_a_401_names_its_scheme() -> None:
    assert "WWW-Authenticate" in error_response(Unauthorized("no")).headers


def test_a_client_reads_back_the_error_that_the_edge_wrote() -> None:
    error = Overloaded("full", code="queue_full", field="f", hint="wait", retry_after_ms=2000)
    answer = error_response(error)
    read = http_error(answer.status_code, answer.headers, bytes(answer.body))
    assert (read.message, read.code, read.status) == ("full", "queue_full", 503)
    assert (read.field, read.hint, read.retry_after_ms) == ("f", "wait", 2000)
    assert read.retryable


def test_a_client_reads_a_known_code_as_its_class() -> None:
    answer = error_response(NotFound("gone"))
    assert type(http_error(answer.status_code, answer.headers, bytes(answer.body))) is NotFound


def test_a_page_of_a_proxy_is_judged_by_its_status() -> None:
    for body in (b"<html>", b"", b"[]", b'{"error": "text"}'):
        assert http_error(502, {}, body).retryable
        assert not http_error(403, {}, body).retryable


def test_a_date_in_retry_after_is_passed_over() -> None:
    read: TailraceError = http_error(503, {"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}, b"")
    assert read.retry_after_ms is None


def openai_error_of(error: TailraceError, path: str) -> Any:
    return json.loads(bytes(error_response(error, path).body))["error"]


@pytest.mark.parametrize(
    ("path", "error", "message", "param"),
    [
        (
            CHAT_PATH,
            CallerError("is 2.5", field="temperature", hint="a number from 0 to 2"),
            "'temperature' is 2.5 (a number from 0 to 2)",
            "temperature",
        ),
        (
            CHAT_PATH,
            CallerError("is 21", field="logprobs", hint="from 0 to 20"),
            "'top_logprobs' is 21 (from 0 to 20)",
            "top_logprobs",
        ),
        (
            COMPLETIONS_PATH,
            CallerError("is 21", field="logprobs"),
            "'logprobs' is 21",
            "logprobs",
        ),
        (
            CHAT_PATH,
            CallerError("is longer than 9 bytes", field="format"),
            "'response_format' is longer than 9 bytes",
            "response_format",
        ),
        (
            RESPONSES_PATH,
            CallerError("is longer than 9 bytes", field="format"),
            "'text.format' is longer than 9 bytes",
            "text.format",
        ),
        (
            CHAT_PATH,
            CallerError("has 0 characters", field="stop[0]", hint="1 to 128 characters"),
            "'stop' has 0 characters (1 to 128 characters)",
            "stop",
        ),
        (CHAT_PATH, CallerError("9 sequences", field="stop"), "'stop': 9 sequences", "stop"),
        (
            CHAT_PATH,
            CallerError("Invalid value for 'logprobs': 3 is not true or false.", field="logprobs"),
            "Invalid value for 'logprobs': 3 is not true or false.",
            "logprobs",
        ),
        (
            CHAT_PATH,
            NotFound("no model 'gpt'", field="model", hint="this origin serves 'demo'"),
            "no model 'gpt' (this origin serves 'demo')",
            "model",
        ),
        (
            COMPLETIONS_PATH,
            BeyondEnd("index 9 is beyond the end", field="after", hint="at most 8"),
            "index 9 is beyond the end (at most 8)",
            "starting_after",
        ),
    ],
)
def test_an_error_of_the_openai_dialects_begins_with_what_the_user_wrote(
    path: str, error: TailraceError, message: str, param: str
) -> None:
    told = openai_error_of(error, path)
    assert (told["message"], told["param"]) == (message, param)


def test_an_error_of_the_ai_sdks_routes_is_a_text_that_can_be_shown() -> None:
    for path in ("/api/chat", "/api/chat/chat-1/stream"):
        answer = error_response(CallerError("is 2.5", field="temperature", hint="up to 2"), path)
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert bytes(answer.body) == b"'temperature' is 2.5 (up to 2)"
    assert error_response(NotFound("x"), "/api/chats").media_type == "application/json"
