"""The HTTP views over a real origin link; how they stream is for tests/e2e to see."""

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.types import Message

from tailrace.edge.application import create_app
from tailrace.edge.config import EdgeConfig
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import WINDOW_FRAMES
from tailrace.ledger.errors import Unavailable
from tailrace.ledger.frame import (
    Cancel,
    Chunk,
    Classification,
    Detach,
    Embedding,
    FinishReason,
    Heartbeat,
    Notice,
    Open,
    Opened,
    Reasoning,
    Resume,
    Revision,
    Score,
    ScoredToken,
    Sibling,
    Steer,
    StreamEnd,
    StreamError,
    Token,
    TokenScores,
    decode,
    encode,
    split,
)
from tests.e2e.sse import after_retry
from tests.edge.scripted_origin import STREAM, TOKEN, ScriptedOrigin

pytestmark = pytest.mark.anyio

WORDS = 3
ID = STREAM.hex()
BODY = {"model": "demo", "prompt": "Once"}
SSE = {"Accept": "text/event-stream"}
FRAMES = {"Accept": "application/vnd.tailrace.frames"}
EVENTS = (
    'id: 0\ndata: {"text":" w0","index":0}\n\n'
    'id: 1\ndata: {"text":" w1","index":1}\n\n'
    'id: 2\ndata: {"text":" w2","index":2}\n\n'
    "id: 3\nevent: end\n"
    'data: {"total_tokens":3,"finish_reason":"length","index":3,"prompt_tokens":3}\n\n'
)


@asynccontextmanager
async def edge(link: OriginPool, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(link, EdgeConfig(http=("127.0.0.1:0",), max_body_bytes=2048, **settings))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
async def origin() -> ScriptedOrigin:
    return ScriptedOrigin(WORDS)


@pytest.fixture
async def client(origin: ScriptedOrigin) -> AsyncIterator[httpx.AsyncClient]:
    async with origin.serving() as link, edge(link) as client:
        yield client


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    return error


# ---- starting ----


async def test_events_carry_every_frame_and_headers_the_way_back(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/generate", json=BODY, headers=SSE)
    assert answer.status_code == 200
    assert after_retry(answer.text) == EVENTS
    assert answer.headers["Tailrace-Stream"] == ID
    assert answer.headers["Tailrace-Token"] == TOKEN
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert answer.headers["Cache-Control"] == "no-store, no-transform"


async def test_raw_frames_are_those_of_the_origin_on_corr_0(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    answer = await client.post("/v1/generate", json=BODY, headers=FRAMES)
    assert [decode(raw) for raw in split(answer.content)] == [(0, f) for f in origin.frames]
    assert answer.headers["Content-Type"] == "application/vnd.tailrace.frames"


async def test_an_edge_in_front_asks_in_frames_and_is_told_all_that_opened_says(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    wanted = Open("demo", prompt="Once", note="mine", credit=3, idempotency_key="its own")
    asked = FRAMES | {"Content-Type": "application/vnd.tailrace.frames", "Idempotency-Key": "k"}
    answer = await client.post("/v1/generate", content=encode(wanted), headers=asked)
    sent = origin.received[0]
    assert isinstance(sent, Open)
    assert (sent.prompt, sent.note, sent.idempotency_key) == ("Once", "mine", "k")
    assert sent.credit == WINDOW_FRAMES
    _, opened = decode(b64decode(answer.headers["Tailrace-Opened"]))
    assert isinstance(opened, Opened)
    assert (opened.stream.hex(), opened.token) == (
        answer.headers["Tailrace-Stream"],
        answer.headers["Tailrace-Token"],
    )


async def test_one_document_comes_at_the_end(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/generate", json=BODY)
    assert answer.json() == {
        "id": ID,
        "model": "demo",
        "text": " w0 w1 w2",
        "finish_reason": "length",
        "total_tokens": 3,
        "prompt_tokens": 3,
    }


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_document_counts_the_prompt_as_the_end_does(
    client: httpx.AsyncClient, origin: ScriptedOrigin, method: str
) -> None:
    # As in front of an upstream server, which counts the prompt when it has read it.
    origin.frames = [Token(" w0", 0), StreamEnd(1, FinishReason.LENGTH, 1, 12)]
    origin.released = 2
    path, body = ("/v1/generate", BODY) if method == "POST" else (f"/v1/generate/{ID}", None)
    document = (await client.request(method, path, json=body)).json()
    assert (document["text"], document["prompt_tokens"]) == (" w0", 12)


async def test_a_stream_longer_than_the_window_arrives_whole() -> None:
    origin = ScriptedOrigin(1500)
    async with origin.serving() as link, edge(link) as client:
        answer = await client.post("/v1/generate", json=BODY)
    assert answer.json()["text"] == "".join(f" w{n}" for n in range(1500))


async def test_the_clients_idempotency_key_reaches_the_origin_or_else_one_of_the_edge(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    await client.post("/v1/generate", json=BODY, headers={"Idempotency-Key": "mine"})
    await client.post("/v1/generate", json=BODY)
    await client.post("/v1/generate", json=BODY)
    keys = [frame.idempotency_key for frame in origin.received if isinstance(frame, Open)]
    assert keys[0] == "mine"
    assert len({key for key in keys if key}) == 3


async def test_the_streams_of_one_request_come_in_one_document(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    origin.siblings = (Sibling(b"1" * 16, "v1.one"), Sibling(b"2" * 16, "v1.two"))
    answer = await client.post("/v1/generate", json=BODY | {"n": 3})
    end = {"finish_reason": "length", "total_tokens": 3}
    streams = [STREAM, b"1" * 16, b"2" * 16]
    assert answer.json() == {
        "id": ID,
        "model": "demo",
        "choices": [{"id": stream.hex(), "text": " w0 w1 w2", **end} for stream in streams],
        "prompt_tokens": 3,
    }
    asked = [frame for frame in origin.received if isinstance(frame, Resume)]
    assert {(frame.stream, frame.token) for frame in asked} == {
        (sibling.stream, sibling.token) for sibling in origin.siblings
    }


async def test_the_streams_beside_the_first_are_named_in_a_header(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    origin.siblings = (Sibling(b"1" * 16, "v1.one"), Sibling(b"2" * 16, ""))
    answer = await client.post("/v1/generate", json=BODY | {"n": 3}, headers=SSE)
    assert answer.headers["Tailrace-Siblings"] == f"{'31' * 16};token=v1.one, {'32' * 16}"
    assert after_retry(answer.text) == EVENTS


async def test_a_stream_that_is_lost_beside_others_is_the_error_of_all(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    origin.siblings = (Sibling(b"1" * 16, ""),)
    origin.frames[-1] = StreamError("damaged", "gone", retryable=False, status=500)  # type: ignore[call-overload]
    answer = await client.post("/v1/generate", json=BODY | {"n": 2})
    assert (answer.status_code, error_of(answer)["code"]) == (500, "damaged")


async def test_a_document_says_what_the_frames_add_up_to(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    score = TokenScores(Score(5, b"\xc3", -0.5), (Score(6, b"a", float("-inf")),))
    origin.frames = [
        Notice("truncated", "2 messages", 0),
        Token("one ", 1),
        Revision(2, "tw", False, 2),
        Revision(2, "two", True, 3),
        ScoredToken("!", (score,), 4),
        Classification("spam", 0.5, 5),
        Embedding((0.5, 1.5), 6),
        Chunk(b"\x00", False, 7),
        Chunk(b"\xff", True, 8),
        Reasoning("let me ", 9),
        Reasoning("think", 10),
        StreamEnd(4, FinishReason.FAILED, 11, 3, "NaN", retryable=True),
    ]
    origin.released = len(origin.frames)
    document = (await client.post("/v1/generate", json=BODY)).json()
    assert document == {
        "id": ID,
        "model": "demo",
        "text": "one two!",
        "logprobs": [
            {
                "id": 5,
                "token": "\ufffd",
                "logprob": -0.5,
                "bytes": [0xC3],
                "top": [{"id": 6, "token": "a", "logprob": None}],
            }
        ],
        "classification": [{"label": "spam", "confidence": 0.5}],
        "embedding": [0.5, 1.5],
        "data": "AP8=",
        "reasoning": "let me think",
        "notices": [{"code": "truncated", "message": "2 messages"}],
        "finish_reason": "failed",
        "total_tokens": 4,
        "message": "NaN",
        "retryable": True,
        "prompt_tokens": 3,
    }


async def test_several_embeddings_are_a_list(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    origin.frames = [
        Embedding((0.5,), 0),
        Embedding((1.5,), 1),
        StreamEnd(0, FinishReason.STOP, 2, 3),
    ]
    origin.released = 3
    document = (await client.post("/v1/generate", json=BODY)).json()
    assert document["embeddings"] == [[0.5], [1.5]]


async def test_what_is_too_long_for_a_document_is_refused(
    client: httpx.AsyncClient, origin: ScriptedOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.edge.generate.routes.MAX_DOCUMENT_BYTES", 40)
    answer = await client.post("/v1/generate", json=BODY)
    assert (answer.status_code, error_of(answer)["code"]) == (413, "too_large")


# ---- steering ----


async def test_a_steer_reaches_the_origin_and_says_how_far_the_stream_is(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    answer = await client.post(
        f"/v1/generate/{ID}/steer", json={"text": " but"}, headers={"Tailrace-Token": TOKEN}
    )
    assert answer.json() == {"id": ID, "state": "running", "next_index": WORDS + 1}
    assert origin.received == [Steer(STREAM, TOKEN, " but")]


# ---- reading again ----


async def test_an_empty_last_event_id_asks_for_all(client: httpx.AsyncClient) -> None:
    answer = await client.get(f"/v1/generate/{ID}", headers=SSE | {"Last-Event-ID": ""})
    assert after_retry(answer.text) == EVENTS


async def test_a_frame_that_is_no_event_is_passed_over(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    origin.frames.insert(0, Heartbeat(0, ready=True))  # type: ignore[arg-type]
    origin.released += 1
    answer = await client.get(f"/v1/generate/{ID}", headers=SSE)
    assert after_retry(answer.text) == EVENTS


@pytest.mark.parametrize(
    ("path", "view"),
    [
        (f"/v1/generate/{ID}", SSE),
        (f"/v1/generate/{ID}", FRAMES),
        (f"/v1/completions/{ID}?stream=true", SSE),
        (f"/v1/responses/resp_{ID}?stream=true", SSE),
    ],
)
async def test_the_head_of_a_running_stream_is_its_head_alone(
    client: httpx.AsyncClient, origin: ScriptedOrigin, path: str, view: dict[str, str]
) -> None:
    origin.released = 1
    async with asyncio.timeout(60):  # with the fault it would wait for an end that never comes
        answer = await client.head(path, headers=view)
    assert (answer.status_code, answer.headers["Tailrace-Stream"]) == (200, ID)
    assert answer.headers["Content-Type"] == view["Accept"]
    assert "Content-Length" not in answer.headers
    await origin.has_received(2)
    assert [type(frame) for frame in origin.received] == [Resume, Detach]


async def test_the_document_of_a_running_stream_has_its_text_so_far(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    origin.released = 2
    document = (await client.get(f"/v1/generate/{ID}")).json()
    assert document == {
        "id": ID,
        "model": "demo",
        "state": "running",
        "next_index": 2,
        "text": " w0 w1",
        "prompt_tokens": 3,
    }


async def test_a_reader_presents_its_token(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    token = {"Tailrace-Token": "v1.mine"}
    await client.get(f"/v1/generate/{ID}", headers=token)
    await client.post(f"/v1/generate/{ID}/cancel", headers=token)
    asked = [frame for frame in origin.received if isinstance(frame, Resume | Cancel)]
    assert [frame.token for frame in asked] == ["v1.mine", "v1.mine"]


# ---- errors ----


@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
@pytest.mark.parametrize(
    ("allowed", "page", "may"),
    [
        ((), "https://page.example", None),
        (("https://page.example",), "https://page.example", "https://page.example"),
        (("https://page.example",), "https://other.example", None),
        (("*",), "https://page.example", "*"),
    ],
)
async def test_a_page_of_another_origin_may_generate_only_where_it_is_named(
    origin: ScriptedOrigin,
    method: str,
    allowed: tuple[str, ...],
    page: str,
    may: str | None,
) -> None:
    headers = SSE | {"Origin": page, "Access-Control-Request-Method": "POST"}
    async with origin.serving() as link, edge(link, allowed_origins=allowed) as client:
        answer = await client.request(method, "/v1/generate", json=BODY, headers=headers)
        refusal = await client.request(method, f"/v1/generate/{ID}?after=x", headers=headers)
    for each in (answer, refusal):
        assert each.headers.get("Access-Control-Allow-Origin") == may
        exposed = each.headers.get("Access-Control-Expose-Headers", "").split(", ")
        assert ({"Tailrace-Stream", "Tailrace-Token", "Retry-After"} <= set(exposed)) == bool(may)
    if method == "OPTIONS":
        asked_for = answer.headers.get("Access-Control-Allow-Headers", "").split(", ")
        assert ({"Content-Type", "Idempotency-Key"} <= set(asked_for)) == bool(may)
        assert origin.received == []


async def test_a_body_of_unknown_length_is_cut_off_at_the_limit(client: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 512

    answer = await client.post("/v1/generate", content=endless())
    assert answer.status_code == 413


async def test_a_fault_of_ours_shows_no_traceback(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object, **_kwargs: object) -> Open:
        raise RuntimeError("a secret of the implementation")

    monkeypatch.setattr("tailrace.edge.generate.routes.parse_generate", broken)
    answer = await client.post("/v1/generate", json=BODY)
    assert (answer.status_code, error_of(answer)["code"]) == (500, "internal")
    assert "secret" not in answer.text


# ---- health ----


async def test_ready_is_what_the_origin_says(
    client: httpx.AsyncClient, origin: ScriptedOrigin
) -> None:
    answer = await client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {
        "ready": True,
        "reasons": [],
        "models": ["demo"],
        "devices": ["cpu torch"],
        "origins": [
            {
                "origin": f"127.0.0.1:{origin.port}",
                "up": True,
                "ready": True,
                "reasons": [],
                "models": ["demo"],
                "streams": 0,
                "room": 0,
            }
        ],
    }


async def test_without_a_link_an_edge_lives_but_is_not_ready() -> None:
    async with edge(OriginPool(("127.0.0.1", 9))) as client:
        assert (await client.get("/healthz")).status_code == 200
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["reasons"] == ["no link to the origin at 127.0.0.1:9"]


@pytest.mark.parametrize(
    "headers", [{"X-Forwarded-For": "203.0.113.5"}, {"Via": "1.1 proxy"}, {"Host": "192.0.2.1"}]
)
async def test_others_learn_only_if_an_edge_is_ready_and_the_kind_of_reason(
    client: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    answer = await client.get("/readyz", headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "reasons": []})
    async with edge(OriginPool(("127.0.0.1", 9))) as without:
        answer = await without.get("/readyz", headers=headers)
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "reasons": ["no_origin"]}


# ---- one of the two goes away ----


class Visit:
    """One ASGI request whose client can watch the body grow and leave in the middle."""

    def __init__(self, app: Starlette, accept: str) -> None:
        self._body = json.dumps(BODY | {"prompt": "hold"}).encode()
        self._left = asyncio.Event()
        self._begun = asyncio.Event()
        self.received = b""
        headers = [(b"accept", accept.encode()), (b"host", b"127.0.0.1")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/generate",
            "raw_path": b"/v1/generate",
            "query_string": b"",
            "headers": headers,
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def first_frame(self) -> None:
        await self._begun.wait()

    def leave(self) -> None:
        self._left.set()

    async def _receive(self) -> Message:
        body, self._body = self._body, b""
        if body:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.received += message.get("body", b"")
        if self.received:
            self._begun.set()


@pytest.mark.parametrize("accept", [SSE["Accept"], FRAMES["Accept"]])
async def test_a_client_that_leaves_is_detached(origin: ScriptedOrigin, accept: str) -> None:
    async with origin.serving() as link:
        visit = Visit(create_app(link, EdgeConfig()), accept)
        await visit.first_frame()
        visit.leave()
        await visit.task
        await origin.has_received(2)
    assert [type(frame) for frame in origin.received] == [Open, Detach]


async def test_a_stream_that_the_edge_abandons_ends_with_a_retryable_error(
    origin: ScriptedOrigin,
) -> None:
    async with origin.serving() as link:
        app = create_app(link, EdgeConfig())
        events, frames = Visit(app, SSE["Accept"]), Visit(app, FRAMES["Accept"])
        await events.first_frame()
        await frames.first_frame()
        link.refuse_all(Unavailable("shutting down"))
        await asyncio.gather(events.task, frames.task)
    event = events.received.decode().split("\n\n")[-2]
    assert event.startswith("event: error\n")
    assert json.loads(event.partition("data: ")[2])["error"]["retryable"]
    _, last = decode(split(frames.received)[-1])
    assert isinstance(last, StreamError)
    assert (last.code, last.message, last.retryable) == ("unavailable", "shutting down", True)
    assert last.retry_after_ms is not None


async def test_an_edge_that_goes_away_takes_nothing_new(origin: ScriptedOrigin) -> None:
    async with origin.serving() as link, edge(link) as client:
        link.refuse_all(Unavailable("shutting down"))
        assert (await client.post("/v1/generate", json=BODY)).status_code == 503
    assert origin.received == []
