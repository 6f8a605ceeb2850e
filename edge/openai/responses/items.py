"""The output of a response while it grows: its items, and what a client is told of each.

An item is a message, a reasoning or a function call. What is told here has no sequence number
yet: `edge.openai.responses.events` numbers it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from edge.openai.answers import scores_of
from ledger.frame import Frame, Reasoning, Revision, ScoredToken, Token, TokenScores, ToolCall
from ledger.text import AppendedText

Fields = dict[str, Any]
"""Of a JSON object."""
IMPOSSIBLE = -9999.0
"""What that API says of a token that cannot be."""

COMPLETED = "completed"
INCOMPLETE = "incomplete"
IN_PROGRESS = "in_progress"


class Item(ABC):
    """One item of the output; `at` is its place there."""

    prefix: ClassVar[str]
    """Of its id."""
    said: ClassVar[str]
    """What the events of its text are called."""

    def __init__(self, stream: str, at: int) -> None:
        self.id, self.at = f"{self.prefix}_{stream}{at:04x}", at
        self._place: Fields = {"item_id": self.id, "output_index": at}

    @abstractmethod
    def takes(self, frame: Frame) -> bool:
        """Whether the frame is a part of this item; another one ends it."""

    def begin(self) -> Iterator[Fields]:
        yield self._whole("added", self.fields(IN_PROGRESS))

    @abstractmethod
    def add(self, frame: Frame) -> Iterator[Fields]: ...

    def end(self, status: str) -> Iterator[Fields]:
        yield self._told("done", **self._all_said())
        yield self._whole("done", self.fields(status))

    @abstractmethod
    def fields(self, status: str) -> Fields:
        """The item as far as it has got."""

    @abstractmethod
    def _all_said(self) -> Fields: ...

    def _told(self, what: str, **fields: Any) -> Fields:
        return {"type": f"response.{self.said}.{what}", **self._place, **fields}

    def _whole(self, what: str, item: Fields) -> Fields:
        return {"type": f"response.output_item.{what}", "output_index": self.at, "item": item}


class TextItem(Item):
    """An item whose content is one part of text."""

    def __init__(self, stream: str, at: int) -> None:
        super().__init__(stream, at)
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
    """Text of the answer."""

    prefix, said = "msg", "output_text"

    def __init__(self, stream: str, at: int) -> None:
        super().__init__(stream, at)
        self.text = AppendedText()
        self._scores: list[TokenScores] = []

    def takes(self, frame: Frame) -> bool:
        return isinstance(frame, Token | ScoredToken | Revision)

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
    """What the model thought apart from its answer."""

    prefix, said = "rs", "reasoning_text"

    def __init__(self, stream: str, at: int) -> None:
        super().__init__(stream, at)
        self._texts: list[str] = []

    def takes(self, frame: Frame) -> bool:
        return isinstance(frame, Reasoning)

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
    """One call of a tool; pieces of several calls may come in turns."""

    prefix, said = "fc", "function_call_arguments"

    def __init__(self, stream: str, at: int, first: ToolCall) -> None:
        super().__init__(stream, at)
        self._first = first
        self._arguments: list[str] = []

    def takes(self, frame: Frame) -> bool:
        return isinstance(frame, ToolCall) and frame.call == self._first.call

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


def item_of(frame: Frame, stream: str, at: int) -> Item | None:
    """The item that begins with this frame; None for one that is no part of an output."""
    match frame:
        case Token() | ScoredToken() | Revision():
            return MessageItem(stream, at)
        case Reasoning():
            return ReasoningItem(stream, at)
        case ToolCall():
            return FunctionCallItem(stream, at, frame)
    return None
