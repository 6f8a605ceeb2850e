"""The schemas of requests, responses and events in `/openapi.json`.

Schemas of requests are made from the pydantic models that parse them, and schemas of events from
the classes of frames, so that each field is declared only once. Responses have no such models:
their schemas are written in this file, and tests compare them with responses of a real edge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from tailrace.edge.ai_sdk import ChatBody as AiSdkChatBody
from tailrace.edge.anthropic.events import CANCELLED as MESSAGE_CANCELLED
from tailrace.edge.anthropic.events import PREFIX as MESSAGE_PREFIX
from tailrace.edge.anthropic.events import STOP_REASON, STOP_SEQUENCE
from tailrace.edge.anthropic.request import CANNOT as NO_MESSAGE_FIELDS
from tailrace.edge.anthropic.request import MessagesBody
from tailrace.edge.generate.schema import BranchBody, GenerateBody, StagesBody, SteerBody
from tailrace.edge.openai.answers import (
    CANCELLED,
)
from tailrace.edge.openai.chat import ChatBody
from tailrace.edge.openai.chunks import (
    FINISH,
)
from tailrace.edge.openai.completions import CompletionBody
from tailrace.edge.openai.embeddings import EmbeddingBody
from tailrace.edge.openai.request import IGNORED, OpenAiBody
from tailrace.edge.openai.responses.events import PREFIX
from tailrace.edge.openai.responses.request import UNSAID, ResponseBody
from tailrace.ledger.frame import FRAMES, Logged, Snapshot, StreamEnd, StreamState
from tailrace.ledger.usage import UsageCounts
from tailrace.ledger.wire.words import Word

Schema = dict[str, Any]
Schemas = dict[str, Schema]

ORIGIN_BODIES = Path(__file__).parent / "origin_bodies.json"
"""File with the schemas of request bodies that origins parse. The edge must not import the origin's
models, so `python -m tests.origin_bodies` writes this file from them. A test compares the two."""

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}
STREAM_ID: Schema = {
    "type": "string",
    "pattern": "^[0-9a-f]{32}$",
    "description": "The id of a stream.",
}


def ref(name: str) -> Schema:
    """Return a reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def const(value: object) -> Schema:
    return {"const": value}


def one_of(*schemas: Schema) -> Schema:
    """Return the schema of a value that matches at least one of these schemas (`anyOf`)."""
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    return one_of(schema, {"type": "null"})


def described(description: str, schema: Schema) -> Schema:
    return schema | {"description": description}


def record(
    description: str, required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None
) -> Schema:
    """Return the schema of an object.

    It allows further fields, because a later release may add some to a response.
    """
    return {
        "type": "object",
        "description": description,
        "properties": {**required, **(optional or {})},
        "required": list(required),
    }


# ---- requests: the models that read them ----

REQUESTS: dict[str, tuple[type[BaseModel], str]] = {
    "GenerateRequest": (
        GenerateBody,
        "A stream to generate. Exactly one of `prompt` and `messages` is given. `null` counts as"
        " left out.",
    ),
    "BranchRequest": (
        BranchBody,
        "Where a new stream leaves its parent, and what is different from there on.",
    ),
    "SteerRequest": (SteerBody, "Text to add to a running generation."),
    "StagesRequest": (StagesBody, "Stages of a running pipeline to switch on or off."),
    "ChatCompletionRequest": (ChatBody, "A request of OpenAI's chat completions."),
    "CompletionRequest": (CompletionBody, "A request of OpenAI's completions."),
    "ResponseRequest": (ResponseBody, "A request of OpenAI's Responses API."),
    "MessageRequest": (
        MessagesBody,
        "A request of Anthropic's Messages API. The parameters of `POST /v1/generate` are accepted,"
        " too. Unknown parameters are refused, as are those that would change the answer and are"
        f" not supported: {', '.join(f'`{name}`' for name in NO_MESSAGE_FIELDS)}.",
    ),
    "EmbeddingRequest": (EmbeddingBody, "A request of OpenAI's embeddings."),
    "AiSdkChatRequest": (
        AiSdkChatBody,
        "The request of the AI SDK's `useChat`. `model` is optional if the edge has one model.",
    ),
}
_LENIENT = (
    f" Unknown parameters are ignored, and named in the header `{IGNORED}`. The parameters of"
    " `POST /v1/generate` are accepted, too."
)


def _requests() -> Schemas:
    made: Schemas = {}
    for name, (model, about) in REQUESTS.items():
        description = about
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        made |= {inner: plain(one) for inner, one in schema.pop("$defs", {}).items()}
        if issubclass(model, OpenAiBody):
            description += _LENIENT
            if model.cannot:
                names = ", ".join(f"`{one}`" for one in model.cannot)
                description += f" Refused if they would change the answer: {names}."
        made[name] = plain(schema) | {"description": description}
    message = made["MessageRequest"]
    made["MessageTokenCountRequest"] = message | {
        "description": "The same request without `max_tokens`. Sampling settings have no effect.",
        "required": [name for name in message["required"] if name != "max_tokens"],
    }
    return made


def plain(schema: Any) -> Any:
    """Return a schema from pydantic without `title` fields and without null as a `default`."""
    if isinstance(schema, list):
        return [plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: {key: plain(one) for key, one in value.items()}
        if name == "properties"
        else plain(value)
        for name, value in schema.items()
        if name != "title" and not (name == "default" and value is None)
    }


# ---- events: the classes of frames ----

_EVENTS = {
    "Token": "A piece of the text. It is the plain event, without an `event:` line.",
    "ScoredToken": "A piece of the text, with the scores of its tokens: the plain event of a"
    " request for `logprobs`.",
    "StreamEnd": "The stream has ended. This is its last event. With `finish_reason` `stop`,"
    " `message` is the stop sequence that ended the text.",
    "Classification": "A label, and the model's confidence in it.",
    "Embedding": "A vector.",
    "Chunk": "A piece of bulk output; `data` is base64.",
    "Revision": "`text` replaces the text of all events from index `replaces` on.",
    "Notice": "Information about the stream for readers, such as `loading` or `inexact`.",
    "Reasoning": "A piece of the model's reasoning, which is not part of the text.",
    "ToolCall": "A piece of a tool call; the `arguments` of one `call` together are JSON.",
    "Snapshot": "The text of the events `first` to `index`, in their place, of a request with"
    " `snapshot`.",
}
"""Maps each frame that becomes an event to a description. A test checks that none is missing."""


def _frame_events() -> Schemas:
    """Return the schema of each kind of event in a `text/event-stream`: id, name and data."""
    made: Schemas = {}
    for cls in FRAMES.values():
        if not issubclass(cls, Logged | Snapshot):
            continue
        called = cls.__name__
        name = {"StreamEnd": "end", "Token": "message", "ScoredToken": "message"}.get(
            called, called.lower()
        )
        data = _data_of(cls)
        if called == "ScoredToken":  # in events, the field `scores` is named `logprobs`
            del data["properties"]["scores"]
            data["properties"]["logprobs"] = array(ref("TokenScores"))
            data["required"] = list(data["properties"])
        parts = {"id": described("The index of the frame.", COUNT), "data": data}
        named = {"event": const(name)}
        is_plain = name == "message"
        made[event_name(called)] = record(
            _EVENTS[called], parts if is_plain else parts | named, named if is_plain else None
        )
    made["ErrorEvent"] = record(
        "The stream broke off without an `end`. The event has no id: resume after the last one.",
        {"event": const("error"), "data": ref("Error")},
    )
    names = [*made]
    made["GenerateEvent"] = {
        "description": "One event of a stream: its `event:`, `id:` and `data:` (as JSON). The"
        " first line of a body is `retry:` with a random time of 500 to 2000 ms, and a comment"
        " `: ping` comes after 4 to 6 s of silence.",
        "anyOf": [ref(name) for name in names],
    }
    made["GenerateLine"] = record(
        "One line of JSON lines. Its other fields are those of the event's `data`.",
        {
            "type": described(
                "The name of the event; `token` for text, `ping` for a keepalive.", STRING
            )
        },
        {"index": described("The index of the frame; an `error` or `ping` has none.", COUNT)},
    )
    return made


def event_name(frame: str) -> str:
    """Return the name of the event schema for a type of frame, such as `TokenEvent`."""
    return "EndEvent" if frame == "StreamEnd" else f"{frame}Event"


def _data_of(cls: type[Logged | Snapshot]) -> Schema:
    """Return the schema of a frame's fields as they are shown in JSON."""
    hints = get_type_hints(cls)
    schema: Schema = {"type": "object", "properties": {}, "required": []}
    for field in fields(cls):
        optional = field.default is not MISSING
        hint = hints[field.name]
        schema["properties"][field.name] = _kind(_not_none(hint) if optional else hint)
        if not optional:
            schema["required"].append(field.name)
    return schema


def _not_none(hint: Any) -> Any:
    """Return the type of an optional field without None: an event lacks a field that is None."""
    if get_origin(hint) in (Union, UnionType):
        [hint] = [one for one in get_args(hint) if one is not NoneType]
    return hint


def _kind(hint: Any) -> Schema:
    if get_origin(hint) is tuple:
        return array(_kind(get_args(hint)[0]))
    if isinstance(hint, type) and issubclass(hint, Word):
        return words(hint)
    kinds: dict[Any, Schema] = {
        str: STRING,
        bool: BOOLEAN,
        int: COUNT,
        float: nullable(NUMBER),  # infinities and NaN, which JSON lacks, become null
        bytes: {"type": "string", "contentEncoding": "base64"},
    }
    return kinds.get(hint, ANY_OBJECT)


def words(enum: type[Word]) -> Schema:
    """Return the schema of an enum, whose values are words in JSON."""
    return {"type": "string", "enum": [member.word for member in enum]}


# ---- answers: `/v1/generate` ----


def _generate() -> Schemas:
    end = _data_of(StreamEnd)["properties"]
    ended = {name: end[name] for name in ("finish_reason", "total_tokens", "message", "retryable")}
    made = ended | {
        "logprobs": array(ref("TokenScores")),
        "embedding": array(nullable(NUMBER)),
        "embeddings": array(array(nullable(NUMBER))),
        "classification": array(
            record("A label.", {"label": STRING, "confidence": nullable(NUMBER)})
        ),
        "data": described("Bulk output, in base64.", STRING),
        "reasoning": STRING,
        "tool_calls": array(
            record("A tool call.", {"id": STRING, "name": STRING, "arguments": STRING})
        ),
        "notices": array(record("A notice.", {"code": STRING, "message": STRING})),
    }
    score = {"id": COUNT, "token": STRING, "logprob": nullable(NUMBER)}
    split = {
        "bytes": described(
            "The token's bytes, if they are not valid UTF-8 by themselves.", array(COUNT)
        )
    }
    begin = {"id": STREAM_ID, "model": STRING, "prompt_tokens": COUNT}
    choice = record("One stream of several.", {"id": STREAM_ID, "text": STRING}, made)
    return {
        "TokenScore": record("A token, and the logarithm of its probability.", score, split),
        "TokenScores": record(
            "The sampled token, and the most likely ones, the best first.",
            score,
            split | {"top": array(ref("TokenScore"))},
        ),
        "GenerateAnswer": record(
            "A stream that has ended. With `n` above 1 the fields of each stream are in `choices`.",
            begin,
            {"text": STRING, **made, "choices": array(choice)},
        ),
        "StreamDocument": record(
            "A stream as far as it has got. The fields of its end are present once it has ended.",
            {**begin, "state": words(StreamState), "next_index": COUNT, "text": STRING},
            made,
        ),
        "StreamStatus": record(
            "The state and position of a stream. `running` after a cancel means that its end is"
            " not yet written.",
            {"id": STREAM_ID, "state": words(StreamState), "next_index": COUNT},
        ),
        "StoredInput": record(
            "The size in bytes of the input of a stream, as far as it is durable.",
            {"id": STREAM_ID, "bytes": COUNT, "complete": BOOLEAN},
        ),
    }


# ---- errors ----


def _errors() -> Schemas:
    error = record(
        "The reason why a request failed. Clients should use `code` if they know it, else the"
        " status.",
        {
            "code": described("A stable identifier of the error.", STRING),
            "message": described("For people.", STRING),
            "retryable": described("The same request may succeed later, unchanged.", BOOLEAN),
        },
        {
            "field": described("The part of the request that is wrong.", STRING),
            "hint": described("What would be right.", STRING),
        },
    )
    openai = record(
        "An error in the shape of OpenAI's API.",
        {
            "message": STRING,
            "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
            "param": nullable(STRING),
            "code": nullable(STRING),
        },
    )
    return {
        "Error": record("An error.", {"error": error}),
        "OpenAiError": record("An error of OpenAI's routes.", {"error": openai}),
        "MessagesError": record(
            "An error of Anthropic's routes.",
            {
                "type": const("error"),
                "error": record(
                    "The error.",
                    {"type": STRING, "message": STRING},
                    {"details": record("For SDKs.", {"error_code": STRING})},
                ),
                "request_id": described("The id of the request.", STRING),
            },
        ),
    }


# ---- answers: OpenAI's dialects ----


def _openai() -> Schemas:
    reasons = {"enum": [*FINISH.values(), CANCELLED, None]}
    usage = record(
        "Token counts.",
        {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
    )
    call = record(
        "A tool call, or a piece of one.",
        {"function": record("The function.", {"arguments": STRING}, {"name": STRING})},
        {"id": STRING, "type": const("function"), "index": COUNT},
    )
    message = record(
        "The model's message.",
        {"role": const("assistant"), "content": nullable(STRING), "refusal": {"type": "null"}},
        {"reasoning_content": STRING, "tool_calls": array(call)},
    )
    delta = record(
        "The part of the message that is new.",
        {},
        {
            "role": const("assistant"),
            "content": nullable(STRING),
            "reasoning_content": STRING,
            "tool_calls": array(call),
        },
    )
    common = {"index": COUNT, "logprobs": nullable(ANY_OBJECT), "finish_reason": reasons}

    def head(kind: str, choice: Schema) -> Schemas:
        named = {"id": STRING, "object": const(kind), "created": COUNT, "model": STRING}
        return named | {"choices": array(record("One choice.", choice))}

    more = {
        "sequence_number": described("The index of the frame, for `starting_after`.", COUNT),
        "usage": nullable(usage),
        "notice": record("A notice.", {"code": STRING, "message": STRING}),
    }
    failed = {"error": openai_error()}
    chat, text = common | {"message": message}, common | {"text": STRING}
    chunks = {
        "ChatCompletionChunk": head("chat.completion.chunk", common | {"delta": delta}),
        "CompletionChunk": head("text_completion", text),
    }
    return {
        "ChatCompletion": record(
            "A chat completion.", head("chat.completion", chat) | {"usage": usage}
        ),
        "Completion": record("A completion.", head("text_completion", text) | {"usage": usage}),
        **{name: record("A `data:` line of a stream.", one, more) for name, one in chunks.items()},
        **{
            f"{name}Event": {
                "description": "One event; the last one's data is `[DONE]`.",
                "type": "object",
                "properties": {
                    "data": one_of(ref(name), const("[DONE]"), record("An error.", failed))
                },
                "required": ["data"],
            }
            for name in chunks
        },
        "Model": record(
            "A model that the origins serve.",
            {"id": STRING, "object": const("model"), "created": COUNT, "owned_by": STRING},
        ),
        "ModelList": record("Models.", {"object": const("list"), "data": array(ref("Model"))}),
        "EmbeddingList": record(
            "Vectors, in the order of the texts.",
            {
                "object": const("list"),
                "model": STRING,
                "data": array(
                    record(
                        "A vector: numbers, or base64 of little-endian 32-bit floats.",
                        {
                            "object": const("embedding"),
                            "index": COUNT,
                            "embedding": one_of(array(NUMBER), STRING),
                        },
                    )
                ),
                "usage": record("Usage.", {"prompt_tokens": COUNT, "total_tokens": COUNT}),
            },
        ),
    }


def openai_error() -> Schema:
    """Return a reference to the schema of OpenAI's error object, the value of `error`."""
    return {"$ref": "#/components/schemas/OpenAiError/properties/error"}


def _responses() -> Schemas:
    item = record(
        "An item: a message, reasoning, or a function call.",
        {"id": STRING, "type": STRING},
        {"status": STRING, "role": STRING, "content": {}, "call_id": STRING, "name": STRING},
    )
    response = {
        "id": {"type": "string", "pattern": f"^{PREFIX}[0-9a-f]{{32}}$"},
        "object": const("response"),
        "created_at": COUNT,
        "model": STRING,
        "status": {
            "enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
        },
        "output": array(item),
        "error": nullable(
            record("The reason why the response failed.", {"code": STRING, "message": STRING})
        ),
        "incomplete_details": nullable(
            record("The reason why the response is incomplete.", {"reason": STRING})
        ),
        "usage": nullable(
            record(
                "Token counts.",
                {"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT},
            )
        ),
    }
    repeated = {name: described("Repeated from the request.", {}) for name in UNSAID}
    return {
        "Response": record("A response as far as it has got.", response | repeated),
        "ResponseEvent": record(
            "One event of a response; `event:` repeats the type. The last one is"
            " `response.completed`, `response.incomplete` or `response.failed`.",
            {
                "event": STRING,
                "data": record(
                    "The event.",
                    {"type": STRING, "sequence_number": INTEGER},
                    {"response": ref("Response"), "delta": STRING, "item": item},
                ),
            },
        ),
        "ResponseDeleted": record(
            "A response that was deleted.",
            {"id": STRING, "object": const("response"), "deleted": const(True)},
        ),
        "ResponseInput": record(
            "The input items of a response.",
            {
                "object": const("list"),
                "data": array(record("An item.", {"id": STRING, "type": STRING})),
                "first_id": nullable(STRING),
                "last_id": nullable(STRING),
                "has_more": BOOLEAN,
            },
        ),
        "UiMessageEvent": record(
            "One event of the AI SDK's UI-message stream: a part of one message, or `[DONE]`.",
            {"data": one_of(record("A part.", {"type": STRING}), const("[DONE]"))},
        ),
    }


def _messages() -> Schemas:
    block = record(
        "A content block: text, thinking, or a call of a tool.",
        {"type": {"enum": ["text", "thinking", "tool_use"]}},
        {
            **dict.fromkeys(("text", "thinking", "signature", "id", "name"), STRING),
            "input": described("The arguments of a call.", {}),
        },
    )
    usage = {
        **dict.fromkeys(("input_tokens", "output_tokens"), COUNT),
        "cache_creation_input_tokens": described("Not counted: always 0.", COUNT),
        "cache_read_input_tokens": described(
            "Tokens of the prompt that came from a KV cache, at the end.", COUNT
        ),
    }
    reasons = {"enum": [*STOP_REASON.values(), STOP_SEQUENCE, MESSAGE_CANCELLED, None]}
    message = {
        "id": {"type": "string", "pattern": f"^{MESSAGE_PREFIX}[0-9a-f]{{32}}$"},
        "type": const("message"),
        "role": const("assistant"),
        "model": STRING,
        "content": array(block),
        "stop_reason": reasons,
        "stop_sequence": nullable(STRING),
        "stop_details": nullable(ANY_OBJECT),
        "usage": record("Token counts.", usage),
    }
    kinds = (
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop", "ping", "error"),
    )
    return {
        "Message": record("A message as far as it has got.", message),
        "MessageTokenCount": record("The tokens of a prompt.", {"input_tokens": COUNT}),
        "MessageEvent": record(
            "One event of a message. Its `id` is its number; `ping`, and an `error` that is not in"
            " the log, have none.",
            {
                "event": {"enum": [*kinds]},
                "data": record(
                    "The event.",
                    {"type": STRING},
                    {
                        "message": ref("Message"),
                        "index": COUNT,
                        "content_block": block,
                        "delta": ANY_OBJECT,
                        "usage": record("Token counts.", usage),
                        "error": {"$ref": "#/components/schemas/MessagesError/properties/error"},
                    },
                ),
            },
            {"id": COUNT},
        ),
    }


# ---- answers: the edge, its origins, the Durable Streams protocol ----


def _key_usage() -> Schemas:
    counts: Schemas = dict.fromkeys(UsageCounts._fields, COUNT)
    day = nullable(STRING | {"pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"})
    sums = {
        "by": array(STRING),
        "from": described("The first day; null for no limit.", day),
        "to": described("The last day; null for no limit.", day),
        "usage": array(record("The sums of one group, whose values are further fields.", counts)),
        "total": record("The sums of all groups.", counts),
    }
    budget = record(
        "A budget of the key, in tokens of prompts and outputs.",
        {
            "period": {"enum": ["day", "month"]},
            "tokens": COUNT,
            "used": COUNT,
            "remaining": COUNT,
            "ends_ms": described("Unix time at which the next period begins, in ms.", COUNT),
        },
    )
    about = "Usage of generations that have ended, each counted once."
    missing = described("The error of each origin that did not answer.", ANY_OBJECT)
    return {
        "OwnUsage": record(about, {**sums, "key": STRING, "budgets": array(budget)}),
        "AllUsage": record(about, {**sums, "ledgers": array(STRING), "missing": missing}),
    }


def _edge() -> Schemas:
    origin = record("An origin.", {"origin": described("Its address.", STRING)})
    return {
        "Alive": record("The edge runs.", {"ok": const(True)}),
        "Readiness": record(
            "`ready` is true while the edge accepts new streams; `reasons` say why it does not,"
            " as words,"
            " or as sentences for callers with a key or on the edge's machine.",
            {"ready": BOOLEAN, "reasons": array(STRING)},
            {"models": array(STRING), "devices": array(STRING), "origins": array(ANY_OBJECT)},
        ),
        "Version": record(
            "The release, and the hash of the wire schema.",
            {"tailrace": STRING, "schema": {"type": "string", "pattern": "^[0-9a-f]{16}$"}},
        ),
        "LiveStreams": record(
            "One page of the streams that run or wait, and those that ended recently.",
            {
                **dict.fromkeys(("now_ms", "live", "paused", "found"), COUNT),
                "states": ANY_OBJECT,
                "streams": array(record("A stream.", {"id": STREAM_ID})),
                "ended": array(record("A stream that has ended.", {"id": STREAM_ID})),
                "cursor": described("Send it as `since` in the next request.", STRING),
                "origins": array(origin),
            },
        ),
        "StoredStream": record(
            "One stream as its origin describes it: settings, state, end.",
            {
                "id": STREAM_ID,
                "tenant": STRING,
                **dict.fromkeys(("created_ms", "epoch", "next_index"), COUNT),
                "durability": STRING,
                "ended": BOOLEAN,
                "recipe": ANY_OBJECT,
                "end": nullable(ANY_OBJECT),
                "live": nullable(ANY_OBJECT),
                "lately": nullable(ANY_OBJECT),
            },
            {"origin": STRING, "prompt": nullable(STRING), "messages": array(ANY_OBJECT)},
        ),
        "FramePage": record(
            "Frames of a stream.",
            {
                "id": STREAM_ID,
                "next_index": COUNT,
                "ended": BOOLEAN,
                "frames": array(
                    record(
                        "A frame.",
                        {
                            "index": COUNT,
                            "type": STRING,
                            "bytes": COUNT,
                            "tokens": COUNT,
                            "at_ms": nullable(INTEGER),
                        },
                    )
                ),
            },
        ),
        "Health": record(
            "The health of this edge, and of each origin as the edge sees it and as it reports"
            " itself.",
            {
                "edge": record("The edge.", {"version": STRING, "ready": BOOLEAN}),
                "origins": array(record("An origin.", {"itself": origin})),
            },
        ),
        "EachOrigin": record(
            "The answer of each origin; one that did not answer has an `error` instead.",
            {"origins": array(origin)},
        ),
        "Simulation": record("The cost of each policy.", {}),
        "DurableStreamEvent": record(
            "One event of `live=sse`: `data` has the appended content, `control` the reader's"
            " position.",
            {"event": {"enum": ["data", "control"]}, "data": {}},
        ),
        "Subscription": record("A subscription and its state.", {}),
        "Wake": record("The response to the worker or webhook that was woken.", {}),
        "KeySet": record("The keys that sign webhooks.", {"keys": array(ANY_OBJECT)}),
    }


def _chats() -> Schemas:
    turn = {
        "turn": described("The number of the turn, from 0.", COUNT),
        "stream": STREAM_ID,
        "started_ms": described("The time at which it was listed, in Unix ms.", COUNT),
    }
    states = {"enum": [*(state.word for state in StreamState), "gone"]}
    listed = turn | {
        "state": described("The state of the stream; `gone` if it was deleted.", states)
    }
    listed_turn = record("A turn.", listed, {"next_index": COUNT})
    readers = described("The number of clients that follow the chat.", COUNT)
    kinds = described("`turn`, `presence`, `ping`, or the name of a frame's event.", STRING)
    return {
        "Chat": record(
            "A chat and some of its turns.",
            {
                "id": STRING,
                "turns": array(listed_turn),
                "next_turn": described("The number of the next turn.", COUNT),
                "readers": readers,
            },
        ),
        "StoppedChat": record(
            "The turns that were running.", {"id": STRING, "stopped": array(listed_turn)}
        ),
        "ChatEvent": record(
            "One event of a chat: a `turn` with its number as id, `presence` without an id, or an"
            " event of a turn's stream, whose id is the turn's number, a point and the index.",
            {"data": ANY_OBJECT},
            {"id": one_of(COUNT, STRING), "event": STRING},
        ),
        "ChatLine": record(
            "One line of a chat. `turn` is in every line but `presence` and `ping`.",
            {"type": kinds},
            {**turn, "index": COUNT, "readers": readers},
        ),
    }


@cache
def schemas() -> Schemas:
    """Return all schemas of the document, by name."""
    made = {
        **_requests(),
        **_frame_events(),
        **_key_usage(),
        **_generate(),
        **_errors(),
        **_openai(),
        **_responses(),
        **_messages(),
        **_chats(),
        **_edge(),
        **json.loads(ORIGIN_BODIES.read_text("utf-8")),
    }
    return {name: made[name] for name in sorted(made)}
