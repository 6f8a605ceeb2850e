"""/v1/stream over a real origin link; the answers are the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.types import Message

from tailrace.edge.access.page_origins import EXPOSED_HEADERS
from tailrace.edge.application import create_app
from tailrace.edge.config import EdgeConfig
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import WINDOW_BODIES
from tailrace.ledger.errors import Conflict, NotFound, TailraceError
from tailrace.ledger.frame import (
    Answer,
    Body,
    BodyEnd,
    Call,
    Credit,
    Detach,
    Frame,
    Header,
    error_frame,
)
from tests.edge.scripted_origin import ScriptedOrigin

pytestmark = pytest.mark.anyio

LIMIT = 2048
PATH = "/v1/stream/chats/7"


@asynccontextmanager
async def edge(link: OriginPool, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    # Behind a proxy any host may be asked for; the test's client is at 127.0.0.1.
    config = EdgeConfig(
        http=("127.0.0.1:0",), max_body_bytes=LIMIT, trusted_proxies=("127.0.0.1",), **settings
    )
    transport = httpx.ASGITransport(create_app(link, config), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
        yield client


@pytest.fixture
async def origin() -> ScriptedOrigin:
    return ScriptedOrigin(0)


@pytest.fixture
async def link(origin: ScriptedOrigin) -> AsyncIterator[OriginPool]:
    async with origin.serving() as link:
        yield link


@pytest.fixture
async def client(link: OriginPool) -> AsyncIterator[httpx.AsyncClient]:
    async with edge(link) as client:
        yield client


def answers(origin: ScriptedOrigin, *frames: Frame) -> None:
    """Answer every Call with these frames from now on."""
    origin.answers = frames


def calls(origin: ScriptedOrigin) -> list[Call]:
    return [frame for frame in origin.received if isinstance(frame, Call)]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    return error


# ---- what reaches the object, and what comes back ----


async def test_a_request_becomes_one_call_and_its_answer_the_response(
    origin: ScriptedOrigin, client: httpx.AsyncClient
) -> None:
    head = Answer(201, (Header("location", "http://edge/x"), Header("stream-next-offset", "7")))
    answers(origin, head, Body(b"ab"), Body(b"c"), BodyEnd())
    got = await client.put(
        f"{PATH}?x=1&y=%2F", content=b"\x00\xff", headers={"Stream-TTL": "60", "Host": "edge:81"}
    )
    assert (got.status_code, got.content) == (201, b"abc")
    assert got.headers["Location"] == "http://edge/x"
    assert got.headers["Stream-Next-Offset"] == "7"
    [call] = calls(origin)
    assert (call.object, call.name, call.method) == ("stream", "chats/7", "PUT")
    assert call.url == "http://edge:81/v1/stream/chats/7?x=1&y=%2F"
    assert Header("stream-ttl", "60") in call.headers
    assert (call.body, call.credit) == (b"\x00\xff", WINDOW_BODIES)


async def test_headers_of_one_connection_go_no_further(
    origin: ScriptedOrigin, client: httpx.AsyncClient
) -> None:
    answers(origin, Answer(204, (Header("keep-alive", "5"), Header("x-kept", "1"))), BodyEnd())
    got = await client.post(
        PATH,
        content=b"x",
        headers=[
            (b"Connection", b"close, X-Secret"),
            (b"X-Secret", b"1"),
            (b"TE", b"trailers"),
            (b"Proxy-Connection", b"1"),
            (b"X-Kept", b"\xe9"),
        ],
    )
    [call] = calls(origin)
    names = {header.name for header in call.headers}
    assert Header("x-kept", "\xe9") in call.headers
    assert names.isdisjoint({"connection", "x-secret", "te", "proxy-connection"})
    assert ("keep-alive" in got.headers, got.headers["X-Kept"]) == (False, "1")


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "POST", "DELETE"])
async def test_every_method_of_the_protocol_passes(
    origin: ScriptedOrigin, client: httpx.AsyncClient, method: str
) -> None:
    answers(origin, Answer(200, (Header("content-length", "4"),)), Body(b"body"), BodyEnd())
    got = await client.request(method, PATH)
    assert calls(origin)[0].method == method
    assert got.content == (b"" if method == "HEAD" else b"body")
    assert got.headers["Content-Length"] == "4"


async def test_the_content_of_a_get_means_nothing(
    origin: ScriptedOrigin, client: httpx.AsyncClient
) -> None:
    answers(origin, Answer(204), BodyEnd())
    await client.request("GET", PATH, content=b"x" * 100)
    assert calls(origin)[0].body == b""


async def test_the_content_of_a_stream_never_acts_as_a_page(
    origin: ScriptedOrigin, client: httpx.AsyncClient
) -> None:
    answers(origin, Answer(200, (Header("content-type", "text/plain"),)), Body(b"x"), BodyEnd())
    got = await client.get(PATH)
    assert got.headers["Content-Security-Policy"] == "sandbox; default-src 'none'"
    assert "Content-Disposition" not in got.headers


@pytest.mark.parametrize("error", [NotFound("gone"), Conflict("closed", field="stream")])
async def test_an_error_of_the_origin_is_the_usual_document(
    origin: ScriptedOrigin, client: httpx.AsyncClient, error: TailraceError
) -> None:
    answers(origin, error_frame(error))
    got = await client.get(PATH)
    assert got.status_code == error.status
    assert error_of(got)["message"] == error.message
    assert got.headers["X-Content-Type-Options"] == "nosniff"
    assert got.headers["Content-Security-Policy"] == "sandbox; default-src 'none'"
    assert got.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    refused = await client.patch(PATH)
    assert refused.status_code == 405
    assert refused.headers["Content-Security-Policy"] == "sandbox; default-src 'none'"


# ---- names ----


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a", "a"),
        ("a/b/c.d-e_f~1", "a/b/c.d-e_f~1"),
        ("caf%C3%A9/%20x", "café/ x"),
        ("a%25b", "a%b"),
        ("...", "..."),
        ("a/__ds/b", "a/__ds/b"),
        ("a:b@c;d=e", "a:b@c;d=e"),
    ],
)
async def test_a_name_is_the_decoded_path(
    origin: ScriptedOrigin, client: httpx.AsyncClient, path: str, name: str
) -> None:
    answers(origin, Answer(204), BodyEnd())
    await client.get(f"/v1/stream/{path}")
    assert [(call.object, call.name) for call in calls(origin)] == [("stream", name)]


@pytest.mark.parametrize(
    "path",
    [
        "%2e%2e/x",
        "x/%2e%2e",
        "x/%2E",
        "x/%2e./y",
        "x//y",
        "x/",
        "",
        "a%2Fb",
        "a%2fb",
        "a%00",
        "a%0ab",
        "a%7f",
        "%ff",
        "%5f_ds/jwks.json",
    ],
)
async def test_a_path_with_tricks_in_it_is_as_if_absent(
    origin: ScriptedOrigin, client: httpx.AsyncClient, path: str
) -> None:
    for method in ("GET", "PUT"):
        got = await client.request(method, f"/v1/stream/{path}")
        assert got.status_code == 404
    assert calls(origin) == []


async def test_dots_that_no_client_resolved_are_not_resolved_here_either(
    origin: ScriptedOrigin, link: OriginPool
) -> None:
    app = create_app(link, EdgeConfig(http=("127.0.0.1:0",)))
    for path in (b"/v1/stream/../generate", b"/v1/stream/a/../b", b"/v1/stream/./a"):
        sent = await asgi(app, path)
        assert sent[0]["status"] == 404
    assert calls(origin) == []


async def test_a_name_may_be_512_characters_long(
    origin: ScriptedOrigin, client: httpx.AsyncClient
) -> None:
    answers(origin, Answer(204), BodyEnd())
    assert (await client.get("/v1/stream/" + "𝄞" * 512)).status_code == 204
    for name in ("x" * 513, "é" * 513, "x/" * 2000 + "x"):
        got = await client.get(f"/v1/stream/{name}")
        assert (got.status_code, error_of(got)["field"]) == (400, "path")
    assert len(calls(origin)) == 1


async def test_the_reserved_paths_are_the_subscription_api(
    origin: ScriptedOrigin, client: httpx.AsyncClient
) -> None:
    answers(origin, Answer(204), BodyEnd())
    for path in ("jwks.json", "subscriptions/a%2Fb/streams/x%2Fy"):
        await client.get(f"/v1/stream/__ds/{path}")
        assert (calls(origin)[-1].object, calls(origin)[-1].name) == ("subscription", path)


@pytest.mark.parametrize("host", ["", "a b", "a/b", "a@b", "[::1", "a:b"])
async def test_a_host_that_is_none_is_refused(
    origin: ScriptedOrigin, client: httpx.AsyncClient, host: str
) -> None:
    got = await client.get(PATH, headers={"Host": host})
    assert (got.status_code, error_of(got)["field"]) == (400, "Host")


@pytest.mark.parametrize("host", ["a.example", "127.0.0.1:8080", "[::1]:8080", "xn--bcher-kva.ch"])
async def test_the_url_has_the_host_that_the_client_asked(
    origin: ScriptedOrigin, client: httpx.AsyncClient, host: str
) -> None:
    answers(origin, Answer(204), BodyEnd())
    await client.get(PATH, headers={"Host": host})
    assert calls(origin)[0].url == f"http://{host}{PATH}"


# ---- sizes ----


async def test_a_body_over_the_limit_is_refused_before_the_origin_sees_it(
    origin: ScriptedOrigin, client: httpx.AsyncClient
) -> None:
    answers(origin, Answer(204), BodyEnd())
    assert (await client.post(PATH, content=b"x" * LIMIT)).status_code == 204
    got = await client.post(PATH, content=b"x" * (LIMIT + 1))
    assert (got.status_code, error_of(got)["code"]) == (413, "too_large")
    assert got.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert len(calls(origin)) == 1


async def test_headers_over_the_limit_are_refused(
    origin: ScriptedOrigin, client: httpx.AsyncClient
) -> None:
    got = await client.get(PATH, headers={f"X-{n}": "x" * 1000 for n in range(200)})
    assert (got.status_code, error_of(got)["code"]) == (431, "headers_too_large")
    assert calls(origin) == []


@pytest.mark.parametrize("value", [b"a\x00b", b"a\r\nb: c", b"\n"])
async def test_a_header_that_http_1_could_not_carry_is_refused(
    origin: ScriptedOrigin, client: httpx.AsyncClient, value: bytes
) -> None:
    got = await client.get(PATH, headers=[(b"Producer-Id", value)])
    assert got.status_code == 400
    assert calls(origin) == []


async def test_no_more_calls_are_taken_than_the_edge_can_hold(
    origin: ScriptedOrigin, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.edge.origins.origin_pool.MAX_HELD_BYTES", 1000)
    answers(origin)  # no answer, so that the requests stay open
    waiting = asyncio.create_task(client.post(PATH, content=b"x" * LIMIT))
    await origin.has_received(1)
    got = await client.post(PATH, content=b"x")
    assert (got.status_code, error_of(got)["code"]) == (503, "overloaded")
    waiting.cancel()
    await asyncio.wait([waiting])
    await origin.has_received(2)  # its Detach
    answers(origin, Answer(204), BodyEnd())
    assert (await client.post(PATH, content=b"x")).status_code == 204


# ---- other origins' pages ----


async def test_where_any_page_may_it_sees_the_headers_of_the_protocol(
    origin: ScriptedOrigin, link: OriginPool
) -> None:
    answers(origin, Answer(200, (Header("vary", "accept"),)), BodyEnd())
    async with edge(link, allowed_origins=("*",)) as client:
        got = await client.get(PATH, headers={"Origin": "https://page.example"})
    assert got.headers["Access-Control-Allow-Origin"] == "*"
    assert got.headers["Access-Control-Expose-Headers"] == EXPOSED_HEADERS
    assert got.headers["Cross-Origin-Resource-Policy"] == "cross-origin"
    assert got.headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Credentials" not in got.headers
    assert got.headers["Vary"] == "accept"


async def test_a_preflight_is_answered_by_the_edge(
    origin: ScriptedOrigin, link: OriginPool
) -> None:
    headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "PUT"}
    async with edge(link, allowed_origins=("*",)) as client:
        got = await client.options(PATH, headers=headers)
    assert (got.status_code, got.content) == (204, b"")
    allowed = got.headers["Access-Control-Allow-Headers"].lower().split(", ")
    assert {"if-none-match", "content-type", "stream-ttl", "producer-seq"} <= set(allowed)
    assert "PUT" in got.headers["Access-Control-Allow-Methods"].split(", ")
    assert origin.received == []


async def test_unless_it_is_named_a_page_of_another_origin_can_do_nothing(
    origin: ScriptedOrigin, client: httpx.AsyncClient
) -> None:
    """A browser would only hide the answer from it: so it is refused before anything is done."""
    for method in ("GET", "PUT", "POST", "DELETE", "OPTIONS"):
        got = await client.request(method, PATH, headers={"Origin": "https://page.example"})
        assert (got.status_code, error_of(got)["code"]) == (403, "foreign_origin")
        assert got.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert not [name for name in got.headers if name.startswith("access-control")]
    assert origin.received == []
    answers(origin, Answer(204), BodyEnd())
    own = await client.get(PATH, headers={"Origin": "http://edge"})
    assert own.status_code == 204


async def test_only_listed_origins_may_read_where_there_is_a_list(
    origin: ScriptedOrigin, link: OriginPool
) -> None:
    answers(origin, Answer(204, (Header("vary", "accept"),)), BodyEnd())
    async with edge(link, allowed_origins=("https://good.example",)) as client:
        for method in ("GET", "OPTIONS"):
            good = await client.request(method, PATH, headers={"Origin": "https://good.example"})
            assert good.headers["Access-Control-Allow-Origin"] == "https://good.example"
            assert "Origin" in good.headers["Vary"]
            for other in ("https://bad.example", "null"):
                bad = await client.request(method, PATH, headers={"Origin": other})
                assert bad.status_code == 403
                assert not [name for name in bad.headers if name.startswith("access-control")]
                assert "Origin" in bad.headers["Vary"]


async def test_a_query_that_no_url_holds_is_the_callers_fault(
    origin: ScriptedOrigin, link: OriginPool
) -> None:
    """A client of HTTP/2 can send such a query."""
    app = create_app(link, EdgeConfig(http=("127.0.0.1:0",)))
    sent = await asgi(app, PATH.encode(), http_version="2", query="offset=é".encode())
    assert sent[0]["status"] == 400
    assert origin.received == []


# ---- a body as it comes ----


async def asgi(
    app: Callable[..., Awaitable[None]],
    path: bytes,
    on_send: Callable[[Message], Awaitable[None]] | None = None,
    left: asyncio.Event | None = None,
    http_version: str = "1.1",
    query: bytes = b"",
) -> list[Message]:
    """One GET as a server makes it; `left` is set when the client goes."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": http_version,
        "method": "GET",
        "scheme": "http",
        "path": path.decode(),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": [(b"host", b"127.0.0.1")],
        "server": ("127.0.0.1", 80),
    }
    sent: list[Message] = []
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if on_send is not None:
            await on_send(message)

    await app(scope, receive, send)
    return sent


async def test_credit_is_renewed_as_the_client_reads(
    origin: ScriptedOrigin, link: OriginPool
) -> None:
    """The origin gives more than a window; a client that reads gets all of it."""
    pieces = [Body(b"%d." % n) for n in range(5 * WINDOW_BODIES)]
    answers(origin, Answer(200), *pieces, BodyEnd())
    app = create_app(link, EdgeConfig(http=("127.0.0.1:0",)))
    sent = await asgi(app, PATH.encode())
    assert b"".join(m.get("body", b"") for m in sent) == b"".join(p.data for p in pieces)
    assert sent[-1]["more_body"] is False
    limits = [frame.limit for frame in origin.received if isinstance(frame, Credit)]
    assert limits == sorted(limits)
    assert limits[-1] >= len(pieces)


async def test_a_client_that_reads_nothing_holds_one_window(
    origin: ScriptedOrigin, link: OriginPool
) -> None:
    pieces = [Body(b"x") for _ in range(5 * WINDOW_BODIES)]
    answers(origin, Answer(200), *pieces, BodyEnd())
    app = create_app(link, EdgeConfig(http=("127.0.0.1:0",)))
    stalled, may_read = asyncio.Event(), asyncio.Event()

    async def stall(message: Message) -> None:
        if message["type"] == "http.response.body":
            stalled.set()
            await may_read.wait()

    reading = asyncio.create_task(asgi(app, PATH.encode(), stall))
    await stalled.wait()
    async with edge(link) as client:  # the other request's answer passes the stalled one
        answers(origin, Answer(204), BodyEnd())
        assert (await client.get(PATH)).status_code == 204
    assert origin.bodies_sent <= WINDOW_BODIES
    may_read.set()
    sent = await reading
    assert b"".join(m.get("body", b"") for m in sent) == b"x" * len(pieces)


async def test_a_client_that_leaves_is_detached(origin: ScriptedOrigin, link: OriginPool) -> None:
    answers(origin, Answer(200), Body(b"live"))
    app = create_app(link, EdgeConfig(http=("127.0.0.1:0",)))
    left = asyncio.Event()

    async def leave(message: Message) -> None:
        if message.get("body") == b"live":
            left.set()

    sent = await asgi(app, PATH.encode(), leave, left)
    assert sent[-1]["more_body"] is True
    await origin.has_received(2)
    assert isinstance(origin.received[-1], Detach)


async def test_a_client_that_leaves_before_the_answer_is_detached(
    origin: ScriptedOrigin, link: OriginPool
) -> None:
    answers(origin)
    app = create_app(link, EdgeConfig(http=("127.0.0.1:0",)))
    left = asyncio.Event()
    asking = asyncio.create_task(asgi(app, PATH.encode(), None, left))
    await origin.has_received(1)
    left.set()
    await asking
    await origin.has_received(2)
    assert isinstance(origin.received[-1], Detach)


@pytest.mark.parametrize("http_version", ["1.1", "2", "3"])
async def test_a_body_that_breaks_off_is_not_ended(
    origin: ScriptedOrigin, link: OriginPool, http_version: str
) -> None:
    answers(origin, Answer(200), Body(b"begun"), error_frame(NotFound("gone")))
    app = create_app(link, EdgeConfig(http=("127.0.0.1:0",)))
    sent = await asgi(app, PATH.encode(), http_version=http_version)
    assert b"".join(m.get("body", b"") for m in sent) == b"begun"
    assert sent[-1]["more_body"]


async def test_a_lost_link_breaks_a_body_off(origin: ScriptedOrigin, link: OriginPool) -> None:
    answers(origin, Answer(200), Body(b"live"))
    app = create_app(link, EdgeConfig(http=("127.0.0.1:0",)))

    async def cut(message: Message) -> None:
        if message.get("body") == b"live":
            origin.drop_links()

    sent = await asgi(app, PATH.encode(), cut)
    assert sent[-1]["more_body"] is True


async def test_a_change_whose_link_broke_has_an_unknown_outcome_and_a_read_is_asked_again(
    origin: ScriptedOrigin, client: httpx.AsyncClient
) -> None:
    answers(origin)
    posting = asyncio.create_task(client.post(PATH, content=b"x"))
    getting = asyncio.create_task(client.get(PATH))
    await origin.has_received(2)
    answers(origin, Answer(200), Body(b"read"), BodyEnd())
    origin.drop_links()
    posted = await posting
    assert (posted.status_code, error_of(posted)["code"]) == (503, "outcome_unknown")
    assert error_of(posted)["retryable"] is True
    assert (await getting).content == b"read"
