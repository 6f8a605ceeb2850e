"""Grouped text in each dialect, over sockets: cut within a group, resumed, and whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tailrace.client import Client, StreamFrame
from tailrace.edge.ai_sdk import UiEvents
from tailrace.edge.generate.grouping import FrameGrouper, Grouping
from tailrace.ledger.errors import FrameError
from tailrace.ledger.frame import (
    FRAMES_TYPE,
    Answer,
    Body,
    BodyEnd,
    FinishReason,
    Notice,
    Reasoning,
    Sibling,
    Snapshot,
    Splitter,
    StreamEnd,
    Token,
    decode,
    encode,
)
from tailrace.ledger.text_units import Unit
from tests.edge.scripted_origin import PROMPT_TOKENS, STREAM, ScriptedOrigin
from tests.edge.server.serving import PATIENCE_S, serving

pytestmark = pytest.mark.anyio

TEXTS = ["Hi", ".", " So", " it", " is", " 3", ".", "14", "!", "\n\n", "And", " no", " end"]
WHOLE = "".join(TEXTS)
PIECES = ["Hi.", " So it is 3.14!\n\n", "And no end"]
FRAMES = [
    *(Token(text, index) for index, text in enumerate(TEXTS)),
    StreamEnd(len(TEXTS), FinishReason.STOP, len(TEXTS), PROMPT_TOKENS),
]
BY_SENTENCE = Grouping(Unit.SENTENCE)
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
PARTS = {"messages": [{"role": "user", "parts": [{"type": "text", "text": "Hi"}]}]}
Piece = tuple[str, int | None]


def pieces_of(count: int) -> list[str]:
    """Return the pieces that an edge sends of the first `count` frames."""
    grouper = FrameGrouper(BY_SENTENCE)
    sent = [each for frame in FRAMES[:count] for each in grouper.add(encode(frame))]
    frames = [decode(raw)[1] for raw in sent]
    return [frame.text for frame in frames if isinstance(frame, Token | Snapshot)]


# ---- the pieces in a body, which may be cut ----


def in_events(body: bytes) -> list[Piece]:
    found: list[Piece] = []
    for block in body.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if "id" in lines and "event" not in lines:
            data = json.loads(lines["data"])
            assert int(lines["id"]) == data["index"]
            found.append((data["text"], data["index"]))
    return found


def in_lines(body: bytes) -> list[Piece]:
    told = [json.loads(line) for line in body.split(b"\n")[:-1]]
    return [(line["text"], line["index"]) for line in told if line["type"] == "token"]


def in_frames(body: bytes) -> list[Piece]:
    found: list[Piece] = []
    expected: int | None = None
    for raw in Splitter().feed(body):
        frame = decode(raw)[1]
        if isinstance(frame, Token | Snapshot):
            first = frame.first if isinstance(frame, Snapshot) else frame.index
            assert expected in (None, first), "a gap"
            expected = frame.index + 1
            found.append((frame.text, frame.index))
    return found


def data_in(body: bytes) -> list[dict[str, Any]]:
    blocks = body.decode().split("\n\n")[:-1]
    return [json.loads(block[6:]) for block in blocks if block.startswith("data: {")]


def in_chunks(body: bytes) -> list[Piece]:
    found: list[Piece] = []
    for chunk in data_in(body):
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            if text:
                found.append((text, chunk["sequence_number"]))
    return found


def in_parts(body: bytes) -> list[Piece]:
    return [(each["delta"], None) for each in data_in(body) if each["type"] == "text-delta"]


@dataclass(frozen=True)
class Dialect:
    """How a dialect starts and resumes a grouped stream, and how its bodies are read."""

    start: str
    body: dict[str, Any]
    read: str
    pieces: Callable[[bytes], list[Piece]]
    after: str | None
    accept: str = "text/event-stream"


GENERATE = {"model": "demo", "prompt": "Once"}
READ = f"/v1/generate/{STREAM.hex()}?group=sentence"
CHUNKS = f"{STREAM.hex()}?stream=true&group=sentence"
COMPLETIONS = f"/v1/completions/cmpl-{CHUNKS}"
DIALECTS = {
    "events": Dialect("/v1/generate", GENERATE, READ, in_events, "after"),
    "lines": Dialect("/v1/generate", GENERATE, READ, in_lines, "after", "application/jsonl"),
    "frames": Dialect("/v1/generate", GENERATE, READ, in_frames, "after", FRAMES_TYPE),
    "branch": Dialect(
        f"/v1/generate/{STREAM.hex()}/branch", {"index": 0}, READ, in_events, "after"
    ),
    "chat completions": Dialect(
        "/v1/chat/completions",
        CHAT | {"stream": True},
        f"/v1/chat/completions/chatcmpl-{CHUNKS}",
        in_chunks,
        "starting_after",
    ),
    "completions": Dialect(
        "/v1/completions", GENERATE | {"stream": True}, COMPLETIONS, in_chunks, "starting_after"
    ),
    "AI SDK": Dialect("/api/chat", PARTS, "/api/chat/a/stream?group=sentence", in_parts, None),
}


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    return DIALECTS[request.param]


@pytest.fixture
def origin() -> ScriptedOrigin:
    made = ScriptedOrigin(0)
    made.frames, made.released = [*FRAMES], len(FRAMES)
    turns = json.dumps({"turns": [{"stream": STREAM.hex()}]}).encode()
    made.answers = (Answer(200), Body(turns), BodyEnd())
    return made


@pytest.fixture
async def client(origin: ScriptedOrigin) -> AsyncIterator[httpx.AsyncClient]:
    async with origin.listening(), serving(origin) as served:
        url = f"http://127.0.0.1:{served.port}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            yield client


async def cut_off(client: httpx.AsyncClient, dialect: Dialect, count: int) -> list[Piece]:
    """Start a stream, and kill the connection when `count` pieces have come."""
    body = dialect.body | {"group": "sentence"}
    head = {"Accept": dialect.accept}
    async with client.stream("POST", dialect.start, json=body, headers=head) as response:
        assert response.status_code == 200
        got = b""
        async for data in response.aiter_raw():
            got += data
            try:
                if len(dialect.pieces(got)) >= count:
                    break
            except FrameError:  # the data ends within a frame
                continue
    return dialect.pieces(got)


async def test_the_text_before_a_cut_and_the_resumed_text_are_the_whole(
    origin: ScriptedOrigin, client: httpx.AsyncClient, dialect: Dialect
) -> None:
    """The connection is cut while the text of some frames is held: within a group."""
    for released in range(1, len(FRAMES)):
        origin.released = released
        expected = pieces_of(released)
        before = await cut_off(client, dialect, len(expected)) if expected else []
        assert [text for text, _ in before] == expected
        origin.released = len(FRAMES)
        params: dict[str, str | int] = {}
        if dialect.after is not None and before:
            params = {dialect.after: before[-1][1] or 0}
        url = httpx.URL(dialect.read)
        head = {"Accept": dialect.accept}
        response = await client.get(url.copy_merge_params(params), headers=head)
        assert response.status_code == 200
        rest = [text for text, _ in dialect.pieces(response.content)]
        seen = "" if dialect.after is None else "".join(expected)
        assert seen + "".join(rest) == WHOLE
        assert len(rest) <= len(PIECES)


async def test_a_whole_answer_has_the_pieces(client: httpx.AsyncClient, dialect: Dialect) -> None:
    got = await client.get(dialect.read, headers={"Accept": dialect.accept})
    assert [text for text, _ in dialect.pieces(got.content)] == PIECES


BODIES: list[tuple[object, str, str]] = [
    ("page", "group", '"paragraph"'),
    ({"by": "page"}, "group.by", "paragraph"),
    ({"ms": 0}, "group.ms", "60000"),
    ({"ms": -5}, "group.ms", "60000"),
    ({"chars": 4097}, "group.chars", "4096"),
    ({}, "group", '"paragraph"'),
]
QUERIES = [
    ("group=page", "group", "paragraph"),
    ("group_ms=0", "group_ms", "60000"),
    ("group_ms=-1", "group_ms", "60000"),
    ("group_chars=x", "group_chars", "4096"),
]


async def test_an_invalid_group_is_refused_in_the_shape_of_the_dialect(
    client: httpx.AsyncClient, dialect: Dialect
) -> None:
    head = {"Accept": dialect.accept}
    answers = []
    for group, field, right in BODIES:
        posted = await client.post(dialect.start, json=dialect.body | {"group": group})
        answers.append((posted, field, right))
    for query, field, right in QUERIES:
        url = dialect.read.replace("group=sentence", query)
        answers.append((await client.get(url, headers=head), field, right))
    for answer, field, right in answers:
        assert answer.status_code == 400
        if dialect.after is None:  # the AI SDK, whose errors are plain text
            assert field in answer.text
            assert right in answer.text
            continue
        error = answer.json()["error"]
        assert error.get("param", error.get("field")) == field
        assert right in error["message"] + error.get("hint", "")


async def test_a_document_has_the_whole_text(client: httpx.AsyncClient) -> None:
    made = await client.post("/v1/generate", json=GENERATE | {"group": "word"})
    read = await client.get(READ)
    chat = await client.post("/v1/chat/completions", json=CHAT | {"group": "word"})
    assert made.json()["text"] == read.json()["text"] == WHOLE
    assert chat.json()["choices"][0]["message"]["content"] == WHOLE


async def test_a_group_is_sent_when_its_time_is_over(
    origin: ScriptedOrigin, client: httpx.AsyncClient
) -> None:
    origin.released = 2
    body = GENERATE | {"group": {"ms": 1}}
    head = {"Accept": "text/event-stream"}
    async with client.stream("POST", "/v1/generate", json=body, headers=head) as response:
        got = b""
        async for data in response.aiter_raw():
            got += data
            if in_events(got):
                break
    assert "".join(text for text, _ in in_events(got)) in ("Hi", "Hi.")


async def test_the_python_client_that_is_cut_after_each_piece_gets_the_whole(
    client: httpx.AsyncClient,
) -> None:
    got: list[StreamFrame] = []
    async with Client([str(client.base_url)]) as reader:
        stream = reader.generate(prompt="Once", group={"by": "sentence", "chars": 9})
        async for frame in stream:
            got.append(frame)
            stream.cut()
    pieces = [frame.text for frame in got if isinstance(frame, Token | Snapshot)]
    assert "".join(pieces) == WHOLE
    assert len(pieces) < len(TEXTS) / 2
    assert stream.resumes == len(pieces)


async def test_each_choice_has_its_own_pieces(
    origin: ScriptedOrigin, client: httpx.AsyncClient
) -> None:
    origin.siblings = (Sibling(bytes(15) + b"\x01", ""),)
    body = CHAT | {"stream": True, "n": 2, "group": "sentence"}
    got = await client.post("/v1/chat/completions", json=body)
    for choice in (0, 1):
        deltas = [
            each["delta"]["content"]
            for chunk in data_in(got.content)
            for each in chunk["choices"]
            if each["index"] == choice and each["delta"].get("content")
        ]
        assert deltas == PIECES


async def test_parts_of_reasoning_and_notices_keep_their_places(
    origin: ScriptedOrigin, client: httpx.AsyncClient
) -> None:
    origin.frames = [
        Reasoning("Hm", 0),
        Reasoning(", so", 1),
        Token("It", 2),
        Token(" is", 3),
        Notice("inexact", "another engine", 4),
        Token(" so", 5),
        StreamEnd(6, FinishReason.STOP, 6, PROMPT_TOKENS),
    ]
    origin.released = len(origin.frames)
    got = await client.get(READ, headers={"Accept": "application/jsonl"})
    told = [json.loads(line) for line in got.text.splitlines()]
    assert [(line["type"], line.get("text"), line["index"]) for line in told] == [
        ("reasoning", "Hm, so", 1),
        ("token", "It is", 3),
        ("notice", None, 4),
        ("token", " so", 5),
        ("end", None, 6),
    ]
    encoder = UiEvents()
    assert encoder.hold_s is None
    chat = await client.get(DIALECTS["AI SDK"].read)
    assert in_parts(chat.content) == [("It is", None), (" so", None)]


@pytest.mark.parametrize("snapshot", [0, 1])
async def test_a_tail_and_a_snapshot_can_be_grouped(
    client: httpx.AsyncClient, snapshot: int
) -> None:
    url = f"{READ}&tail=5&snapshot={snapshot}"
    got = await client.get(url, headers={"Accept": FRAMES_TYPE})
    texts = [text for text, _ in in_frames(got.content)]
    rest = "".join(TEXTS[-4:])
    assert texts == ([rest] if snapshot else ["\n\nAnd no end"])
