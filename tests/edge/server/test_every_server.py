"""One table of requests on three servers: ours, Hypercorn as it comes, and Starlette's TestClient.

Hypercorn answers each of them over HTTP/1.1 and over HTTP/3. Every answer is the same, to the byte;
on our server the streams among them leave past ASGI.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx
import pytest
import zstandard
from hypercorn.asyncio import serve
from hypercorn.config import Config
from starlette.testclient import TestClient

from tailrace.edge.access.keys import KeyRing, changing
from tailrace.edge.assembly import assemble
from tailrace.edge.config import EdgeConfig
from tailrace.ledger.frame import Cache, Caller, Open, Priority, Resume, Sibling, encode
from tailrace.up import CertificateFiles, development_certificate
from tests.e2e.processes import free_port
from tests.e2e.sse import after_retry
from tests.edge.access.test_authenticator import KEY as API_KEY
from tests.edge.access.test_authenticator import api_key
from tests.edge.quic.http3_client import Http3Client
from tests.edge.scripted_origin import STREAM, ScriptedOrigin, is_up
from tests.edge.server.detached import detached
from tests.edge.server.serving import Answer, Client, Served, serving
from tests.edge.server.stock_hypercorn import hypercorn, ready

pytestmark = pytest.mark.anyio

WORDS = 700
ID = STREAM.hex()
SSE = "Accept: text/event-stream"
FRAMES = "Accept: application/vnd.tailrace.frames"
NDJSON = "Accept: application/x-ndjson"
JSONL = "Accept: application/jsonl"
KEY = "Idempotency-Key: mine"
ZSTD = "Accept-Encoding: zstd, identity;q=0"
NO_CODING = "Accept-Encoding: br, *;q=0"
PAGE = "Origin: https://app.example"
VERSION = "Anthropic-Version: 2023-06-01"
BODY = b'{"model": "demo", "prompt": "Once"}'
STREAMED = b'{"model": "demo", "prompt": "Once", "stream": true%b}'
CHAT = b'{"model": "demo", "messages": [{"role": "user", "content": "Once"}], "stream": true%b}'
RESPONSE = b'{"model": "demo", "input": "Once", "stream": true}'
MESSAGE = (
    b'{"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "Once"}],'
    b' "stream": true}'
)
UNKNOWN = MESSAGE.replace(b"demo", b"x")
BRANCH = f"POST /v1/generate/{ID}/branch"
FROM_3 = b'{"index": 3, "seed": 7}'
KNOWN = BODY[:-1] + b', "cache": "exact"}'
UI = b'{"messages": [{"role": "user", "parts": [{"type": "text", "text": "Once"}]}]%b}'
IN_FRAMES = "Content-Type: application/vnd.tailrace.frames"
OPEN = encode(Open("demo", prompt="Once", credit=0))
OPEN_KNOWN = encode(Open("demo", prompt="Once", credit=0, cache=Cache.EXACT))
OF_A_CALLER = encode(Open("demo", prompt="Once", caller=Caller("somebody", 0)))
NO_OPEN = encode(Resume(STREAM))
MAGIC = zstandard.FRAME_HEADER
"""The beginning of a compressed body. TestClient, which is httpx, decompresses by itself."""
URGENT = encode(Open("demo", prompt="Once", credit=0, priority=Priority.INTERACTIVE))
BATCH_KEY = f"Authorization: Bearer {API_KEY}"
SLOW, FAST = b', "priority": "batch"}', b', "priority": "standard"}'
SETTINGS: dict[str, Any] = {"allowed_origins": ("https://app.example",), "max_body_bytes": 2048}


class Case(NamedTuple):
    """A request that every server must answer alike."""

    name: str
    line: str
    headers: tuple[str, ...] = (SSE,)
    body: bytes | None = None
    fast: bool = True
    """The answer leaves our server past ASGI."""
    chunked: bool = False
    by_http3: bool = True
    """False if aioquic's client cannot read the answer: it compares the length that a response to
    HEAD announces with that of the body, which such a response does not have (RFC 9114, 4.1.2)."""


CASES = [
    Case("start, events", "POST /v1/generate", (SSE, KEY), BODY),
    Case("start, frames", "POST /v1/generate", (FRAMES, KEY), BODY),
    Case("start, in chunks", "POST /v1/generate", (SSE, KEY), BODY, chunked=True),
    Case("start, expecting", "POST /v1/generate", (SSE, KEY, "Expect: 100-continue"), BODY),
    Case("start, a page of an allowed origin", "POST /v1/generate", (SSE, PAGE), BODY),
    Case("start, close", "POST /v1/generate", (SSE, KEY, "Connection: close"), BODY),
    Case("start, no such model", "POST /v1/generate", body=b'{"model": "x", "prompt": "y"}'),
    Case("start, by a frame", "POST /v1/generate", (FRAMES, KEY, IN_FRAMES), OPEN),
    Case("read", f"GET /v1/generate/{ID}"),
    Case("read, frames", f"GET /v1/generate/{ID}", (FRAMES,)),
    Case("read, some preferred", f"GET /v1/generate/{ID}", ("Accept: text/*;q=0.9, */*;q=0.1",)),
    Case("read after", f"GET /v1/generate/{ID}?after=41"),
    Case("read after, by header", f"GET /v1/generate/{ID}", (SSE, "Last-Event-ID: 600")),
    Case("read after, an empty header", f"GET /v1/generate/{ID}", (SSE, "Last-Event-ID:")),
    Case("read after the end", f"GET /v1/generate/{ID}?after={WORDS}"),
    Case("read beyond the end", f"GET /v1/generate/{ID}?after=9999"),
    Case("read another stream", f"GET /v1/generate/{'f' * 32}"),
    Case("start, lines", "POST /v1/generate", (NDJSON, KEY), BODY),
    Case("read, lines", f"GET /v1/generate/{ID}", (JSONL,)),
    Case("read after, lines", f"GET /v1/generate/{ID}?after=41", (NDJSON,)),
    Case("read after the end, lines", f"GET /v1/generate/{ID}?after={WORDS}", (NDJSON,)),
    Case("snapshot", f"GET /v1/generate/{ID}?snapshot=1"),
    Case("snapshot, lines", f"GET /v1/generate/{ID}?snapshot=1&after=9", (JSONL,)),
    Case("tail", f"GET /v1/generate/{ID}?tail=9"),
    Case("tail, snapshot", f"GET /v1/generate/{ID}?tail=9&snapshot=1", (FRAMES,)),
    Case("read, compressed", f"GET /v1/generate/{ID}", (SSE, ZSTD)),
    Case("read, frames, compressed", f"GET /v1/generate/{ID}", (FRAMES, ZSTD)),
    Case("snapshot, lines, compressed", f"GET /v1/generate/{ID}?snapshot=1", (JSONL, ZSTD)),
    Case("start, compressed", "POST /v1/generate", (SSE, KEY, ZSTD), BODY),
    Case("responses, compressed", f"GET /v1/responses/resp_{ID}?stream=true", (ZSTD,)),
    Case("chat, read, compressed", f"GET /v1/chat/completions/{ID}?stream=true", (ZSTD,)),
    Case("since", f"GET /v1/generate/{ID}?since=2026-11-28T09:30:00Z"),
    Case("since, lines", f"GET /v1/generate/{ID}?since=1764322200000", (NDJSON,)),
    Case("branch", BRANCH, (SSE, KEY), FROM_3),
    Case("branch, frames", BRANCH, (FRAMES, KEY), FROM_3),
    Case("branch, lines", BRANCH, (NDJSON, KEY), FROM_3),
    Case("branch, snapshot", f"{BRANCH}?snapshot=1", (SSE, KEY), FROM_3),
    Case("branch, with a text", BRANCH, (SSE, KEY), b'{"index": 3, "text": " But then"}'),
    Case("branch of another stream", BRANCH.replace(ID, "f" * 32), (SSE,), FROM_3),
    Case("branch beyond the end", BRANCH, (SSE,), b'{"index": 9999}'),
    Case("start, maybe from the ledger", "POST /v1/generate", (SSE, KEY), KNOWN),
    Case(
        "start, by a frame, maybe from the ledger",
        "POST /v1/generate",
        (FRAMES, KEY, IN_FRAMES),
        OPEN_KNOWN,
    ),
    Case("head of a stream", f"HEAD /v1/generate/{ID}"),
    Case("completions", "POST /v1/completions", (KEY,), STREAMED % b""),
    Case("completions, one choice", "POST /v1/completions", (KEY,), STREAMED % b', "n": 1'),
    Case("completions, choices of null", "POST /v1/completions", (KEY,), STREAMED % b',"n":null'),
    Case("chat", "POST /v1/chat/completions", (KEY,), CHAT % b""),
    Case("chat, refused", "POST /v1/chat/completions", (KEY,), CHAT.replace(b"demo", b"x") % b""),
    Case("chat, read", f"GET /v1/chat/completions/{ID}?stream=true", ()),
    Case("chat, read after", f"GET /v1/chat/completions/{ID}?stream=true&starting_after=9", ()),
    Case("responses", "POST /v1/responses", (KEY,), RESPONSE),
    Case("responses, read", f"GET /v1/responses/resp_{ID}?stream=true", ()),
    Case("responses, after", f"GET /v1/responses/resp_{ID}?stream=true&starting_after=9", ()),
    Case("messages", "POST /v1/messages", (KEY, VERSION), MESSAGE),
    Case("messages, no such model", "POST /v1/messages", (VERSION,), UNKNOWN),
    Case("messages, read", f"GET /v1/messages/msg_{ID}?stream=true", ()),
    Case("messages, after", f"GET /v1/messages/msg_{ID}?starting_after=9", ()),
    Case("messages, by header", f"GET /v1/messages/msg_{ID}", ("Last-Event-ID: 600",)),
    Case("the AI SDK's chat", "POST /api/chat", (KEY,), UI % b', "model": "demo"'),
    Case("the AI SDK's chat, frames", "POST /api/chat", (FRAMES, KEY), UI % b', "model": "demo"'),
    # No streams, and requests that are refused before a stream begins.
    Case("start, by a frame of another", "POST /v1/generate", (FRAMES, IN_FRAMES), NO_OPEN, False),
    Case("start, by a caller", "POST /v1/generate", (FRAMES, IN_FRAMES), OF_A_CALLER, False),
    Case("start, by no frame", "POST /v1/generate", (FRAMES, IN_FRAMES), b"\xff\xff", False),
    Case("document", "POST /v1/generate", (KEY,), BODY, fast=False),
    Case("nothing acceptable", "POST /v1/generate", ("Accept: image/png",), BODY, fast=False),
    Case("no coding acceptable", "POST /v1/generate", (SSE, NO_CODING), BODY, fast=False),
    Case("chat, no coding", "POST /v1/chat/completions", (NO_CODING,), CHAT % b"", fast=False),
    Case("messages, no coding", "POST /v1/messages", (VERSION, NO_CODING), MESSAGE, fast=False),
    Case("head of a document", f"HEAD /v1/generate/{ID}", (), fast=False, by_http3=False),
    Case("wrong method", "PUT /v1/generate", body=BODY, fast=False),
    Case("no stream id", "GET /v1/generate/nothing", fast=False),
    Case("a query that is an index twice", f"GET /v1/generate/{ID}?after=1&after=2", fast=False),
    Case("an index that is none", f"GET /v1/generate/{ID}?after=x", fast=False),
    Case("tail and after", f"GET /v1/generate/{ID}?tail=1&after=2", fast=False),
    Case("since and after", f"GET /v1/generate/{ID}?since=1764322200000&after=2", fast=False),
    Case("no time", f"GET /v1/generate/{ID}?since=noon", (JSONL,), fast=False),
    Case("a tail of nothing", f"GET /v1/generate/{ID}?tail=0", (FRAMES,), fast=False),
    Case("branch, document", BRANCH, (KEY,), FROM_3, fast=False),
    Case("branch without an index", BRANCH, body=b"{}", fast=False),
    Case("branch with a prompt", BRANCH, body=b'{"index": 3, "prompt": "x"}', fast=False),
    Case("branch, no stream id", BRANCH.replace(ID, "nothing"), body=FROM_3, fast=False),
    Case("branch, a snapshot that is a word", f"{BRANCH}?snapshot=yes", body=FROM_3, fast=False),
    Case("branch, wrong method", BRANCH.replace("POST", "GET"), fast=False),
    Case("a cache that is none", "POST /v1/generate", body=KNOWN[:-3] + b'ly"}', fast=False),
    Case("no JSON", "POST /v1/generate", body=b"{", fast=False),
    Case("a key that is none", "POST /v1/generate", (SSE, "Idempotency-Key:"), BODY, fast=False),
    Case("too long a body", "POST /v1/generate", body=b" " * 3000, fast=False),
    Case("a foreign page", "POST /v1/generate", (SSE, "Origin: https://x.example"), BODY, False),
    Case("another host", f"GET /v1/generate/{ID}", (SSE, "Host: x.example"), fast=False),
    Case("message, document", f"GET /v1/messages/msg_{ID}", (), fast=False),
    Case("message, no version", "POST /v1/messages", (), MESSAGE, fast=False),
    Case("chat, a position that is none", "GET /v1/chats/c?after=x", fast=False),
    Case("chat, as frames", "GET /v1/chats/c", (FRAMES,), fast=False),
    Case("chat, two streams", "POST /v1/generate", (), BODY[:-1] + b', "chat":"c","n":2}', False),
    Case("nothing there", "GET /v1/nothing", fast=False),
    Case("usage of a key, without keys", "GET /v1/usage?by=day", fast=False),
    Case("usage of all keys, without a right", "GET /v1/admin/usage", fast=False),
    Case("alive", "GET /healthz", fast=False),
]

CASES_OF_A_KEY = [
    Case("its class", "POST /v1/generate", (SSE, KEY, BATCH_KEY), BODY),
    Case("its class, by name", "POST /v1/generate", (SSE, KEY, BATCH_KEY), BODY[:-1] + SLOW),
    Case("its class, branch", BRANCH, (SSE, KEY, BATCH_KEY), FROM_3),
    Case("its class, chat", "POST /v1/chat/completions", (KEY, BATCH_KEY), CHAT % b""),
    Case("urgent", "POST /v1/generate", (SSE, BATCH_KEY), BODY[:-1] + FAST, fast=False),
    Case("urgent, document", "POST /v1/generate", (BATCH_KEY,), BODY[:-1] + FAST, fast=False),
    Case("urgent, by a frame", "POST /v1/generate", (FRAMES, IN_FRAMES, BATCH_KEY), URGENT, False),
    Case("urgent, branch", BRANCH, (SSE, BATCH_KEY), FROM_3[:-1] + FAST, fast=False),
    Case("urgent, completions", "POST /v1/completions", (BATCH_KEY,), STREAMED % FAST[:-1], False),
    Case("urgent, chat", "POST /v1/chat/completions", (BATCH_KEY,), CHAT % FAST[:-1], fast=False),
    Case("urgent, responses", "POST /v1/responses", (BATCH_KEY,), RESPONSE[:-1] + FAST, fast=False),
    Case(
        "urgent, messages",
        "POST /v1/messages",
        (BATCH_KEY, VERSION),
        MESSAGE[:-1] + FAST,
        fast=False,
    ),
    Case(
        "urgent, the AI SDK's chat",
        "POST /api/chat",
        (BATCH_KEY,),
        UI % (b', "model": "demo"' + FAST[:-1]),
        fast=False,
    ),
    Case("without a key", "POST /v1/generate", (SSE,), BODY, fast=False),
]
"""Requests to an edge with API keys, most with a key that is bound to the class batch."""

API_KEYS = EdgeConfig.model_fields["api_keys"].default
Ask = Callable[[Case], Awaitable[Answer]]
HTTP3 = "Hypercorn, HTTP/3"


@asynccontextmanager
async def by_hypercorn(origin: ScriptedOrigin, keys: KeyRing | None) -> AsyncIterator[Ask]:
    """Hypercorn as it comes, in this process, over HTTP/1.1."""
    bound = socket.create_server(("127.0.0.1", 0))
    server = Config()
    server.bind = [f"fd://{bound.fileno()}"]
    server.accesslog = None
    edge = assemble(config_for(origin), 65_536)
    edge.rules.authenticator.ring = keys
    stopped = asyncio.Event()
    serving = asyncio.create_task(
        serve(cast(Any, edge.app), server, shutdown_trigger=cast(Any, stopped.wait))
    )
    await is_up(edge.link)
    port = bound.getsockname()[1]

    async def ask(case: Case) -> Answer:
        return await asked_by_socket(port, case)

    try:
        yield ask
    finally:
        stopped.set()
        await serving
        bound.detach()


@asynccontextmanager
async def by_hypercorn_http3(
    origin: ScriptedOrigin, folder: Path, certificate: CertificateFiles
) -> AsyncIterator[Ask]:
    """Hypercorn as it comes, in a process of its own, over HTTP/3."""
    port, plain = free_port(), free_port()
    flags = (
        *("--bind", f"127.0.0.1:{port}", "--quic-bind", f"127.0.0.1:{port}"),
        *("--insecure-bind", f"127.0.0.1:{plain}"),
        *("--certfile", str(certificate.certificate), "--keyfile", str(certificate.key)),
    )
    settings = {
        "origin": f"127.0.0.1:{origin.port}",
        "allowed_origins": ",".join(SETTINGS["allowed_origins"]),
        "max_body_bytes": str(SETTINGS["max_body_bytes"]),
    }

    async def ask(case: Case) -> Answer:
        method, _, target = case.line.partition(" ")
        headers = [(n, v) for n, v in headers_of(case) if n not in ("Connection", "Expect")]
        body = [] if case.body is None else [case.body]
        if case.chunked and case.body is not None:
            body = [case.body[:7], case.body[7:]]
        async with Http3Client.connected(port, certificate.certificate) as client:
            return await client.request(method, target, headers, body)

    async with (
        hypercorn(folder, *flags, **settings),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{plain}", trust_env=False) as client,
    ):
        await ready(client)
        yield ask


@asynccontextmanager
async def by_test_client(origin: ScriptedOrigin, keys: KeyRing | None) -> AsyncIterator[Ask]:
    """Starlette's TestClient, in threads of its own: it blocks."""
    edge = assemble(config_for(origin), 65_536)
    edge.rules.authenticator.ring = keys
    client = TestClient(
        cast(Any, edge.app), base_url="http://localhost", client=("127.0.0.1", 50_000)
    )
    client.headers.clear()

    def asked(case: Case) -> Answer:
        method, _, target = case.line.partition(" ")
        headers = [(n, v) for n, v in headers_of(case) if n not in ("Connection", "Expect")]
        if case.chunked:
            headers = [(n, v) for n, v in headers if n != "Content-Length"]
        body = iter([case.body[:7], case.body[7:]]) if case.chunked and case.body else case.body
        answer = client.request(method, target, headers=headers, content=body)
        return Answer(answer.status_code, dict(answer.headers), answer.content)

    await asyncio.to_thread(client.__enter__)
    try:
        while not edge.link.up:  # noqa: ASYNC110  (of another thread)
            await asyncio.sleep(0.01)
        yield lambda case: asyncio.to_thread(asked, case)
    finally:
        await asyncio.to_thread(client.__exit__)


class Servers(NamedTuple):
    """Our server and other ASGI servers, with one origin."""

    origin: ScriptedOrigin
    ours: Served
    others: dict[str, Ask]


@asynccontextmanager
async def all_servers(folder: Path, keys: KeyRing | None = None) -> AsyncIterator[Servers]:
    """Yield every server, with an origin of their own.

    With `keys`, `folder` has them in the file that a process of its own reads.
    """
    certificate = development_certificate(folder, datetime.now(UTC))
    async with AsyncExitStack() as stack:
        origin = await stack.enter_async_context(ScriptedOrigin(WORDS).listening())
        ours = await stack.enter_async_context(serving(origin, **SETTINGS))
        ours.edge.rules.authenticator.ring = keys
        others = {
            "Hypercorn": await stack.enter_async_context(by_hypercorn(origin, keys)),
            HTTP3: await stack.enter_async_context(by_hypercorn_http3(origin, folder, certificate)),
            "TestClient": await stack.enter_async_context(by_test_client(origin, keys)),
        }
        yield Servers(origin, ours, others)


@pytest.fixture(scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    async with all_servers(tmp_path_factory.mktemp("servers")) as made:
        yield made


@pytest.fixture(scope="module")
async def servers_with_keys(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    folder = tmp_path_factory.mktemp("servers_with_keys")
    key = api_key(priority=Priority.BATCH)
    with changing(folder / API_KEYS) as stored:
        stored.keys.append(key)
    async with all_servers(folder, stored.ring()) as made:
        yield made


def config_for(origin: ScriptedOrigin) -> EdgeConfig:
    return EdgeConfig(http=("127.0.0.1:0",), origin=(f"127.0.0.1:{origin.port}",), **SETTINGS)


def headers_of(case: Case) -> list[tuple[str, str]]:
    given = [(name, value.strip()) for name, _, value in (h.partition(":") for h in case.headers)]
    given.append(("X-Request-Id", "ours-1"))
    if not any(name == "Host" for name, _ in given):
        given.append(("Host", "localhost"))
    if case.body is not None and not case.chunked:
        given.append(("Content-Length", str(len(case.body))))
    return given


async def asked_by_socket(port: int, case: Case) -> Answer:
    headers = headers_of(case)
    body = case.body or b""
    if case.chunked:
        headers.append(("Transfer-Encoding", "chunked"))
        body = b"7\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (body[:7], len(body) - 7, body[7:])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = Client(reader, writer)
    head = f"{case.line} HTTP/1.1\r\n" + "".join(f"{n}: {v}\r\n" for n, v in headers)
    try:
        await client.send(head.encode() + b"\r\n" + body)
        return await client.answer(case.line.partition(" ")[0])
    finally:
        writer.close()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_the_answer_is_the_same_on_every_server(servers: Servers, case: Case) -> None:
    await answered_alike(servers, case)


@pytest.mark.parametrize("case", CASES_OF_A_KEY, ids=[case.name for case in CASES_OF_A_KEY])
async def test_a_key_of_a_class_is_answered_alike_on_every_server(
    servers_with_keys: Servers, case: Case
) -> None:
    ours = await answered_alike(servers_with_keys, case)
    if case.name.startswith("urgent"):
        assert ours.status == 403
        assert b"more urgent" in ours.body
    elif case.fast:
        asked = request_of(servers_with_keys.origin)
        assert isinstance(asked, Open)
        assert asked.priority is Priority.BATCH
    else:
        assert ours.status == 401


async def answered_alike(servers: Servers, case: Case) -> Answer:
    """Compare the answers of all servers; return that of ours."""
    with detached() as sources:
        ours = await asked_by_socket(servers.ours.port, case)
    assert bool(sources) == case.fast
    asked = request_of(servers.origin)
    for name, ask in servers.others.items():
        if name == HTTP3 and not case.by_http3:
            continue
        other = await ask(case)
        assert (name, ours.status, ours.ended) == (name, other.status, other.ended)
        assert (name, shown(ours)) == (name, shown(other))
        assert (name, kept(ours)) == (name, kept(other))
        assert (name, asked) == (name, request_of(servers.origin))
    return ours


def kept(answer: Answer) -> dict[str, str]:
    """Return the headers, without those that are a server's own, or that count a drawn number."""
    own = {"date", "server", "transfer-encoding", "connection", "alt-svc"}
    return {name: value for name, value in answer.headers.items() if name not in own}


def shown(answer: Answer) -> bytes:
    """Return a body, decompressed, without the `retry:` that each answer of events draws."""
    body = answer.body
    if "content-encoding" in answer.headers and body.startswith(MAGIC):
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        body = decompressor.decompress(body)
        assert decompressor.eof
    return after_retry(body.decode()).encode() if body.startswith(b"retry:") else body


def request_of(origin: ScriptedOrigin) -> Open | Resume | None:
    """Return the last request at the origin, but for a key that was made up."""
    asked = [frame for frame in origin.received if isinstance(frame, Open | Resume)]
    if not asked:
        return None
    last = asked[-1]
    if isinstance(last, Open) and last.idempotency_key != "mine":
        assert last.idempotency_key
        return Open(**{n: getattr(last, n) for n in Open.__match_args__ if n != "idempotency_key"})
    return last


async def test_several_streams_in_one_answer_are_the_same_on_every_server(
    servers: Servers,
) -> None:
    """Their chunks come in any order; each choice has all of its own."""
    body = b'{"model": "demo", "prompt": ["Once", "Twice"], "stream": true}'
    case = Case("two prompts", "POST /v1/completions", (), body)
    with detached() as sources:
        answers = [await asked_by_socket(servers.ours.port, case)]
    assert len(sources) == 1
    answers += [await ask(case) for ask in servers.others.values()]
    for answer in answers:
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert sorted(answer.body.split(b"\n\n")) == sorted(answers[0].body.split(b"\n\n"))
        assert kept(answer) == kept(answers[0])


async def test_siblings_are_named_alike() -> None:
    async with ScriptedOrigin(3).listening() as origin, serving(origin) as served:
        origin.siblings = (Sibling(b"1" * 16, "v1.one"), Sibling(b"2" * 16, ""))
        answer = await asked_by_socket(
            served.port, Case("siblings", "POST /v1/generate", (SSE,), BODY)
        )
    named = f"{(b'1' * 16).hex()};token=v1.one, {(b'2' * 16).hex()}"
    assert answer.headers["tailrace-siblings"] == named
