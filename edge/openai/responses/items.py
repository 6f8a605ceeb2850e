"""The output of a response while it grows: its items, and what a client is told of each.

An item is a message, a reasoning or a function call. What is told here has no sequence number
yet: `edge.openai.responses.events` numbers it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from edge.openai.scores import scores_of
from ledger.frame import Frame, Reasoning, Revision, ScoredToken, Token, TokenScores, ToolCall
from ledger.text import AppendedText

Fields = dict[str, Any]
"""Of a JSON object."""

COMPLETED = "completed"
INCOMPLETE = "incomplete"
IN_PROGRESS = "in_progress"


class Item(Protocol):
    """One item of the output; `at` is its place there."""

    id: str
    at: int

    def takes(self, frame: Frame) -> bool:
        """Whether the frame is a part of this item; another one ends it."""

    def begin(self) -> Iterator[Fields]: ...

    def add(self, frame: Frame) -> Iterator[Fields]: ...

    def end(self, status: str) -> Iterator[Fields]: ...

    def fields(self, status: str) -> Fields:
        """The item as far as it has got."""


class MessageItem:
    """Text of the answer."""

    def __init__(self, stream: str, at: int) -> None:
        self.id, self.at = f"msg_{stream}{at:04x}", at
        self.text = AppendedText()
        self._scores: list[TokenScores] = []
        self._place = {"item_id": self.id, "output_index": at, "content_index": 0}

    def takes(self, frame: Frame) -> bool:
        return isinstance(frame, Token | ScoredToken | Revision)

    def begin(self) -> Iterator[Fields]:
        item = self._item([], IN_PROGRESS)
        yield {"type": "response.output_item.added", "output_index": self.at, "item": item}
        yield {"type": "response.content_part.added", **self._place, "part": _text_part("", [])}

    def add(self, frame: Frame) -> Iterator[Fields]:
        delta, scores = self.text.added(frame), []
        if isinstance(frame, ScoredToken):
            self._scores += frame.scores
            scores = scores_of(frame.scores)
        if delta or scores:
            yield {
                "type": "response.output_text.delta",
                **self._place,
                "delta": delta,
                "logprobs": scores,
            }

    def end(self, status: str) -> Iterator[Fields]:
        text, scores = self.text.text, scores_of(self._scores)
        yield {
            "type": "response.output_text.done",
            **self._place,
            "text": text,
            "logprobs": scores,
        }
        part = _text_part(text, scores)
        yield {"type": "response.content_part.done", **self._place, "part": part}
        item = self._item([part], status)
        yield {"type": "response.output_item.done", "output_index": self.at, "item": item}

    def fields(self, status: str) -> Fields:
        return self._item([_text_part(self.text.text, scores_of(self._scores))], status)

    def _item(self, content: list[Fields], status: str) -> Fields:
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }


class ReasoningItem:
    """What the model thought apart from its answer."""

    def __init__(self, stream: str, at: int) -> None:
        self.id, self.at = f"rs_{stream}{at:04x}", at
        self._texts: list[str] = []
        self._place = {"item_id": self.id, "output_index": at, "content_index": 0}

    def takes(self, frame: Frame) -> bool:
        return isinstance(frame, Reasoning)

    def begin(self) -> Iterator[Fields]:
        item = self._item([], IN_PROGRESS)
        yield {"type": "response.output_item.added", "output_index": self.at, "item": item}
        part = _reasoning_part("")
        yield {"type": "response.content_part.added", **self._place, "part": part}

    def add(self, frame: Frame) -> Iterator[Fields]:
        assert isinstance(frame, Reasoning), frame
        self._texts.append(frame.text)
        yield {"type": "response.reasoning_text.delta", **self._place, "delta": frame.text}

    def end(self, status: str) -> Iterator[Fields]:
        text = "".join(self._texts)
        yield {"type": "response.reasoning_text.done", **self._place, "text": text}
        part = _reasoning_part(text)
        yield {"type": "response.content_part.done", **self._place, "part": part}
        item = self._item([part], status)
        yield {"type": "response.output_item.done", "output_index": self.at, "item": item}

    def fields(self, status: str) -> Fields:
        return self._item([_reasoning_part("".join(self._texts))], status)

    def _item(self, content: list[Fields], status: str) -> Fields:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": content,
        }


class FunctionCallItem:
    """One call of a tool; pieces of several calls may come in turns."""

    def __init__(self, stream: str, at: int, first: ToolCall) -> None:
        self.id, self.at = f"fc_{stream}{at:04x}", at
        self._call, self._call_id, self._name = first.call, first.id, first.name
        self._arguments: list[str] = []
        self._place = {"item_id": self.id, "output_index": at}

    def takes(self, frame: Frame) -> bool:
        return isinstance(frame, ToolCall) and frame.call == self._call

    def begin(self) -> Iterator[Fields]:
        item = self._item("", IN_PROGRESS)
        yield {"type": "response.output_item.added", "output_index": self.at, "item": item}

    def add(self, frame: Frame) -> Iterator[Fields]:
        assert isinstance(frame, ToolCall), frame
        if frame.arguments:
            self._arguments.append(frame.arguments)
            yield {
                "type": "response.function_call_arguments.delta",
                **self._place,
                "delta": frame.arguments,
            }

    def end(self, status: str) -> Iterator[Fields]:
        arguments = "".join(self._arguments)
        yield {
            "type": "response.function_call_arguments.done",
            **self._place,
            "name": self._name,
            "arguments": arguments,
        }
        item = self._item(arguments, status)
        yield {"type": "response.output_item.done", "output_index": self.at, "item": item}

    def fields(self, status: str) -> Fields:
        return self._item("".join(self._arguments), status)

    def _item(self, arguments: str, status: str) -> Fields:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": arguments,
        }


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


def _text_part(text: str, scores: list[Fields]) -> Fields:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


def _reasoning_part(text: str) -> Fields:
    return {"type": "reasoning_text", "text": text}
