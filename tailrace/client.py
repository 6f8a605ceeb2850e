"""An async client whose streams survive cut connections and dead edges.

It needs only httpx and Tailrace's wire format. A stream is read as raw frames. When a connection
breaks, the client requests the frames after the last one from the next edge in its list.

    async with Client(["http://127.0.0.1:8080"]) as client:
        async for frame in client.generate(prompt="Once upon a time"):
            if isinstance(frame, Token):
                print(frame.text, end="")
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from random import Random
from typing import Any, Literal, Self, TypedDict, Unpack
from uuid import uuid4

import httpx

from tailrace.ledger.errors import (
    CallerError,
    FrameError,
    SchemaMismatch,
    TailraceError,
    Unavailable,
)
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.frame import (
    FRAMES_TYPE,
    SCHEMA_HASH,
    Frame,
    Heartbeat,
    Logged,
    Opened,
    Snapshot,
    Splitter,
    Status,
    StreamEnd,
    StreamError,
    StreamState,
    decode,
    to_error,
)
from tailrace.ledger.process.version import software

RECONNECT_MIN_S = 0.05
RECONNECT_MAX_S = 10.0
RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses to retry if the body does not say so, for example in the error page of a proxy."""

State = Literal["connecting", "open", "waiting", "resumed", "ended"]
OnState = Callable[[State, str], None]
StreamFrame = Logged | Snapshot
"""A frame that a reader of a stream can get; a Snapshot only if the reader has requested a snapshot
or grouped text."""
Group = Literal["word", "phrase", "sentence", "paragraph"] | Mapping[str, str | int]
"""How an edge groups text: a unit, or a mapping such as `{"by": "sentence", "ms": 200}`."""


@dataclass(frozen=True, slots=True)
class Edges:
    """State that all streams of a client share; each edge in `urls` can serve every stream."""

    urls: list[str]
    http: httpx.AsyncClient
    patience_s: float
    random: Random
    on_state: OnState | None

    def tell(self, state: State, detail: str) -> None:
        if self.on_state is not None:
            self.on_state(state, detail)

    async def cancel(self, stream: str, token: str | None) -> Status:
        """Cancel a stream; retry until an edge answers, because cancelling is idempotent."""
        return await self._change(stream, "cancel", token)

    async def switch_stages(
        self, stream: str, token: str | None, stages: Mapping[str, bool]
    ) -> Status:
        """Switch stages of a pipeline; retry until an edge answers, as switching is idempotent."""
        return await self._change(stream, "stages", token, {"stages": dict(stages)})

    async def _change(
        self, stream: str, what: str, token: str | None, body: object = None
    ) -> Status:
        attempts = Attempts(self)
        while True:
            try:
                return await self._asked(f"{attempts.url}/v1/generate/{stream}/{what}", token, body)
            except (httpx.TransportError, TailraceError) as error:
                await attempts.failed(error)

    async def steer(self, stream: str, text: str, token: str | None) -> Status:
        """Steer a stream; retry only while no edge can have received the text.

        Steering is not idempotent: a repeated request could append the text twice. So if an answer
        is lost, this raises Unavailable with the code `outcome_unknown`.
        """
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
                    f"{attempts.url}: {said}: it is unknown if the text was appended",
                    code="outcome_unknown",
                    hint="continue to read the stream to see whether it contains the text",
                ) from error

    async def send(
        self, stream: str, token: str | None, data: bytes, offset: int, *, last: bool
    ) -> int:
        """Send bytes for a stream's input; retry until an edge answers.

        Returns the size of the stored input. Bytes that are stored already are not stored twice, so
        a request may be repeated.
        """
        attempts = Attempts(self)
        params = {"offset": offset, "last": int(last)}
        while True:
            url = f"{attempts.url}/v1/generate/{stream}/input"
            try:
                answer = await self.http.post(
                    url, params=params, headers=token_header(token), content=data
                )
                if answer.status_code != 200:
                    raise http_error(answer.status_code, answer.headers, answer.content)
                return int(answer.json()["bytes"])
            except (httpx.TransportError, TailraceError) as error:
                await attempts.failed(error)

    async def _asked(self, url: str, token: str | None, body: object = None) -> Status:
        answer = await self.http.post(url, headers=token_header(token), json=body)
        if answer.status_code != 200:
            raise http_error(answer.status_code, answer.headers, answer.content)
        said = answer.json()
        state = StreamState.from_word(said["state"])
        return Status(bytes.fromhex(said["id"]), state, said["next_index"])


class Attempts:
    """The attempts of one request: decides the next edge, the delay, and when to give up."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges
        self._backoff = Backoff(RECONNECT_MIN_S, RECONNECT_MAX_S, edges.random)
        self._nth = 0
        self._failing_since: float | None = None

    @property
    def url(self) -> str:
        """Return the URL of the edge to try next."""
        return self._edges.urls[self._nth]

    def next_edge(self) -> None:
        self._nth = (self._nth + 1) % len(self._edges.urls)

    def worked(self) -> None:
        self._backoff.reset()
        self._failing_since = None

    async def failed(self, error: httpx.TransportError | TailraceError) -> None:
        """Wait, and switch to the next edge; raise the error if another attempt is useless.

        Another attempt is useless if the error is not retryable, or if all attempts have failed for
        `patience_s`.
        """
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


def group_params(group: Group | None) -> dict[str, str | int]:
    """Return the parameters of a query that say how the edge groups text."""
    fields = {"by": group} if isinstance(group, str) else dict(group or {})
    return {"group" if name == "by" else f"group_{name}": fields[name] for name in fields}


def check_schema(schema: str | None) -> None:
    """Raise SchemaMismatch if the edge has another schema; None is accepted.

    Frames of another schema could be decoded into wrong values. `schema` is None if an older edge
    or a proxy has made the response.
    """
    if schema is not None and schema != SCHEMA_HASH.hex():
        raise SchemaMismatch(
            f"the edge has schema {schema}, and this client {SCHEMA_HASH.hex()}",
            field="Tailrace-Schema",
            hint="install the release of tailrace that the edge runs",
        )


def http_error(status: int, headers: Mapping[str, str], body: bytes) -> TailraceError:
    """Return the error of an HTTP response, which an origin, an edge or a proxy may have made."""
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
    """Return the time in a Retry-After header in milliseconds; None if it is not in seconds.

    The header may also hold a date (RFC 9110, 10.2.3), but edges never send one.
    """
    if header is None or not (header.isascii() and header.isdigit()):
        return None
    return int(header) * 1000


class Position:
    """The position of a reader in a stream, which it keeps when it changes its connection.

    - `next_index`: the index of the next frame
    - `ended`: True if no frame will follow
    - `fault`: the error because of which this connection must not be read any further: the error of
      a StreamError frame, or a retryable error if bytes were malformed or a frame was missing
    """

    def __init__(self, after: int | None = None) -> None:
        self.next_index = 0 if after is None else after + 1
        self.ended = False
        self.fault: TailraceError | None = None
        self._splitter = Splitter()

    @property
    def after(self) -> int | None:
        """The index after which to resume, which is that of the last frame; None at the start."""
        return self.next_index - 1 if self.next_index else None

    def reconnect(self) -> None:
        """Prepare for a new connection: drop the last one's incomplete frame and its fault."""
        self.fault = None
        self._splitter = Splitter()

    def rewind(self, next_index: int) -> None:
        """Return to an earlier index, from which frames will be read again."""
        self.next_index = next_index
        self.ended = False

    def feed(self, data: bytes) -> list[StreamFrame]:
        """Return the new frames that `data` completes.

        Frames that were read before are left out. At an error the method sets `fault` and returns
        the frames before the error.
        """
        logged: list[StreamFrame] = []
        try:
            for raw in self._splitter.feed(data):
                _, frame = decode(raw)
                if isinstance(frame, Logged | Snapshot):
                    if self._advance(frame):
                        logged.append(frame)
                else:
                    self._note(frame)
        except FrameError as error:
            self.fault = Unavailable(f"malformed frames in the body: {error}", code="bad_frame")
        except TailraceError as error:
            self.fault = error
        return logged

    def _advance(self, frame: StreamFrame) -> bool:
        """Return True if this is the next frame, or False if it was read before.

        Raises Unavailable if a frame is missing before this one.
        """
        first = frame.first if isinstance(frame, Snapshot) else frame.index
        if first > self.next_index:
            raise Unavailable(
                f"received frame {first} instead of {self.next_index}", code="frames_missing"
            )
        if first < self.next_index:
            return False
        self.next_index = frame.index + 1
        self.ended = isinstance(frame, StreamEnd)
        return True

    def _note(self, frame: Frame) -> None:
        """Handle a frame about the stream that is not part of its log, such as Status."""
        if isinstance(frame, StreamError):
            raise to_error(frame)
        if isinstance(frame, Status):
            self.ended = frame.state is StreamState.ENDED
        elif not isinstance(frame, Heartbeat):
            name = type(frame).__name__
            raise Unavailable(f"unexpected {name} frame in a stream's body", code="bad_frame")


class Stream:
    """One stream: an async iterator that yields each frame once and in order.

    If a connection is lost, it resumes on another one. `id` and `token` are known after the first
    frame; `next_index` is the index of the next frame; `resumes` counts the connections after the
    first one. The iterator raises TailraceError if the stream cannot be read any further.
    """

    def __init__(
        self,
        edges: Edges,
        *,
        body: dict[str, Any] | None = None,
        idempotency_key: str = "",
        parent: str | None = None,
        stream: str | None = None,
        after: int | None = None,
        token: str | None = None,
        snapshot: bool = False,
        begin: Mapping[str, int] | None = None,
        group: Group | None = None,
    ) -> None:
        """Create a stream to read: an existing `stream`, a branch of `parent`, or a new one.

        `token` is the resume token of the stream or of its parent. `group` says how the edge groups
        the text, in every connection.
        """
        self.id = stream
        self.token = token
        self.resumes = 0
        self.end: StreamEnd | None = None
        self._edges = edges
        self._body = body if body is None or group is None else {**body, "group": group}
        self._group = group_params(group)
        self._idempotency_key = idempotency_key
        self._parent = parent
        self._snapshot = snapshot
        # The parameter `tail` or `since`; None once the edge has sent the index of the first frame.
        self._begin = begin
        self._position = Position(after)
        self.next_index = self._position.next_index
        self._attempts = Attempts(edges)
        self._unread: deque[StreamFrame] = deque()
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._opened = False
        self._cut = False
        self._reading: asyncio.Timeout | None = None
        self._connecting = asyncio.Lock()
        self._stored: int | None = None  # bytes of the stream's input that are durable

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamFrame:
        while not self._unread:
            if self._position.ended:
                await self.aclose()
                raise StopAsyncIteration
            await self._advance()
        frame = self._unread.popleft()
        self.next_index = frame.index + 1
        if isinstance(frame, StreamEnd):
            self.end = frame
            self._edges.tell("ended", frame.finish_reason.word)
        return frame

    async def cancel(self) -> Status:
        """End the stream, also for all its other readers."""
        return await self._edges.cancel(self._begun(), self.token)

    async def steer(self, text: str) -> Status:
        """Append `text` to the stream; the model continues after it, for all readers."""
        return await self._edges.steer(self._begun(), text, self.token)

    async def switch_stages(self, stages: Mapping[str, bool]) -> Status:
        """Switch optional stages of a pipeline on or off, each at one of its next items.

        Returns when the request is durable. The stages are switched for all readers.
        """
        return await self._edges.switch_stages(self._begun(), self.token, stages)

    def _begun(self) -> str:
        """Return the id of the stream."""
        if self.id is None:
            raise CallerError(
                "the stream has not begun", hint="read its first frame before calling this"
            )
        return self.id

    async def send(self, data: bytes, *, last: bool = False) -> int:
        """Send bytes to a pipeline that takes input, after those that were sent before.

        Returns the size of the input, when the bytes are durable. `last` completes the input. Call
        it again only after it has returned. Opens the stream if nothing was read of it yet.

        If it raises, a part of the bytes may be stored: `send(b"")` returns the size of the input,
        after which the next bytes are to follow.
        """
        while self.id is None:
            await self._advance()
        offset, self._stored = self._stored, None  # not known any more if this call fails
        if offset is None:
            offset = await self._edges.send(self.id, self.token, b"", 0, last=False)
        await self._edges.send(self.id, self.token, data, offset, last=last)
        self._stored = offset + len(data)
        return self._stored

    def cut(self) -> None:
        """Drop the connection now, as a network failure would; the next read resumes the stream."""
        if self.end is not None:
            return
        self._cut = self._response is not None
        self._unread.clear()
        self._position.rewind(self.next_index)
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())

    async def aclose(self) -> None:
        """Close the connection; the generation itself continues and can be resumed."""
        response, self._response, self._chunks = self._response, None, None
        if response is not None:
            await response.aclose()

    # ---- connections ----

    async def _advance(self) -> None:
        """Do one step towards the next frame: connect, read, or wait before another attempt."""
        try:
            if self._position.fault is not None:
                raise self._position.fault
            if self._chunks is not None:
                await self._read(self._chunks)
                return
            async with self._connecting:  # `send` connects, too
                if self._chunks is None:
                    await self._connect()
        except (httpx.TransportError, TailraceError) as error:
            await self.aclose()
            self._position.reconnect()
            await self._attempts.failed(error)

    async def _connect(self) -> None:
        self._edges.tell("connecting", self._attempts.url)
        response = await self._edges.http.send(self._request(), stream=True)
        if response.status_code == 204:
            await response.aclose()
            self._position.ended = True
            self._edges.tell("ended", "nothing is left to read")
            return
        if response.status_code != 200:
            body = await response.aread()
            raise http_error(response.status_code, response.headers, body)
        check_schema(response.headers.get("Tailrace-Schema"))
        if self._begin is not None:
            self._begin_at(response.headers["Tailrace-Opened"])
        self.id = response.headers.get("Tailrace-Stream", self.id)
        self.token = response.headers.get("Tailrace-Token", self.token)
        self._response, self._chunks = response, response.aiter_bytes()
        self.resumes += self._opened
        where = f"{self._attempts.url}, from index {self.next_index}"
        self._edges.tell("resumed" if self._opened else "open", where)
        self._opened = True

    def _begin_at(self, header: str) -> None:
        """Begin at the first frame that the edge sends; `header` is Opened in base64."""
        _, opened = decode(b64decode(header))
        assert isinstance(opened, Opened)
        self._begin = None
        self._position.rewind(opened.first)
        self.next_index = opened.first

    def _request(self) -> httpx.Request:
        url, http = self._attempts.url, self._edges.http
        headers = {"Accept": FRAMES_TYPE}
        if self.id is None:
            # The key makes a repeated request safe: if the answer was lost, it starts no second
            # stream.
            headers["Idempotency-Key"] = self._idempotency_key
            path = "/v1/generate"
            if self._parent is not None:
                path = f"{path}/{self._parent}/branch"
                headers |= token_header(self.token)
            return http.build_request("POST", f"{url}{path}", headers=headers, json=self._body)
        after = self._position.after
        params: dict[str, str | int] = {} if after is None else {"after": after}
        params |= {**(self._begin or {}), **self._group}
        if self._snapshot:
            params["snapshot"] = 1
        return http.build_request(
            "GET",
            f"{url}/v1/generate/{self.id}",
            headers=headers | token_header(self.token),
            params=params,
        )

    async def _read(self, chunks: AsyncIterator[bytes]) -> None:
        """Read the next bytes of the body; if `cut` is called, drop the connection instead."""
        try:
            # The timeout has no deadline until `cut` sets one, to end this read. The
            # timeouts for a silent server are those of httpx.
            async with asyncio.timeout(None) as self._reading:
                data = None if self._cut else await anext(chunks, b"")
        except TimeoutError:
            data = None
        except httpx.DecodingError as error:  # a body that ends inside its compressed data
            raise Unavailable(f"malformed compressed body: {error}", code="cut_short") from error
        finally:
            self._reading = None
        if data is None:
            self._cut = False
            await self.aclose()
            self._position.reconnect()
            self._attempts.next_edge()
            return
        if not data:
            raise Unavailable("the body ended before the stream's last frame", code="cut_short")
        self._unread.extend(self._position.feed(data))
        if self._position.fault is None:
            self._attempts.worked()


CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 10.0
"""A connection counts as lost if no byte arrives for this many seconds: an edge sends a keepalive
every 4 to 6 s."""
PATIENCE_S = 60.0
"""Default time after which a client gives up if all attempts to get a new frame have failed, in
seconds."""
MAX_KEPT_CONNECTIONS = 16


class SamplingSettings(TypedDict, total=False):
    """The sampling settings that `Client.generate` accepts as keyword arguments."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None


class Client:
    """A client that reads streams from any of several edges in front of the same origins.

    `api_key` is sent with every request, for edges that require one. `on_state(state, detail)` is
    called when a connection changes: connecting, open, waiting (for another attempt), resumed,
    ended. After `patience_s` without success a request fails. `verify` and `trust_env` are given to
    httpx: `verify` is False or an SSL context for a development certificate, and `trust_env` says
    if proxies of the environment are used.
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
                "edges is not a list of http:// or https:// URLs",
                field="edges",
                hint="give a list such as ['http://127.0.0.1:8080']",
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
        """Close all connections; the generations continue and their streams can be resumed."""
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
        cache: str | None = None,
        stages: Mapping[str, bool] | None = None,
        chat: str | None = None,
        group: Group | None = None,
        idempotency_key: str | None = None,
        **sampling: Unpack[SamplingSettings],
    ) -> Stream:
        """Return a new stream; the request is sent when its first frame is read.

        Two calls with the same `idempotency_key` read the same stream. `chat` is the id of the chat
        that gets the stream as a turn. `stages` has False for each optional stage of a pipeline
        that is to be skipped. With `group`, such as "sentence", the edge joins the text of
        consecutive frames: each piece of several frames is one Snapshot.
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
            "cache": cache,
            "stages": None if stages is None else dict(stages),
            "chat": chat,
            **sampling,
        }
        body = {name: value for name, value in fields.items() if value is not None}
        key = idempotency_key or uuid4().hex
        return Stream(self._edges, body=body, idempotency_key=key, group=group)

    def resume(
        self,
        stream: str,
        *,
        after: int | None = None,
        token: str | None = None,
        snapshot: bool = False,
        tail: int | None = None,
        since: datetime | None = None,
        group: Group | None = None,
    ) -> Stream:
        """Return an existing stream, to be read after the frame with the index `after`.

        Without `after`, the stream is read from its start. Instead of `after`, `tail` gives the
        number of newest frames to begin with, or `since` the time at or after which the first frame
        was stored. `since` must have a time zone. With `snapshot`, one Snapshot with the text so
        far replaces the existing frames with text. `group` is that of `generate`.

        Raises:
            CallerError: More than one of `after`, `tail` and `since` is given, or `since` has no
                time zone.
        """
        if sum(each is not None for each in (after, tail, since)) > 1:
            raise CallerError("give only one of after, tail and since", field="after")
        begin = None if tail is None else {"tail": tail}
        if since is not None:
            if since.tzinfo is None:
                raise CallerError(
                    "since has no time zone", field="since", hint="set its tzinfo, such as UTC"
                )
            begin = {"since": int(since.timestamp() * 1000)}
        return Stream(
            self._edges,
            stream=stream,
            after=after,
            token=token,
            snapshot=snapshot,
            begin=begin,
            group=group,
        )

    def branch(
        self,
        stream: str,
        index: int,
        *,
        token: str | None = None,
        text: str | None = None,
        instruction: str | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        group: Group | None = None,
        idempotency_key: str | None = None,
        **sampling: Unpack[SamplingSettings],
    ) -> Stream:
        """Return a new stream that shares the first `index` frames of an existing one.

        The request is sent when the first frame of the new stream is read. The model continues
        after `text`, as if the model had written it, or after `instruction` as the user's next
        message. Settings that are not given are those of the existing stream, except that the seed
        is new. `token` is the resume token of the existing stream. `group` is that of `generate`.
        """
        fields = {
            "index": index,
            "text": text,
            "instruction": instruction,
            "max_tokens": max_tokens,
            "stop": stop if stop is None or isinstance(stop, str) else list(stop),
            **sampling,
        }
        body = {name: value for name, value in fields.items() if value is not None}
        key = idempotency_key or uuid4().hex
        return Stream(
            self._edges, body=body, idempotency_key=key, parent=stream, token=token, group=group
        )

    async def cancel(self, stream: str, token: str | None = None) -> Status:
        """End a stream for all its readers; a stream that has ended is not changed."""
        return await self._edges.cancel(stream, token)

    async def steer(self, stream: str, text: str, token: str | None = None) -> Status:
        """Append `text` to a running stream; return when the text is part of the stream.

        The request is not repeated if the answer is lost, because that could append the text twice.
        """
        return await self._edges.steer(stream, text, token)
