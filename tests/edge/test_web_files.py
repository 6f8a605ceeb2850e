"""The files of edge/web, as a browser asks for them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from tailrace.edge.errors import tailrace_error
from tailrace.edge.web_files import FOLDER, web_routes
from tailrace.ledger.errors import TailraceError

pytestmark = pytest.mark.anyio

SCRIPT = '<script src="/web/sub/main.js" type="module"></script>'
LONG = "export const answer = 42;\n" * 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "web"
    (made / "sub").mkdir(parents=True)
    (made / "node_modules").mkdir()
    (made / "index.html").write_text("<!doctype html>" + 2 * SCRIPT)
    (made / "sub/main.js").write_text("1")
    (made / "sub/long.js").write_text(LONG)
    (made / "sub/picture.png").write_bytes(bytes(4096))
    (made / "sub/package.json").write_text("{}")
    (made / "node_modules/other.js").write_text("2")
    (tmp_path / "secret.js").write_text("3")
    return made


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(routes=web_routes(folder), exception_handlers={TailraceError: tailrace_error})
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
    ) as made:
        yield made


async def test_the_first_page_lies_at_the_root(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    found = re.search(r"script-src 'nonce-([\w-]{22})'; style-src", policy)
    assert found is not None and "script-src 'self'" not in policy
    script = SCRIPT.replace("<script", f'<script nonce="{found[1]}"')
    assert (answer.status_code, answer.text) == (200, "<!doctype html>" + 2 * script)
    # A nonce is good for one answer.
    assert answer.headers["Cache-Control"] == "no-store" and "ETag" not in answer.headers
    assert (await client.get("/")).headers["Content-Security-Policy"] != policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert (await client.post("/")).status_code == 405


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip", "gzip"),
        ("GZIP;q=0.5", "gzip"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("gzip, zstd;q=0.1", "gzip"),
        ("*", "zstd"),
        ("*;q=0.5, zstd;q=0", "gzip"),
        ("gzip;q=0", None),
        ("gzip;q=0.000", None),
        ("br", None),
        ("identity", None),
        ("gzip;q=x", None),
        ("", None),
    ],
)
async def test_scripts_are_sent_in_a_coding_that_the_client_accepts(
    client: httpx.AsyncClient, accepted: str, coding: str | None
) -> None:
    asked = {"Accept-Encoding": accepted}
    answer = await client.get("/web/sub/long.js", headers=asked)
    assert (answer.status_code, answer.text) == (200, LONG)
    assert answer.headers.get("Content-Encoding") == coding
    assert answer.headers["Vary"] == "Accept-Encoding"
    assert (int(answer.headers["Content-Length"]) < len(LONG)) == (coding is not None)
    tag = answer.headers["ETag"]
    plain = (await client.get("/web/sub/long.js", headers={"Accept-Encoding": ""})).headers["ETag"]
    assert (tag == plain) == (coding is None)
    again = await client.get("/web/sub/long.js", headers=asked | {"If-None-Match": tag})
    assert (again.status_code, again.headers["ETag"]) == (304, tag)
    assert again.headers["Vary"] == "Accept-Encoding" and "Content-Encoding" not in again.headers
    other = await client.get("/web/sub/long.js", headers=asked | {"If-None-Match": f"{plain}x"})
    assert other.status_code == 200


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/web/sub/picture.png", {}),
        ("/web/sub/main.js", {}),  # one byte
        ("/web/sub/long.js", {"Range": "bytes=0-9"}),
    ],
)
async def test_what_compression_would_not_help_or_would_confuse_is_sent_as_it_is(
    client: httpx.AsyncClient, path: str, headers: dict[str, str]
) -> None:
    answer = await client.get(path, headers={"Accept-Encoding": "gzip, zstd"} | headers)
    assert answer.status_code == 200 and "Content-Encoding" not in answer.headers


async def test_the_client_for_browsers_takes_8_kb_of_the_network() -> None:
    """docs/web.md states the sizes: what a page loads first, and the part for WebSockets."""
    app = Starlette(routes=web_routes())
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1"
    ) as client:
        sizes = {}
        for name in ("index", "chunk", "socket"):
            path = f"/web/tailrace/{name}.min.js"
            async with client.stream("GET", path, headers={"Accept-Encoding": "gzip"}) as answer:
                sizes[name] = len(b"".join([piece async for piece in answer.aiter_raw()]))
                assert sizes[name] == int(answer.headers["Content-Length"])
    assert sizes["index"] + sizes["chunk"] < 8.5 * 1024, sizes
    assert sizes["socket"] < 4.5 * 1024, sizes


async def test_a_file_that_has_not_changed_is_not_sent_again(
    client: httpx.AsyncClient, folder: Path
) -> None:
    first = await client.get("/web/sub/main.js")
    assert first.headers["Content-Type"] == "text/javascript; charset=utf-8"
    tag = first.headers["ETag"]
    for said in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await client.get("/web/sub/main.js", headers={"If-None-Match": said})
        assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)
    (folder / "sub/main.js").write_text("4")
    changed = await client.get("/web/sub/main.js", headers={"If-None-Match": tag})
    assert (changed.status_code, changed.text) == (200, "4")


@pytest.mark.parametrize(
    "path",
    [
        *("/web/", "/web/sub", "/web/sub/", "/web/none.js", "/web/sub/package.json"),
        *("/web/node_modules/other.js", "/web/%2e%2e/secret.js", "/web/..%2fsecret.js"),
        "/web//etc/passwd",
    ],
)
async def test_nothing_else_is_served(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_the_clients_own_files_are_among_what_is_served() -> None:
    assert (FOLDER / "tailrace" / "wire.js").is_file()
