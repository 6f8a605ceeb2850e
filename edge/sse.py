"""Frames as server-sent events (WHATWG HTML, 9.2.6); the event id is the frame's index."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from json.encoder import encode_basestring
from operator import itemgetter
from random import Random
from typing import Any

from tailrace.ledger.errors import error_body
from tailrace.ledger.frame import (
    LOGGED,
    SMALL_INDEXES,
    Frame,
    Score,
    ScoredToken,
    StreamEnd,
    StreamError,
    Token,
    TokenScores,
    decode,
    tag_of,
    to_error,
)

EVENTS = LOGGED | {StreamError.tag}
"""Tags of the frames that an event can be made of."""

# Where a Token's parts begin in its frame: behind header and tag the corr, the length of the text.
_TAG_AT, _SIZE_AT, _TEXT_AT = 4, 9, 10
_TOKEN = Token.tag
_LONG_TEXT_BYTES = 1 << 7  # the length of a text from here on takes two bytes
_tag, _size = itemgetter(_TAG_AT), itemgetter(_SIZE_AT)
_TWO_BYTES_FROM = 1 << 7  # the index of a frame from here on takes two bytes
# The bytes of all indexes of one byte, one after the other, and of two.
_SHORT_INDEXES = b"".join([*SMALL_INDEXES][:_TWO_BYTES_FROM])
_LONG_INDEXES = b"".join([*SMALL_INDEXES][_TWO_BYTES_FROM:])
_TO_ESCAPE = bytes(range(0x20)) + b'"\\'
_to_escape = re.compile(rb"[%b]" % re.escape(_TO_ESCAPE)).search
_not_a_token = re.compile(rb"[^%c]" % _TOKEN).search
LEAST_RUN = 8
"""Frames from which on it is less work to look at all of them together."""
_between: list[bytes] = []  # the text of the index and that of the next one, as far as was asked

MIN_RETRY_MS = 500
"""Minimum time in ms after which an EventSource that lost its connection asks again."""
MAX_RETRY_MS = 2_000
"""Maximum of that time in ms. Browsers would wait three to five seconds, all equally long."""
PING = b": ping\n\n"
"""A comment: keeps the connection alive, and no client sees an event."""


def retry(random: Random) -> bytes:
    """Return the first field of a body: the time after which its EventSource asks again.

    Each body has a time of its own. When an edge dies, its thousands of readers so come back one
    after another and not in the same moment.
    """
    return b"retry: %d\n\n" % random.randint(MIN_RETRY_MS, MAX_RETRY_MS)


def events(frames: Sequence[bytes]) -> bytes:
    """The events of raw frames, in order; those that no event can be made of are left out."""
    if len(frames) == 1:
        return _event(frames[0])
    try:
        tags = sizes = b""
        if len(frames) >= LEAST_RUN:
            tags, sizes = bytes(map(_tag, frames)), bytes(map(_size, frames))
    except IndexError:  # one is too short to be looked into
        tags = b""
    if not tags:
        return b"".join([_event(raw) for raw in frames])
    made, at = [], 0
    while at < len(frames):
        other = _not_a_token(tags, at)
        end = len(frames) if other is None else other.start()
        token = short_token(frames[at]) if end - at >= LEAST_RUN else None
        if token is None:
            made.append(_event(frames[at]))
            at += 1
        else:
            index = token[1]
            past = _TWO_BYTES_FROM if index < _TWO_BYTES_FROM else len(SMALL_INDEXES)
            end = min(end, at + past - index)
            made.append(_run(frames[at:end], sizes[at:end], index))
            at = end
    return b"".join(made)


def _run(run: Sequence[bytes], told: bytes, index: int) -> bytes:
    """The events of Tokens whose indexes, from `index` on, are all of one length; `told` are the
    lengths of their texts, a byte each.

    A replay is made of a few calls for all of it, if the texts are short and the indexes follow
    each other: what stands between two texts is the same for everybody.
    """
    past = index + len(run)
    if index < _TWO_BYTES_FROM:
        width, expected = 1, _SHORT_INDEXES[index:past]
    else:
        begin, end = index - _TWO_BYTES_FROM, past - _TWO_BYTES_FROM
        width, expected = 2, _LONG_INDEXES[2 * begin : 2 * end]
    texts = list(map(itemgetter(slice(_TEXT_AT, -width)), run))
    indexes = b"".join(map(itemgetter(slice(-width, None)), run))
    fit = max(told) < _LONG_TEXT_BYTES and list(told) == list(map(len, texts))
    if not fit or indexes != expected:
        return b"".join([_event(raw) for raw in run])
    together = b"".join(texts)
    if len(together.translate(None, _TO_ESCAPE)) < len(together):
        texts = [_escaped(text) for text in texts]
    while len(_between) < past:
        last = len(_between)
        _between.append(b'","index":%d}\n\nid: %d\ndata: {"text":"' % (last, last + 1))
    parts = [b""] * (2 * len(run))
    parts[::2] = texts
    parts[1::2] = _between[index:past]
    parts[-1] = b'","index":%d}\n\n' % (past - 1)
    return b'id: %d\ndata: {"text":"' % index + b"".join(parts)


def short_token(raw: bytes) -> tuple[bytes, int] | None:
    """A Token of a short text, from its bytes: nearly all of the traffic.

    Gives its text, as JSON has it between quotes, and its index; None for every other frame, and
    for whatever is wrong.
    """
    if raw[_TAG_AT] != _TOKEN or len(raw) <= _TEXT_AT:
        return None
    size = raw[_SIZE_AT]
    if size >= _LONG_TEXT_BYTES:
        return None
    end = _TEXT_AT + size
    index = SMALL_INDEXES.get(raw[end:])
    if index is None:
        return None
    text = raw[_TEXT_AT:end]
    return (_escaped(text) if _to_escape(text) else text), index


def _escaped(text: bytes) -> bytes:
    """As JSON has it between quotes."""
    return encode_basestring(text.decode())[1:-1].encode()


def _event(raw: bytes) -> bytes:
    token = short_token(raw)
    if token is None:
        return _any(raw)
    text, index = token
    return b'id: %d\ndata: {"text":"%b","index":%d}\n\n' % (index, text, index)


def _any(raw: bytes) -> bytes:
    return event(decode(raw)[1]) if tag_of(raw) in EVENTS else b""


def event(frame: Frame) -> bytes:
    """The event of one logged frame or StreamError.

    Token is the plain message event, and ScoredToken too, with `logprobs`; StreamEnd is `end`,
    StreamError is `error` (without an id, so that Last-Event-ID stays at the last frame seen),
    any other is called as in the schema, in lower case.
    """
    if isinstance(frame, Token):
        return _format(frame.index, None, {"text": frame.text, "index": frame.index})
    if isinstance(frame, ScoredToken):
        scored = {"text": frame.text, "index": frame.index, "logprobs": logprobs(frame.scores)}
        return _format(frame.index, None, scored)
    if isinstance(frame, StreamEnd):
        return _format(frame.index, "end", end_fields(frame))
    if isinstance(frame, StreamError):
        return _format(None, "error", error_body(to_error(frame)))
    fields = {name: finite(value) for name, value in asdict(frame).items()}
    return _format(fields["index"], type(frame).__name__.lower(), fields)


def end_fields(end: StreamEnd) -> dict[str, object]:
    """The JSON of a StreamEnd; `message` and `retryable` only where there is one, or it is."""
    fields: dict[str, object] = {
        "total_tokens": end.total_tokens,
        "finish_reason": end.finish_reason.word,
        "index": end.index,
        "prompt_tokens": end.prompt_tokens,
    }
    if end.message is not None:
        fields["message"] = end.message
    if end.retryable:
        fields["retryable"] = True
    return fields


def logprobs(scores: Sequence[TokenScores]) -> list[dict[str, object]]:
    """The JSON of scores: each drawn token, with the likeliest ones under `top`.

    `bytes` is there where a token is no text by itself, and `token` has U+FFFD for its bytes.
    """
    return [_score(each.chosen) | {"top": [_score(top) for top in each.top]} for each in scores]


def finite(value: Any) -> Any:
    """`value`, with null for a number that JSON does not know: an infinity, or NaN."""
    if isinstance(value, tuple | list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _score(score: Score) -> dict[str, object]:
    text = score.token.decode(errors="replace")
    fields: dict[str, object] = {
        "id": score.id,
        "token": text,
        "logprob": finite(score.logprob),
    }
    return fields if text.encode() == score.token else fields | {"bytes": list(score.token)}


def _format(index: int | None, name: str | None, fields: object) -> bytes:
    # JSON leaves no bare line break in the data, so one data line always does.
    data = _JSON.encode(fields)
    event_id = "" if index is None else f"id: {index}\n"
    event_name = "" if name is None else f"event: {name}\n"
    return f"{event_id}{event_name}data: {data}\n\n".encode()


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is no part of a frame")


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)
