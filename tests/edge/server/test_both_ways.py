"""One table of requests, asked past the application and of it: the same answers, to the byte."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple, cast

import httpx
import pytest

from tailrace.edge.server.interfaces import Admitted, Request, ResponseSource, ResponseWriter
from tailrace.ledger.frame import Caller, Open, Resume, Sibling, encode
from tests.e2e.sse import after_retry
from tests.edge.scripted_origin import STREAM, ScriptedOrigin
from tests.edge.server.serving import Client, Served, serving

pytestmark = pytest.mark.anyio

WORDS = 700
ID = STREAM.hex()
SSE = "Accept: text/event-stream"
FRAMES = "Accept: application/vnd.tailrace.frames"
KEY = "Idempotency-Key: mine"
PAGE = "Origin: https://app.example"
BODY = b'{"model": "demo", "prompt": "Once"}'
IN_FRAMES = "Content-Type: application/vnd.tailrace.frames"
OPEN = encode(Open("demo", prompt="Once", credit=0))
OF_A_CALLER = encode(Open("demo", prompt="Once", caller=Caller("somebody", 0)))
NO_OPEN = encode(Resume(STREAM))
SETTINGS: dict[str, Any] = {"allowed_origins": ("https://app.example",), "max_body_bytes": 2048}


class Case(NamedTuple):
    name: str
    line: str
    headers: tuple[str, ...] = (SSE,)
    body: bytes | None = None
    fast: bool = True


CASES = [
    Case("start, events", "POST /v1/generate", (SSE, KEY), BODY),
    Case("start, frames", "POST /v1/generate", (FRAMES, KEY), BODY),
    Case("start, a page of an allowed origin", "POST /v1/generate", (SSE, PAGE), BODY),
    Case("start, close", "POST /v1/generate", (SSE, KEY, "Connection: close"), BODY),
    Case("start, no such model", "POST /v1/generate", body=b'{"model": "x", "prompt": "y"}'),
    Case("start, by a frame", "POST /v1/generate", (FRAMES, KEY, IN_FRAMES), OPEN),
    Case("start, by a frame of another", "POST /v1/generate", (FRAMES, IN_FRAMES), NO_OPEN),
    Case("start, by a caller", "POST /v1/generate", (FRAMES, IN_FRAMES), OF_A_CALLER),
    Case("start, by no frame", "POST /v1/generate", (FRAMES, IN_FRAMES), b"\xff\xff"),
    Case("read", f"GET /v1/generate/{ID}"),
    Case("read, frames", f"GET /v1/generate/{ID}", (FRAMES,)),
    Case("read, some preferred", f"GET /v1/generate/{ID}", ("Accept: text/*;q=0.9, */*;q=0.1",)),
    Case("read after", f"GET /v1/generate/{ID}?after=41"),
    Case("read after, by header", f"GET /v1/generate/{ID}", (SSE, "Last-Event-ID: 600")),
    Case("read after, an empty header", f"GET /v1/generate/{ID}", (SSE, "Last-Event-ID:")),
    Case("read after the end", f"GET /v1/generate/{ID}?after={WORDS}"),
    Case("read beyond the end", f"GET /v1/generate/{ID}?after=9999"),
    Case("read another stream", f"GET /v1/generate/{'f' * 32}"),
    # What is not plain is the application's.
    Case("document", "POST /v1/generate", (KEY,), BODY, fast=False),
    Case("nothing acceptable", "POST /v1/generate", ("Accept: image/png",), BODY, fast=False),
    Case("head", f"HEAD /v1/generate/{ID}", fast=False),
    Case("wrong method", "PUT /v1/generate", body=BODY, fast=False),
    Case("no stream id", "GET /v1/generate/nothing", fast=False),
    Case("a query that is an index twice", f"GET /v1/generate/{ID}?after=1&after=2"),
    Case("an index that is none", f"GET /v1/generate/{ID}?after=x"),
    Case("no JSON", "POST /v1/generate", body=b"{"),
    Case("a key that is none", "POST /v1/generate", (SSE, "Idempotency-Key:"), BODY),
    Case("too long a body", "POST /v1/generate", body=b" " * 3000, fast=False),
    Case("a foreign page", "POST /v1/generate", (SSE, "Origin: https://x.example"), BODY),
    Case("another host", f"GET /v1/generate/{ID}", (SSE, "Host: x.example")),
    Case("expecting", "POST /v1/generate", (SSE, KEY, "Expect: 100-continue"), BODY, fast=False),
]


class Noting:
    """The routes, which note whose answer it was."""

    def __init__(self, served: Served) -> None:
        self._routes = served.context.routes
        self.served = 0

    def claims(self, request: Request) -> bool:
        return self._routes.claims(request)

    def admit(self, request: Request, writer: ResponseWriter) -> Admitted | None:
        admitted = self._routes.admit(request, writer)
        self.served += admitted is None
        return admitted

    def serve(
        self, admitted: Admitted, body: bytes, writer: ResponseWriter
    ) -> ResponseSource | None:
        source = self._routes.serve(admitted, body, writer)
        self.served += source is not None
        return source


@pytest.fixture(scope="module")
async def origin() -> AsyncIterator[ScriptedOrigin]:
    async with ScriptedOrigin(WORDS).listening() as origin:
        yield origin


@pytest.fixture(scope="module")
async def served(origin: ScriptedOrigin) -> AsyncIterator[tuple[Served, Noting]]:
    async with serving(origin, **SETTINGS) as served:
        noting = Noting(served)
        object.__setattr__(served.context, "routes", noting)
        yield served, noting


def headers_of(case: Case) -> list[tuple[str, str]]:
    given = [(name, value.strip()) for name, _, value in (h.partition(":") for h in case.headers)]
    given.append(("X-Request-Id", "ours-1"))
    if not any(name == "Host" for name, _ in given):
        given.append(("Host", "localhost"))
    if case.body is not None:
        given.append(("Content-Length", str(len(case.body))))
    return given


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_the_answer_is_that_of_the_application(
    served: tuple[Served, Noting], origin: ScriptedOrigin, case: Case
) -> None:
    server, noting = served
    headers = headers_of(case)
    method, _, target = case.line.partition(" ")
    before = noting.served
    async with Client.connected(server) as client:
        head = f"{case.line} HTTP/1.1\r\n" + "".join(f"{n}: {v}\r\n" for n, v in headers)
        await client.send(head.encode() + b"\r\n" + (case.body or b""))
        answer = await client.answer(method)
    asked_here = request_of(origin)
    assert (noting.served > before) == case.fast

    transport = httpx.ASGITransport(cast(Any, server.context.application.app))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as app:
        given = [(name, value) for name, value in headers if name != "Connection"]
        other = await app.request(method, target, headers=given, content=case.body)
    assert (answer.status, answer.ended) == (other.status_code, True)
    assert shown(answer.body) == shown(other.content)
    ignored = ("date", "transfer-encoding", "connection")
    here = {name: value for name, value in answer.headers.items() if name not in ignored}
    assert here == dict(other.headers)
    assert asked_here == request_of(origin)


def shown(body: bytes) -> bytes:
    """Return a body without the `retry:` that each answer of events draws for itself."""
    return after_retry(body.decode()).encode() if body.startswith(b"retry:") else body


def request_of(origin: ScriptedOrigin) -> Open | Resume | None:
    """The last request at the origin, but for a key that was made up."""
    asked = [frame for frame in origin.received if isinstance(frame, Open | Resume)]
    if not asked:
        return None
    last = asked[-1]
    if isinstance(last, Open) and last.idempotency_key != "mine":
        assert last.idempotency_key
        return Open(**{n: getattr(last, n) for n in Open.__match_args__ if n != "idempotency_key"})
    return last


async def test_siblings_are_named_alike() -> None:
    async with ScriptedOrigin(3).listening() as origin, serving(origin) as served:
        origin.siblings = (Sibling(b"1" * 16, "v1.one"), Sibling(b"2" * 16, ""))
        async with Client.connected(served) as client:
            head = f"POST /v1/generate HTTP/1.1\r\nHost: localhost\r\n{SSE}\r\n"
            await client.send(f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
            answer = await client.answer("POST")
    named = f"{(b'1' * 16).hex()};token=v1.one, {(b'2' * 16).hex()}"
    assert answer.headers["tailrace-siblings"] == named
