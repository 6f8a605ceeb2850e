"""Faulty messages of WebSocket clients, and the answer that every edge must give.

The answers are written by hand, so that they cannot follow a mistake of ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Call,
    Caller,
    Cancel,
    Credit,
    Detach,
    Frame,
    Hello,
    Input,
    Open,
    Resume,
    Sampling,
    Steer,
    SwitchStages,
    Token,
    encode,
)
from tests.vectors.refused import built

NOBODYS = bytes(16)
FORGED = "v1.nokey.AAAA.AAAA"
Message = bytes | dict[str, str] | dict[str, int]
"""A message: bytes in hex, a text, or a number of zero bytes."""


class Row(NamedTuple):
    """`errors` by corr. `close` is a code of RFC 6455; None: the connection goes on."""

    name: str
    messages: list[Message]
    errors: dict[int, dict[str, Any]]
    close: int | None = None


def hello(schema: bytes = SCHEMA_HASH) -> bytes:
    return encode(Hello(schema, "tailrace-test/1"))


def open_of(**more: Any) -> Open:
    return replace(Open("demo", prompt="Once", max_tokens=4, credit=64), **more)


def raw(tag: int, payload: str = "", **more: int) -> bytes:
    return bytes.fromhex(built(tag, payload, **more))


def told(code: str, message: str, field: str | None, hint: str | None = None) -> dict[str, Any]:
    """Return a StreamError that is not to be sent again unchanged."""
    fields = {"code": code, "message": message, "retryable": False, "status": STATUS[code]}
    more = {"field": field, "hint": hint}
    return fields | {name: text for name, text in more.items() if text is not None}


STATUS = {
    **dict.fromkeys(("bad_frame", "corr_in_use", "invalid_request", "too_much_credit"), 400),
    **dict.fromkeys(("schema_mismatch", "bad_version"), 426),
    **dict.fromkeys(("unknown_model", "unknown_stream"), 404),
    "too_large": 413,
    "bad_token": 401,
}
OPENING = encode(open_of(), 7)
STALLED = encode(open_of(credit=0), 7)
HOT = ("temperature", "a number from 0 to 2")
BAD_BOOL = encode(Credit(64), 7)[:-1] + b"\x80"  # the flag of the byte credit must be 0 or 1
BAD_VERSION = told(
    "bad_version",
    "frame version 2 is not supported at byte 3",
    "header.version",
    "this side speaks version 1",
)
NOT_FREE = "use a corr other than 0 that has no open stream"
NO_STREAM = told(
    "unknown_stream",
    f"no stream {NOBODYS.hex()}",
    None,
    "it never existed, or it has expired",
)
BAD_TOKEN = told(
    "bad_token",
    "the resume token is not valid",
    "token",
    "send the Tailrace-Token of the response that opened the stream, before it expires",
)
TEXT = told(
    "bad_frame",
    "frames travel in binary messages",
    None,
    "with the subprotocol tailrace.json they are JSON, otherwise binary",
)
ONE_START = "send only one of Resume.after, Resume.tail and Resume.since_ms"
TOO_LARGE = told(
    "too_large",
    "a message is too large",
    None,
    "at most 65536 bytes of frames in a message",
)
CUT = told("bad_frame", "the message ends inside a frame at byte 0", "header.length")


def _too_much(field: str) -> dict[str, Any]:
    hint = "at most 1024 frames beyond the last one received"
    return told("too_much_credit", "more credit than may be in flight", field, hint)


def _broken(name: str, frame: bytes, message: str, field: str) -> Row:
    """Return what leaves the frames of the connection without meaning."""
    return Row(name, [hello(), frame], {0: told("bad_frame", message, field)}, 1002)


def _refused(name: str, frame: Frame, error: dict[str, Any]) -> Row:
    """Return what costs its own corr, and nothing else."""
    return Row(name, [hello(), encode(frame, 7)], {7: error})


def _invalid(name: str, message: str, field: str, hint: str | None, **more: Any) -> Row:
    return _refused(name, open_of(**more), told("invalid_request", message, field, hint))


SESSIONS = [
    Row(
        "no Hello first",
        [OPENING],
        {0: told("schema_mismatch", "the first frame must be a Hello", None)},
        1002,
    ),
    Row(
        "a Hello of another schema",
        [hello(bytes(8))],
        {
            0: told(
                "schema_mismatch",
                "schema 0000000000000000 is not supported by this edge",
                "Hello.schema",
                f"this edge speaks {SCHEMA_HASH.hex()}",
            )
        },
        1002,
    ),
    _broken("two Hellos", hello(), "clients must not send Hello frames here at byte 4", "tag"),
    Row("another version, and no Hello", [raw(16, version=2)], {0: BAD_VERSION}, 1002),
    Row("another version", [hello(), raw(16, version=2)], {0: BAD_VERSION}, 1002),
    _broken("an unknown flag", raw(20, flags=2), "unknown flags 0x2 at byte 3", "header.flags"),
    _broken("an unknown tag", raw(33), "unknown tag 33 at byte 4", "tag"),
    _broken("a tag of an origin's inside", raw(40), "unknown tag 40 at byte 4", "tag"),
    _broken(
        "a frame that servers send",
        encode(Token("x", 0), 7),
        "tag 0 is not this side's to send at byte 4",
        "tag",
    ),
    _broken(
        "a frame that edges send",
        encode(Call("stream", "a", "GET", "http://localhost/v1/stream/a"), 7),
        "tag 22 is not this side's to send at byte 4",
        "tag",
    ),
    _broken(
        "a length over the limit",
        b"\xff\xff\xff\x01" + bytes(32),
        "length 16777215 exceeds the limit of 65536 at byte 0",
        "header.length",
    ),
    _broken(
        "a length that holds no corr",
        bytes.fromhex("0400000114070000"),
        "length 4 cannot hold a tag and a corr at byte 0",
        "header.length",
    ),
    _broken(
        "a bad payload on corr 0",
        raw(18, "8000" + "00", corr=0),
        "varint is not in its shortest form at byte 9",
        "Credit.limit",
    ),
    Row("a message that ends inside a frame", [hello(), OPENING[:-1]], {0: CUT}, 1002),
    Row("a message of one byte", [hello(), b"\0"], {0: CUT}, 1002),
    Row(
        "a request on corr 0",
        [hello(), encode(open_of(), 0)],
        {0: told("corr_in_use", "corr 0 is not free", "corr", NOT_FREE)},
        1002,
    ),
    Row(
        "a corr that is open",
        [hello(), STALLED + STALLED],
        {0: told("corr_in_use", "corr 7 is not free", "corr", NOT_FREE)},
        1002,
    ),
    Row("a text message", [hello(), {"text": "hello"}], {0: TEXT}, 1003),
    Row("a text message before Hello", [{"text": "{}"}], {0: TEXT}, 1003),
    Row("a message over 65,536 bytes", [hello(), {"zeros": 65_537}], {0: TOO_LARGE}, 1009),
    Row("a message of a megabyte", [hello(), {"zeros": 1 << 20}], {0: TOO_LARGE}, 1009),
    Row("a message without bytes", [hello(), b""], {}),
    Row(
        "a compressed frame",
        [hello(), raw(20, flags=1)],
        {
            7: told(
                "bad_frame",
                "compressed frame, and this side has no zstd at byte 3",
                "header.flags",
                "send frames without the zstd flag",
            )
        },
    ),
    Row(
        "a bad payload",
        [hello(), BAD_BOOL],
        {7: told("bad_frame", "byte 0x80 is neither 0 nor 1 at byte 10", "Credit.bytes")},
    ),
    Row(
        "a payload with a byte more",
        [hello(), raw(20, "00")],
        {7: told("bad_frame", "1 bytes too many at byte 9", "Detach")},
    ),
    _invalid("max_tokens 0", "is 0", "max_tokens", "at least 1", max_tokens=0),
    _invalid("temperature 9", "is 9.0", *HOT, sampling=Sampling(temperature=9.0)),
    _invalid("temperature NaN", "is nan", *HOT, sampling=Sampling(temperature=float("nan"))),
    _invalid("no prompt", "give either prompt or messages", "prompt", None, prompt=None),
    _invalid(
        "a caller",
        "`caller` is set by the edge and must not be sent by clients",
        "caller",
        "leave it out",
        caller=Caller("acme", 127),
    ),
    _refused(
        "an unknown model",
        open_of(model="gpt"),
        told("unknown_model", "no model 'gpt'", "model", "this origin serves 'demo'"),
    ),
    _refused("an Open with too much credit", open_of(credit=1025), _too_much("Open.credit")),
    _refused(
        "Resume with too much credit", Resume(NOBODYS, credit=1025), _too_much("Resume.credit")
    ),
    Row(
        "a Credit that is too much",
        [hello(), STALLED + encode(Credit(2000), 7)],
        {7: _too_much("Credit.limit")},
    ),
    _refused(
        "a Resume with a tail and an index",
        Resume(NOBODYS, after=1, tail=2, credit=64),
        told(
            "invalid_request",
            "Resume.tail and Resume.after both say where to begin",
            "Resume.tail",
            ONE_START,
        ),
    ),
    _refused(
        "a Resume with a time and an index",
        Resume(NOBODYS, after=1, since_ms=1_764_322_200_000, credit=64),
        told(
            "invalid_request",
            "Resume.since_ms and Resume.after both say where to begin",
            "Resume.since_ms",
            ONE_START,
        ),
    ),
    _refused(
        "a Resume with a tail of nothing",
        Resume(NOBODYS, tail=0, credit=64),
        told(
            "invalid_request",
            "Resume.tail is 0, which asks for no frame",
            "Resume.tail",
            "send at least 1; for new frames only, send Resume.after with the last index",
        ),
    ),
    _refused("a Resume of nobody's stream", Resume(NOBODYS, credit=64), NO_STREAM),
    _refused("a Resume with a forged token", Resume(NOBODYS, token=FORGED, credit=64), BAD_TOKEN),
    _refused("a Cancel of nobody's stream", Cancel(NOBODYS), NO_STREAM),
    _refused("a Cancel with a forged token", Cancel(NOBODYS, FORGED), BAD_TOKEN),
    _refused("a Steer of nobody's stream", Steer(NOBODYS, None, "x"), NO_STREAM),
    _refused("a SwitchStages of nobody's stream", SwitchStages(NOBODYS, None, ()), NO_STREAM),
    _refused("an Input of nobody's stream", Input(NOBODYS, None, 0, b"x"), NO_STREAM),
    Row("a Credit for no open corr", [hello(), encode(Credit(5), 99)], {}),
    Row("a Detach of no open corr", [hello(), encode(Detach(), 99)], {}),
]
