"""The edge's default for streams without a reader, for every way to open one."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect

from tailrace.ledger.frame import SCHEMA_HASH, Hello, Open, Opened, Unread, decode, encode, split
from tests.edge.scripted_origin import ScriptedOrigin
from tests.edge.server.serving import PATIENCE_S, serving

pytestmark = pytest.mark.anyio

PROMPT = {"model": "demo", "prompt": "Once"}
MESSAGES = [{"role": "user", "content": "Once"}]
CHAT = {"model": "demo", "messages": MESSAGES}
TURN = {"id": "1", "role": "user", "parts": [{"type": "text", "text": "Once"}]}
RESPONSE = {"model": "demo", "input": "Once"}
SETTINGS: dict[str, Any] = {"unread": "cancel", "unread_after_s": 7}
DEFAULT, RUN = (Unread.CANCEL, 7), (Unread.RUN, 30)
PAUSE = {"unread": {"then": "pause", "after_s": 5}}
SSE = {"Accept": "text/event-stream"}


@pytest.mark.parametrize(
    ("path", "headers", "body", "expected"),
    [
        ("/v1/generate", {}, PROMPT, DEFAULT),
        ("/v1/generate", SSE, PROMPT, DEFAULT),
        ("/v1/generate", SSE, PROMPT | {"unread": None}, DEFAULT),
        ("/v1/generate", SSE, PROMPT | {"unread": "run"}, RUN),
        ("/v1/generate", SSE, PROMPT | {"unread": "pause"}, (Unread.PAUSE, None)),
        ("/v1/generate", SSE, PROMPT | PAUSE, (Unread.PAUSE, 5)),
        ("/v1/chat/completions", {}, CHAT, DEFAULT),
        ("/v1/chat/completions", {}, CHAT | {"stream": True}, DEFAULT),
        ("/v1/chat/completions", {}, CHAT | {"stream": True, "unread": "run"}, RUN),
        ("/v1/completions", {}, PROMPT | {"stream": True}, DEFAULT),
        ("/v1/responses", {}, RESPONSE, DEFAULT),
        ("/v1/responses", {}, RESPONSE | {"stream": True}, DEFAULT),
        ("/v1/responses", {}, RESPONSE | {"background": True}, RUN),
        ("/v1/responses", {}, RESPONSE | {"background": True} | PAUSE, (Unread.PAUSE, 5)),
        ("/api/chat", {}, {"id": "c", "model": "demo", "messages": [TURN]}, DEFAULT),
    ],
)
async def test_an_edge_says_what_its_clients_leave_out(
    path: str,
    headers: dict[str, str],
    body: dict[str, Any],
    expected: tuple[Unread, int | None],
) -> None:
    origin = ScriptedOrigin(3)
    async with origin.listening(), serving(origin, **SETTINGS) as served:
        url = f"http://127.0.0.1:{served.port}{path}"
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
            await client.post(url, json=body, headers=headers)
    [asked] = [frame for frame in origin.received if isinstance(frame, Open)]
    assert (asked.unread, asked.unread_after_s) == expected


@pytest.mark.parametrize(
    ("unread", "after_s", "expected"),
    [
        (Unread.RUN, None, DEFAULT),
        (Unread.RUN, 30, RUN),
        (Unread.PAUSE, None, (Unread.PAUSE, None)),
    ],
)
async def test_so_it_does_for_websockets(
    unread: Unread, after_s: int | None, expected: tuple[Unread, int | None]
) -> None:
    origin = ScriptedOrigin(3)
    wanted = Open("demo", prompt="Once", unread=unread, unread_after_s=after_s, credit=9)
    async with (
        origin.listening(),
        serving(origin, **SETTINGS) as served,
        connect(f"ws://127.0.0.1:{served.port}/v1/ws", proxy=None) as socket,
    ):
        await socket.send(encode(Hello(SCHEMA_HASH, "test")) + encode(wanted, 1))
        heard: list[object] = []
        while not any(isinstance(frame, Opened) for frame in heard):
            heard += [decode(raw)[1] for raw in split(await socket.recv(decode=False))]
    [asked] = [frame for frame in origin.received if isinstance(frame, Open)]
    assert (asked.unread, asked.unread_after_s) == expected


async def test_without_the_setting_requests_go_on_as_they_came() -> None:
    origin = ScriptedOrigin(3)
    async with origin.listening(), serving(origin) as served:
        url = f"http://127.0.0.1:{served.port}/v1/generate"
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
            await client.post(url, json=PROMPT, headers=SSE)
    [asked] = [frame for frame in origin.received if isinstance(frame, Open)]
    assert (asked.unread, asked.unread_after_s) == (Unread.RUN, None)
