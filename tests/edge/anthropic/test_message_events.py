"""Messages of Anthropic's API, from the frames of their streams."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from tailrace.edge.anthropic.events import PING, MessageEvents, StreamedMessage
from tailrace.ledger.errors import OriginUnreachable, Overloaded
from tailrace.ledger.frame import (
    Classification,
    FinishReason,
    Frame,
    Notice,
    Opened,
    Reasoning,
    Revision,
    StreamEnd,
    Token,
    ToolCall,
    encode,
    error_frame,
)

STREAM = bytes(range(16))
ID = f"msg_{STREAM.hex()}"
USAGE = {
    "input_tokens": 3,
    "output_tokens": 5,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
}
STOPPED = {"stop_reason": "end_turn", "stop_sequence": None, "stop_details": None}


def opened(thinking: str | None = None) -> Opened:
    note = None if thinking is None else json.dumps({"message": {"thinking": thinking}})
    return Opened(STREAM, 0, "", "demo", 3, note=note)


def ended(index: int, reason: FinishReason = FinishReason.STOP) -> StreamEnd:
    failed = reason not in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS)
    return StreamEnd(5, reason, index, 3, "no worker is left" if failed else None)


def body_of(said: Opened, *frames: Frame, after: int | None = None) -> bytes:
    encoder = MessageEvents("request", after)
    encoder.opened(said)
    return encoder.frames([]) + b"".join(encoder.frames([encode(frame)]) for frame in frames)


def parsed(body: bytes, first: int = 0) -> list[dict[str, Any]]:
    """Return the events of a body, whose names and numbers are as they should be."""
    events = []
    for number, block in enumerate(body.decode().split("\n\n")[:-1], first):
        name, identifier, data = block.split("\n")
        fields: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert (name, identifier) == (f"event: {fields['type']}", f"id: {number}")
        events.append(fields)
    return events


def collected(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of events; it has one open block at a time."""
    message: dict[str, Any] = events[0]["message"]
    inputs: list[str] = []
    is_open = False
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                is_open = True
                message["content"].append(event["content_block"])
                inputs.append("")
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                [(name, value)] = [(k, v) for k, v in event["delta"].items() if k != "type"]
                if name == "partial_json":
                    inputs[-1] += value
                else:
                    message["content"][-1][name] += value
            case "content_block_stop":
                assert is_open and event["index"] == len(message["content"]) - 1
                is_open = False
                if inputs[-1]:
                    message["content"][-1]["input"] = arguments(inputs[-1])
            case "message_delta":
                assert not is_open
                message |= event["delta"] | {"usage": event["usage"]}
            case other:
                assert other in ("message_stop", "error") and event is events[-1]
    return message


def arguments(text: str) -> object:
    """Return the input of a call as SDKs read it, also if it was cut off."""
    try:
        return from_json(text, allow_partial=True)
    except ValueError:
        return {}


def document_of(said: Opened, *frames: Frame) -> dict[str, Any]:
    message = StreamedMessage(said)
    for frame in frames:
        message.add(frame)
    return message.document()


def test_a_text_is_one_block_whose_deltas_are_the_tokens() -> None:
    frames = (Token("", 0), Token("Once", 1), Token(' "upon"', 2), Token("\n\u2028 é", 3), ended(4))
    events = parsed(body_of(opened(), *frames))
    assert events == [
        {
            "type": "message_start",
            "message": {
                "id": ID,
                "type": "message",
                "role": "assistant",
                "model": "demo",
                "content": [],
                **STOPPED,
                "stop_reason": None,
                "usage": USAGE | {"output_tokens": 0},
            },
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": text},
            }
            for text in ("Once", ' "upon"', "\n\u2028 é")
        ),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": STOPPED, "usage": USAGE},
        {"type": "message_stop"},
    ]
    document = document_of(opened(), *frames)
    assert document == collected(events)
    assert document["content"] == [{"type": "text", "text": 'Once "upon"\n\u2028 é'}]


THOUGHTS = (
    *(Reasoning("Hm, ", 0), Notice("inexact", "", 1), Reasoning("so.", 2), Token("Yes", 3)),
    *(Reasoning("More.", 4), Classification("calm", 0.5, 5), Token("!", 6), ended(7)),
)


@pytest.mark.parametrize("thinking", [None, "shown"])
def test_reasoning_is_thinking_with_a_signature(thinking: str | None) -> None:
    events = parsed(body_of(opened(thinking), *THOUGHTS))
    signature = STREAM.hex() + "0000"
    assert events[1:6] == [
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        *(
            {"type": "content_block_delta", "index": 0, "delta": delta}
            for delta in (
                {"type": "thinking_delta", "thinking": "Hm, "},
                {"type": "thinking_delta", "thinking": "so."},
                {"type": "signature_delta", "signature": signature},
            )
        ),
        {"type": "content_block_stop", "index": 0},
    ]
    document = document_of(opened(thinking), *THOUGHTS)
    assert document == collected(events)
    assert document["content"] == [
        {"type": "thinking", "thinking": "Hm, so.", "signature": signature},
        {"type": "text", "text": "Yes"},
        {"type": "thinking", "thinking": "More.", "signature": STREAM.hex() + "0002"},
        {"type": "text", "text": "!"},
    ]


def test_reasoning_that_was_not_asked_for_is_not_shown() -> None:
    events = parsed(body_of(opened("hidden"), *THOUGHTS))
    document = document_of(opened("hidden"), *THOUGHTS)
    assert document == collected(events)
    assert document["content"] == [{"type": "text", "text": "Yes"}, {"type": "text", "text": "!"}]
    omitted = document_of(opened("omitted"), *THOUGHTS)
    assert omitted == collected(parsed(body_of(opened("omitted"), *THOUGHTS)))
    assert [block.get("thinking") for block in omitted["content"]] == ["", None, "", None]
    assert all(block["signature"] for block in omitted["content"] if "signature" in block)


CALLS = (
    *(Token("I ask.", 0), ToolCall(0, "call_a", "add", "", 1), ToolCall(0, "", "", '{"a"', 2)),
    *(ToolCall(1, "call_b", "now", "{}", 3), ToolCall(0, "", "", ":1}", 4)),
    *(ToolCall(2, "call_c", "who", "", 5), ended(6, FinishReason.TOOL_CALLS)),
)


def test_calls_follow_each_other_even_if_their_pieces_alternate() -> None:
    events = parsed(body_of(opened(), *CALLS))
    assert [event.get("index") for event in events[1:-2]] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3]
    pieces = [
        event["delta"]["partial_json"]
        for event in events
        if event.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert pieces == ['{"a"', ":1}", "{}"]
    document = document_of(opened(), *CALLS)
    assert document == collected(events)
    assert (document["stop_reason"], document["content"][1:]) == (
        "tool_use",
        [
            {"type": "tool_use", "id": "call_a", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "call_b", "name": "now", "input": {}},
            {"type": "tool_use", "id": "call_c", "name": "who", "input": {}},
        ],
    )


def test_a_complete_call_ends_when_the_next_one_begins() -> None:
    encoder = MessageEvents("request")
    encoder.opened(opened())
    encoder.frames([encode(ToolCall(0, "a", "add", '{"a":1} ', 0))])
    told = encoder.frames([encode(ToolCall(1, "b", "now", "", 1))])
    kinds = [event["type"] for event in parsed(told, first=3)]
    assert kinds == ["content_block_stop", "content_block_start"]


@pytest.mark.parametrize("piece", ['{"a": [1, 2], "b": {"c": "x', '{"a": [1, 2], "b": {'])
def test_a_call_that_was_cut_off_has_the_values_that_are_whole(piece: str) -> None:
    frames = (ToolCall(0, "a", "add", piece, 0), ended(1, FinishReason.LENGTH))
    document = document_of(opened(), *frames)
    [block] = document["content"]
    assert (block["input"], document["stop_reason"]) == ({"a": [1, 2], "b": {}}, "max_tokens")


@pytest.mark.parametrize("piece", ["nonsense", "}", "\x00"])
def test_arguments_that_are_not_json_do_no_harm(piece: str) -> None:
    frames = (ToolCall(0, "a", "add", piece, 0), ToolCall(1, "b", "now", "{}", 1), ended(2))
    document = document_of(opened(), *frames)
    assert [block["input"] for block in document["content"]] == [{}, {}]


def test_text_that_ended_at_a_stop_sequence_names_the_sequence() -> None:
    frames = (Token("Once", 0), StreamEnd(5, FinishReason.STOP, 1, 3, "\n\n"))
    events = parsed(body_of(opened(), *frames))
    stopped = {"stop_reason": "stop_sequence", "stop_sequence": "\n\n", "stop_details": None}
    assert events[-2]["delta"] == stopped
    assert parsed(body_of(opened(), *frames, after=3), first=4) == events[4:]
    document = document_of(opened(), *frames)
    assert document == document | stopped == collected(events)


def test_a_filtered_answer_is_a_refusal_with_its_reason() -> None:
    frames = (Token("No", 0), ended(1, FinishReason.FILTERED))
    document = document_of(opened(), *frames)
    assert document["stop_reason"] == "refusal"
    assert document["stop_details"] == {
        "type": "refusal",
        "category": None,
        "explanation": "no worker is left",
    }
    assert document == collected(parsed(body_of(opened(), *frames)))


@pytest.mark.parametrize(
    ("reason", "kind", "said"),
    [
        (FinishReason.CANCELLED, "invalid_request_error", "the stream was cancelled"),
        (FinishReason.FAILED, "invalid_request_error", "no worker is left"),
        (FinishReason.ORIGIN_LOST, "api_error", "no worker is left"),
    ],
)
def test_a_stream_that_did_not_end_well_ends_with_an_error(
    reason: FinishReason, kind: str, said: str
) -> None:
    events = parsed(body_of(opened(), Token("Once", 0), ended(1, reason)))
    assert events[-2:] == [
        {"type": "content_block_stop", "index": 0},
        {"type": "error", "error": {"type": kind, "message": said}},
    ]


def test_an_error_that_is_not_logged_has_no_number() -> None:
    encoder = MessageEvents("request", 1)
    encoder.opened(opened())
    lost = encode(error_frame(OriginUnreachable("no origin answers", code="origin_lost")))
    told = encoder.frames([encode(Token("Once", 0)), lost]).decode().split("\n\n")
    assert told[0].startswith("event: content_block_delta\nid: 2\n")
    assert told[1] == (
        'event: error\ndata: {"type":"error","error":'
        '{"type":"api_error","message":"no origin answers"}}'
    )


def test_a_refusal_has_the_shape_and_the_status_of_the_api() -> None:
    answer = MessageEvents("request").refusal(Overloaded("the queue is full", retry_after_ms=1500))
    assert answer.status_code == 529
    assert json.loads(bytes(answer.body)) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the queue is full"},
        "request_id": "request",
    }
    headers = {"Retry-After": "2", "Retry-After-Ms": "1500"}
    assert {name: answer.headers[name] for name in headers} == headers
    assert answer.headers["X-Should-Retry"] == "true"


def test_a_keepalive_is_a_ping_without_a_number() -> None:
    assert MessageEvents("request").keepalive() == PING
    assert json.loads(PING.decode().split("data: ")[1]) == {"type": "ping"}


def test_a_revision_adds_the_rest_or_nothing_until_the_document() -> None:
    frames = (
        *(Revision(0, "Onc", False, 0), Revision(0, "Once", False, 1)),
        *(Revision(0, "Two", False, 2), Token("!", 3), ended(4)),
    )
    events = parsed(body_of(opened(), *frames))
    deltas = [event["delta"]["text"] for event in events if event["type"].endswith("block_delta")]
    assert deltas == ["Onc", "e"]
    assert document_of(opened(), *frames)["content"] == [{"type": "text", "text": "Two!"}]


TEXTS = st.text(max_size=4)
KINDS = ("token", "reasoning", "notice", "revision", "call 0", "call 1")


@st.composite
def logs(draw: st.DrawFn) -> tuple[Frame, ...]:
    """Draw the frames of a stream: text, thoughts, and calls whose pieces may alternate."""
    frames: list[Frame] = []
    for index, kind in enumerate(draw(st.lists(st.sampled_from(KINDS), max_size=12))):
        text = draw(TEXTS)
        match kind:
            case "token":
                frames.append(Token(text, index))
            case "reasoning":
                frames.append(Reasoning(text, index))
            case "notice":
                frames.append(Notice("inexact", text, index))
            case "revision":
                frames.append(Revision(index, text, True, index))
            case _:
                piece = draw(st.sampled_from(["", "{}", "{", '"a":1', "}"]))
                frames.append(ToolCall(int(kind[-1]), f"c{kind[-1]}", "add", piece, index))
    reason = draw(st.sampled_from(list(FinishReason)))
    return (*frames, ended(len(frames), reason))


@given(logs(), st.sampled_from([None, "shown", "omitted", "hidden"]))
def test_every_suffix_completes_its_prefix(log: tuple[Frame, ...], thinking: str | None) -> None:
    said = opened(thinking)
    whole = body_of(said, *log)
    blocks = whole.split(b"\n\n")[:-1]
    for after in range(len(blocks)):
        prefix = b"".join(block + b"\n\n" for block in blocks[: after + 1])
        assert prefix + body_of(said, *log, after=after) == whole
    parsed(whole)


@given(logs(), st.sampled_from([None, "shown", "omitted", "hidden"]))
def test_the_document_is_what_the_events_add_up_to(
    log: tuple[Frame, ...], thinking: str | None
) -> None:
    events = parsed(body_of(opened(thinking), *log))
    message, document = collected(events), document_of(opened(thinking), *log)
    if events[-1]["type"] == "error":
        document |= {name: message[name] for name in ("stop_reason", "stop_details", "usage")}
    assert message == document
