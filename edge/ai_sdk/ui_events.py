"""A stream as the parts of one message of the AI SDK, in its UI-message stream protocol.

What is told follows from the log and the stream's id alone, so that a message which is told again,
from its start, is the same one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from json.encoder import encode_basestring
from typing import Any

from starlette.responses import PlainTextResponse, Response

from edge.body import Encoder
from edge.openai.answers import DONE, data_event
from edge.openai.errors import error_headers
from ledger.errors import TailraceError
from ledger.frame import (
    FinishReason,
    Frame,
    Logged,
    Opened,
    Reasoning,
    Revision,
    ScoredToken,
    StreamEnd,
    StreamError,
    Token,
    ToolCall,
    decode,
    to_error,
)
from ledger.text import AppendedText

HEADER = {"X-Vercel-AI-UI-Message-Stream": "v1"}
"""By it the AI SDK tells this protocol from others."""
REVISED = "data-revised"
"""The part that has the whole text after a revision that took back what was shown; the AI SDK
keeps the last one of an id."""

_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.FILTERED: "content-filter",
    FinishReason.TOOL_CALLS: "tool-calls",
}

Fields = dict[str, Any]


class UiEvents(Encoder):
    """The `Encoder` of the message that one stream is."""

    def __init__(self) -> None:
        self._message = ""
        self._before = b""  # what no frame is needed for
        self._parts = 0
        self._open: tuple[str, str] | None = None  # the kind of the open part, and its id
        self._text = AppendedText()
        self._calls: dict[int, tuple[ToolCall, list[str]]] = {}

    def opened(self, opened: Opened) -> None:
        self._message = f"msg_{opened.stream.hex()}"
        begin = [{"type": "start", "messageId": self._message}, {"type": "start-step"}]
        self._before = _events(begin)

    def refusal(self, error: TailraceError) -> Response:
        return refusal(error)

    def frames(self, frames: list[bytes]) -> bytes:
        before, self._before = self._before, b""
        return b"".join([before, *[self._told(decode(raw)[1]) for raw in frames]])

    def _told(self, frame: Frame) -> bytes:
        if isinstance(frame, StreamError):
            return _events([{"type": "error", "errorText": to_error(frame).message}]) + DONE
        if not isinstance(frame, Logged):
            return b""
        if isinstance(frame, StreamEnd):
            return _events([*self._closed(), *_ended(frame)]) + DONE
        if type(frame) is Token and self._open is not None and self._open[0] == "text":
            return self._delta(self._open[1], self._text.added(frame))
        return _events(self._added(frame))

    @staticmethod
    def _delta(part: str, text: str) -> bytes:
        """Nearly all that is told."""
        if not text:
            return b""
        return f'data: {{"type":"text-delta","id":"{part}","delta":{_quoted(text)}}}\n\n'.encode()

    def _added(self, frame: Frame) -> list[Fields]:
        match frame:
            case Token() | ScoredToken() | Revision():
                begun = self._part("text")
                if text := self._text.added(frame):
                    begun.append({"type": "text-delta", "id": self._id, "delta": text})
                if self._text.departed and isinstance(frame, Revision):
                    revised = {"text": self._text.text, "final": frame.final}
                    begun.append({"type": REVISED, "id": self._message, "data": revised})
                return begun
            case Reasoning():
                begun = self._part("reasoning")
                told = {"type": "reasoning-delta", "id": self._id, "delta": frame.text}
                return [*begun, told]
            case ToolCall():
                return self._called(frame)
        return []

    def _part(self, kind: str) -> list[Fields]:
        """Have a part of this kind open; what is told of that."""
        if self._open is not None and self._open[0] == kind:
            return []
        closed = self._closed()
        self._open = kind, str(self._parts)
        self._parts += 1
        return [*closed, {"type": f"{kind}-start", "id": self._id}]

    @property
    def _id(self) -> str:
        assert self._open is not None
        return self._open[1]

    def _called(self, frame: ToolCall) -> list[Fields]:
        told: list[Fields] = []
        if frame.call not in self._calls:
            told = [] if self._calls else self._closed()
            self._calls[frame.call] = frame, []
            begun = {"toolCallId": frame.id, "toolName": frame.name}
            told.append({"type": "tool-input-start", **begun})
        first, pieces = self._calls[frame.call]
        if frame.arguments:
            pieces.append(frame.arguments)
            delta = {"toolCallId": first.id, "inputTextDelta": frame.arguments}
            told.append({"type": "tool-input-delta", **delta})
        return told

    def _closed(self) -> list[Fields]:
        """End what is open."""
        told: list[Fields] = []
        if self._open is not None:
            kind, part = self._open
            told.append({"type": f"{kind}-end", "id": part})
            self._open = None
        told += [_call(first, "".join(pieces)) for first, pieces in self._calls.values()]
        self._calls.clear()
        return told


def refusal(error: TailraceError) -> Response:
    """The AI SDK shows the text of an answer that is none of its streams to its user."""
    hint = f" ({error.hint})" if error.hint else ""
    return PlainTextResponse(f"{error.message}{hint}", error.status, error_headers(error))


def _call(first: ToolCall, arguments: str) -> Fields:
    fields: Fields = {"toolCallId": first.id, "toolName": first.name}
    try:
        given = json.loads(arguments or "{}")
    except ValueError:  # the stream was cut off within it
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


_quoted = encode_basestring
