"""The files of edge/web, as a browser asks for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from edge.errors import tailrace_error
from edge.web_files import FOLDER, web_routes
from ledger.errors import TailraceError

pytestmark = pytest.mark.anyio


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "web"
    (made / "sub").mkdir(parents=True)
    (made / "node_modules").mkdir()
    (made / "index.html").write_text("<!doctype html>")
    (made / "sub/main.js").write_text("1")
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
    assert (answer.status_code, answer.text) == (200, "<!doctype html>")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert (await client.post("/")).status_code == 405


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
