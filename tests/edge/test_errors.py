import json

from edge.errors import error_response
from ledger.errors import BeyondEnd, NotFound, Overloaded, TailraceError, Unauthorized
from tailrace.client import http_error


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
    assert "Retry-After" not in error_response(Overloaded("full")).headers


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
