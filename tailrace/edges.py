"""The edges that a client may use, and its tries to get an answer from one of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import httpx

from ledger.backoff import Backoff
from ledger.errors import TailraceError, Unavailable
from ledger.frame import Status, StreamError, StreamState, to_error

RECONNECT_MIN_S = 0.05
RECONNECT_MAX_S = 10.0
RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Retried when the answer itself does not say, as with a proxy's error page."""

State = Literal["connecting", "open", "waiting", "resumed", "ended"]
OnState = Callable[[State, str], None]


@dataclass(frozen=True, slots=True)
class Edges:
    """What all streams of one client share; `urls` are alike, any may be asked for any stream."""

    urls: list[str]
    http: httpx.AsyncClient
    patience_s: float
    random: Random
    on_state: OnState | None

    def tell(self, state: State, detail: str) -> None:
        if self.on_state is not None:
            self.on_state(state, detail)

    async def cancel(self, stream: str, token: str | None) -> Status:
        """Ask until an edge answers: cancelling twice is the same as once."""
        attempts = Attempts(self)
        while True:
            try:
                return await self._asked(f"{attempts.url}/v1/generate/{stream}/cancel", token)
            except (httpx.TransportError, TailraceError) as error:
                await attempts.failed(error)

    async def steer(self, stream: str, text: str, token: str | None) -> Status:
        """Ask until an edge takes the text, or may have taken it: twice is not the same as once."""
        attempts = Attempts(self)
        while True:
            url = f"{attempts.url}/v1/generate/{stream}/steer"
            try:
                return await self._asked(url, token, {"text": text})
            except (httpx.ConnectError, Unavailable) as error:
                if isinstance(error, Unavailable) and error.code == "outcome_unknown":
                    raise
                await attempts.failed(error)
            except httpx.TransportError as error:
                said = str(error) or type(error).__name__
                raise Unavailable(
                    f"{attempts.url}: {said}: whether the text was taken is not known",
                    code="outcome_unknown",
                    hint="read on, and look",
                ) from error

    async def _asked(self, url: str, token: str | None, body: object = None) -> Status:
        answer = await self.http.post(url, headers=token_header(token), json=body)
        if answer.status_code != 200:
            raise http_error(answer.status_code, answer.headers, answer.content)
        said = answer.json()
        state = StreamState.from_word(said["state"])
        return Status(bytes.fromhex(said["id"]), state, said["next_index"])


class Attempts:
    """One request's tries: which edge is next, how long to wait, when to give up."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges
        self._backoff = Backoff(RECONNECT_MIN_S, RECONNECT_MAX_S, edges.random)
        self._nth = 0
        self._failing_since: float | None = None

    @property
    def url(self) -> str:
        """The edge whose turn it is."""
        return self._edges.urls[self._nth]

    def next_edge(self) -> None:
        self._nth = (self._nth + 1) % len(self._edges.urls)

    def worked(self) -> None:
        self._backoff.reset()
        self._failing_since = None

    async def failed(self, error: httpx.TransportError | TailraceError) -> None:
        """Wait, then try the next edge; raises when trying again is of no use."""
        if not isinstance(error, TailraceError):
            error = unreachable(self.url, error)
        if not error.retryable:
            raise error
        now = asyncio.get_running_loop().time()
        if self._failing_since is None:
            self._failing_since = now
        delay_s = max(self._backoff.next_delay_s(), (error.retry_after_ms or 0) / 1000)
        if now + delay_s - self._failing_since > self._edges.patience_s:
            raise error
        self._edges.tell("waiting", f"{delay_s:.2f} s: {error}")
        self.next_edge()
        await asyncio.sleep(delay_s)


def unreachable(url: str, error: httpx.TransportError) -> Unavailable:
    said = str(error) or type(error).__name__
    return Unavailable(f"{url}: {said}", code="edge_unreachable")


def token_header(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Tailrace-Token": token}


def http_error(status: int, headers: Mapping[str, str], body: bytes) -> TailraceError:
    """The error that an HTTP answer tells of, whoever between client and origin wrote it."""
    try:
        said = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        said = None
    fields: dict[str, Any] = said if isinstance(said, dict) else {}
    return to_error(
        StreamError(
            code=str(fields.get("code", "http_error")),
            message=str(fields.get("message", f"the answer was HTTP status {status}")),
            retryable=bool(fields.get("retryable", status in RETRYABLE_STATUSES)),
            status=status,
            field=_text(fields.get("field")),
            hint=_text(fields.get("hint")),
            retry_after_ms=_retry_after_ms(headers.get("Retry-After")),
        )
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _retry_after_ms(header: str | None) -> int | None:
    """Seconds only: no edge sends the date form (RFC 9110, 10.2.3)."""
    if header is None or not (header.isascii() and header.isdigit()):
        return None
    return int(header) * 1000
