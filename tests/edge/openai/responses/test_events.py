"""Events of responses, from the frames of their streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.edge.openai.responses.events import ResponseEvents, StreamedResponse
from tailrace.edge.openai.responses.request import ResponseNote
from tailrace.ledger.errors import CallerError, OriginUnreachable
from tailrace.ledger.frame import (
    Classification,
    FinishReason,
    Frame,
    Notice,
    Opened,
    Reasoning,
    Revision,
    Score,
    ScoredToken,
    StreamEnd,
    Token,
    TokenScores,
    ToolCall,
    encode,
    error_frame,
)

STREAM = bytes(range(16))
ID = STREAM.hex()
CREATED_MS = 1_750_000_000_999


def opened(**asked: object) -> Opened:
    note = ResponseNote(asked, ()).write() if asked else None
    return Opened(STREAM, 0, "", "demo", 3, created_ms=CREATED_MS, note=note)


def ended(index: int, reason: FinishReason = FinishReason.STOP, tokens: int = 5) -> StreamEnd:
    failed = reason in (FinishReason.FAILED, FinishReason.ORIGIN_LOST)
    return StreamEnd(tokens, reason, index, 3, "no worker is left" if failed else None)


def parsed(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a body, each with an event line that says its type."""
    events = []
    for block in body.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        fields: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        events.append(fields)
    return events


def body_of(said: Opened, *frames: Frame, after: int | None = None) -> bytes:
    encoder = ResponseEvents(after)
    encoder.opened(said)
    return encoder.frames([encode(frame) for frame in frames])


def test_a_text_is_one_message_and_its_last_event_is_the_whole_response() -> None:
    frames = (Token("Once", 0), Token(' "upon"', 1), Token("\n\u2028 é", 2), ended(3))
    events = parsed(body_of(opened(metadata={"a": "b"}, temperature=0.5), *frames))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    text = 'Once "upon"\n\u2028 é'
    assert "".join(delta["delta"] for delta in deltas) == text
    place = {"item_id": f"msg_{ID}0000", "output_index": 0, "content_index": 0}
    assert all(place.items() <= delta.items() and delta["logprobs"] == [] for delta in deltas)
    begun, last = events[0]["response"], events[-1]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert last | {"output": 0, "usage": 0} == begun | {
        "status": "completed",
        "output": 0,
        "usage": 0,
    }
    assert (last["id"], last["created_at"], last["model"]) == (f"resp_{ID}", 1_750_000_000, "demo")
    assert (last["metadata"], last["temperature"]) == ({"a": "b"}, 0.5)
    assert last["output"] == [events[-2]["item"]]
    assert last["output"][0]["content"][0]["text"] == text
    assert last["usage"]["total_tokens"] == 8


def test_thoughts_calls_and_text_are_items_of_their_own_and_calls_may_come_in_turns() -> None:
    frames = (
        *(Notice("truncated", "1 older message", 0), Reasoning("Let me ", 1), Reasoning("see.", 2)),
        *(Token("I ask.", 3), ToolCall(0, "call_a", "add", "", 4), ToolCall(0, "", "", '{"a"', 5)),
        *(ToolCall(1, "call_b", "now", "{}", 6), ToolCall(0, "", "", ":1}", 7)),
        *(Token("Asked.", 8), Classification("calm", 0.5, 9), ended(10, FinishReason.TOOL_CALLS)),
    )
    events = parsed(body_of(opened(), *frames))
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == [
        *("reasoning", "message", "function_call", "function_call", "message"),
    ]
    assert [item["status"] for item in output] == ["completed"] * 5
    assert len({item["id"] for item in output}) == 5
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    calls = [(item["call_id"], item["name"], item["arguments"]) for item in output[2:4]]
    assert calls == [("call_a", "add", '{"a":1}'), ("call_b", "now", "{}")]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output
    arguments = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert [(e["output_index"], e["delta"]) for e in arguments] == [
        *((2, '{"a"'), (3, "{}"), (2, ":1}")),
    ]
    assert events[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    ("reason", "last", "status", "why"),
    [
        (FinishReason.LENGTH, "incomplete", "incomplete", {"reason": "max_output_tokens"}),
        (FinishReason.FILTERED, "incomplete", "incomplete", {"reason": "content_filter"}),
        (FinishReason.CANCELLED, "incomplete", "cancelled", None),
        (FinishReason.FAILED, "failed", "failed", None),
        (FinishReason.ORIGIN_LOST, "failed", "failed", None),
    ],
)
def test_what_was_cut_off_says_so_and_why(
    reason: FinishReason, last: str, status: str, why: object
) -> None:
    events = parsed(body_of(opened(), Reasoning("Hm.", 0), Token("Once", 1), ended(2, reason)))
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"]) == (f"response.{last}", status)
    assert response["incomplete_details"] == why
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    failure = {"code": "server_error", "message": "no worker is left"}
    assert response["error"] == (failure if status == "failed" else None)


def test_one_in_the_background_waits_until_its_log_begins() -> None:
    said = opened(background=True)
    response = StreamedResponse(said)
    assert response.document()["status"] == "queued"
    response.add(Token("Once", 0))
    document = response.document()
    assert (document["status"], document["output"][0]["status"]) == ("in_progress", "in_progress")
    events = parsed(body_of(said, Token("Once", 0)))
    assert [(e["type"], e["response"]["status"]) for e in events[:3]] == [
        ("response.created", "queued"),
        ("response.queued", "queued"),
        ("response.in_progress", "in_progress"),
    ]


def test_scores_are_told_with_their_text_and_again_with_all_of_it() -> None:
    half = Score(7, b"\xc3", -0.25)
    one = TokenScores(half, (half, Score(8, b"a", float("-inf"))))
    frames = (ScoredToken("", (one,), 0), ScoredToken("é", (one,), 1), ended(2))
    events = parsed(body_of(opened(), *frames))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    score = {"token": "\ufffd", "bytes": [0xC3], "logprob": -0.25}
    told = score | {
        "top_logprobs": [score, {"token": "a", "bytes": [97], "logprob": -9999.0}],
    }
    assert [(each["delta"], each["logprobs"]) for each in deltas] == [("", [told]), ("é", [told])]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [told, told]


def test_a_revision_changes_the_text_that_is_told_in_the_end() -> None:
    frames = (
        *(Token("Once", 0), Revision(1, " up", False, 1), Revision(1, " upon", True, 2)),
        *(Revision(0, "Twice", False, 3), Token(" upon", 4), ended(5)),
    )
    events = parsed(body_of(opened(), *frames))
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert deltas == ["Once", " up", "on"]
    text = [e["text"] for e in events if e["type"] == "response.output_text.done"]
    assert text == ["Twice upon"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Twice upon"


def test_an_error_that_is_not_of_the_log_takes_no_number() -> None:
    error = error_frame(OriginUnreachable("the origin is gone"))
    events = parsed(body_of(opened(), Token("Once", 0), error))
    assert events[-1] == {
        "type": "error",
        "sequence_number": events[-2]["sequence_number"],
        "code": "origin_unreachable",
        "message": "the origin is gone",
        "param": None,
    }
    refused = error_frame(CallerError("is not a schema", field="format"))
    assert parsed(body_of(opened(), refused))[-1]["param"] == "text.format"
    # A client that has got no event yet keeps its position.
    assert parsed(body_of(opened(), error, after=7))[-1]["sequence_number"] == 7


FRAMES = st.one_of(
    st.builds(lambda text: lambda at: Token(text, at), st.text(max_size=3)),
    st.builds(lambda text: lambda at: Reasoning(text, at), st.text(max_size=3)),
    st.builds(lambda call: lambda at: ToolCall(call, f"c{call}", "f", "{", at), st.integers(0, 2)),
    st.builds(
        lambda back: lambda at: Revision(max(0, at - back), "x", True, at), st.integers(0, 4)
    ),
    st.just(lambda at: Notice("inexact", "", at)),
)


@given(st.lists(FRAMES, max_size=12), st.booleans(), st.data())
def test_the_events_after_any_number_are_the_same_bytes_however_the_log_comes(
    made: list[Any], background: bool, data: st.DataObject
) -> None:
    frames = [encode(make(index)) for index, make in enumerate(made)]
    frames.append(encode(ended(len(frames), data.draw(st.sampled_from(FinishReason)))))
    said = opened(background=background)

    def told(after: int | None, cut: int) -> list[bytes]:
        encoder = ResponseEvents(after)
        encoder.opened(said)
        body = encoder.frames(frames[:cut]) + encoder.frames(frames[cut:])
        return body.split(b"\n\n")[:-1]

    whole = told(None, 0)
    numbers = [event["sequence_number"] for event in parsed(b"\n\n".join([*whole, b""]))]
    assert numbers == list(range(len(whole)))
    after = data.draw(st.integers(0, len(whole)))
    assert told(after, data.draw(st.integers(0, len(frames)))) == whole[after + 1 :]
