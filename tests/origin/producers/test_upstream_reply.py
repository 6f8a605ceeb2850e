"""The meaning of an upstream server's events and statuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tailrace.ledger.errors import CallerError, TailraceError, Unavailable
from tailrace.ledger.frame import FinishReason
from tailrace.origin.producers.upstream_reply import Reply, ServerEvent, Usage, read_reply, refusal


def reply(said: object, name: str = "message") -> Reply:
    return read_reply(ServerEvent(name, said if isinstance(said, str) else json.dumps(said)))


def chunk(delta: object = None, finish: object = None, **more: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def stopped_by(name: str, value: object) -> dict[str, Any]:
    """Return the last chunk of a server that says what ended its answer."""
    choice = {"index": 0, "delta": {}, "finish_reason": "stop", name: value}
    return {"choices": [choice]}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("[DONE]", Reply(done=True)),
        (chunk({"role": "assistant"}), Reply()),
        (chunk({"role": "assistant", "content": "Hi"}), Reply("Hi")),
        (chunk({"content": None, "reasoning_content": "hm"}), Reply(reasoning="hm")),
        (chunk({"reasoning": "hm", "reasoning_content": "hm"}), Reply(reasoning="hm")),
        (chunk({"reasoning": {"summary": "hm"}}), Reply()),
        ({"choices": []}, Reply()),
        ({"choices": [], "usage": None}, Reply()),
        ({"choices": [{"text": " there"}]}, Reply(" there")),
        ({"choices": [{"index": 1, "text": "other"}]}, Reply()),
        (
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}},
            Reply(usage=Usage(3, 4)),
        ),
        ({"choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": True}}, Reply()),
        (chunk({"content": "end"}, "length"), Reply("end", FinishReason.LENGTH)),
        (chunk({}, "stop"), Reply(finish=FinishReason.STOP)),
        (stopped_by("stop_reason", "END"), Reply(finish=FinishReason.STOP, stop="END")),
        (stopped_by("matched_stop", "END"), Reply(finish=FinishReason.STOP, stop="END")),
        (stopped_by("stop_reason", 128009), Reply(finish=FinishReason.STOP)),
        (chunk({}, "content_filter"), Reply(finish=FinishReason.FILTERED)),
        (chunk({}, "tool_calls"), Reply(finish=FinishReason.TOOL_CALLS)),
    ],
)
def test_an_event_means_what_servers_mean_by_it(said: object, expected: Reply) -> None:
    assert reply(said) == expected


@pytest.mark.parametrize(
    "said",
    [
        "",
        "{",
        "[1]",
        "null",
        "[" * 100_000,
        {},
        {"choices": {}},
        {"choices": [1]},
        chunk({"content": 1}),
        '{"choices":[{"text":"\\ud800"}]}',
        chunk({}, 7),
    ],
)
def test_rubbish_is_a_lost_server(said: object) -> None:
    with pytest.raises(Unavailable, match="the upstream server sent") as caught:
        reply(said)
    assert caught.value.code == "upstream_rubbish"


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"error": {"message": "out of memory", "code": 500}}, Unavailable),
        ({"error": "engine died"}, Unavailable),
        ({"error": {"message": "slow down", "code": 429}}, Unavailable),
        ({"error": {"message": "context too long", "code": 400}}, CallerError),
        (chunk({}, "abort"), Unavailable),
    ],
)
def test_an_error_event_is_an_error(said: object, error: type[TailraceError]) -> None:
    with pytest.raises(error):
        reply(said)


def test_an_event_called_error_is_an_error_whatever_is_in_it() -> None:
    with pytest.raises(Unavailable):
        reply({"message": "gone"}, name="error")


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (400, b'{"error":{"message":"too long"}}', CallerError, "refused the request: too long"),
        (422, b'{"detail":"Unexpected fields"}', CallerError, "request: Unexpected fields"),
        (422, b'{"detail":[{"loc":1}]}', CallerError, "refused the request$"),
        (404, b"<html>", CallerError, "refused the request$"),
        (400, b"[" * 100_000, CallerError, "refused the request$"),
        (401, b'{"error":{"message":"key sk-123"}}', TailraceError, "this origin's key$"),
        (429, b"", Unavailable, "answered 429"),
        (503, b'{"message":"loading"}', Unavailable, "answered 503: loading"),
        (302, b"", TailraceError, "answered 302"),
    ],
)
def test_a_status_says_whose_fault_it_is(
    status: int, body: bytes, error: type[TailraceError], message: str
) -> None:
    with pytest.raises(error, match=message):
        raise refusal(status, body)
