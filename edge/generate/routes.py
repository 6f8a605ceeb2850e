"""The endpoints of `/v1/generate`: start, read, steer and cancel a stream."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from secrets import token_hex

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tailrace.edge.access.middleware import caller_of
from tailrace.edge.answer_parts import Change, Part, PartTracker
from tailrace.edge.chats.calls import open_turn
from tailrace.edge.generate.encoders import (
    HEADERS,
    Encoder,
    FrameEncoder,
    SseEncoder,
    stream_headers,
)
from tailrace.edge.generate.group_encoder import grouped
from tailrace.edge.generate.group_request import parse_group
from tailrace.edge.generate.grouping import Grouping
from tailrace.edge.generate.json_lines import JsonLinesEncoder
from tailrace.edge.generate.params import (
    View,
    check_idempotency_key,
    choose_view,
    parse_after,
    parse_flag,
    parse_since,
    parse_stream_id,
    parse_tail,
    read_body,
)
from tailrace.edge.generate.schema import (
    Start,
    parse_branch,
    parse_generate,
    parse_open,
    parse_stages,
    parse_steer,
)
from tailrace.edge.generate.snapshot_encoder import SnapshotEncoder
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import Reader
from tailrace.edge.sse import end_fields, finite, logprobs
from tailrace.edge.starlette_helpers import link_of, unless_disconnected
from tailrace.edge.starting_point import check_starting_point
from tailrace.edge.stream_answer import StreamAnswer
from tailrace.ledger.errors import TooLarge
from tailrace.ledger.frame import (
    FRAMES_TYPE,
    Caller,
    Cancel,
    Chunk,
    Classification,
    Embedding,
    Frame,
    Notice,
    Open,
    Opened,
    Reasoning,
    Resume,
    ScoredToken,
    Sibling,
    Status,
    Steer,
    StreamEnd,
    StreamError,
    StreamState,
    SwitchStages,
    Token,
    TokenScores,
    ToolCall,
    decode,
    to_error,
)
from tailrace.ledger.process.tasks import gather
from tailrace.ledger.stream_text import StreamText

MAX_DOCUMENT_BYTES = 32 << 20
"""Maximum size of the frames of one stream that are collected for a JSON document, in bytes."""


@dataclass(slots=True)
class Call:
    """A tool call as far as it was received; `arguments` is valid JSON once it is complete."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Collected:
    """The content of a stream as far as it was read, and the frame that closed it."""

    text: StreamText = field(default_factory=StreamText)
    scores: list[TokenScores] = field(default_factory=list)
    embeddings: list[Embedding] = field(default_factory=list)
    labels: list[Classification] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    closing: StreamEnd | Status | None = None
    _parts: PartTracker = field(default_factory=PartTracker)
    _arguments: dict[Part, list[str]] = field(default_factory=dict)

    @property
    def calls(self) -> list[Call]:
        """The tool calls in the order in which they began."""
        return [
            Call(part.call.id, part.call.name, "".join(pieces))
            for part, pieces in self._arguments.items()
        ]

    def add(self, frame: Frame) -> None:
        """Add the stream's next frame; raise the error of a StreamError."""
        self.text.add(frame)
        if type(frame) is Token and self._parts.text is not None:
            return  # a shortcut: a Token that continues a part changes only the text
        for change, part in self._parts.follow(frame):
            if change is Change.GROW and isinstance(frame, ToolCall):
                self._arguments.setdefault(part, []).append(frame.arguments)
        match frame:
            case ScoredToken():
                self.scores += frame.scores
            case Embedding():
                self.embeddings.append(frame)
            case Classification():
                self.labels.append(frame)
            case Notice():
                self.notices.append(frame)
            case Reasoning():
                self.reasoning.append(frame.text)
            case Chunk():
                self.data.append(frame.data)
            case StreamEnd() | Status():
                self.closing = frame
            case StreamError():
                raise to_error(frame)


async def collect(reader: Reader) -> Collected:
    """Read frames until one closes the stream; raise the error of a StreamError.

    Raises TooLarge if the frames exceed MAX_DOCUMENT_BYTES.
    """
    collected, size = Collected(), 0
    while collected.closing is None:
        for raw in await reader.take():
            size += len(raw)
            collected.add(decode(raw)[1])
        if size > MAX_DOCUMENT_BYTES:
            raise TooLarge(
                f"the stream has over {MAX_DOCUMENT_BYTES} bytes",
                field="Accept",
                hint="send Accept: text/event-stream, and read it as events",
            )
    return collected


def answer_document(opened: Opened, collected: Sequence[Collected]) -> dict[str, object]:
    """Return the JSON response to a POST; with several choices it has one stream for each."""
    begin: dict[str, object] = {"id": opened.stream.hex(), "model": opened.model}
    prompt_tokens = {"prompt_tokens": _prompt_tokens(opened, collected[0])}
    if not opened.siblings:
        return begin | _fields(collected[0]) | prompt_tokens
    streams = [opened.stream, *(sibling.stream for sibling in opened.siblings)]
    choices = [
        {"id": stream.hex()} | _fields(each)
        for stream, each in zip(streams, collected, strict=True)
    ]
    return begin | {"choices": choices} | prompt_tokens


def state_document(opened: Opened, collected: Collected) -> dict[str, object]:
    """Return the JSON response to a GET of a stream, which may still run."""
    closing = collected.closing
    if isinstance(closing, StreamEnd):
        state, next_index = StreamState.ENDED, closing.index + 1
    else:
        assert closing is not None, "collect ends with the frame that closes"
        state, next_index = closing.state, closing.next_index
    return {
        "id": opened.stream.hex(),
        "model": opened.model,
        "state": state.word,
        "next_index": next_index,
        **_fields(collected),
        "prompt_tokens": _prompt_tokens(opened, collected),
    }


def _prompt_tokens(opened: Opened, collected: Collected) -> int:
    """Return the number of tokens of the prompt.

    If an upstream server or an embedder counts them, only the StreamEnd has the number.
    """
    end = collected.closing
    return end.prompt_tokens if isinstance(end, StreamEnd) else opened.prompt_tokens


def _fields(collected: Collected) -> dict[str, object]:
    """Return the fields for the content: `text`, and others if the stream has frames for them."""
    fields: dict[str, object] = {"text": collected.text.text}
    if collected.scores:
        fields["logprobs"] = logprobs(collected.scores)
    if collected.embeddings:
        vectors = [finite(embedding.values) for embedding in collected.embeddings]
        fields |= {"embedding": vectors[0]} if len(vectors) == 1 else {"embeddings": vectors}
    if collected.labels:
        fields["classification"] = [
            {"label": each.label, "confidence": finite(each.confidence)}
            for each in collected.labels
        ]
    if collected.data:
        fields["data"] = b64encode(b"".join(collected.data)).decode()
    if collected.reasoning:
        fields["reasoning"] = "".join(collected.reasoning)
    if collected.calls:
        fields["tool_calls"] = [asdict(call) for call in collected.calls]
    if collected.notices:
        fields["notices"] = [
            {"code": notice.code, "message": notice.message} for notice in collected.notices
        ]
    if isinstance(collected.closing, StreamEnd):
        end = end_fields(collected.closing)
        fields |= {name: end[name] for name in end if name not in ("index", "prompt_tokens")}
    return fields


# ---- requests to the origin ----


def open_request(
    body: bytes, key: str | None, caller: Caller | None, media_type: str | None = None
) -> Start:
    """Return what a POST asks for; `key` is the value of its Idempotency-Key header."""
    # An origin starts no second stream for the same key. So the edge, which generates a key if the
    # client has sent none, can send the request again when the link to the origin breaks.
    ours = token_hex(16) if key is None else check_idempotency_key(key)
    if media_type == FRAMES_TYPE:
        start = Start(parse_open(body))
        if key is not None or start.wanted.idempotency_key is None:
            start = Start(replace(start.wanted, idempotency_key=ours))
    else:
        start = parse_generate(body, idempotency_key=ours)
    return start._replace(wanted=replace(start.wanted, caller=caller))


def resume_request(
    stream: str,
    after: Sequence[str],
    last_event_id: str | None,
    token: str | None,
    caller: Caller | None,
    *,
    follow: bool = True,
) -> Resume:
    """Return the Resume for a GET of the stream with the id `stream`.

    Args:
        stream: The stream's id from the path of the URL, not yet checked.
        after: The values of `?after=`.
        last_event_id: The value of the Last-Event-ID header.
        token: The resume token.
        caller: The caller that the API key identifies.
        follow: True to wait for further frames if the stream still runs.

    Raises:
        NotFound: The id is not valid.
        CallerError: The index to resume after is not valid.
    """
    return Resume(
        stream=parse_stream_id(stream),
        after=parse_after(after, last_event_id),
        token=token,
        follow=follow,
        caller=caller,
    )


# ---- endpoints ----


async def start(request: Request) -> Response:
    """Handle POST /v1/generate: start a stream."""
    view = choose_view(request.headers.get("Accept"))
    body = await read_body(request)
    key = request.headers.get("Idempotency-Key")
    media_type = request.headers.get("Content-Type")
    wanted, chat, grouping = open_request(body, key, caller_of(request), media_type)
    return await _answer(request, view, wanted, chat=chat, grouping=grouping)


async def read(request: Request) -> Response:
    """Handle GET /v1/generate/{id}: read a stream."""
    view = choose_view(request.headers.get("Accept"))
    query = request.query_params
    wanted = resume_request(
        request.path_params["id"],
        query.getlist("after"),
        request.headers.get("Last-Event-ID"),
        # EventSource cannot set headers, so the token may also be in the query.
        request.headers.get("Tailrace-Token") or query.get("token"),
        caller_of(request),
        follow=view is not View.JSON,
    )
    wanted = replace(
        wanted,
        tail=parse_tail(query.getlist("tail")),
        since_ms=parse_since(query.getlist("since")),
        snapshot=parse_flag(query.getlist("snapshot"), "snapshot"),
    )
    check_starting_point(wanted, after="after", tail="tail", since="since")
    return await _answer(request, view, wanted, grouping=parse_group(query))


async def cancel(request: Request) -> Response:
    """Handle POST /v1/generate/{id}/cancel: end a stream."""
    await read_body(request)
    wanted = Cancel(
        stream=parse_stream_id(request.path_params["id"]),
        token=request.headers.get("Tailrace-Token"),
        caller=caller_of(request),
    )
    return await _asked(request, wanted)


async def branch(request: Request) -> Response:
    """Handle POST /v1/generate/{id}/branch: start a stream that shares frames with this one."""
    view = choose_view(request.headers.get("Accept"))
    body = await read_body(request)
    key = request.headers.get("Idempotency-Key")
    wanted, chat, grouping = parse_branch(
        body,
        parse_stream_id(request.path_params["id"]),
        request.headers.get("Tailrace-Token"),
        idempotency_key=token_hex(16) if key is None else check_idempotency_key(key),
    )
    snapshot = parse_flag(request.query_params.getlist("snapshot"), "snapshot")
    wanted = replace(wanted, caller=caller_of(request))
    return await _answer(request, view, wanted, chat=chat, snapshot=snapshot, grouping=grouping)


async def steer(request: Request) -> Response:
    """Handle POST /v1/generate/{id}/steer: add text to a running stream."""
    body = await read_body(request)
    wanted = Steer(
        stream=parse_stream_id(request.path_params["id"]),
        token=request.headers.get("Tailrace-Token"),
        text=parse_steer(body),
        caller=caller_of(request),
    )
    return await _asked(request, wanted)


async def switch_stages(request: Request) -> Response:
    """Handle POST /v1/generate/{id}/stages: switch optional stages of a running pipeline."""
    body = await read_body(request)
    wanted = SwitchStages(
        stream=parse_stream_id(request.path_params["id"]),
        token=request.headers.get("Tailrace-Token"),
        stages=parse_stages(body),
        caller=caller_of(request),
    )
    return await _asked(request, wanted)


async def _asked(request: Request, wanted: Cancel | Steer | SwitchStages) -> Response:
    """Send a request to the stream's origin, and return the stream's new state as JSON."""
    with Reader(link_of(request)) as reader:
        status = await unless_disconnected(request, reader.ask(wanted))
    fields = {
        "id": status.stream.hex(),
        "state": status.state.word,
        "next_index": status.next_index,
    }
    return JSONResponse(fields, headers=HEADERS)


# ---- from a request frame to an answer ----

ENCODERS: dict[View, Callable[[], Encoder]] = {
    View.SSE: SseEncoder,
    View.FRAMES: FrameEncoder,
    View.NDJSON: partial(JsonLinesEncoder, View.NDJSON.value),
    View.JSONL: partial(JsonLinesEncoder, View.JSONL.value),
}


async def _answer(
    request: Request,
    view: View,
    wanted: Open | Resume,
    *,
    chat: str | None = None,
    snapshot: bool = False,
    grouping: Grouping | None = None,
) -> Response:
    """Return a response that shows the stream of `wanted` in the given view.

    `chat` is the id of the chat that gets the stream as a turn, if any. `snapshot` is True if a new
    branch begins with one frame that holds the text which the branch shares with its parent.
    `grouping` has no effect on a document, which has the whole text.
    """
    if view is not View.JSON:
        encoder = grouped(ENCODERS[view](), grouping)
        if snapshot or (isinstance(wanted, Resume) and wanted.snapshot):
            encoder = SnapshotEncoder(encoder)
        if chat is None:
            return StreamAnswer(wanted, encoder)
        with ExitStack() as source:
            reader = source.enter_context(Reader(link_of(request)))
            opened = await open_turn(request, reader, wanted, chat)
            encoder.opened(opened)
            source.pop_all()
            return StreamAnswer.reading(reader, opened, encoder)
    with Reader(link_of(request)) as reader:
        opened = await open_turn(request, reader, wanted, chat)
        found = await unless_disconnected(request, _document(reader, wanted, opened))
        return JSONResponse(found, headers=stream_headers(opened, View.JSON.value))


async def _document(reader: Reader, wanted: Open | Resume, opened: Opened) -> dict[str, object]:
    if isinstance(wanted, Resume):
        return state_document(opened, await collect(reader))
    caller = wanted.caller
    others = [_sibling(reader.link, sibling, caller) for sibling in opened.siblings]
    return answer_document(opened, await gather(collect(reader), *others))


async def _sibling(link: OriginPool, sibling: Sibling, caller: Caller | None) -> Collected:
    with Reader(link) as reader:
        await reader.open(Resume(sibling.stream, token=sibling.token or None, caller=caller))
        return await collect(reader)
