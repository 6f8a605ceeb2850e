"""`/api/chat`: the chat API of the AI SDK, which can also resume an answer.

To resume, the AI SDK sends only the id of its chat. The origin keeps a list of each chat's answers,
its turns (`edge/chats/`), so that every edge finds the latest answer. A stream is sent as the parts
of one message, in the UI-message stream protocol. The events depend only on the stream's log and
id, so a message that is sent again from its start is the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import count
from json.encoder import encode_basestring
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tailrace.edge.access.middleware import caller_of
from tailrace.edge.answer_parts import Change, Part, PartKind, PartTracker
from tailrace.edge.chats.calls import open_turn, read_turns
from tailrace.edge.chats.chat_id import check_chat
from tailrace.edge.chats.routes import stop
from tailrace.edge.errors import AI_SDK_PATH, OLLAMA, error_response
from tailrace.edge.generate.encoders import Encoder, FrameEncoder
from tailrace.edge.generate.group_encoder import grouped
from tailrace.edge.generate.group_request import GROUP, GroupField, grouping_of, parse_group
from tailrace.edge.generate.grouping import Grouping
from tailrace.edge.generate.params import parse_flag, read_body
from tailrace.edge.generate.schema import Count, Settings
from tailrace.edge.generate.snapshot import as_snapshot, as_text
from tailrace.edge.generate.snapshot_encoder import SnapshotEncoder
from tailrace.edge.openai.chunks import (
    DONE,
    data_event,
)
from tailrace.edge.openai.messages import TOOL_SCHEMA, missing, read_tools, text_of
from tailrace.edge.openai.request import (
    ALL_THERE_IS,
    OpenAiBody,
    compact,
    invalid,
    open_of,
    parse_body,
)
from tailrace.edge.origins.reader import Reader
from tailrace.edge.starlette_helpers import NO_STORE, link_of
from tailrace.edge.stream_answer import StreamAnswer
from tailrace.ledger.errors import CallerError, NotFound, TailraceError, Unavailable
from tailrace.ledger.frame import (
    FRAMES_TYPE,
    MAX_MESSAGES,
    Caller,
    FinishReason,
    Frame,
    Message,
    Open,
    Opened,
    Reasoning,
    Resume,
    Revision,
    ScoredToken,
    StreamEnd,
    StreamError,
    Token,
    ToolCall,
    decode,
    to_error,
)
from tailrace.ledger.stream_text import AppendedText

HEADER = {"X-Vercel-AI-UI-Message-Stream": "v1"}
"""The response header by which the AI SDK recognises the UI-message stream protocol."""
REVISED = "data-revised"
"""The type of a message part that holds the whole text of the answer. It is sent after a revision
that withdrew text which the client already shows. Of several data parts with the same id, the
AI SDK keeps the last one."""

_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.FILTERED: "content-filter",
    FinishReason.TOOL_CALLS: "tool-calls",
}

Fields = dict[str, Any]


class UiEvents(Encoder):
    """Encodes one stream as the parts of one message of the AI SDK."""

    def __init__(self) -> None:
        self._message = ""
        self._before = b""  # encoded `start` events, sent before the events of the first frame
        self._parts = PartTracker()
        self._id = ""  # id of the latest part of text or reasoning
        self._ids = count()
        self._text = AppendedText()
        self._revised = ""  # the text of the last REVISED event
        self._arguments: dict[Part, list[str]] = {}  # pieces of each open tool call's arguments

    def opened(self, opened: Opened) -> None:
        self._message = f"msg_{opened.stream.hex()}"
        begin = [{"type": "start", "messageId": self._message}, {"type": "start-step"}]
        self._before = _events(begin)

    def refusal(self, error: TailraceError) -> Response:
        return error_response(error, AI_SDK_PATH)

    def frames(self, frames: list[bytes]) -> bytes:
        before, self._before = self._before, b""
        return b"".join([before, *[self._frame(decode(raw)[1]) for raw in frames]])

    def _frame(self, frame: Frame) -> bytes:
        """Return the encoded events for the stream's next frame."""
        if isinstance(frame, StreamError):
            return _events([{"type": "error", "errorText": to_error(frame).message}]) + DONE
        if isinstance(frame, StreamEnd):
            ends = [event for _, part in self._parts.close() for event in self._end(part)]
            return _events([*ends, *_ended(frame)]) + DONE
        if type(frame) is Token and self._parts.text is not None:
            return _text_delta(self._id, self._text.added(frame))
        events: list[Fields] = []
        for change, part in self._parts.follow(frame):
            match change:
                case Change.BEGIN:
                    events.append(self._begin(part))
                case Change.GROW:
                    events += self._grow(part, frame)
                case Change.END:
                    events += self._end(part)
        return _events(events)

    def _begin(self, part: Part) -> Fields:
        if part.kind is PartKind.TOOL_CALL:
            self._arguments[part] = []
            return {"type": "tool-input-start", **_call_fields(part)}
        self._id = str(next(self._ids))
        return {"type": f"{_PREFIX[part.kind]}-start", "id": self._id}

    def _grow(self, part: Part, frame: Frame) -> Iterator[Fields]:
        """Yield the events that add a frame's content to its part; none if it has no content."""
        match frame:
            case Token() | ScoredToken() | Revision():
                if text := self._text.added(frame):
                    yield {"type": "text-delta", "id": self._id, "delta": text}
                if self._text.departed and isinstance(frame, Revision):
                    yield self._whole(final=frame.final, stability=frame.stability)
            case Reasoning():
                yield {"type": "reasoning-delta", "id": self._id, "delta": frame.text}
            case ToolCall() if frame.arguments:
                self._arguments[part].append(frame.arguments)
                delta = {"toolCallId": part.call.id, "inputTextDelta": frame.arguments}
                yield {"type": "tool-input-delta", **delta}

    def _whole(self, *, final: bool, stability: float) -> Fields:
        """Return a REVISED event with the whole text, after a revision that withdrew some of it.

        The AI SDK cannot delete text that earlier text-delta events have added to a message. So a
        client shows the text of this event instead. `final` is True if no later revision changes
        this text, and `stability` says how likely that is.
        """
        self._revised = self._text.text
        data = {"text": self._revised, "final": final, "stability": stability}
        return {"type": REVISED, "id": self._message, "data": data}

    def _end(self, part: Part) -> Iterator[Fields]:
        if part.kind is PartKind.TOOL_CALL:
            yield _call(part, "".join(self._arguments.pop(part)))
            return
        # After a revision that withdrew text, no deltas are sent, because the client would append
        # them to the withdrawn text. So the text since the last REVISED event is still to be sent.
        if self._text.departed and self._revised != self._text.text:
            yield self._whole(final=True, stability=1.0)
        yield {"type": f"{_PREFIX[part.kind]}-end", "id": self._id}


_PREFIX = {PartKind.TEXT: "text", PartKind.REASONING: "reasoning"}


def _text_delta(part: str, text: str) -> bytes:
    """Return a text-delta event, faster than `data_event`: nearly all events are text deltas."""
    if not text:
        return b""
    quoted = encode_basestring(text)
    return f'data: {{"type":"text-delta","id":"{part}","delta":{quoted}}}\n\n'.encode()


def _call_fields(part: Part) -> Fields:
    return {"toolCallId": part.call.id, "toolName": part.call.name}


def _call(part: Part, arguments: str) -> Fields:
    """Return the event for a complete tool call: an error event if its arguments are not JSON."""
    fields = _call_fields(part)
    try:
        given = json.loads(arguments or "{}")
    except ValueError:  # the stream may have been cut off within the arguments
        why = {"input": arguments, "errorText": "the arguments are no JSON"}
        return {"type": "tool-input-error", **fields, **why}
    return {"type": "tool-input-available", **fields, "input": given}


def _ended(end: StreamEnd) -> list[Fields]:
    if end.finish_reason is FinishReason.CANCELLED:
        return [{"type": "finish-step"}, {"type": "abort", "reason": "cancelled"}]
    reason = _FINISH.get(end.finish_reason)
    if reason is None:
        why = end.message or "the generation failed"
        return [{"type": "error", "errorText": why}]
    return [{"type": "finish-step"}, {"type": "finish", "finishReason": reason}]


def _events(told: Iterable[Fields]) -> bytes:
    return b"".join(map(data_event, told))


EXAMPLE = (
    '{"id": "chat-1", "messages": [{"role": "user", "parts": [{"type": "text", "text": "Hi"}]}]}'
)
ROLES = ("system", "user", "assistant")
SKIPPED = ("reasoning", "source-url", "source-document")
"""Types of message parts that clients show but that are not sent to the model."""


class ChatBody(Settings, OpenAiBody):
    """The JSON body of `POST /api/chat`. Without `model`, the first model of the edge is used."""

    model: str | None = Field(None, min_length=1, description='a model, such as "demo"')  # type: ignore[assignment]
    id: str | None = Field(None, description="a string: the id of the chat")
    messages: list[Any] = Field(description="a list of messages, each with a list of parts")
    trigger: str | None = Field(
        None, description='a string, such as "submit-message": why useChat sends the request'
    )
    messageId: str | None = Field(None, description="a string: the id of a message")  # noqa: N815, as it is sent
    system: str | None = Field(None, description="a string: the system prompt")
    max_tokens: Count | None = Field(None, ge=1, description="an integer of at least 1")
    tools: list[Any] | None = Field(
        None,
        description="a list of functions that the model may call",
        json_schema_extra={"items": TOOL_SCHEMA},
    )
    tool_choice: Any = None
    group: GroupField = GROUP


def to_open(body: ChatBody, key: str | None, caller: Caller | None) -> Open:
    """Return the Open frame for a request; `body.model` must be set."""
    system = () if body.system is None else (Message("system", body.system),)
    said = read_messages(body.messages)
    messages = (*system, *said)
    if not said or len(messages) > MAX_MESSAGES:
        raise CallerError(
            f"{len(said)} messages; 1 to {MAX_MESSAGES - len(system)} are expected",
            field="messages",
            hint=_COUNT,
        )
    return open_of(
        body,
        key,
        caller,
        messages=messages,
        max_tokens=ALL_THERE_IS if body.max_tokens is None else body.max_tokens,
        tools=read_tools(body.tools, body.tool_choice, None),
    )


_COUNT = f"send from 1 to {MAX_MESSAGES}, the system prompt included"


# ---- messages with parts ----


def read_messages(given: list[Any]) -> tuple[Message, ...]:
    """Return the turns of a conversation. Raises CallerError with the name of an invalid part."""
    return tuple(turn for at, one in enumerate(given) for turn in _turns(one, f"messages[{at}]"))


def _turns(message: object, place: str) -> list[Message]:
    if not isinstance(message, dict):
        raise invalid(place, message, "an object")
    role, parts = message.get("role"), message.get("parts")
    if role not in ROLES:
        raise invalid(f"{place}.role", role, "one of " + ", ".join(ROLES))
    if not isinstance(parts, list) and "content" in message:
        raise CallerError(
            "this route is for the AI SDK, whose messages have 'parts' instead of 'content'",
            field=place,
            hint=OLLAMA,
        )
    if not isinstance(parts, list):
        raise missing(f"{place}.parts")
    turns, step = list[Message](), _Step(str(role))
    for at, part in enumerate(parts):
        if isinstance(part, dict) and part.get("type") == "step-start":
            turns += step.turns()
            step = _Step(str(role))
        else:
            step.add(part, f"{place}.parts[{at}]")
    return turns + step.turns()


class _Step:
    """One step of a message: its text, its tool calls, and the results of these calls."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._texts: list[str] = []
        self._calls: list[dict[str, str]] = []
        self._outputs: list[Message] = []

    def add(self, part: object, place: str) -> None:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid(place, part, "an object with a type")
        kind: str = part["type"]
        if kind == "text":
            self._texts.append(text_of(part, "text", place))
        elif kind == "dynamic-tool" or kind.startswith("tool-"):
            self._add_call(part, kind, place)
        elif not (kind in SKIPPED or kind.startswith("data-")):
            raise CallerError(
                f"message parts of type {kind!r} are not supported: models take text only",
                field=place,
            )

    def _add_call(self, part: dict[str, Any], kind: str, place: str) -> None:
        call_id, state = text_of(part, "toolCallId", place), part.get("state")
        name = text_of(part, "toolName", place) if kind == "dynamic-tool" else kind[len("tool-") :]
        if state not in ("input-available", "output-available", "output-error"):
            return  # the input of the call is incomplete, so the tool was never called
        arguments = compact(part.get("input", {}))
        self._calls.append({"id": call_id, "name": name, "arguments": arguments})
        if state == "output-available":
            output = part.get("output")
            text = output if isinstance(output, str) else compact(output)
            self._outputs.append(Message("tool", text, tool_call_id=call_id))
        elif state == "output-error":
            error = text_of(part, "errorText", place)
            self._outputs.append(Message("tool", error, tool_call_id=call_id))

    def turns(self) -> list[Message]:
        if not (self._texts or self._calls):
            return []
        calls = compact(self._calls) if self._calls else None
        return [Message(self._role, "".join(self._texts), tool_calls=calls), *self._outputs]


# ---- endpoints ----


async def send(request: Request) -> Response:
    """Handle POST /api/chat: start an answer and stream it."""
    body, headers = parse_body(ChatBody, await read_body(request), EXAMPLE)
    body.model = body.model or _only_model(request)
    wanted = to_open(body, request.headers.get("Idempotency-Key"), caller_of(request))
    chat = None if body.id is None else check_chat(body.id)
    grouping = grouping_of(body.group)
    return await _answered(request, wanted, headers, chat, grouping=grouping)


async def resume(request: Request) -> Response:
    """Handle GET /api/chat/{id}/stream: send the chat's latest answer from its start.

    An answer that has ended is sent, too, because a page that was offline at the end has no other
    way to get it. A page that already shows the answer does not show it twice: the AI SDK replaces
    the message that has the same id.
    """
    chat = check_chat(request.path_params["id"])
    token = request.headers.get("Tailrace-Token")
    snapshot = parse_flag(request.query_params.getlist("snapshot"), "snapshot")
    grouping = parse_group(request.query_params)
    try:
        found = await read_turns(request, chat, "tail=1")
        for turn in found["turns"]:
            stream = bytes.fromhex(turn["stream"])
            wanted = Resume(stream, token=token, caller=caller_of(request))
            return await _answered(request, wanted, {}, snapshot=snapshot, grouping=grouping)
    except NotFound:
        pass
    return Response(status_code=204, headers=NO_STORE)


ROUTES = [
    Route(AI_SDK_PATH, send, methods=["POST"]),
    Route(f"{AI_SDK_PATH}/{{id}}/stream", resume, methods=["GET"]),
    Route(f"{AI_SDK_PATH}/{{id}}/stop", stop, methods=["POST"]),
]


# ---- from a request to a stream ----


async def _answered(
    request: Request,
    wanted: Open | Resume,
    headers: dict[str, str],
    chat: str | None = None,
    *,
    snapshot: bool = False,
    grouping: Grouping | None = None,
) -> Response:
    """Return the response with the stream: as parts of a message, or as frames if requested.

    The stream becomes a turn of `chat` before the response begins, so that a client that has seen
    a part of the response can resume it.
    """
    as_frames = FRAMES_TYPE in request.headers.get("Accept", "")
    encoder = grouped(FrameEncoder() if as_frames else UiEvents(), grouping)
    if snapshot:
        folded = as_snapshot if as_frames else as_text
        encoder = SnapshotEncoder(encoder, folded)
    with ExitStack() as source:
        reader = source.enter_context(Reader(link_of(request)))
        opened = await open_turn(request, reader, wanted, chat)
        encoder.opened(opened)
        source.pop_all()
        headers |= {} if as_frames else HEADER
        return StreamAnswer.reading(reader, opened, encoder, headers)


def _only_model(request: Request) -> str:
    """Return the first model that the origins offer. Raises Unavailable if there is none."""
    models = link_of(request).heartbeat.models
    if not models:
        raise Unavailable("no model is loaded", code="loading")
    return models[0]
