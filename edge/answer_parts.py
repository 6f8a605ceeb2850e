"""The parts of an answer: stretches of text and of reasoning, and calls of tools.

A stream's log has the frames of an answer one after another. The APIs of OpenAI and Anthropic and
the AI SDK show an answer in parts, each of which begins, grows and ends. `PartTracker` decides for
each frame which part it begins, continues or ends. The encoders of all these APIs use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from tailrace.ledger.frame import (
    Frame,
    Logged,
    Reasoning,
    Revision,
    ScoredToken,
    Token,
    ToolCall,
)


class PartKind(Enum):
    """The kind of content of a part."""

    TEXT = auto()
    REASONING = auto()
    TOOL_CALL = auto()


class Change(Enum):
    """A change that a frame makes to a part."""

    BEGIN = auto()
    GROW = auto()
    END = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One part of an answer.

    Attributes:
        kind: The kind of content of this part.
        at: The number of parts before this one.
        first: The frame that began this part.
    """

    kind: PartKind
    at: int
    first: Logged

    @property
    def call(self) -> ToolCall:
        """The first piece of a tool call, which holds the call's id and the function's name."""
        assert isinstance(self.first, ToolCall), self.first
        return self.first

    def takes(self, frame: Frame) -> bool:
        """Return True if the frame continues this part."""
        if isinstance(frame, ToolCall) and self.kind is PartKind.TOOL_CALL:
            return frame.call == self.call.call
        return kind_of(frame) is self.kind


def kind_of(frame: Frame) -> PartKind | None:
    """Return the kind of the part that a frame belongs to, or None if it belongs to no part."""
    match frame:
        case Token() | ScoredToken() | Revision():
            return PartKind.TEXT
        case Reasoning():
            return PartKind.REASONING
        case ToolCall():
            return PartKind.TOOL_CALL
    return None


class PartTracker:
    """Divides the frames of one stream into parts, in the order of its log.

    A part of text or reasoning ends when a part of another kind begins. Several calls of tools may
    be open together, because their pieces may alternate; all of them end when text or reasoning
    begins.

    Attributes:
        open: The parts that may grow: one part of text or reasoning, or calls of tools.
    """

    def __init__(self) -> None:
        self.open: list[Part] = []
        self._count = 0

    @property
    def text(self) -> Part | None:
        """The open part of text, if there is one.

        While a part of text is open, each Token continues it, and needs no call of `follow`. Nearly
        all frames are such Tokens, so the shortcut saves time.
        """
        return self.open[0] if self.open and self.open[0].kind is PartKind.TEXT else None

    def follow(self, frame: Frame) -> Iterator[tuple[Change, Part]]:
        """Take the next frame and yield each change that it makes, with the changed part, in order.

        The last change is the growth of the part that the frame belongs to. A frame that belongs to
        no part changes nothing. The caller must consume the iterator before the next call.
        """
        kind = kind_of(frame)
        if kind is None:
            return
        assert isinstance(frame, Logged), frame
        part = next((part for part in self.open if part.takes(frame)), None)
        if part is None:
            if not (kind is PartKind.TOOL_CALL and self.open and self.open[0].kind is kind):
                yield from self.close()
            part = Part(kind, self._count, frame)
            self._count += 1
            self.open.append(part)
            yield Change.BEGIN, part
        yield Change.GROW, part

    def close(self) -> Iterator[tuple[Change, Part]]:
        """End all open parts; yield an END change for each. Call this at the end of the stream."""
        ended, self.open = self.open, []
        for part in ended:
            yield Change.END, part
