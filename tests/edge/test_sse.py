import json

import pytest

from edge import sse
from ledger.frame import (
    Chunk,
    Classification,
    FinishReason,
    Logged,
    StreamEnd,
    StreamError,
    Tag,
    Token,
)


def test_a_token_is_a_plain_event_with_its_index_as_id() -> None:
    event = sse.event(Token(" the", 42), Tag.TOKEN)
    assert event == b'id: 42\ndata: {"text":" the","index":42}\n\n'


def test_the_end_is_an_event_of_its_own() -> None:
    end = StreamEnd(60, FinishReason.ORIGIN_LOST, 61, 9)
    assert sse.event(end, Tag.STREAM_END) == (
        b"id: 61\nevent: end\n"
        b'data: {"total_tokens":60,"finish_reason":"origin-lost","index":61,"prompt_tokens":9}\n\n'
    )


def test_an_end_with_a_message_says_it() -> None:
    end = StreamEnd(0, FinishReason.FAILED, 0, 9, "NaN logits")
    assert b'"message":"NaN logits"' in sse.event(end, Tag.STREAM_END)


def test_an_error_has_no_id_so_that_the_last_frame_stays_the_place_to_resume() -> None:
    error = StreamError("unavailable", "this edge is shutting down", True, 503)
    assert sse.event(error, Tag.STREAM_ERROR) == (
        b"event: error\n"
        b'data: {"error":{"code":"unavailable","message":"this edge is shutting down",'
        b'"retryable":true}}\n\n'
    )


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "\n\n", "\r", "\u2028", "é😀", "\0", ""])
def test_no_text_can_break_out_of_its_data_line(text: str) -> None:
    event = sse.event(Token(text, 0), Tag.TOKEN).decode()
    head, data, *rest = event.split("\n")
    assert (head, rest) == ("id: 0", ["", ""])
    assert "\r" not in data
    assert json.loads(data.removeprefix("data: "))["text"] == text


@pytest.mark.parametrize(
    ("frame", "tag", "lines"),
    [
        (
            Classification("spam", 0.5, 3),
            Tag.CLASSIFICATION,
            b'id: 3\nevent: classification\ndata: {"label":"spam","confidence":0.5,"index":3}\n\n',
        ),
        (
            Chunk(b"\x00\xff", True, 4),
            Tag.CHUNK,
            b'id: 4\nevent: chunk\ndata: {"data":"AP8=","last":true,"index":4}\n\n',
        ),
    ],
)
def test_other_logged_frames_are_called_as_in_the_schema(
    frame: Logged, tag: int, lines: bytes
) -> None:
    assert sse.event(frame, tag) == lines
