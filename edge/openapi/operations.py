"""The table of what an edge serves: each route and method, as `/openapi.json` tells of it.

It lies beside the routes of `edge/application.py`; a test holds each to the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailrace.edge.ai_sdk import EXAMPLE as AI_SDK_EXAMPLE
from tailrace.edge.errors import AI_SDK_PATH, CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH
from tailrace.edge.generate.schema import GENERATE_EXAMPLE, STEER_EXAMPLE
from tailrace.edge.openai import embeddings
from tailrace.edge.openai.chat import EXAMPLE as CHAT_EXAMPLE
from tailrace.edge.openai.completions import TEXT_EXAMPLE
from tailrace.edge.openai.responses.request import EXAMPLE as RESPONSE_EXAMPLE
from tailrace.edge.openapi.errors import ALWAYS, KEYED, ErrorShape
from tailrace.edge.openapi.schemas import STRING, Schema, ref
from tailrace.ledger.frame import FRAMES_TYPE
from tailrace.ledger.links.rights import Right

JSON = "application/json"
SSE = "text/event-stream"
TEXT = "text/plain"
ANY = "*/*"
EVENT_SCHEMA = "x-event-schema"
"""The field of a media type that names the schema of one event: OpenAPI 3.1 has none for it."""
BYTES: Schema = {"type": "string", "format": "binary"}
STREAM_HEADERS = ("Tailrace-Stream", "Tailrace-Token")

TAGS = {
    "Generations": "Streams of tokens: start one, read it from any index, steer it, cancel it.",
    "OpenAI": "OpenAI's chat completions, completions, embeddings and models.",
    "Responses": "OpenAI's Responses API. A response is a stream, and is resumed as one.",
    "AI SDK": "The chat of the AI SDK (`useChat`).",
    "Streams": "The Durable Streams protocol: streams that any program writes.",
    "Subscriptions": "Webhooks and workers that are woken when streams grow. Off by default.",
    "Objects": "Durable Objects of the operator's own classes.",
    "Operators": "What operators see and do. Needs an API key with the right `admin`; without keys"
    " the setting `operator_without_key`, and a request from the edge's machine.",
    "Edge": "The edge itself: health, version, metrics, files.",
}


@dataclass(frozen=True, slots=True)
class Content:
    """A body of one media type. `event` names the schema of its events, if it is made of events."""

    media_type: str
    schema: Schema
    event: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response that is no error."""

    description: str
    content: tuple[Content, ...] = ()
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a request; `example` is sent by the test of all examples."""

    place: str
    name: str
    description: str
    schema: Schema
    example: object = None

    @property
    def required(self) -> bool:
        return self.place == "path"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    `right` is what an API key needs: `Right(0)` is any key, and None needs no key. `examples` are
    bodies of the first media type.
    """

    method: str
    path: str
    name: str
    tag: str
    summary: str
    description: str
    answers: dict[int, Answer]
    right: Right | None = None
    parameters: tuple[Parameter, ...] = ()
    body: tuple[Content, ...] = ()
    examples: dict[str, Any] = field(default_factory=dict)
    errors: Sequence[int] = KEYED
    shape: ErrorShape = ErrorShape.NATIVE
    takes_token: bool = False
    """A resume token of the stream allows it, too."""

    @property
    def statuses(self) -> list[int]:
        """All statuses that an answer may have."""
        return sorted({*self.answers, *self.errors})


def json_body(name: str) -> tuple[Content, ...]:
    return (Content(JSON, ref(name)),)


def document(description: str, name: str, *headers: str) -> dict[int, Answer]:
    """Return the answers of an operation whose only success is one JSON document."""
    return {200: Answer(description, json_body(name), headers)}


def _path(name: str, description: str, pattern: str = "", example: object = None) -> Parameter:
    schema = STRING | {"pattern": pattern} if pattern else STRING
    return Parameter("path", name, description, schema, example)


def _query(name: str, description: str, schema: Schema, example: object = None) -> Parameter:
    return Parameter("query", name, description, schema, example)


def _header(name: str, description: str, schema: Schema = STRING) -> Parameter:
    return Parameter("header", name, description, schema)


NUMBER_TEXT = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "string", "enum": ["true", "false", "1", "0"]}
ID = _path("id", "The id of the stream, 32 hex digits.", "^[0-9a-f]{32}$")
IDEMPOTENCY = Parameter(
    "header",
    "Idempotency-Key",
    "Makes the POST safe to repeat: the same key finds the stream that the first request made.",
    {"type": "string", "minLength": 1, "maxLength": 255},
)
AFTER = _query(
    "after", "Only frames with a higher index. The index of the last one you have.", NUMBER_TEXT, 0
)
LAST_EVENT_ID = _header(
    "Last-Event-ID", "The same as `after`, as a browser's EventSource sends it.", NUMBER_TEXT
)
STARTING_AFTER = _query(
    "starting_after", "Only what follows this `sequence_number`. Needs `stream=true`.", NUMBER_TEXT
)
STREAM = _query("stream", "Answer with events instead of one document.", FLAG, "true")
POSTED = (*KEYED, 404, 409, 413)
OPENED = (*POSTED, 406)


# ---- generations ----


def _generations() -> Iterator[Operation]:
    views = (
        Content(SSE, STRING, "GenerateEvent"),
        Content(FRAMES_TYPE, BYTES),
    )
    headers = (*STREAM_HEADERS, "Tailrace-Siblings", "Tailrace-Opened", "X-Request-Id")
    yield Operation(
        "POST",
        "/v1/generate",
        "startStream",
        "Generations",
        "Start a stream",
        "`Accept` chooses the view: server-sent events, raw frames, or one JSON document when the"
        " stream has ended. A client that loses the connection resumes with"
        " `GET /v1/generate/{id}`; leaving does not cancel.",
        {200: Answer("The stream.", (Content(JSON, ref("GenerateAnswer")), *views), headers)},
        Right.GENERATE,
        (IDEMPOTENCY,),
        (*json_body("GenerateRequest"), Content(FRAMES_TYPE, BYTES)),
        {
            "prompt": json.loads(GENERATE_EXAMPLE) | {"max_tokens": 8},
            "messages": {
                "model": "demo",
                "messages": [{"role": "user", "content": "Tell me a story."}],
                "max_tokens": 8,
                "seed": 7,
                "unread": "run",
            },
        },
        OPENED,
    )
    yield Operation(
        "GET",
        "/v1/generate/{id}",
        "readStream",
        "Generations",
        "Read a stream, from any index",
        "Events and frames follow the stream to its end; JSON is what there is now. On any edge of"
        " the same origins. `after` and `Last-Event-ID` may both be given if they are equal.",
        {
            200: Answer("The stream.", (Content(JSON, ref("StreamDocument")), *views), headers),
            204: Answer("The stream has ended, and the client has all of it.", (), STREAM_HEADERS),
        },
        Right.READ,
        (ID, AFTER, LAST_EVENT_ID),
        errors=(*KEYED, 404, 406, 413, 416),
        takes_token=True,
    )
    yield Operation(
        "POST",
        "/v1/generate/{id}/cancel",
        "cancelStream",
        "Generations",
        "Cancel a stream, for all of its readers",
        "Cancelling a stream that has ended changes nothing. A lost connection never cancels.",
        document("Where the stream is.", "StreamStatus"),
        Right.CANCEL,
        (ID,),
        errors=(*KEYED, 404, 409, 413),
        takes_token=True,
    )
    yield Operation(
        "POST",
        "/v1/generate/{id}/steer",
        "steerStream",
        "Generations",
        "Add text to a running generation",
        "It goes on as if it had generated the text next. The answer comes when the text is durable"
        " in the stream's log.",
        document("Where the stream is.", "StreamStatus"),
        Right.STEER,
        (ID,),
        json_body("SteerRequest"),
        {"text": json.loads(STEER_EXAMPLE)},
        (*KEYED, 404, 409, 413),
        takes_token=True,
    )
    yield Operation(
        "GET",
        "/v1/ws",
        "openSession",
        "Generations",
        "Open a WebSocket for frames of many streams",
        "An opening handshake of RFC 6455 over HTTP/1.1; the messages are described in PROTOCOL.md."
        " A page offers the subprotocols `tailrace` and `tailrace-key.KEY`.",
        {101: Answer("The WebSocket is open.")},
        Right(0),
        errors=(*KEYED, 426),
        takes_token=True,
    )


# ---- OpenAI's API ----


def _openai() -> Iterator[Operation]:
    chat = ("ChatCompletion", "chatcmpl-", "chat completion")
    text = ("Completion", "cmpl-", "completion")
    for path, (name, prefix, called), example in (
        (CHAT_PATH, chat, CHAT_EXAMPLE),
        (COMPLETIONS_PATH, text, TEXT_EXAMPLE),
    ):
        views = (Content(JSON, ref(name)), Content(SSE, STRING, f"{name}ChunkEvent"))
        asked = json.loads(example) | {"max_tokens": 8}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        yield Operation(
            "POST",
            path,
            f"create{name}",
            "OpenAI",
            f"Create a {called}",
            "With `stream` the answer is a stream of chunks that ends with `[DONE]`; each has a"
            " `sequence_number`. Any chunk may be the last one that arrives: resume with"
            f" `GET {path}/{{id}}`.",
            {
                200: Answer(
                    f"The {called}.",
                    views,
                    (*STREAM_HEADERS, "Tailrace-Siblings", "Tailrace-Ignored", "X-Request-Id"),
                )
            },
            Right.GENERATE,
            (IDEMPOTENCY,),
            json_body(f"{name}Request"),
            {"document": asked, "stream": asked | options},
            POSTED,
            ErrorShape.OPENAI,
        )
        yield Operation(
            "GET",
            f"{path}/{{id}}",
            f"read{name}",
            "OpenAI",
            f"Read a {called}, from any chunk",
            "One document of what there is, or with `stream=true` the chunks.",
            {200: Answer(f"The {called}.", views, STREAM_HEADERS)},
            Right.READ,
            (
                _path("id", f"The id of the answer: `{prefix}` and the stream's id."),
                STREAM,
                STARTING_AFTER,
                _query("include_usage", "A last chunk with the usage.", FLAG, "true"),
                _query("continuous_usage_stats", "The usage so far in each chunk.", FLAG),
            ),
            errors=(*KEYED, 404, 409, 413),
            shape=ErrorShape.OPENAI,
            takes_token=True,
        )
    yield Operation(
        "POST",
        "/v1/embeddings",
        "createEmbeddings",
        "OpenAI",
        "Make embeddings of texts",
        "Needs a model that makes embeddings; others are refused with 400.",
        document("The vectors.", "EmbeddingList", "Tailrace-Stream", "Tailrace-Ignored"),
        Right.GENERATE,
        (IDEMPOTENCY,),
        json_body("EmbeddingRequest"),
        {"text": json.loads(embeddings.EXAMPLE)},
        POSTED,
        ErrorShape.OPENAI,
    )
    yield Operation(
        "GET",
        "/v1/models",
        "listModels",
        "OpenAI",
        "List the models that are served",
        "All models of all origins.",
        document("The models.", "ModelList"),
        Right(0),
        shape=ErrorShape.OPENAI,
    )
    yield Operation(
        "GET",
        "/v1/models/{name}",
        "readModel",
        "OpenAI",
        "Read one model",
        "404 where no origin serves it.",
        document("The model.", "Model"),
        Right(0),
        (_path("name", "The name of a model; it may have slashes.", example="demo"),),
        errors=(*KEYED, 404),
        shape=ErrorShape.OPENAI,
    )


def _responses() -> Iterator[Operation]:
    response = _path("id", "The id of the response: `resp_` and the stream's id.")
    views = (Content(JSON, ref("Response")), Content(SSE, STRING, "ResponseEvent"))
    asked = json.loads(RESPONSE_EXAMPLE) | {"max_output_tokens": 8}
    found = (*KEYED, 404)
    openai = ErrorShape.OPENAI
    one = f"{RESPONSES_PATH}/{{id}}"
    yield Operation(
        "POST",
        RESPONSES_PATH,
        "createResponse",
        "Responses",
        "Create a response",
        "One document when it has ended, events with `stream`, or at once with `background`.",
        {
            200: Answer(
                "The response.", views, (*STREAM_HEADERS, "Tailrace-Ignored", "X-Request-Id")
            )
        },
        Right.GENERATE,
        (IDEMPOTENCY,),
        json_body("ResponseRequest"),
        {
            "document": asked,
            "stream": asked | {"stream": True},
            "background": asked | {"background": True},
        },
        POSTED,
        openai,
    )
    yield Operation(
        "GET",
        one,
        "readResponse",
        "Responses",
        "Read a response, from any event",
        "One document of what there is, or with `stream=true` the events.",
        {200: Answer("The response.", views, STREAM_HEADERS)},
        Right.READ,
        (response, STREAM, STARTING_AFTER),
        errors=(*found, 413),
        shape=openai,
        takes_token=True,
    )
    yield Operation(
        "DELETE",
        one,
        "deleteResponse",
        "Responses",
        "Cancel a response, and delete what is stored of it",
        "From then on it is as if it had never been.",
        document("It is deleted.", "ResponseDeleted"),
        Right.CANCEL,
        (response,),
        errors=(*found, 409),
        shape=openai,
        takes_token=True,
    )
    yield Operation(
        "POST",
        f"{one}/cancel",
        "cancelResponse",
        "Responses",
        "Cancel a response",
        "It ends as `response.incomplete`, with the status `cancelled`.",
        document("What it has come to.", "Response", *STREAM_HEADERS),
        Right.CANCEL,
        (response,),
        errors=(*found, 409, 413),
        shape=openai,
        takes_token=True,
    )
    yield Operation(
        "GET",
        f"{one}/input_items",
        "listInputItems",
        "Responses",
        "List the items that a response was given",
        "400 `input_not_kept` where the input was too long, or was not to be stored.",
        document("A page of the items.", "ResponseInput", *STREAM_HEADERS),
        Right.READ,
        (
            response,
            _query(
                "limit",
                "Maximum number of items.",
                {"type": "integer", "minimum": 1, "maximum": 100},
                20,
            ),
            _query("order", "The order of the items.", {"enum": ["asc", "desc"]}, "asc"),
            _query("after", "The id of the item before the page.", STRING),
        ),
        errors=found,
        shape=openai,
        takes_token=True,
    )


def _ai_sdk() -> Iterator[Operation]:
    events = (Content(SSE, STRING, "UiMessageEvent"),)
    headers = (*STREAM_HEADERS, "X-Vercel-AI-UI-Message-Stream")
    yield Operation(
        "POST",
        AI_SDK_PATH,
        "sendChat",
        "AI SDK",
        "Answer a chat of the AI SDK",
        "The stream is the parts of one message. Errors are plain text.",
        {200: Answer("The message.", events, (*headers, "Tailrace-Ignored", "X-Request-Id"))},
        Right.GENERATE,
        (IDEMPOTENCY,),
        json_body("AiSdkChatRequest"),
        {"chat": json.loads(AI_SDK_EXAMPLE) | {"max_tokens": 8}},
        POSTED,
        ErrorShape.AI_SDK,
    )
    yield Operation(
        "GET",
        f"{AI_SDK_PATH}/{{id}}/stream",
        "resumeChat",
        "AI SDK",
        "Read the latest answer of a chat, from its start",
        "Whether it has ended or not; it is known for 24 hours.",
        {200: Answer("The message.", events, headers), 204: Answer("The chat has no answer.")},
        Right.READ,
        (_path("id", "The id of the chat, as its client chose it.", example="chat-1"),),
        errors=(*KEYED, 404),
        shape=ErrorShape.AI_SDK,
    )


# ---- the Durable Streams protocol, and objects ----


def _streams() -> Iterator[Operation]:
    path = "/v1/stream/{name}"
    name = _path(
        "name",
        "The name of a stream: path segments, up to 512 characters together. The id of a"
        " generation is the name of a stream that can only be read.",
        example="notes/today",
    )
    raw = Content(ANY, BYTES)
    tip = ("Stream-Next-Offset", "Stream-Closed", "X-Request-Id")
    producer = (
        _header("Producer-Id", "The name of the producer. Makes the append safe to repeat."),
        _header("Producer-Epoch", "The epoch of the producer.", NUMBER_TEXT),
        _header("Producer-Seq", "The number of this append in the epoch, from 0.", NUMBER_TEXT),
    )
    closed = _header("Stream-Closed", "`true` closes the stream.", {"enum": ["true"]})
    found = (*KEYED, 404, 405, 410)
    written = (*found, 409, 413)
    placed = ("Producer-Epoch", "Producer-Seq")
    yield Operation(
        "PUT",
        path,
        "createDurableStream",
        "Streams",
        "Create a stream",
        "The body is its first content. A repeated equal request is answered with 200.",
        {
            200: Answer("The stream is there already.", (), tip),
            201: Answer("The stream was created.", (), ("Location", *tip)),
        },
        Right.STREAM_WRITE,
        (
            name,
            _header("Stream-TTL", "Seconds that the stream is kept after its last use."),
            _header("Stream-Expires-At", "When the stream is deleted (RFC 3339)."),
            closed,
            _header("Stream-Forked-From", "The path of the stream that this one begins as."),
            _header("Stream-Fork-Offset", "Where the fork begins."),
            _header("Stream-Fork-Sub-Offset", "How many messages after that offset.", NUMBER_TEXT),
        ),
        (Content(TEXT, STRING), Content(JSON, {}), raw),
        {"text": "first "},
        written,
    )
    yield Operation(
        "POST",
        path,
        "appendToDurableStream",
        "Streams",
        "Append to a stream, or close it",
        "The content type is the stream's. In JSON each value, or each element of an array, is one"
        " message.",
        {
            200: Answer("It was appended for this producer.", (), (*tip, *placed)),
            204: Answer("It was appended, or had been before.", (), (*tip, *placed)),
        },
        Right.STREAM_WRITE,
        (name, closed, _header("Stream-Seq", "Must rise with each append."), *producer),
        (Content(TEXT, STRING), Content(JSON, {}), raw),
        {"text": "second "},
        written,
    )
    yield Operation(
        "GET",
        path,
        "readDurableStream",
        "Streams",
        "Read a stream from an offset, and wait for more",
        "`live=long-poll` waits for the next content, `live=sse` and `live=frames` follow the"
        " stream. Go on at the `Stream-Next-Offset` of the last answer.",
        {
            200: Answer(
                "The content from the offset on.",
                (raw, Content(SSE, STRING, "DurableStreamEvent"), Content(FRAMES_TYPE, BYTES)),
                (*tip, "Stream-Up-To-Date", "Stream-Cursor", "Stream-SSE-Data-Encoding", "ETag"),
            ),
            204: Answer(
                "Nothing has come for as long as a long poll waits.",
                (),
                (*tip, "Stream-Up-To-Date", "Stream-Cursor"),
            ),
            304: Answer("The client has it already.", (), ("ETag",)),
        },
        Right.STREAM_READ,
        (
            name,
            _query("offset", "Where to begin: an offset, `-1` (the start) or `now`.", STRING, "-1"),
            _query("live", "How to wait.", {"enum": ["long-poll", "sse", "frames"]}),
            _query("cursor", "The `Stream-Cursor` of the last answer.", STRING),
            _header("If-None-Match", "The `ETag` that the client has."),
        ),
        errors=found,
        takes_token=True,
    )
    yield Operation(
        "HEAD",
        path,
        "describeDurableStream",
        "Streams",
        "Read the type and the end of a stream",
        "Without its content.",
        {200: Answer("The stream is there.", (), (*tip, "Stream-TTL", "Stream-Expires-At"))},
        Right.STREAM_READ,
        (name,),
        errors=found,
        takes_token=True,
    )
    yield Operation(
        "DELETE",
        path,
        "deleteDurableStream",
        "Streams",
        "Delete a stream",
        "Forks of it keep what they share.",
        {204: Answer("It is deleted.")},
        Right.STREAM_WRITE,
        (name,),
        errors=written,
    )


def _subscriptions() -> Iterator[Operation]:
    root = "/v1/stream/__ds"
    one = f"{root}/subscriptions/{{id}}"
    name = _path("id", "The id of the subscription.", example="watch-notes")
    kept = (*KEYED, 404, 405, 409, 413)
    none = {204: Answer("It is done.")}
    wake = {"worker": "worker-1"}
    done = {"wake_id": "w-1", "generation": 1, "done": True}

    def operation(
        method: str,
        path: str,
        called: str,
        summary: str,
        answers: dict[int, Answer],
        body: str = "",
        example: dict[str, Any] | None = None,
        *more: Parameter,
    ) -> Operation:
        own = (name,) if "{id}" in path else ()
        return Operation(
            method,
            path,
            called,
            "Subscriptions",
            summary,
            "404 `subscriptions_off` unless the origin's operator has set `[streams]"
            " subscriptions`. Not for tenants.",
            answers,
            Right(0),
            (*own, *more),
            json_body(body) if body else (),
            {} if example is None else {"body": example},
            kept,
        )

    subscription = json_body("Subscription")
    yield operation(
        "PUT",
        one,
        "putSubscription",
        "Create a subscription",
        {
            200: Answer("It is there already.", subscription),
            201: Answer("It was created.", subscription),
        },
        "SubscriptionRequest",
        {"type": "pull-wake", "pattern": "notes/*", "wake_stream": "wakes"},
    )
    yield operation(
        "GET",
        one,
        "readSubscription",
        "Read a subscription",
        document("The subscription.", "Subscription"),
    )
    yield operation("DELETE", one, "deleteSubscription", "Delete a subscription", none)
    yield operation(
        "POST",
        f"{one}/streams",
        "addSubscribedStreams",
        "Add streams to a subscription",
        none,
        "SubscribedStreams",
        {"streams": ["notes/today"]},
    )
    yield operation(
        "DELETE",
        f"{one}/streams/{{name}}",
        "removeSubscribedStream",
        "Take a stream from a subscription",
        none,
        "",
        None,
        _path("name", "The name of the stream.", example="notes/today"),
    )
    told = document("What the holder of the wake is told.", "Wake")
    yield operation("POST", f"{one}/claim", "claimWake", "Claim a wake", told, "ClaimRequest", wake)
    yield operation(
        "POST", f"{one}/callback", "callBack", "Report from a webhook", told, "HolderRequest", done
    )
    yield operation(
        "POST", f"{one}/ack", "acknowledge", "Report from a worker", told, "HolderRequest", done
    )
    yield operation(
        "POST", f"{one}/release", "releaseWake", "Give a wake back", none, "HolderRequest", done
    )
    yield operation(
        "GET",
        f"{root}/jwks.json",
        "readSigningKeys",
        "Read the keys that sign webhooks",
        document("The keys.", "KeySet"),
    )


def _objects() -> Iterator[Operation]:
    name = (
        _path("binding", "The name of a binding of the edge's deployment.", example="ROOMS"),
        _path(
            "name",
            "The name of the object; what is below it in the path is the object's.",
            example="lobby",
        ),
    )
    for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
        sends = method in ("PUT", "POST")
        yield Operation(
            method,
            "/v1/objects/{binding}/{name}",
            f"{method.lower()}Object",
            "Objects",
            f"Send a {method} request to an object",
            "What it means, and what the answer is, is the object's to say: any status may come."
            " 404 `unknown_binding` where the edge has no such binding.",
            {200: Answer("The object's answer.", () if method == "HEAD" else (Content(ANY, {}),))},
            Right.STREAM_READ if method in ("GET", "HEAD") else Right.STREAM_WRITE,
            name,
            (Content(JSON, {}), Content(ANY, BYTES)) if sends else (),
            {"body": {"hello": "world"}} if sends else {},
            (*KEYED, 404, 413),
        )


# ---- operators ----


def _operators() -> Iterator[Operation]:
    root = "/v1/admin"
    origin = _query("origin", "The address of one origin, to ask it alone.", STRING)
    text = _query("text", "Also what the stream says.", {"enum": ["0", "1"]}, "1")
    days = _query("days", "How far to look back.", {"type": "integer", "minimum": 1}, 1)

    def operation(
        method: str,
        path: str,
        called: str,
        summary: str,
        description: str,
        answer: str,
        *parameters: Parameter,
        body: str = "",
        example: dict[str, Any] | None = None,
    ) -> Operation:
        own = (ID,) if "{id}" in path else ()
        return Operation(
            method,
            f"{root}/{path}",
            called,
            "Operators",
            summary,
            description,
            document("What the origins say.", answer, "X-Request-Id"),
            Right.ADMIN,
            (*own, *parameters),
            json_body(body) if body else (),
            {} if example is None else {"body": example},
            (*KEYED, 404, 405, 409, 413),
        )

    yield operation(
        "GET",
        "streams",
        "listLiveStreams",
        "List the streams that run or wait",
        "One list of all origins. With `since` only what has changed.",
        "LiveStreams",
        _query("sort", "A field of the rows.", STRING, "tokens"),
        _query("order", "The order.", {"enum": ["asc", "desc"]}, "desc"),
        _query("offset", "How many streams to skip.", NUMBER_TEXT, 0),
        _query(
            "limit",
            "Maximum number of streams.",
            {"type": "integer", "minimum": 0, "maximum": 1000},
            10,
        ),
        _query("tenant", "Only streams of this tenant.", STRING),
        _query("model", "Only streams of this model.", STRING, "demo"),
        _query("state", "Only streams in this state.", STRING, "running"),
        _query("id", "How the ids begin.", STRING),
        _query("since", "The `cursor` of an earlier answer to the same query.", STRING),
        origin,
    )
    yield operation(
        "GET",
        "streams/{id}",
        "inspectStream",
        "Read one stream",
        "Its settings, its state and its end; with `text=1` its prompt too.",
        "StoredStream",
        text,
    )
    yield operation(
        "GET",
        "streams/{id}/frames",
        "listFrames",
        "List the frames of a stream",
        "Each with the time at which it was released, as far as its origin knows.",
        "FramePage",
        _query("start", "The first index.", NUMBER_TEXT, 0),
        _query(
            "limit",
            "Maximum number of frames.",
            {"type": "integer", "minimum": 1, "maximum": 1000},
            10,
        ),
        text,
    )
    yield operation(
        "POST",
        "streams/{id}/cancel",
        "endStream",
        "Cancel a stream",
        "For all of its readers.",
        "StoredStream",
    )
    yield operation(
        "GET",
        "health",
        "readHealth",
        "Read the health of the edge and its origins",
        "Links, breakers, and what each origin says of itself.",
        "Health",
    )
    yield operation(
        "POST",
        "simulate",
        "simulatePolicies",
        "Simulate warm-pool policies over a trace",
        "By the first origin that is there. It takes up to a minute.",
        "Simulation",
        body="SimulationRequest",
        example={"trace": "mixed", "days": 0.1, "policies": ["ttl-60"]},
    )
    for path, called, summary in (
        ("pool", "readPool", "Read the workers and what each has loaded"),
        ("histograms", "readHistograms", "Read the histograms of the origins' metrics"),
        ("ledger", "readLedger", "Read the size of the ledger"),
    ):
        yield operation("GET", path, called, summary, "Of each origin.", "EachOrigin", origin)
    yield operation(
        "GET",
        "warm",
        "readWarmModels",
        "Read the tier of each model",
        "What was asked of each model, and what decides.",
        "EachOrigin",
        days,
        origin,
    )
    yield operation(
        "GET",
        "warm/explain",
        "explainModel",
        "Read the last decisions about a model",
        "Its last decisions and starts.",
        "EachOrigin",
        _query("model", "The model.", STRING, "demo"),
        _query("limit", "Maximum number of decisions.", {"type": "integer", "minimum": 1}, 5),
        origin,
    )
    yield operation(
        "GET",
        "warm/residence",
        "readResidence",
        "Read which worker held which model in which tier",
        "Of each origin.",
        "EachOrigin",
        days,
        origin,
    )
    yield operation(
        "POST",
        "warm/apply",
        "applyPolicy",
        "Apply a warm-pool policy",
        "At every origin; 409 where there is no pool.",
        "EachOrigin",
        origin,
        body="PolicyRequest",
        example={"policy": "ttl-60", "shadow": True},
    )
    yield operation(
        "POST",
        "warm/prewarm",
        "prewarmModel",
        "Load a model now",
        "At every origin; 409 where there is no pool.",
        "EachOrigin",
        origin,
        body="PrewarmRequest",
        example={"model": "demo"},
    )
    yield operation(
        "POST",
        "warm/pin",
        "pinModel",
        "Keep a model loaded, or let it go",
        "At every origin; 409 where there is no pool.",
        "EachOrigin",
        origin,
        body="PinRequest",
        example={"model": "demo", "pinned": True},
    )


# ---- the edge ----


def _edge() -> Iterator[Operation]:
    for path, name in (("/healthz", "readLiveness"), ("/health", "readHealthAlias")):
        yield Operation(
            "GET",
            path,
            name,
            "Edge",
            "Tell that the edge runs",
            "200 while the process runs, whatever the origin does.",
            document("It runs.", "Alive"),
            errors=ALWAYS,
        )
    ready = json_body("Readiness")
    yield Operation(
        "GET",
        "/readyz",
        "readReadiness",
        "Edge",
        "Tell whether the edge takes new streams",
        "With a key, or from the edge's machine, the answer has the models and the origins.",
        {200: Answer("It takes them.", ready), 503: Answer("It does not, and why.", ready)},
        errors=(*ALWAYS, 401, 429),
    )
    yield Operation(
        "GET",
        "/version",
        "readVersion",
        "Edge",
        "Read the release and the wire schema",
        "Edges and origins of one schema speak with each other.",
        document("The version.", "Version"),
        errors=ALWAYS,
    )
    yield Operation(
        "GET",
        "/metrics",
        "readMetrics",
        "Edge",
        "Read Prometheus metrics",
        "As text, or as OpenMetrics if `Accept` says so. For operators; 404 without metrics.",
        {
            200: Answer(
                "The metrics.",
                (Content(TEXT, STRING), Content("application/openmetrics-text", STRING)),
            )
        },
        Right.ADMIN,
        errors=(*KEYED, 404),
    )
    cached = (*ALWAYS, 404)
    unchanged = Answer("The client has it already.", (), ("ETag",))
    for path, name, summary, content in (
        ("/openapi.json", "readDescription", "Read this description", Content(JSON, {})),
        ("/llms.txt", "readGuide", "Read a short guide for language models", Content(TEXT, STRING)),
    ):
        yield Operation(
            "GET",
            path,
            name,
            "Edge",
            summary,
            "It changes with the release only. Send `If-None-Match`.",
            {200: Answer("The document.", (content,), ("ETag",)), 304: unchanged},
            parameters=(_header("If-None-Match", "The `ETag` that the client has."),),
            errors=ALWAYS,
        )
    page = Content("text/html", STRING)
    yield Operation(
        "GET",
        "/",
        "readConsole",
        "Edge",
        "Open the console",
        "A page that starts streams and shows them.",
        {200: Answer("The page.", (page,))},
        errors=ALWAYS,
    )
    yield Operation(
        "GET",
        "/web/{path}",
        "readFile",
        "Edge",
        "Read a file for browsers",
        "The client for pages is at `/web/tailrace/index.js`: docs/web.md.",
        {
            200: Answer("The file.", (Content(ANY, BYTES),), ("ETag",)),
            304: unchanged,
        },
        parameters=(_path("path", "The name of a file.", example="console/main.js"),),
        errors=cached,
    )


OPERATIONS: tuple[Operation, ...] = (
    *_generations(),
    *_openai(),
    *_responses(),
    *_ai_sdk(),
    *_streams(),
    *_subscriptions(),
    *_objects(),
    *_operators(),
    *_edge(),
)
