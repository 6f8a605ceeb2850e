"""The table of operations: each route and method of an edge, as `/openapi.json` describes it.

The routes themselves are in `edge/application.py`; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tailrace.edge.ai_sdk import EXAMPLE as AI_SDK_EXAMPLE
from tailrace.edge.anthropic.request import EXAMPLE as MESSAGE_EXAMPLE
from tailrace.edge.anthropic.routes import VERSION_HEADER, VERSIONS
from tailrace.edge.errors import (
    AI_SDK_PATH,
    CHAT_PATH,
    COMPLETIONS_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
)
from tailrace.edge.generate.grouping import MAX_GROUP_CHARS, MAX_GROUP_MS
from tailrace.edge.generate.schema import (
    BRANCH_EXAMPLE,
    GENERATE_EXAMPLE,
    STAGES_EXAMPLE,
    STEER_EXAMPLE,
)
from tailrace.edge.openai import embeddings
from tailrace.edge.openai.chat import EXAMPLE as CHAT_EXAMPLE
from tailrace.edge.openai.completions import TEXT_EXAMPLE
from tailrace.edge.openai.responses.request import EXAMPLE as RESPONSE_EXAMPLE
from tailrace.edge.openapi.errors import ALWAYS, KEYED, MESSAGES_KEYED, ErrorShape
from tailrace.edge.openapi.schemas import STRING, Schema, ref
from tailrace.ledger.frame import FRAMES_TYPE
from tailrace.ledger.links.rights import Right
from tailrace.ledger.text_units import Unit

JSON = "application/json"
SSE = "text/event-stream"
TEXT = "text/plain"
ANY = "*/*"
EVENT_SCHEMA = "x-event-schema"
"""Extension field of a media type. It refers to the schema of the events in a
`text/event-stream`, for which OpenAPI 3.1 has no field."""
BYTES: Schema = {"type": "string", "format": "binary"}
CODING = "Content-Encoding"
STREAM_HEADERS = ("Tailrace-Stream", "Tailrace-Token", "Tailrace-Schema", CODING, "Vary")

TAGS = {
    "Generations": "Streams of tokens: start one, read it from any index, steer it, cancel it.",
    "Chats": "The turns of a conversation: follow them on every device, and stop them from any.",
    "OpenAI": "OpenAI's chat completions, completions, embeddings and models.",
    "Responses": "OpenAI's Responses API. A response is a stream, and is resumed as one.",
    "Anthropic": "Anthropic's Messages API. A message is a stream, and is resumed as one.",
    "AI SDK": "The chat of the AI SDK (`useChat`).",
    "Streams": "The Durable Streams protocol: streams that any program writes.",
    "Subscriptions": "Webhooks and workers that are woken when streams grow. Off by default.",
    "Objects": "Durable Objects of classes that the operator has installed at the origin.",
    "Usage": "What an API key has used, and its budgets.",
    "Operators": "For operators. Needs an API key with the right `admin`; without keys"
    " the setting `operator_without_key`, and a request from the edge's machine.",
    "Edge": "The edge itself: health, version, metrics, files.",
}


@dataclass(frozen=True, slots=True)
class Content:
    """A body of one media type.

    For a body of events, `event` is the name of their schema.
    """

    media_type: str
    schema: Schema
    event: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful response."""

    description: str
    content: tuple[Content, ...] = ()
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a request; a test sends the `example` to a real edge."""

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

    `right` is the right that the API key must have: `Right(0)` means any key, None that no key is
    needed. `examples` are request bodies of the first media type in `body`.
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
    """True if a resume token of the stream also authorizes the operation."""

    @property
    def statuses(self) -> list[int]:
        """All statuses that a response may have, in ascending order."""
        streams = any(
            content.event and CODING in answer.headers
            for answer in self.answers.values()
            for content in answer.content
        )
        # 406: `Accept-Encoding` may refuse every content coding in which a stream can be sent.
        return sorted({*self.answers, *self.errors, *([406] if streams else ())})


def json_body(name: str) -> tuple[Content, ...]:
    return (Content(JSON, ref(name)),)


def document(description: str, name: str, *headers: str) -> dict[int, Answer]:
    """Return the responses of an operation that succeeds with a JSON document only."""
    return {200: Answer(description, json_body(name), headers)}


def _path(name: str, description: str, pattern: str = "", example: object = None) -> Parameter:
    schema = STRING | {"pattern": pattern} if pattern else STRING
    return Parameter("path", name, description, schema, example)


def _query(name: str, description: str, schema: Schema, example: object = None) -> Parameter:
    return Parameter("query", name, description, schema, example)


def _header(
    name: str, description: str, schema: Schema = STRING, example: object = None
) -> Parameter:
    return Parameter("header", name, description, schema, example)


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
    "after",
    "Return only frames after this index: the index of the last frame that the client has.",
    NUMBER_TEXT,
    0,
)
SNAPSHOT = _query(
    "snapshot",
    "1: the text so far comes as one frame, in place of the frames of that text.",
    {"type": "string", "enum": ["0", "1"]},
    "1",
)
TAIL = _query(
    "tail",
    "Return only the newest frames, this many, and those that follow. Not with `after`, `since`.",
    {"type": "integer", "minimum": 1},
)
SINCE = _query(
    "since",
    "Return only frames that were stored at or after this time (RFC 3339, or Unix milliseconds),"
    " and at most one second of earlier ones. Not with `after`, `tail`.",
    STRING,
)
OFFSET = _query(
    "offset",
    "Number of bytes of the input before the first byte of the body. By default 0.",
    NUMBER_TEXT,
    0,
)
LAST = _query(
    "last",
    "1: the input is complete with this body.",
    {"type": "string", "enum": ["0", "1"]},
    "1",
)
GROUP = (
    _query(
        "group",
        "Join the text of consecutive frames: it is sent when a unit is complete.",
        {"type": "string", "enum": [unit.value for unit in Unit]},
        "sentence",
    ),
    _query(
        "group_ms",
        "Send joined text when its first frame has waited for this many milliseconds.",
        {"type": "integer", "minimum": 1, "maximum": MAX_GROUP_MS},
        200,
    ),
    _query(
        "group_chars",
        "Send joined text when it has this many characters.",
        {"type": "integer", "minimum": 1, "maximum": MAX_GROUP_CHARS},
        80,
    ),
)
"""Parameters that group the text of a response. Each one may be left out."""
LAST_EVENT_ID = _header(
    "Last-Event-ID", "The same as `after`, as a browser's EventSource sends it.", NUMBER_TEXT
)
STARTING_AFTER = _query(
    "starting_after",
    "Return only what follows this `sequence_number`. Needs `stream=true`.",
    NUMBER_TEXT,
)
STREAM = _query("stream", "Answer with events instead of one document.", FLAG, "true")
CHAT_ID = _path("id", "The id of the chat, as its client chose it.", example="chat-1")
CHAT_POSITION: Schema = {"type": "string", "pattern": r"^[0-9]{1,20}(\.[0-9]{1,20})?$"}
POSTED = (*KEYED, 404, 409, 413)
OPENED = (*POSTED, 406)


# ---- generations ----


def _generations() -> Iterator[Operation]:
    views = (
        Content(SSE, STRING, "GenerateEvent"),
        Content(FRAMES_TYPE, BYTES),
        Content("application/x-ndjson", STRING, "GenerateLine"),
        Content("application/jsonl", STRING, "GenerateLine"),
    )
    headers = (*STREAM_HEADERS, "Tailrace-Siblings", "Tailrace-Opened", "X-Request-Id")
    yield Operation(
        "POST",
        "/v1/generate",
        "startStream",
        "Generations",
        "Start a stream",
        "`Accept` chooses the view: server-sent events, raw frames, JSON lines, or one JSON"
        " document when the stream has ended. A client that loses the connection resumes with"
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
        "Events, frames and JSON lines follow the stream to its end; JSON shows the stream so far."
        " Any edge of the same origins can be used. `after` and `Last-Event-ID` may both be given"
        " if equal.",
        {
            200: Answer("The stream.", (Content(JSON, ref("StreamDocument")), *views), headers),
            204: Answer("The stream has ended, and the client has all of it.", (), STREAM_HEADERS),
        },
        Right.READ,
        (ID, AFTER, SNAPSHOT, TAIL, SINCE, *GROUP, LAST_EVENT_ID),
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
        document("The state and the position of the stream.", "StreamStatus"),
        Right.CANCEL,
        (ID,),
        errors=(*KEYED, 404, 409, 413),
        takes_token=True,
    )
    yield Operation(
        "POST",
        "/v1/generate/{id}/branch",
        "branchStream",
        "Generations",
        "Start a stream that shares the first frames of this one",
        "The new stream has the first `index` frames of this one, without a copy, and goes on from"
        " there with other settings, another text, or an instruction. It outlives its parent. It is"
        " read, resumed and cancelled like any stream. Settings that are left out are the parent's,"
        " except a new `seed`.",
        {200: Answer("The stream.", (Content(JSON, ref("GenerateAnswer")), *views), headers)},
        Right.GENERATE,
        (ID, SNAPSHOT, IDEMPOTENCY),
        json_body("BranchRequest"),
        {"regenerate": json.loads(BRANCH_EXAMPLE)},
        (*OPENED, 416),
        takes_token=True,
    )
    yield Operation(
        "POST",
        "/v1/generate/{id}/steer",
        "steerStream",
        "Generations",
        "Add text to a running generation",
        "The generation continues as if it had generated the text itself. The answer comes when the"
        " text is durable in the stream's log.",
        document("The state and the position of the stream.", "StreamStatus"),
        Right.STEER,
        (ID,),
        json_body("SteerRequest"),
        {"text": json.loads(STEER_EXAMPLE)},
        (*KEYED, 404, 409, 413),
        takes_token=True,
    )
    yield Operation(
        "POST",
        "/v1/generate/{id}/stages",
        "switchStages",
        "Generations",
        "Switch optional stages of a running pipeline",
        "A stage is switched at one of its next items, and a notice `stage_switched` in the stream"
        " says so."
        " The answer comes when the request is durable.",
        document("The state and the position of the stream.", "StreamStatus"),
        Right.STEER,
        (ID,),
        json_body("StagesRequest"),
        {"stages": json.loads(STAGES_EXAMPLE)},
        (*KEYED, 404, 409, 413),
        takes_token=True,
    )
    yield Operation(
        "POST",
        "/v1/generate/{id}/input",
        "sendInput",
        "Generations",
        "Send bytes to a stream whose pipeline takes input",
        "The bytes are stored in pieces while the body arrives. If the request is cut off, send the"
        " rest with the offset of its first byte: bytes that are stored already are left out. An"
        " empty body returns how many bytes are stored.",
        document("The size of the stored input.", "StoredInput"),
        Right.STEER,
        (ID, OFFSET, LAST),
        (Content("application/octet-stream", BYTES),),
        errors=(*KEYED, 404, 408, 409, 413),
        takes_token=True,
    )
    yield Operation(
        "GET",
        "/v1/ws",
        "openSession",
        "Generations",
        "Open a WebSocket for frames of many streams",
        "An opening handshake of RFC 6455 over HTTP/1.1; the messages are described in PROTOCOL.md."
        " A page offers the subprotocols `tailrace` and `tailrace-key.KEY`. With `tailrace.json`"
        " each frame is a text message of JSON, for people who debug.",
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
            "One document of the answer so far, or with `stream=true` its chunks.",
            {200: Answer(f"The {called}.", views, STREAM_HEADERS)},
            Right.READ,
            (
                _path("id", f"The id of the answer: `{prefix}` and the stream's id."),
                STREAM,
                STARTING_AFTER,
                _query("include_usage", "Send a last chunk with the usage.", FLAG, "true"),
                _query("continuous_usage_stats", "Include the usage so far in each chunk.", FLAG),
                *GROUP,
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
        document(
            "The vectors.",
            "EmbeddingList",
            "Tailrace-Stream",
            "Tailrace-Schema",
            "Tailrace-Ignored",
        ),
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
        "404 if no origin serves it.",
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
        "One document when it has ended; events with `stream`; a document at once with"
        " `background`.",
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
        "One document of the response so far, or with `stream=true` its events.",
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
        "Cancel a response, and delete it",
        "Later requests for it get 404.",
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
        "Its last event is `response.incomplete`, with the status `cancelled`.",
        document("The response as far as it got.", "Response", *STREAM_HEADERS),
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
        "List the input items of a response",
        "400 `input_not_kept` if the input was too long, or the request had `store: false`.",
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
            _query("after", "The id of the last item of the previous page.", STRING),
        ),
        errors=found,
        shape=openai,
        takes_token=True,
    )


def _messages() -> Iterator[Operation]:
    message = _path("id", "The id of the message: `msg_` and the stream's id.")
    version = _header(
        VERSION_HEADER,
        "The version of the API, which is required.",
        {"enum": [*VERSIONS]},
        VERSIONS[-1],
    )
    views = (Content(JSON, ref("Message")), Content(SSE, STRING, "MessageEvent"))
    headers = (*STREAM_HEADERS, "Request-Id", "X-Request-Id")
    asked = json.loads(MESSAGE_EXAMPLE) | {"max_tokens": 8}
    found = (*MESSAGES_KEYED, 404)
    messages = ErrorShape.MESSAGES
    one = f"{MESSAGES_PATH}/{{id}}"
    yield Operation(
        "POST",
        MESSAGES_PATH,
        "createMessage",
        "Anthropic",
        "Create a message",
        "One document when it has ended, or events with `stream`. Any event may be the last one"
        f" that arrives: resume with `GET {one}`.",
        {200: Answer("The message.", views, (*headers, "Tailrace-Ignored"))},
        Right.GENERATE,
        (version, IDEMPOTENCY),
        json_body("MessageRequest"),
        {"document": asked, "stream": asked | {"stream": True}},
        (*found, 409, 413),
        messages,
    )
    yield Operation(
        "POST",
        f"{MESSAGES_PATH}/count_tokens",
        "countTokens",
        "Anthropic",
        "Count the tokens of a prompt",
        "The messages, with the system prompt and the tools, as the model reads them. Needs a model"
        " of the origin's own: 400 if another server reads the prompts.",
        document("The count.", "MessageTokenCount", "Request-Id", "Tailrace-Ignored"),
        Right.GENERATE,
        (version,),
        json_body("MessageTokenCountRequest"),
        {"document": {name: value for name, value in asked.items() if name != "max_tokens"}},
        (*found, 413),
        messages,
    )
    yield Operation(
        "GET",
        one,
        "readMessage",
        "Anthropic",
        "Read a message, from any event",
        "One document of the message so far; or its events, with `stream=true`, `starting_after`,"
        " `Last-Event-ID` or `Accept: text/event-stream`.",
        {
            200: Answer("The message.", views, headers),
            204: Answer(
                "`Last-Event-ID` is the last event, and the message has ended.", (), headers
            ),
        },
        Right.READ,
        (
            message,
            STREAM,
            _query(
                "starting_after",
                "Return only the events after this number, which is the `id` of an event.",
                NUMBER_TEXT,
            ),
            LAST_EVENT_ID,
        ),
        errors=(*found, 409, 413),
        shape=messages,
        takes_token=True,
    )
    yield Operation(
        "POST",
        f"{one}/cancel",
        "cancelMessage",
        "Anthropic",
        "Cancel a message",
        "Its last event is `error`. Cancelling a message that has ended changes nothing.",
        document("The message as far as it got.", "Message", *headers),
        Right.CANCEL,
        (message,),
        errors=(*found, 409, 413),
        shape=messages,
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
        "The events are the parts of one message. Errors are plain text.",
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
        "The answer may still run. The origin remembers it for 24 hours.",
        {200: Answer("The message.", events, headers), 204: Answer("The chat has no answer yet.")},
        Right.READ,
        (CHAT_ID, SNAPSHOT, *GROUP),
        errors=(*KEYED, 404),
        shape=ErrorShape.AI_SDK,
    )

    yield Operation(
        "POST",
        f"{AI_SDK_PATH}/{{id}}/stop",
        "stopAiSdkChat",
        "AI SDK",
        "Stop the running answers of a chat, for all of its readers",
        "A chat without a running answer is left as it is.",
        document("The answers that were stopped.", "StoppedChat"),
        Right.CANCEL,
        (CHAT_ID,),
        errors=(*KEYED, 404, 413),
        shape=ErrorShape.AI_SDK,
    )


# ---- chats ----


def _chats() -> Iterator[Operation]:
    path, lines = "/v1/chats/{id}", ("application/x-ndjson", "application/jsonl")
    yield Operation(
        "PUT",
        path,
        "createChat",
        "Chats",
        "Create a chat, so that it can be followed before its first turn",
        "A chat also begins with its first turn: a request with its id in the field `chat` of `POST"
        " /v1/generate`, or in `id` of `POST /api/chat`. It is forgotten 24 hours after its latest"
        " turn began.",
        {204: Answer("The chat exists.")},
        Right.GENERATE,
        (CHAT_ID,),
        errors=(*KEYED, 413),
    )
    yield Operation(
        "GET",
        path,
        "readChat",
        "Chats",
        "Follow a chat, or list its turns",
        "Events and JSON lines bring each turn as it begins, the frames of its stream, and the"
        " number of readers, until the client leaves. JSON lists up to 100 turns.",
        {
            200: Answer(
                "The turns.",
                (
                    Content(JSON, ref("Chat")),
                    Content(SSE, STRING, "ChatEvent"),
                    *(Content(each, STRING, "ChatLine") for each in lines),
                ),
                ("X-Request-Id",),
            )
        },
        Right.READ,
        (
            CHAT_ID,
            _query(
                "after",
                "The id of the last event that the client has: the number of a turn, or a turn and"
                " the index of its frame. In JSON the turns after this one are listed.",
                CHAT_POSITION,
            ),
            _query(
                "tail",
                "Begin with the newest turns, this many. Not with `after`.",
                {"type": "integer", "minimum": 1},
            ),
            _query("turns", "1: leave out the frames of the turns.", {"enum": ["0", "1"]}, "1"),
            SNAPSHOT,
            _header("Last-Event-ID", "The same as `after`.", CHAT_POSITION),
        ),
        errors=(*KEYED, 404, 406, 416),
    )
    yield Operation(
        "POST",
        f"{path}/stop",
        "stopChat",
        "Chats",
        "Stop the running turns of a chat, for all of their readers",
        "A chat without a running turn is left as it is.",
        document("The turns that were stopped.", "StoppedChat"),
        Right.CANCEL,
        (CHAT_ID,),
        errors=(*KEYED, 404, 413),
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
        _header("Producer-Id", "The name of the producer. With it the append is safe to repeat."),
        _header("Producer-Epoch", "The epoch of the producer.", NUMBER_TEXT),
        _header(
            "Producer-Seq", "The sequence number of this append in the epoch, from 0.", NUMBER_TEXT
        ),
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
            200: Answer("The stream existed already, with the same settings.", (), tip),
            201: Answer("The stream was created.", (), ("Location", *tip)),
        },
        Right.STREAM_WRITE,
        (
            name,
            _header("Stream-TTL", "Seconds for which the stream is kept after its last use."),
            _header("Stream-Expires-At", "When the stream is deleted (RFC 3339)."),
            closed,
            _header(
                "Stream-Forked-From",
                "The path of the stream to fork: the new stream begins with its content.",
            ),
            _header("Stream-Fork-Offset", "The offset at which the fork diverges."),
            _header(
                "Stream-Fork-Sub-Offset",
                "Number of messages after that offset that the fork shares, too.",
                NUMBER_TEXT,
            ),
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
        "The content type must be that of the stream. In JSON each value, or each element of an"
        " array, is one message.",
        {
            200: Answer("The content was appended for this producer.", (), (*tip, *placed)),
            204: Answer(
                "The content was appended, now or by an earlier request.", (), (*tip, *placed)
            ),
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
        " stream. Continue at the `Stream-Next-Offset` of the last response.",
        {
            200: Answer(
                "The content from the offset on.",
                (raw, Content(SSE, STRING, "DurableStreamEvent"), Content(FRAMES_TYPE, BYTES)),
                (*tip, "Stream-Up-To-Date", "Stream-Cursor", "Stream-SSE-Data-Encoding", "ETag"),
            ),
            204: Answer(
                "The long poll timed out without new content.",
                (),
                (*tip, "Stream-Up-To-Date", "Stream-Cursor"),
            ),
            304: Answer("The client has the current version already.", (), ("ETag",)),
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
        "The headers of a read, without the content.",
        {200: Answer("The stream exists.", (), (*tip, "Stream-TTL", "Stream-Expires-At"))},
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
        "Its forks keep the content that they share with it.",
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
            200: Answer("The subscription existed already.", subscription),
            201: Answer("The subscription was created.", subscription),
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
        "Remove a stream from a subscription",
        none,
        "",
        None,
        _path("name", "The name of the stream.", example="notes/today"),
    )
    told = document("The response to the worker or webhook that was woken.", "Wake")
    yield operation("POST", f"{one}/claim", "claimWake", "Claim a wake", told, "ClaimRequest", wake)
    yield operation(
        "POST", f"{one}/callback", "callBack", "Report from a webhook", told, "HolderRequest", done
    )
    yield operation(
        "POST", f"{one}/ack", "acknowledge", "Report from a worker", told, "HolderRequest", done
    )
    yield operation(
        "POST", f"{one}/release", "releaseWake", "Release a wake", none, "HolderRequest", done
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
            "The name of the object; what is below it in the path is forwarded to the object.",
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
            "The object decides what the request means, and may answer with any status. The edge"
            " answers"
            " 404 `unknown_binding` if it has no such binding.",
            {200: Answer("The object's answer.", () if method == "HEAD" else (Content(ANY, {}),))},
            Right.STREAM_READ if method in ("GET", "HEAD") else Right.STREAM_WRITE,
            name,
            (Content(JSON, {}), Content(ANY, BYTES)) if sends else (),
            {"body": {"hello": "world"}} if sends else {},
            (*KEYED, 404, 413),
        )


# ---- usage ----

DAY = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}


def _usage_query(groups: str, *filters: str) -> tuple[Parameter, ...]:
    by = f"Groups of the sums, separated by commas: {groups}. Empty for one sum."
    return (
        _query("by", by, STRING, "day,model"),
        _query("from", "The first day (UTC).", DAY, "2026-01-01"),
        _query("to", "The last day (UTC), included.", DAY),
        *(_query(name, f"Only streams with this {name}.", STRING) for name in filters),
    )


def _usage() -> Iterator[Operation]:
    yield Operation(
        "GET",
        "/v1/usage",
        "readOwnUsage",
        "Usage",
        "Read what the API key has used",
        "Tokens of the generations that have ended, and what is left of its budgets. 404 at an"
        " edge without API keys.",
        document("The sums.", "OwnUsage"),
        Right(0),
        _usage_query("day, month, model, class, finish", "model", "class", "finish"),
        errors=(*KEYED, 404),
    )


# ---- operators ----


def _operators() -> Iterator[Operation]:
    root = "/v1/admin"
    origin = _query("origin", "The address of an origin: only that one is queried.", STRING)
    text = _query("text", "Include the text of the stream.", {"enum": ["0", "1"]}, "1")
    days = _query("days", "Time span to look back.", {"type": "integer", "minimum": 1}, 1)

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
            document("The answer of each origin.", answer, "X-Request-Id"),
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
        "One list for all origins. With `since` it has only the changes.",
        "LiveStreams",
        _query("sort", "A field of the rows, by which they are sorted.", STRING, "tokens"),
        _query("order", "The order.", {"enum": ["asc", "desc"]}, "desc"),
        _query("offset", "Number of streams to skip.", NUMBER_TEXT, 0),
        _query(
            "limit",
            "Maximum number of streams.",
            {"type": "integer", "minimum": 0, "maximum": 1000},
            10,
        ),
        _query("tenant", "Only streams of this tenant.", STRING),
        _query("model", "Only streams of this model.", STRING, "demo"),
        _query("state", "Only streams in this state.", STRING, "running"),
        _query("id", "Only streams whose id begins with this.", STRING),
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
        "Each with the time at which it was sent to readers, if its origin knows it.",
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
        "Links, circuit breakers, and each origin's own report.",
        "Health",
    )
    yield operation(
        "GET",
        "usage",
        "readUsage",
        "Read what all API keys have used",
        "Origins that share a ledger are counted once, several ledgers are added up.",
        "AllUsage",
        *_usage_query(
            "day, month, tenant, key, model, class, finish",
            *("tenant", "key", "model", "class", "finish"),
        ),
    )
    yield operation(
        "POST",
        "simulate",
        "simulatePolicies",
        "Simulate warm-pool policies over a trace",
        "The simulation runs at the first connected origin, and takes up to a minute.",
        "Simulation",
        body="SimulationRequest",
        example={"trace": "mixed", "days": 0.1, "policies": ["ttl-60"]},
    )
    for path, called, summary in (
        ("pool", "readPool", "Read the workers and the models that each has loaded"),
        ("histograms", "readHistograms", "Read the histograms of the origins' metrics"),
        ("ledger", "readLedger", "Read the size of the ledger"),
    ):
        yield operation(
            "GET", path, called, summary, "One answer for each origin.", "EachOrigin", origin
        )
    yield operation(
        "GET",
        "warm",
        "readWarmModels",
        "Read the tier of each model",
        "The demand for each model, and the values that decide on its tier.",
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
        "One answer for each origin.",
        "EachOrigin",
        days,
        origin,
    )
    yield operation(
        "POST",
        "warm/apply",
        "applyPolicy",
        "Apply a warm-pool policy",
        "The command goes to every origin. 409 if no origin has a warm pool.",
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
        "The command goes to every origin. 409 if no origin has a warm pool.",
        "EachOrigin",
        origin,
        body="PrewarmRequest",
        example={"model": "demo"},
    )
    yield operation(
        "POST",
        "warm/pin",
        "pinModel",
        "Pin a model, or unpin it",
        "The command goes to every origin. 409 if no origin has a warm pool, or if the pin would"
        " leave too little memory for other models.",
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
            "Check that the edge runs",
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
        "Check whether the edge accepts new streams",
        "With a key, or from the edge's machine, the response names the models and the origins.",
        {
            200: Answer("The edge accepts new streams.", ready),
            503: Answer("The edge does not accept new streams; the body says why.", ready),
        },
        errors=(*ALWAYS, 401, 429),
    )
    yield Operation(
        "GET",
        "/version",
        "readVersion",
        "Edge",
        "Read the release and the wire schema",
        "Edges and origins can be linked if their schemas are the same.",
        document("The version.", "Version"),
        errors=ALWAYS,
    )
    yield Operation(
        "GET",
        "/metrics",
        "readMetrics",
        "Edge",
        "Read Prometheus metrics",
        "Text, or OpenMetrics if `Accept` asks for it. For operators; 404 without metrics.",
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
    unchanged = Answer("The client has the current version already.", (), ("ETag",))
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
            "It only changes with the release. Send `If-None-Match`.",
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
    *_messages(),
    *_ai_sdk(),
    *_chats(),
    *_streams(),
    *_subscriptions(),
    *_objects(),
    *_usage(),
    *_operators(),
    *_edge(),
)
