"""The SSE view as an EventSource reads it, with httpx."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

SSE = {"Accept": "text/event-stream"}
TIMEOUT = httpx.Timeout(60.0)


@dataclass
class Event:
    """An event: `id` is the index, `name` is `message`, `end` or `error`."""

    id: int
    name: str
    data: dict[str, Any]


@dataclass
class Reading:
    """One stream as one reader has received it."""

    stream: str = ""
    token: str = ""
    events: list[Event] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(e.data["text"] for e in self.events if e.name == "message")

    @property
    def indexes(self) -> list[int]:
        return [event.id for event in self.events]

    @property
    def end(self) -> dict[str, Any]:
        assert self.events[-1].name == "end", self.events[-1]
        return self.events[-1].data


async def events(response: httpx.Response) -> AsyncIterator[Event]:
    """Events as they come; fails on any line that an EventSource would not understand."""
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            assert name in ("id", "event", "data", "retry"), line
            fields[name] = value
        elif "data" in fields:
            name = fields.get("event", "message")
            yield Event(int(fields.get("id", -1)), name, json.loads(fields["data"]))
            fields = {}


def retry_ms(text: str) -> int:
    """Return the time in `retry:` with which a body of events begins."""
    found = re.match(r"retry: ([0-9]+)\n\n", text)
    assert found is not None, text[:50]
    return int(found[1])


def after_retry(text: str) -> str:
    """Return a body of events without the `retry:` that it must begin with."""
    return text.removeprefix(f"retry: {retry_ms(text)}\n\n")


async def start(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], stop_after: int | None = None
) -> Reading:
    """POST and read to the end, or drop the connection after a number of events."""
    reading = Reading()
    if stop_after == 0:
        async with client.stream("POST", f"{url}/v1/generate", json=body, headers=SSE) as response:
            return _begun(reading, response)
    async with client.stream("POST", f"{url}/v1/generate", json=body, headers=SSE) as response:
        await _read(_begun(reading, response), response, stop_after)
    return reading


async def resume(
    client: httpx.AsyncClient, url: str, reading: Reading, stop_after: int | None = None
) -> Reading:
    """Go on where `reading` stopped, as an EventSource does."""
    headers = dict(SSE)
    if reading.events:
        headers["Last-Event-ID"] = str(reading.events[-1].id)
    target = f"{url}/v1/generate/{reading.stream}"
    async with client.stream("GET", target, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        await _read(reading, response, stop_after)
    return reading


def _begun(reading: Reading, response: httpx.Response) -> Reading:
    assert response.status_code == 200, response.status_code
    reading.stream = response.headers["Tailrace-Stream"]
    reading.token = response.headers["Tailrace-Token"]
    return reading


async def _read(reading: Reading, response: httpx.Response, stop_after: int | None) -> None:
    before = len(reading.events)
    async for event in events(response):
        reading.events.append(event)
        if stop_after is not None and len(reading.events) - before >= stop_after:
            return


def text_of(events: bytes) -> str:
    """Return what the events of a whole body say."""
    texts = []
    for block in events.decode().strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if "data" in fields and fields.get("event", "message") == "message":
            texts.append(json.loads(fields["data"])["text"])
    return "".join(texts)
