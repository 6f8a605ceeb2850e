"""Shows a stream as a response of the Responses API: as events, or as a document with its items.

The events depend only on the stream's log and its Opened frame, so every edge makes the same events
with the same numbers at any time. If a reader resumes after an event, the edge still reads the
whole log and skips the earlier events, because the last events contain the whole text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from starlette.responses import Response

from tailrace.edge.answer_parts import Change, Part, PartKind, PartTracker
from tailrace.edge.errors import RESPONSES_PATH, openai_error, openai_fields
from tailrace.edge.numbered_encoder import Fields, NumberedEncoder
from tailrace.edge.openai.chunks import (
    data_event,
    scores_of,
)
from tailrace.edge.openai.responses.request import UNSAID, read_note
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import (
    FinishReason,
    Frame,
    Logged,
    Opened,
    Reasoning,
    ScoredToken,
    StreamEnd,
    Token,
    TokenScores,
    ToolCall,
)
from tailrace.ledger.stream_text import AppendedText

IMPOSSIBLE = -9999.0
"""The logprob that OpenAI's Responses API shows for a token of probability 0."""

COMPLETED = "completed"
INCOMPLETE = "incomplete"
IN_PROGRESS = "in_progress"


class Item(ABC):
    """One item of a response's `output`, which shows one part of the answer.

    Methods return events as JSON fields, to which the caller adds the sequence number.

    Attributes:
        prefix: The beginning of the item's id, such as `msg`.
        said: The word for the item's content in the names of events, such as `output_text` in
            `response.output_text.delta`.
        at: The item's index in `output`.
    """

    prefix: ClassVar[str]
    said: ClassVar[str]

    def __init__(self, stream: str, part: Part) -> None:
        self.id, self.at = f"{self.prefix}_{stream}{part.at:04x}", part.at
        self._place: Fields = {"item_id": self.id, "output_index": part.at}

    def begin(self) -> Iterator[Fields]:
        yield self._whole("added", self.fields(IN_PROGRESS))

    @abstractmethod
    def add(self, frame: Frame) -> Iterator[Fields]: ...

    def end(self, status: str) -> Iterator[Fields]:
        yield self._told("done", **self._all_said())
        yield self._whole("done", self.fields(status))

    @abstractmethod
    def fields(self, status: str) -> Fields:
        """Return the item's JSON with its content so far and this status."""

    @abstractmethod
    def _all_said(self) -> Fields: ...

    def _told(self, what: str, **fields: Any) -> Fields:
        return {"type": f"response.{self.said}.{what}", **self._place, **fields}

    def _whole(self, what: str, item: Fields) -> Fields:
        return {"type": f"response.output_item.{what}", "output_index": self.at, "item": item}


class TextItem(Item):
    """An item whose content is one text."""

    def __init__(self, stream: str, part: Part) -> None:
        super().__init__(stream, part)
        self._place["content_index"] = 0

    def begin(self) -> Iterator[Fields]:
        yield self._whole("added", self._item([], IN_PROGRESS))
        yield {"type": "response.content_part.added", **self._place, "part": self._part()}

    def end(self, status: str) -> Iterator[Fields]:
        done, whole = super().end(status)
        yield done
        yield {"type": "response.content_part.done", **self._place, "part": self._part()}
        yield whole

    def fields(self, status: str) -> Fields:
        return self._item([self._part()], status)

    @abstractmethod
    def _item(self, content: list[Fields], status: str) -> Fields: ...

    @abstractmethod
    def _part(self) -> Fields: ...


class MessageItem(TextItem):
    """An item with text of the answer (`message`)."""

    prefix, said = "msg", "output_text"

    def __init__(self, stream: str, part: Part) -> None:
        super().__init__(stream, part)
        self.text = AppendedText()
        self._scores: list[TokenScores] = []

    def add(self, frame: Frame) -> Iterator[Fields]:
        delta, scores = self.text.added(frame), []
        if isinstance(frame, ScoredToken):
            self._scores += frame.scores
            scores = scores_of(frame.scores, IMPOSSIBLE)
        if delta or scores:
            yield self._told("delta", delta=delta, logprobs=scores)

    def _all_said(self) -> Fields:
        return {"text": self.text.text, "logprobs": scores_of(self._scores, IMPOSSIBLE)}

    def _part(self) -> Fields:
        scores = scores_of(self._scores, IMPOSSIBLE)
        text = {"type": "output_text", "text": self.text.text}
        return {**text, "annotations": [], "logprobs": scores}

    def _item(self, content: list[Fields], status: str) -> Fields:
        begun = {"id": self.id, "type": "message", "status": status}
        return {**begun, "role": "assistant", "content": content}


class ReasoningItem(TextItem):
    """An item with reasoning of the model (`reasoning`), which is not part of the answer's text."""

    prefix, said = "rs", "reasoning_text"

    def __init__(self, stream: str, part: Part) -> None:
        super().__init__(stream, part)
        self._texts: list[str] = []

    def add(self, frame: Frame) -> Iterator[Fields]:
        assert isinstance(frame, Reasoning), frame
        self._texts.append(frame.text)
        yield self._told("delta", delta=frame.text)

    def _all_said(self) -> Fields:
        return {"text": "".join(self._texts)}

    def _part(self) -> Fields:
        return {"type": "reasoning_text", **self._all_said()}

    def _item(self, content: list[Fields], status: str) -> Fields:
        begun = {"id": self.id, "type": "reasoning", "status": status}
        return {**begun, "summary": [], "content": content}


class FunctionCallItem(Item):
    """An item with one tool call (`function_call`)."""

    prefix, said = "fc", "function_call_arguments"

    def __init__(self, stream: str, part: Part) -> None:
        super().__init__(stream, part)
        self._first = part.call
        self._arguments: list[str] = []

    def add(self, frame: Frame) -> Iterator[Fields]:
        assert isinstance(frame, ToolCall), frame
        if frame.arguments:
            self._arguments.append(frame.arguments)
            yield self._told("delta", delta=frame.arguments)

    def _all_said(self) -> Fields:
        return {"name": self._first.name, "arguments": "".join(self._arguments)}

    def fields(self, status: str) -> Fields:
        begun = {"id": self.id, "type": "function_call", "status": status}
        return {**begun, "call_id": self._first.id, **self._all_said()}


_ITEMS: dict[PartKind, type[Item]] = {
    PartKind.TEXT: MessageItem,
    PartKind.REASONING: ReasoningItem,
    PartKind.TOOL_CALL: FunctionCallItem,
}


PREFIX = "resp_"
"""Prefix of the id of a response; the stream's id follows."""
CANCELLED, FAILED, QUEUED = "cancelled", "failed", "queued"

_STATUS = {
    FinishReason.STOP: COMPLETED,
    FinishReason.TOOL_CALLS: COMPLETED,
    FinishReason.LENGTH: INCOMPLETE,
    FinishReason.FILTERED: INCOMPLETE,
    FinishReason.CANCELLED: CANCELLED,
    FinishReason.FAILED: FAILED,
    FinishReason.ORIGIN_LOST: FAILED,
}
_WHY_INCOMPLETE = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.FILTERED: "content_filter",
}
_LAST = {COMPLETED: "response.completed", FAILED: "response.failed"}
"""Maps a response's status to the type of its last event. With any other status, also that
of a cancelled response, the last event is `response.incomplete`."""


class StreamedResponse:
    """A response that takes its stream's frames in order and returns the events for each."""

    def __init__(self, opened: Opened) -> None:
        self._stream = opened.stream.hex()
        self._head: Fields = {
            "id": PREFIX + self._stream,
            "object": "response",
            "created_at": opened.created_ms // 1000,
            "model": opened.model,
        }
        self._asked = {**UNSAID, **read_note(opened.note).asked}
        self._parts = PartTracker()
        self._items: list[Item] = []  # one item for each part of the answer
        self._cut: set[int] = set()  # indexes of items that were incomplete at the stream's end
        self._begun = False
        self._end: StreamEnd | None = None

    @property
    def status(self) -> str:
        if self._end is not None:
            return _STATUS[self._end.finish_reason]
        return IN_PROGRESS if self._begun or not self._asked["background"] else QUEUED

    def begin(self) -> list[Fields]:
        """Return the events before the first frame: created, and then queued or in progress."""
        told = [{"type": "response.created", "response": self.document()}]
        last = "response.queued" if self._asked["background"] else "response.in_progress"
        return [*told, {"type": last, "response": self.document()}]

    def add(self, frame: Frame) -> list[Fields]:
        """Take the stream's next frame, and return the events that show it."""
        if not isinstance(frame, Logged):
            return []
        told: list[Fields] = []
        if not self._begun:
            self._begun = True
            if self._asked["background"]:
                told.append({"type": "response.in_progress", "response": self.document()})
        if isinstance(frame, StreamEnd):
            return told + self._finished(frame)
        for change, part in self._parts.follow(frame):
            match change:
                case Change.BEGIN:
                    self._items.append(_ITEMS[part.kind](self._stream, part))
                    told += self._items[part.at].begin()
                case Change.GROW:
                    told += self._items[part.at].add(frame)
                case Change.END:
                    told += self._items[part.at].end(COMPLETED)
        return told

    def extended(self, token: Token) -> MessageItem | None:
        """Add a Token's text to the open message, and return this message.

        This is faster than `add`, and possible for nearly all Tokens. For any other Token, nothing
        is changed and None is returned: the caller must call `add`.
        """
        part = self._parts.text
        item = None if part is None else self._items[part.at]
        if not isinstance(item, MessageItem) or item.text.departed:
            return None
        item.text.add(token)
        return item

    def document(self) -> Fields:
        """Return the response's JSON in its current state."""
        status, end = self.status, self._end
        why = None if end is None else _WHY_INCOMPLETE.get(end.finish_reason)
        return {
            **self._head,
            "status": status,
            **self._asked,
            "output": [item.fields(self._status_of(item)) for item in self._items],
            "error": None if end is None else _error(end),
            "incomplete_details": None if why is None else {"reason": why},
            "usage": None if end is None else _usage(end),
        }

    def _status_of(self, item: Item) -> str:
        """Return the status of an item; `incomplete` if the stream was cut off within the item."""
        if any(part.at == item.at for part in self._parts.open):
            return IN_PROGRESS
        return _of_item(self.status) if item.at in self._cut else COMPLETED

    def _finished(self, end: StreamEnd) -> list[Fields]:
        """Return the events for the end of the stream."""
        self._end = end
        self._cut = {part.at for part in self._parts.open}
        status = _of_item(self.status)
        told = [
            fields for _, part in self._parts.close() for fields in self._items[part.at].end(status)
        ]
        last = _LAST.get(self.status, "response.incomplete")
        return [*told, {"type": last, "response": self.document()}]


class ResponseEvents(NumberedEncoder[MessageItem]):
    """Encodes one response as server-sent events, beginning after the event number `after`."""

    def refusal(self, error: TailraceError) -> Response:
        return openai_error(error, RESPONSES_PATH)

    def _begun(self, opened: Opened) -> StreamedResponse:
        return StreamedResponse(opened)

    def _event(self, fields: Fields, number: int) -> bytes:
        return event(fields, number)

    def _delta_format(self, part: MessageItem) -> bytes:
        return (
            b"event: response.output_text.delta\n"
            b'data: {"type":"response.output_text.delta","sequence_number":%%d,"item_id":"%b",'
            b'"output_index":%d,"content_index":0,"delta":%%b,"logprobs":[]}\n\n'
        ) % (part.id.encode(), part.at)

    def _stream_error(self, error: TailraceError) -> bytes:
        """Return the event for an error.

        This event has the number of the last event, so that a client resumes after that event.
        """
        said = openai_fields(error, RESPONSES_PATH)
        fields = {name: said[name] for name in ("code", "message", "param")}
        return event({"type": "error", **fields}, max(self.last, self._after))


def event(fields: Fields, number: int) -> bytes:
    """Return one encoded event. The first fields of its JSON are `type` and `sequence_number`."""
    kind = fields["type"]
    numbered = {"type": kind, "sequence_number": number, **fields}
    return b"event: %b\n%b" % (kind.encode(), data_event(numbered))


def _of_item(status: str) -> str:
    return COMPLETED if status == COMPLETED else INCOMPLETE


def _error(end: StreamEnd) -> Fields | None:
    if _STATUS[end.finish_reason] != FAILED:
        return None
    return {"code": "server_error", "message": end.message or "the generation failed"}


def _usage(end: StreamEnd) -> Fields:
    """Return the token counts. Cached and reasoning tokens are shown as 0: they are not counted."""
    return {
        "input_tokens": end.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": end.total_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.prompt_tokens + end.total_tokens,
    }
