"""Writes the wire vectors, always the same: `python -m tests.vectors.generate`.

README.md in this folder describes the files; refused.py has the invalid frames, sessions.py what
clients do wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from tailrace.ledger.frame import (
    FRAMES,
    Answer,
    Body,
    BodyEnd,
    Branch,
    Cache,
    Call,
    Caller,
    Cancel,
    Challenge,
    Chunk,
    Classification,
    Compression,
    Credit,
    Detach,
    Durability,
    Embedding,
    FinishReason,
    FormatKind,
    Frame,
    Header,
    Heartbeat,
    Hello,
    Input,
    InputStored,
    Message,
    Notice,
    Open,
    Opened,
    OutputFormat,
    Overflow,
    Pass,
    Priority,
    Proof,
    Reasoning,
    Renew,
    Resume,
    Revision,
    Sampling,
    Score,
    ScoredToken,
    Sibling,
    Snapshot,
    StageSwitch,
    Status,
    Steer,
    StreamEnd,
    StreamError,
    StreamState,
    SwitchStages,
    Token,
    TokenRun,
    TokenScores,
    ToolCall,
    ToolChoice,
    Tools,
    Unread,
    encode,
    tag_of,
)
from tailrace.ledger.wire.bare import (
    BOOL,
    DATA,
    F32,
    F64,
    STR,
    U16,
    U32,
    U64,
    UINT,
    fixed_data,
    list_of,
    optional,
)
from tailrace.ledger.wire.schema import SCHEMA_HASH, Word
from tests.vectors.refused import BAD_HEADERS, BAD_PAYLOADS, STREAM, built
from tests.vectors.sessions import SESSIONS

HERE = Path(__file__).parent
MAX_SAFE_INTEGER = 2**53 - 1  # beyond it a JSON number loses digits in JavaScript
TYPES = {
    of.name: of
    for of in (
        *(UINT, U16, U32, U64, F32, F64, BOOL, STR, DATA),
        *(fixed_data(4), optional(STR), list_of(U16), list_of(STR)),
    )
}


def to_json(value: Any) -> Any:
    """Return a value as the vectors write it: see README.md."""
    if is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Word):
        return value.word
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and value > MAX_SAFE_INTEGER:
        return str(value)
    return value


# ---- BARE types on their own ----

_EDGES: dict[str, list[Any]] = {
    "uint": [
        *(0, 1, 42, 127, 128, 255, 300, 16383, 16384, 2**21 - 1, 2**21, 2**28, 2**35 - 1, 2**42),
        *(2**53 - 1, 2**53, 2**56 - 1, 2**63 - 1, 2**63, 2**64 - 1),
    ],
    "u16": [0, 1, 0x1234, 2**16 - 1],
    "u32": [0, 1, 0x12345678, 2**32 - 1],
    "u64": [0, 1, 2**53, 2**64 - 1],
    "f32": [0.0, -0.0, 1.0, -2.5, 2.0**-149, 2.0**127, math.inf, -math.inf, math.nan],
    "f64": [0.0, -0.0, 0.1, 1e308, 5e-324, math.inf, -math.inf, math.nan],
    "bool": [False, True],
    "str": ["", " the", "\0", "é", "€", "𝄞", "e\u0301", "\ufeffbom", "a" * 127, "a" * 128],
    "data": [b"", b"\x00", b"\xff\xfe", bytes(range(128))],
    "data[4]": [b"\x00\x01\x02\x03"],
    "optional<str>": [None, "", "x"],
    "list<u16>": [(), (1,), (1, 2, 65535)],
    "list<str>": [(), ("", "x")],
}

# (type, bytes, offset of the fault within them, why)
_BAD_PRIMITIVES = [
    ("uint", "", 0, "nothing where a varint should be"),
    ("uint", "80", 0, "varint goes on past the end"),
    ("uint", "ffffffffffffffffff", 0, "nine bytes that all go on"),
    ("uint", "8000", 0, "zero in two bytes"),
    ("uint", "ff00", 0, "127 in two bytes"),
    ("uint", "80808080808080808000", 0, "zero in ten bytes"),
    ("uint", "ffffffffffffffffff02", 0, "65 bits"),
    ("uint", "ffffffffffffffffff7f", 0, "70 bits"),
    ("uint", "8080808080808080808001", 0, "eleven bytes"),
    ("u16", "01", 0, "one byte of two"),
    ("u32", "010203", 0, "three bytes of four"),
    ("u64", "01020304050607", 0, "seven bytes of eight"),
    ("f32", "0000c0", 0, "three bytes of four"),
    ("f64", "", 0, "no bytes of eight"),
    ("bool", "", 0, "no byte"),
    ("bool", "02", 0, "neither 0 nor 1"),
    ("bool", "ff", 0, "neither 0 nor 1"),
    ("str", "", 0, "no length"),
    ("str", "0261", 0, "one byte of two"),
    ("str", "8100", 0, "length not in its shortest form"),
    ("str", "ffffffffffffffffff01", 0, "a length of 2^64-1"),
    ("str", "0180", 0, "a continuation byte alone"),
    ("str", "01ff", 0, "a byte that UTF-8 never uses"),
    ("str", "02c080", 0, "zero in two bytes (overlong)"),
    ("str", "03e08080", 0, "zero in three bytes (overlong)"),
    ("str", "03eda080", 0, "a high surrogate"),
    ("str", "06eda080edb080", 0, "a pair of surrogates"),
    ("str", "04f4908080", 0, "beyond U+10FFFF"),
    ("str", "02e282", 0, "a character cut off"),
    ("data", "03ffff", 0, "two bytes of three"),
    ("data[4]", "000102", 0, "three bytes of four"),
    ("optional<str>", "", 0, "no byte"),
    ("optional<str>", "02", 0, "neither 0 nor 1"),
    ("optional<str>", "01", 1, "present, but nothing there"),
    ("list<u16>", "", 0, "no count"),
    ("list<u16>", "020100", 0, "two items in the room of one"),
    ("list<u16>", "ffffffffffffffffff01", 0, "2^64-1 items"),
    ("list<str>", "02016101", 3, "second item cut off"),
]


def primitives() -> dict[str, Any]:
    valid = []
    for name, values in _EDGES.items():
        for value in values:
            out = bytearray()
            TYPES[name].encode(out, value)
            valid.append({"type": name, "value": to_json(value), "hex": out.hex()})
    invalid = [
        {"type": name, "hex": raw, "offset": offset, "why": why}
        for name, raw, offset, why in _BAD_PRIMITIVES
    ]
    return {"valid": valid, "invalid": invalid}


# ---- valid frames ----

_FRAMES: list[tuple[str, int, Frame]] = [
    ("the token of the README", 7, Token(" the", 42)),
    ("token, empty text", 0, Token("", 0)),
    ("token, text of 127 bytes", 1, Token("a" * 127, 127)),
    ("token, text of 128 bytes", 1, Token("a" * 128, 128)),
    ("token, index of two bytes", 1, Token("é", 16383)),
    ("token, index of three bytes", 1, Token("𝄞", 16384)),
    ("token, largest index and corr", 2**32 - 1, Token("\n", 2**64 - 1)),
    *((f"stream end, {reason.word}", 7, StreamEnd(60, reason, 60, 12)) for reason in FinishReason),
    ("stream end with a message", 7, StreamEnd(3, FinishReason.FAILED, 3, 12, "NaN in logits")),
    ("stream end, retryable", 7, StreamEnd(3, FinishReason.FAILED, 3, 12, "NaN", True)),
    ("stream error, bare", 7, StreamError("not_found", "no such stream", False, 404)),
    (
        "stream error, all fields, on the connection",
        0,
        StreamError("overloaded", "queue is full", True, 503, "model", "wait", 1500),
    ),
    ("classification", 7, Classification("spam", 0.75, 0)),
    ("embedding", 7, Embedding((0.5, -1.0, 0.25), 0)),
    ("embedding of nothing", 7, Embedding((), 0)),
    ("chunk", 7, Chunk(b"\x00\xff\x80", False, 0)),
    ("last chunk, empty", 7, Chunk(b"", True, 1)),
    ("snapshot of a text", 7, Snapshot(0, "Once upon a time", 3)),
    ("token run", 7, TokenRun(41, bytes((4, 0, 3)), " theé,")),
    ("token run without tokens", 7, TokenRun(0, b"", "")),
    ("snapshot of reasoning after others", 7, Snapshot(17, "Well,", 18, reasoning=True)),
    ("revision, interim", 7, Revision(0, "recognise", False, 3, 0.75)),
    ("revision, final", 7, Revision(0, "wreck a nice beach", True, 4, 1.0)),
    (
        "scored token, one alternative",
        7,
        ScoredToken(
            " the", (TokenScores(Score(262, b" the", -0.25), (Score(257, b" a", -2.5),)),), 42
        ),
    ),
    (
        "scored token, one character of two tokens",
        7,
        ScoredToken(
            "é", (TokenScores(Score(195, b"\xc3", -1.0)), TokenScores(Score(169, b"\xa9", 0.0))), 3
        ),
    ),
    ("notice", 7, Notice("truncated", "2 messages were dropped", 0)),
    ("reasoning", 7, Reasoning("1 + 1 is 2", 0)),
    ("tool call, its first piece", 7, ToolCall(0, "call_1", "add", "", 3)),
    ("tool call, a further piece", 7, ToolCall(0, "", "", '{"a": 1', 4)),
    ("heartbeat, ready", 0, Heartbeat(1750000000000, True, (), ("demo",), ("cpu torch",), 3000)),
    (
        "heartbeat of an origin",
        0,
        Heartbeat(1, True, (), ("demo",), ("cpu torch",), 3000, 7, 256, 65536, "file:00ff"),
    ),
    ("heartbeat, not ready", 0, Heartbeat(2**64 - 1, False, ("loading demo", "draining"))),
    ("opened", 7, Opened(STREAM, 0, "v1.k1.cGF5bG9hZA.bWFj", "demo", 12)),
    (
        "opened, with a sibling",
        7,
        Opened(STREAM, 0, "", "demo", 12, (Sibling(STREAM[::-1], "v1"),)),
    ),
    (
        "opened, all fields",
        7,
        Opened(STREAM, 0, "v1", "demo", 12, (Sibling(STREAM, ""),), 1750000000000, '{"a":1}'),
    ),
    (
        "opened, in the middle",
        9,
        Opened(STREAM, 60, "v1", "demo", 12, created_ms=1750000000000, first=42),
    ),
    ("status, running", 9, Status(STREAM, StreamState.RUNNING, 17)),
    ("status, ended", 9, Status(STREAM, StreamState.ENDED, 61)),
    ("hello", 0, Hello(SCHEMA_HASH, "tailrace-edge/0.1.0")),
    ("hello, with compression", 0, Hello(SCHEMA_HASH, "tailrace-edge/0.1.0", Compression.ZSTD)),
    ("answer, bare", 7, Answer(204)),
    (
        "answer, two headers of one name",
        7,
        Answer(200, (Header("vary", "origin"), Header("vary", "accept"))),
    ),
    ("body", 7, Body(b"\x00\xff\x80")),
    ("body of nothing", 7, Body(b"")),
    ("body end", 7, BodyEnd()),
    ("open, least", 1, Open("demo", prompt="Once upon a time")),
    (
        "open, all fields",
        2,
        Open(
            model="demo",
            prompt=None,
            messages=(
                Message("user", "1 + 1 ="),
                Message("assistant", "", '[{"id":"call_1","name":"add","arguments":"{}"}]'),
                Message("tool", "2", tool_call_id="call_1"),
            ),
            max_tokens=64,
            stop=("\n\n", "END"),
            ignore_eos=True,
            logprobs=5,
            format=OutputFormat(FormatKind.REGEX, "[0-9]+"),
            overflow=Overflow.DROP_OLDEST,
            n=3,
            durability=Durability.POWER,
            priority=Priority.BATCH,
            unread=Unread.PAUSE,
            unread_after_s=60,
            tools=Tools('[{"name":"add"}]', ToolChoice.REQUIRED, "add", False),
            note="for whoever reads it",
            cache=Cache.EXACT,
            stages=(StageSwitch("punctuate", False), StageSwitch("group", True)),
            trace="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            idempotency_key="order-17",
            credit=256,
            sampling=Sampling(
                temperature=0.7,
                top_k=40,
                top_p=0.95,
                min_p=0.05,
                repetition_penalty=1.1,
                presence_penalty=-0.5,
                frequency_penalty=0.25,
                seed=2**64 - 1,
            ),
        ),
    ),
    *(
        (f"open, {d.word}, {p.word}", 3, Open("demo", prompt="x", durability=d, priority=p))
        for d, p in zip(Durability, Priority, strict=True)
    ),
    (
        "open, JSON schema",
        3,
        Open("demo", prompt="x", format=OutputFormat(FormatKind.JSON_SCHEMA, '{"type":"object"}')),
    ),
    ("open, a branch", 3, Open("", branch=Branch(STREAM, 0))),
    (
        "open, all fields of a branch",
        3,
        Open("demo", branch=Branch(STREAM, 300, "v1.k1.cGF5bG9hZA.bWFj", " but", "Shorter!")),
    ),
    ("resume from the start", 4, Resume(STREAM)),
    ("challenge", 0, Challenge(bytes(range(32)))),
    ("proof", 0, Proof(bytes(range(32)))),
    ("pass", 7, Pass(bytes(range(32)))),
    ("renew from the start", 4, Renew(STREAM, None, True, 0, None, bytes(range(32)))),
    ("renew, all fields", 5, Renew(STREAM, 41, False, 512, 65536, bytes(range(32)))),
    ("resume, all fields", 5, Resume(STREAM, 41, "v1.k1.cGF5bG9hZA.bWFj", False, 512)),
    ("resume, from an edge", 5, Resume(STREAM, caller=Caller("acme", 5))),
    ("resume, the newest frames as a snapshot", 5, Resume(STREAM, tail=300, snapshot=True)),
    ("resume, frames since a time", 5, Resume(STREAM, since_ms=1750000000000)),
    ("credit", 5, Credit(1024)),
    ("credit, bytes too", 5, Credit(1024, 16_384)),
    ("cancel", 6, Cancel(STREAM)),
    ("cancel with a token", 6, Cancel(STREAM, "v1.k1.cGF5bG9hZA.bWFj")),
    ("cancel, and forget", 6, Cancel(STREAM, forget=True)),
    ("detach", 5, Detach()),
    ("steer", 8, Steer(STREAM, None, "and then")),
    ("steer with a token", 8, Steer(STREAM, "v1.k1.cGF5bG9hZA.bWFj", "")),
    ("input", 9, Input(STREAM, None, 0, b"RIFF")),
    ("input, all fields", 9, Input(STREAM, "v1.k1.cGF5bG9hZA.bWFj", 4096, b"", last=True)),
    ("switch stages", 9, SwitchStages(STREAM, None, (StageSwitch("punctuate", False),))),
    ("input stored", 9, InputStored(STREAM, 4096, False)),
    ("input stored, complete", 9, InputStored(STREAM, 1 << 40, True)),
    ("call, least", 10, Call("stream", "a", "GET", "http://localhost/v1/stream/a")),
    (
        "call, all fields",
        11,
        Call(
            object="stream",
            name="chats/é",
            method="POST",
            url="https://edge.example/v1/stream/chats/%C3%A9?x=1",
            headers=(Header("content-type", "text/plain"), Header("producer-id", "p")),
            body=b"\x00\xffhello",
            credit=16,
            caller=Caller("acme", 127, 64, 2000),
        ),
    ),
]


def frames() -> list[dict[str, Any]]:
    vectors = []
    for name, corr, frame in _FRAMES:
        raw = encode(frame, corr)
        vectors.append(
            {
                "name": name,
                "type": FRAMES[tag_of(raw)].__name__,
                "tag": tag_of(raw),
                "corr": corr,
                "value": to_json(frame),
                "hex": raw.hex(),
            }
        )
    return vectors


# ---- invalid frames ----


def invalid() -> list[dict[str, Any]]:
    keys = ("name", "hex", "code", "field", "offset")
    headers = [dict(zip(keys, vector, strict=True)) for vector in BAD_HEADERS]
    payloads = [
        dict(zip(keys, (name, built(tag, payload), "bad_frame", where, offset), strict=True))
        for name, tag, payload, where, offset in BAD_PAYLOADS
    ]
    return headers + payloads


# ---- cutting a connection into frames ----


def _chunks(raw: bytes, size: int) -> list[str]:
    return [raw[start : start + size].hex() for start in range(0, len(raw), size)]


def streams() -> list[dict[str, Any]]:
    parts = [encode(Token(" the", 42), 7), encode(Detach(), 7), encode(Credit(300), 8)]
    whole = b"".join(parts)
    cut: list[dict[str, Any]] = [
        {"name": f"three frames in pieces of {n}", "chunks": _chunks(whole, n), "pending": 0}
        for n in (1, 3, 7, len(whole))
    ]
    cut.append({"name": "a frame and a half", "chunks": [whole[:18].hex()], "pending": 3})
    for vector in cut:
        done = sum(map(len, vector["chunks"])) // 2 - vector["pending"]
        vector["frames"] = list(_whole(parts, done))
    bad = [
        ("wrong version, seen at the fourth byte", "0b000002", "bad_version", "header.version", 3),
        ("too long, refused before it comes", "ffffff01", "bad_frame", "header.length", 0),
        ("unknown tag, refused before the payload comes", "ff0f000121", "bad_frame", "tag", 4),
    ]
    for name, raw, code, where, offset in bad:
        error = {"code": code, "field": where, "offset": offset}
        cut.append({"name": name, "chunks": [raw], "frames": [], "error": error})
    return cut


def _whole(parts: list[bytes], size: int) -> Iterator[str]:
    """Yield the frames that lie within the first `size` bytes."""
    end = 0
    for part in parts:
        end += len(part)
        if end <= size:
            yield part.hex()


# ---- what edges answer to faults on a WebSocket ----


def sessions() -> list[dict[str, Any]]:
    return [
        {
            "name": row.name,
            "messages": [m.hex() if isinstance(m, bytes) else m for m in row.messages],
            "errors": [{"corr": corr} | error for corr, error in row.errors.items()],
            "close": row.close,
        }
        for row in SESSIONS
    ]


FILES = {
    "primitives.json": primitives,
    "frames.json": frames,
    "invalid.json": invalid,
    "streams.json": streams,
    "sessions.json": sessions,
}


def text_of(name: str) -> str:
    """Return the text of one vector file, as it is to be on disk."""
    return json.dumps(FILES[name](), indent=1, ensure_ascii=True, allow_nan=False) + "\n"


if __name__ == "__main__":
    for file_name in FILES:
        (HERE / file_name).write_text(text_of(file_name), encoding="utf-8")
