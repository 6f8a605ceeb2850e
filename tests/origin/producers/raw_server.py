"""A small HTTP server on a real socket that sends exactly the bytes of a script, and dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Any

STREAM_TYPE = b"Content-Type: text/event-stream; charset=utf-8\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\n" + STREAM_TYPE + b"Connection: close\r\n\r\n"


def answer(status: int, body: object, **headers: str) -> bytes:
    """Return a whole answer with a JSON body."""
    raw = json.dumps(body).encode()
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status} Said\r\nContent-Type: application/json\r\n{more}"
    return head.encode() + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def chat(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


def thought(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"reasoning_content": text}}]})


def completion(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text}]})


def finish(reason: str = "stop") -> bytes:
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event({"choices": [], "usage": counts})


def event(said: object) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Asked:
    """A request that was received."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


Script = Callable[[Asked, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@dataclass
class RawServer:
    """Answers the nth request with the nth script, and every later one with the last.

    A script is bytes, after which the connection is closed, or a coroutine function that is given
    the request and the writer. `gone` counts connections that the other side closed while a script
    waited for that.
    """

    scripts: list[bytes | Script]
    asked: list[Asked] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = await _read(reader)
            self.asked.append(asked)
            script = self.scripts[min(len(self.asked), len(self.scripts)) - 1]
            if isinstance(script, bytes):
                writer.write(script)
                await writer.drain()
            else:
                await self._play(script, asked, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone.set()
        finally:
            writer.close()

    async def _play(
        self,
        script: Script,
        asked: Asked,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Play the script until it is over or the other side closes the connection."""
        playing = asyncio.create_task(script(asked, writer))
        hearing = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait((playing, hearing), return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                self.gone.set()
        finally:
            for task in (playing, hearing):
                task.cancel()
            await asyncio.gather(playing, hearing, return_exceptions=True)


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    line, *rest = head.split("\r\n")
    method, path, _ = line.split(" ")
    headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in rest)}
    raw = await reader.readexactly(int(headers.get("content-length", "0")))
    return Asked(method, path, headers, json.loads(raw) if raw else {})


@asynccontextmanager
async def serving(*scripts: bytes | Script) -> AsyncIterator[RawServer]:
    """Yield a server with these scripts; `url` is its /v1."""
    made = RawServer(list(scripts))
    server = await asyncio.start_server(made._serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    with closing(server):
        yield made
