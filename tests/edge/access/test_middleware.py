"""Refused requests never reach the application."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from tailrace.edge.access.middleware import Access
from tailrace.edge.config import EdgeConfig, access_rules

pytestmark = pytest.mark.anyio


class Visit:
    """One request as a server makes it, and what the application saw and the client got."""

    def __init__(self, *headers: tuple[str, str], **settings: Any) -> None:
        self.seen: Scope | None = None
        self.sent: list[Message] = []
        self._access = Access(self._app, access_rules(EdgeConfig.load(**settings)))
        self._scope: Scope = {
            "type": "http",
            "path": "/healthz",
            "scheme": "http",
            "client": ("10.0.0.1", 4711),
            "headers": [(name.encode(), value.encode()) for name, value in headers],
        }

    async def go(self) -> None:
        await self._access(self._scope, self._receive, self._send)

    async def _app(self, scope: Scope, _receive: Receive, send: Send) -> None:
        self.seen = scope
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def _receive(self) -> Message:
        return {"type": "http.request", "body": b""}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)


async def test_a_name_that_was_pointed_here_is_refused_unless_a_proxy_may_ask_for_it() -> None:
    visit = Visit(("host", "edge.example"))
    await visit.go()
    assert visit.sent[0]["status"] == 421
    behind = Visit(("host", "edge.example"), trusted_proxies="10.0.0.0/8")
    await behind.go()
    assert behind.sent[0]["status"] == 200


async def test_the_application_sees_the_request_as_the_client_sent_it() -> None:
    said = (
        *(("host", "inside"), ("x-forwarded-for", "203.0.113.7")),
        *(("x-forwarded-proto", "https"), ("x-forwarded-host", "edge.example")),
    )
    page = ("origin", "https://edge.example")
    visit = Visit(*said, page, trusted_proxies="10.0.0.1")
    await visit.go()
    assert visit.seen is not None
    assert (visit.seen["client"], visit.seen["scheme"]) == (("203.0.113.7", 0), "https")
    assert (b"host", b"edge.example") in visit.seen["headers"]
