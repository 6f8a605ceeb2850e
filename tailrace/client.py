"""An async client whose streams survive cut connections and dead edges.

Needs httpx and the wire format only. A stream is read as raw frames; when a connection
breaks, the next edge in the list is asked for what follows the last frame read.

    async with Client(["http://127.0.0.1:8080"]) as client:
        async for frame in client.generate(prompt="Once upon a time"):
            if isinstance(frame, Token):
                print(frame.text, end="")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Self, TypedDict, Unpack
from uuid import uuid4

import httpx

from ledger.errors import CallerError
from ledger.frame import Status
from ledger.version import software
from tailrace.client_stream import Stream
from tailrace.edges import Edges, OnState, State

__all__ = ["Client", "OnState", "State", "Stream"]

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 45.0
"""An edge shows a sign of life every 15 s; after three are missed it is taken for dead."""
PATIENCE_S = 60.0
"""How long to go on trying without a single new frame."""
MAX_KEPT_CONNECTIONS = 16


class SamplingSettings(TypedDict, total=False):
    """What a caller of `generate` may say of `ledger.frame.Sampling`."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None


class Client:
    """Streams from any of several edges of one origin.

    `api_key` is sent with every request, to edges that ask for one.
    `on_state(state, detail)` is told what the connection does: connecting, open, waiting
    (for another try), resumed, ended. `verify` and `trust_env` are httpx's: False, or an SSL
    context, for a development certificate; whether proxies of the environment are used.
    """

    def __init__(
        self,
        edges: Sequence[str],
        *,
        api_key: str | None = None,
        on_state: OnState | None = None,
        patience_s: float = PATIENCE_S,
        verify: Any = True,
        trust_env: bool = True,
        random: Random | None = None,
    ) -> None:
        if not edges or not all(edge.startswith(("http://", "https://")) for edge in edges):
            raise CallerError(
                "no usable edge", field="edges", hint="a list such as ['http://127.0.0.1:8080']"
            )
        self._http = httpx.AsyncClient(
            verify=verify,
            trust_env=trust_env,
            timeout=httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_keepalive_connections=MAX_KEPT_CONNECTIONS),
            headers={"User-Agent": software("client")}
            | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        )
        urls = [edge.rstrip("/") for edge in edges]
        self._edges = Edges(urls, self._http, patience_s, random or Random(), on_state)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Drop all connections; the streams run on and can be resumed."""
        await self._http.aclose()

    def generate(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        model: str = "demo",
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        ignore_eos: bool | None = None,
        logprobs: int | None = None,
        format: Mapping[str, Any] | None = None,
        overflow: str | None = None,
        durability: str | None = None,
        priority: str | None = None,
        idempotency_key: str | None = None,
        **sampling: Unpack[SamplingSettings],
    ) -> Stream:
        """A new stream; it begins when its first frame is asked for.

        Two calls with one `idempotency_key` read the same stream.
        """
        fields = {
            "model": model,
            "prompt": prompt,
            "messages": None if messages is None else [dict(turn) for turn in messages],
            "max_tokens": max_tokens,
            "stop": stop if stop is None or isinstance(stop, str) else list(stop),
            "ignore_eos": ignore_eos,
            "logprobs": logprobs,
            "format": None if format is None else dict(format),
            "overflow": overflow,
            "durability": durability,
            "priority": priority,
            **sampling,
        }
        body = {name: value for name, value in fields.items() if value is not None}
        return Stream(self._edges, body=body, idempotency_key=idempotency_key or uuid4().hex)

    def resume(self, stream: str, *, after: int | None = None, token: str | None = None) -> Stream:
        """The frames of an existing stream with an index above `after`, or all of them."""
        return Stream(self._edges, stream=stream, after=after, token=token)

    async def cancel(self, stream: str, token: str | None = None) -> Status:
        """End a stream for all its readers; one that has ended stays as it is."""
        return await self._edges.cancel(stream, token)

    async def steer(self, stream: str, text: str, token: str | None = None) -> Status:
        """Have a running stream go on with `text`; answered when it is part of the stream.

        Not tried again when the answer is lost, because the text could be taken twice.
        """
        return await self._edges.steer(stream, text, token)
