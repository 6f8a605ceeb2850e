"""Server-sent events: their encoding, and what a browser reads from them."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.edge import sse
from tailrace.edge.generate.encoders import SseEncoder
from tailrace.ledger.errors import FrameError
from tailrace.ledger.frame import (
    Chunk,
    Classification,
    FinishReason,
    Logged,
    Notice,
    Reasoning,
    Revision,
    Score,
    ScoredToken,
    Status,
    StreamEnd,
    StreamError,
    StreamState,
    Token,
    TokenScores,
    encode,
)
from tests.e2e.sse import retry_ms


def test_each_body_says_another_time_to_come_back_between_the_bounds() -> None:
    random = Random(1)
    said = [retry_ms(sse.retry(random).decode()) for _ in range(200)]
    assert sse.MIN_RETRY_MS <= min(said) < max(said) <= sse.MAX_RETRY_MS
    assert len(set(said)) > 150
    assert SseEncoder(Random(1)).frames([]) == sse.retry(Random(1))


def test_a_token_is_a_plain_event_with_its_index_as_id() -> None:
    event = sse.event(Token(" the", 42))
    assert event == b'id: 42\ndata: {"text":" the","index":42}\n\n'


def test_a_frame_that_many_readers_get_is_encoded_once() -> None:
    raw = encode(Token(" word", 5))
    event = sse.events([raw])
    assert sse.events([raw]) is event
    other = encode(Token(" other", 6))
    assert sse.events([other]) != event
    assert sse.events([raw]) == event


@given(st.text(), st.integers(0, 1 << 20), st.integers(0, 2**32 - 1))
def test_an_event_made_from_bytes_is_that_of_the_frame(text: str, index: int, corr: int) -> None:
    token = Token(text, index)
    assert sse.events([encode(token, corr)]) == sse.event(token)


TEXTS = st.sampled_from([" token", "", '"', "é\n", "x" * 127, "x" * 128, "y" * 300])


@given(st.integers(0, 1 << 14), st.lists(TEXTS, max_size=40), st.integers(0, 2**32 - 1))
def test_a_replay_is_the_events_of_its_frames(first: int, texts: list[str], corr: int) -> None:
    tokens = [Token(text, first + n) for n, text in enumerate(texts)]
    made = sse.events([encode(token, corr) for token in tokens])
    assert made == b"".join(map(sse.event, tokens))


LOGGED_FRAMES = st.one_of(
    st.builds(Token, TEXTS, st.integers(0, 1 << 20)),
    st.builds(Notice, st.just("inexact"), TEXTS, st.integers(0, 300)),
)


@given(st.lists(LOGGED_FRAMES, max_size=40))
def test_frames_that_do_not_go_on_with_each_other_are_events_too(frames: list[Logged]) -> None:
    assert sse.events([encode(frame) for frame in frames]) == b"".join(map(sse.event, frames))


def test_events_over_the_places_where_an_index_takes_a_byte_more() -> None:
    for first in (120, (1 << 14) - 8):
        tokens = [Token("t", first + n) for n in range(20)]
        assert sse.events([*map(encode, tokens)]) == b"".join(map(sse.event, tokens))


@pytest.mark.parametrize("bad", [b"\x05\0\0\x01\0\0\0\0\0", b"\x06\0\0\x01\0\0\0\0\0\x05"])
def test_a_frame_that_ends_too_early_is_refused_among_others_too(bad: bytes) -> None:
    frames = [encode(Token("t", n)) for n in range(20)]
    for at in (0, 10, 20):
        with pytest.raises(FrameError):
            sse.events([*frames[:at], bad, *frames[at:]])


def test_frames_that_are_no_event_are_left_out() -> None:
    status = Status(bytes(16), StreamState.ENDED, 7)
    notice = Notice("inexact", "", 3)
    frames = [encode(Token('"', 2)), encode(notice), encode(status), encode(Token("b", 4))]
    assert sse.events(frames) == sse.event(Token('"', 2)) + sse.event(notice) + sse.event(
        Token("b", 4)
    )


def test_the_end_is_an_event_of_its_own() -> None:
    end = StreamEnd(60, FinishReason.ORIGIN_LOST, 61, 9)
    assert sse.event(end) == (
        b"id: 61\nevent: end\n"
        b'data: {"total_tokens":60,"finish_reason":"origin-lost","index":61,"prompt_tokens":9}\n\n'
    )


def test_an_end_with_a_message_says_it() -> None:
    end = StreamEnd(0, FinishReason.FAILED, 0, 9, "NaN logits")
    assert b'"message":"NaN logits"' in sse.event(end)


def test_an_end_that_may_not_come_again_says_so() -> None:
    end = StreamEnd(0, FinishReason.FAILED, 0, 9, retryable=True)
    assert b'"retryable":true' in sse.event(end)


def test_a_scored_token_is_a_plain_event_with_scores() -> None:
    scores = (TokenScores(Score(262, b" the", -0.25), (Score(195, b"\xc3", -2.5),)),)
    event = sse.event(ScoredToken(" the", scores, 42)).decode()
    head, data, *_ = event.split("\n")
    assert head == "id: 42"
    top = {"id": 195, "token": "\ufffd", "logprob": -2.5, "bytes": [195]}
    assert json.loads(data.removeprefix("data: ")) == {
        "text": " the",
        "index": 42,
        "logprobs": [{"id": 262, "token": " the", "logprob": -0.25, "top": [top]}],
    }


def test_an_error_has_no_id_so_that_the_last_frame_stays_the_place_to_resume() -> None:
    error = StreamError("unavailable", "this edge is shutting down", True, 503)
    assert sse.event(error) == (
        b"event: error\n"
        b'data: {"error":{"code":"unavailable","message":"this edge is shutting down",'
        b'"retryable":true}}\n\n'
    )


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "\n\n", "\r", "\u2028", "é😀", "\0", ""])
def test_no_text_can_break_out_of_its_data_line(text: str) -> None:
    event = sse.event(Token(text, 0)).decode()
    head, data, *rest = event.split("\n")
    assert (head, rest) == ("id: 0", ["", ""])
    assert "\r" not in data
    assert json.loads(data.removeprefix("data: "))["text"] == text


@pytest.mark.parametrize(
    ("frame", "lines"),
    [
        (
            Classification("spam", 0.5, 3),
            b'id: 3\nevent: classification\ndata: {"label":"spam","confidence":0.5,"index":3}\n\n',
        ),
        (
            Classification("spam", float("nan"), 3),
            b'id: 3\nevent: classification\ndata: {"label":"spam","confidence":null,"index":3}\n\n',
        ),
        (
            Notice("inexact", "another engine", 5),
            b"id: 5\nevent: notice\n"
            b'data: {"code":"inexact","message":"another engine","index":5}\n\n',
        ),
        (
            Reasoning("so\n", 7),
            b'id: 7\nevent: reasoning\ndata: {"text":"so\\n","index":7}\n\n',
        ),
        (
            Revision(0, "a", True, 6, 1.0),
            b"id: 6\nevent: revision\n"
            b'data: {"replaces":0,"text":"a","final":true,"index":6,"stability":1.0}\n\n',
        ),
        (
            Chunk(b"\x00\xff", True, 4),
            b'id: 4\nevent: chunk\ndata: {"data":"AP8=","last":true,"index":4}\n\n',
        ),
    ],
)
def test_other_logged_frames_are_called_as_in_the_schema(frame: Logged, lines: bytes) -> None:
    assert sse.event(frame) == lines
