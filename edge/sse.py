"""Encodes frames as server-sent events (WHATWG HTML, 9.2.6). An event's id is the frame's index."""

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
    Snapshot,
    StreamEnd,
    StreamError,
    Token,
    TokenScores,
    decode,
    tag_of,
    to_error,
)

EVENTS = LOGGED | {Snapshot.tag, StreamError.tag}
"""Tags of the frames that are sent as events; all other frames are left out."""

# Byte offsets of an encoded Token's fields: tag, length of the text (after the corr), and text.
_TAG_AT, _SIZE_AT, _TEXT_AT = 4, 9, 10
_TOKEN = Token.tag
_LONG_TEXT_BYTES = 1 << 7  # from this length on, the length field takes more than one byte
_tag, _size = itemgetter(_TAG_AT), itemgetter(_SIZE_AT)
_TWO_BYTES_FROM = 1 << 7  # from this index on, an encoded index takes two bytes
# The concatenated encodings of all indexes that take one byte, and of all that take two bytes.
_SHORT_INDEXES = b"".join([*SMALL_INDEXES][:_TWO_BYTES_FROM])
_LONG_INDEXES = b"".join([*SMALL_INDEXES][_TWO_BYTES_FROM:])
_TO_ESCAPE = bytes(range(0x20)) + b'"\\'
_to_escape = re.compile(rb"[%b]" % re.escape(_TO_ESCAPE)).search
_not_a_token = re.compile(rb"[^%c]" % _TOKEN).search
MIN_RUN = 8
"""Minimum number of consecutive Tokens for which encoding them together is faster."""
# Cache: item n holds the bytes of the body between the text of event n and that of event n + 1.
_between: list[bytes] = []

MIN_RETRY_MS = 500
"""Minimum of the random `retry:` time, in milliseconds. A client whose connection was lost waits
for this time before it reconnects."""
MAX_RETRY_MS = 2_000
"""Maximum of the random `retry:` time, in milliseconds. Browsers' own default is three to five
seconds."""
PING = b": ping\n\n"
"""The keepalive of an event stream: a comment, which clients ignore."""


def retry(random: Random) -> bytes:
    """Return the `retry:` field that begins a body: the client's delay before it reconnects.

    The delay is random. If an edge dies, its thousands of readers therefore do not reconnect all at
    once.
    """
    return b"retry: %d\n\n" % random.randint(MIN_RETRY_MS, MAX_RETRY_MS)


def events(frames: Sequence[bytes]) -> bytes:
    """Return the encoded events of raw frames, in order; frames that are no events are left out."""
    if len(frames) == 1:
        return _latest.of(frames[0])
    try:
        tags = sizes = b""
        if len(frames) >= MIN_RUN:
            tags, sizes = bytes(map(_tag, frames)), bytes(map(_size, frames))
    except IndexError:  # a frame is too short to have these fields
        tags = b""
    if not tags:
        return b"".join([_event(raw) for raw in frames])
    made, at = [], 0
    while at < len(frames):
        other = _not_a_token(tags, at)
        end = len(frames) if other is None else other.start()
        token = short_token(frames[at]) if end - at >= MIN_RUN else None
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
    """Return the events of a run of Tokens, encoded together with few calls of Python functions.

    This is possible if all texts are short and the indexes are consecutive: the bytes between two
    texts then depend on the index only. Otherwise the Tokens are encoded one by one.

    Args:
        run: Token frames whose encoded indexes are equally long.
        told: The length field of each text, one byte for each Token.
        index: The index of the first Token.
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
    """Parse a Token with a short text; nearly all frames are such Tokens.

    Returns the text, escaped for JSON but without quotes, and the index. Returns None for any other
    frame and for an invalid one.
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
    """Return UTF-8 text escaped for JSON, without the quotes around it."""
    return encode_basestring(text.decode())[1:-1].encode()


class _LatestEvent:
    """The event of the frame that was encoded last.

    Readers of one stream get the same bytes object one after the other, so it is encoded once.
    """

    __slots__ = ("_event", "_frame")

    def __init__(self) -> None:
        self._frame = self._event = b""

    def of(self, frame: bytes) -> bytes:
        """Return the event of a frame."""
        if frame is not self._frame:
            self._frame, self._event = frame, _event(frame)
        return self._event


_latest = _LatestEvent()


def _event(raw: bytes) -> bytes:
    token = short_token(raw)
    if token is None:
        return _any(raw)
    text, index = token
    return b'id: %d\ndata: {"text":"%b","index":%d}\n\n' % (index, text, index)


def _any(raw: bytes) -> bytes:
    return event(decode(raw)[1]) if tag_of(raw) in EVENTS else b""


def event(frame: Frame) -> bytes:
    """Return the encoded event of one logged frame, Snapshot or StreamError.

    The event of a StreamError has no id, so that Last-Event-ID stays at the last frame seen.
    """
    name, fields = event_fields(frame)
    # JSON escapes line breaks, so the data always fits into one line.
    event_id = b"id: %d\n" % fields["index"] if "index" in fields else b""
    event_name = f"event: {name}\n".encode() if name else b""
    return b"%b%bdata: %b\n\n" % (event_id, event_name, compact(fields))


def event_fields(frame: Frame) -> tuple[str | None, dict[str, Any]]:
    """Return the name of a frame's event, and the fields of its data.

    Token and ScoredToken (with `logprobs`) become message events, which have no name. StreamEnd
    becomes `end`, StreamError `error`. The event of any other frame is named after its type, in
    lower case.
    """
    if isinstance(frame, Token):
        return None, {"text": frame.text, "index": frame.index}
    if isinstance(frame, ScoredToken):
        scores = logprobs(frame.scores)
        return None, {"text": frame.text, "index": frame.index, "logprobs": scores}
    if isinstance(frame, StreamEnd):
        return "end", end_fields(frame)
    if isinstance(frame, StreamError):
        return "error", dict(error_body(to_error(frame)))
    fields = {name: finite(value) for name, value in asdict(frame).items()}
    return type(frame).__name__.lower(), fields


def end_fields(end: StreamEnd) -> dict[str, object]:
    """Return the JSON fields of a StreamEnd; `message` and `retryable` are left out if unset."""
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
    """Return scores as JSON: each sampled token, with the most likely alternatives under `top`.

    A token whose bytes are not valid UTF-8 has U+FFFD in `token`, and the bytes in `bytes`.
    """
    return [_score(each.chosen) | {"top": [_score(top) for top in each.top]} for each in scores]


def finite(value: Any) -> Any:
    """Return `value` with None in place of numbers that JSON lacks: infinities and NaN."""
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


def compact(fields: dict[str, Any]) -> bytes:
    """Return the fields as JSON without spaces; bytes become base64."""
    return _JSON.encode(fields).encode()


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"a frame has no field of type {type(value).__name__}")


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain)
