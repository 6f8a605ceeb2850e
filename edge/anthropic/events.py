"""Shows a stream as a message of Anthropic's Messages API: its content blocks, events and document.

All of these follow from the stream's log and its Opened frame, so any edge makes the same events
with the same numbers at any time. The number is the event's `id:`, and the numbers of a message
count from 0 without a gap. A `ping` is no event of the message and has no number.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator
from typing import Any

from pydantic_core import from_json
from starlette.responses import Response

from tailrace.edge.answer_parts import Change, Part, PartKind, PartTracker
from tailrace.edge.anthropic.cached_tokens import cached_tokens
from tailrace.edge.anthropic.request import Thinking, read_note
from tailrace.edge.errors import messages_error, messages_error_fields
from tailrace.edge.numbered_encoder import Fields, NumberedEncoder
from tailrace.edge.openai.chunks import end_error
from tailrace.edge.openai.request import compact
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import (
    Caller,
    FinishReason,
    Frame,
    Logged,
    Opened,
    Reasoning,
    StreamEnd,
    Token,
    ToolCall,
)
from tailrace.ledger.stream_text import AppendedText

PREFIX = "msg_"
"""Prefix of the id of a message, before the id of its stream."""
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
"""The event that is sent as a keepalive while the stream is quiet."""
STOP_REASON = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.FILTERED: "refusal",
    FinishReason.TOOL_CALLS: "tool_use",
}
"""Maps finish reasons to `stop_reason`. Anthropic's API shows every other reason as an error."""
STOP_SEQUENCE = "stop_sequence"
"""The `stop_reason` of text that ended at a stop sequence, which `StreamEnd.message` names."""
CANCELLED = "cancelled"
"""The `stop_reason` of a message that was cancelled and is read later. Anthropic's API has no such
reason."""


# ---- content blocks ----


class Block(ABC):
    """One content block of a message. Only one block of a message is open at a time.

    Attributes:
        at: The block's index, or None before its start.
    """

    def __init__(self) -> None:
        self.at: int | None = None

    @abstractmethod
    def add(self, frame: Frame) -> None:
        """Take the next frame of the part that the block shows."""

    @abstractmethod
    def deltas(self, *, last: bool) -> Iterator[Fields]:
        """Yield the deltas for the frames that were added since the last call.

        `last` is True for the last call, right before the block ends.
        """

    @property
    def begins(self) -> bool:
        """True if the block has content to show, so that it can start."""
        return True

    @abstractmethod
    def empty(self) -> Fields:
        """Return the block's JSON without content, as its start event has it."""

    @abstractmethod
    def fields(self) -> Fields:
        """Return the block's JSON with its content so far."""


class TextBlock(Block):
    """Text of the answer. The block starts with the first piece of text that is not empty."""

    def __init__(self) -> None:
        super().__init__()
        self.text = AppendedText()
        self._new = ""

    def add(self, frame: Frame) -> None:
        self._new += self.text.added(frame)

    def deltas(self, *, last: bool) -> Iterator[Fields]:
        if self._new:
            yield {"type": "text_delta", "text": self._new}
            self._new = ""

    @property
    def begins(self) -> bool:
        return bool(self._new)

    def empty(self) -> Fields:
        return {"type": "text", "text": ""}

    def fields(self) -> Fields:
        return {"type": "text", "text": self.text.text}


class ThinkingBlock(Block):
    """Reasoning of the model, apart from its answer.

    The block's signature consists of the stream's id and the part's number. It is never checked,
    because reasoning that a client sends back does not become part of the conversation.
    """

    def __init__(self, stream: str, part: Part, *, omitted: bool) -> None:
        super().__init__()
        self._signature = f"{stream}{part.at:04x}"
        self._omitted = omitted
        self._texts: list[str] = []
        self._told = 0  # number of items of `_texts` that were sent in deltas
        self._ended = False

    def add(self, frame: Frame) -> None:
        assert isinstance(frame, Reasoning), frame
        if not self._omitted:
            self._texts.append(frame.text)

    def deltas(self, *, last: bool) -> Iterator[Fields]:
        new = "".join(self._texts[self._told :])
        self._told = len(self._texts)
        if new:
            yield {"type": "thinking_delta", "thinking": new}
        if last:
            self._ended = True
            yield {"type": "signature_delta", "signature": self._signature}

    def empty(self) -> Fields:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def fields(self) -> Fields:
        signature = self._signature if self._ended else ""
        return {"type": "thinking", "thinking": "".join(self._texts), "signature": signature}


class ToolUseBlock(Block):
    """One call of a tool."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self._first = part.call
        self._arguments: list[str] = []
        self._told = 0  # number of items of `_arguments` that were sent in deltas

    def add(self, frame: Frame) -> None:
        assert isinstance(frame, ToolCall), frame
        if frame.arguments:
            self._arguments.append(frame.arguments)

    def deltas(self, *, last: bool) -> Iterator[Fields]:
        new = "".join(self._arguments[self._told :])
        self._told = len(self._arguments)
        if new:
            yield {"type": "input_json_delta", "partial_json": new}

    @property
    def is_complete(self) -> bool:
        """True if the arguments so far are whole JSON."""
        if not self._arguments or self._arguments[-1].rstrip()[-1:] not in ("}", "]"):
            return False
        try:
            json.loads("".join(self._arguments))
        except ValueError:
            return False
        return True

    def empty(self) -> Fields:
        return {**self._named, "input": {}}

    def fields(self) -> Fields:
        return {**self._named, "input": _input("".join(self._arguments))}

    @property
    def _named(self) -> Fields:
        return {"type": "tool_use", "id": self._first.id, "name": self._first.name}


def _input(arguments: str) -> Any:
    """Return the arguments of a call. If the JSON was cut off, return its complete values only."""
    if not arguments:
        return {}
    try:
        return from_json(arguments, allow_partial=True)
    except ValueError:
        return {}


# ---- the message ----


class StreamedMessage:
    """A message while it grows: takes its stream's frames in order and returns the events.

    Attributes:
        end: The end of the stream, or None until then.
        cached_tokens: Number of the prompt's tokens that came from a KV cache; set before the end.
    """

    def __init__(self, opened: Opened) -> None:
        self._stream = opened.stream.hex()
        self._model = opened.model
        self._prompt_tokens = opened.prompt_tokens
        self._thinking = read_note(opened.note)
        self._parts = PartTracker()
        self._blocks: list[Block] = []  # the blocks that have started, in order
        self._of: dict[Part, Block] = {}  # the blocks of the parts that may grow
        # The blocks of tool calls that have not ended, in order. The start event has been returned
        # for the first of them at most: `_grown_calls` says why.
        self._calls: list[ToolUseBlock] = []
        self.end: StreamEnd | None = None
        self.cached_tokens = 0

    def begin(self) -> list[Fields]:
        """Return the first event of the message, which comes before those of all frames."""
        return [{"type": "message_start", "message": self.document()}]

    def add(self, frame: Frame) -> list[Fields]:
        """Return the events of the stream's next frame."""
        if not isinstance(frame, Logged):
            return []
        told: list[Fields] = []
        for change, part in self._parts.follow(frame):
            match change:
                case Change.BEGIN:
                    self._begin_part(part)
                case Change.GROW:
                    told += self._grow(part, frame)
                case Change.END:
                    told += self._end_part(part)
        if isinstance(frame, StreamEnd):
            told += self._finished(frame)
        return told

    def extended(self, token: Token) -> TextBlock | None:
        """Take a Token that only adds text to a started block, and return this block.

        Nearly all Tokens do so. For any other Token, nothing is changed and None is returned: the
        caller must call `add`.
        """
        part = self._parts.text
        block = None if part is None else self._of[part]
        if not isinstance(block, TextBlock) or block.at is None or block.text.departed:
            return None
        block.text.add(token)
        return block

    def document(self) -> Fields:
        """Return the message in its current state."""
        return {
            "id": PREFIX + self._stream,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [block.fields() for block in self._blocks],
            **self._stopped(),
            "usage": self._usage(),
        }

    # ---- parts ----

    def _begin_part(self, part: Part) -> None:
        match part.kind:
            case PartKind.TEXT:
                self._of[part] = TextBlock()
            case PartKind.REASONING if self._thinking is not Thinking.HIDDEN:
                omitted = self._thinking is Thinking.OMITTED
                self._of[part] = ThinkingBlock(self._stream, part, omitted=omitted)
            case PartKind.TOOL_CALL:
                call = self._of[part] = ToolUseBlock(part)
                self._calls.append(call)

    def _grow(self, part: Part, frame: Frame) -> list[Fields]:
        block = self._of.get(part)
        if block is None:
            return []
        block.add(frame)
        if part.kind is PartKind.TOOL_CALL:
            return self._grown_calls()
        return [*self._shown(block)]

    def _grown_calls(self) -> list[Fields]:
        """Return the events of the first open call, and of the next one once the first is complete.

        The pieces of several calls may alternate in the log, but Anthropic's API allows only one
        open block at a time. So a later call waits until the calls before it are complete.
        """
        told = [*self._shown(self._calls[0])]
        while len(self._calls) > 1 and self._calls[0].is_complete:
            told += self._ended(self._calls.pop(0))
            told += self._shown(self._calls[0])
        return told

    def _end_part(self, part: Part) -> list[Fields]:
        block = self._of.pop(part, None)
        if block is None:
            return []
        if isinstance(block, ToolUseBlock):
            if block not in self._calls:
                return []  # `_grown_calls` has already ended this call
            self._calls.remove(block)
        return self._ended(block)

    def _shown(self, block: Block, *, last: bool = False) -> Iterator[Fields]:
        """Yield the start of a block, unless the block has started, and its deltas."""
        if block.at is None:
            if not block.begins:
                return
            block.at = len(self._blocks)
            start = {"type": "content_block_start", "index": block.at}
            yield {**start, "content_block": block.empty()}
            self._blocks.append(block)
        for delta in block.deltas(last=last):
            yield {"type": "content_block_delta", "index": block.at, "delta": delta}

    def _ended(self, block: Block) -> list[Fields]:
        told = [*self._shown(block, last=True)]
        if block.at is None:
            return told  # a block that got no text was never started
        return [*told, {"type": "content_block_stop", "index": block.at}]

    # ---- the end ----

    def _finished(self, end: StreamEnd) -> list[Fields]:
        told: list[Fields] = []
        for _, part in self._parts.close():
            told += self._end_part(part)
        self.end = end
        if (error := end_error(end)) is not None:
            return [*told, _error(error)]
        last = {"type": "message_delta", "delta": self._stopped(), "usage": self._usage()}
        return [*told, last, {"type": "message_stop"}]

    def _stopped(self) -> Fields:
        end = self.end
        reason = None if end is None else STOP_REASON.get(end.finish_reason)
        if end is not None and end.finish_reason is FinishReason.CANCELLED:
            reason = CANCELLED
        details = None
        if end is not None and end.finish_reason is FinishReason.FILTERED:
            details = {"type": "refusal", "category": None, "explanation": end.message}
        sequence = None
        if end is not None and end.finish_reason is FinishReason.STOP and end.message is not None:
            reason, sequence = STOP_SEQUENCE, end.message
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": details}

    def _usage(self) -> Fields:
        """Return the token counts. As in the API, `input_tokens` does not include cached tokens."""
        end = self.end
        prompt = self._prompt_tokens if end is None else end.prompt_tokens
        cached = min(self.cached_tokens, prompt)
        return {
            "input_tokens": prompt - cached,
            "output_tokens": 0 if end is None else end.total_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }


def _error(error: TailraceError) -> Fields:
    return {"type": "error", "error": messages_error_fields(error)}


# ---- events ----


class MessageEvents(NumberedEncoder[TextBlock]):
    """Encodes one message as events, from the event after number `after` on.

    Attributes:
        request: The id of the HTTP request, which the response to a refused request contains.
        caller: The client, if the edge knows it.
    """

    def __init__(
        self,
        request: str,
        after: int | None = None,
        caller: Caller | None = None,
        *,
        ends_by_204: bool = False,
    ) -> None:
        super().__init__(after)
        self.request = request
        self.caller = caller
        self.ends_by_204 = ends_by_204

    def refusal(self, error: TailraceError) -> Response:
        return messages_error(error, self.request)

    def keepalive(self) -> bytes:
        return PING

    def before_end(self, link: OriginPool) -> Awaitable[None]:
        return self._count_cached(link)

    async def _count_cached(self, link: OriginPool) -> None:
        message, opened = self._message
        message.cached_tokens = await cached_tokens(link, opened, self.caller)

    def _begun(self, opened: Opened) -> StreamedMessage:
        self._message = StreamedMessage(opened), opened
        return self._message[0]

    def _event(self, fields: Fields, number: int) -> bytes:
        return event(fields, number)

    def _delta_format(self, part: TextBlock) -> bytes:
        return (
            b"event: content_block_delta\nid: %%d\n"
            b'data: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"text_delta","text":%%b}}\n\n'
        ) % (part.at or 0)

    def _stream_error(self, error: TailraceError) -> bytes:
        # The error event has no number, so a reader resumes after the event before it.
        return event(_error(error))


def event(fields: Fields, number: int | None = None) -> bytes:
    """Return one event as it is sent; JSON escapes line breaks, so it fits into one line."""
    numbered = "" if number is None else f"id: {number}\n"
    return f"event: {fields['type']}\n{numbered}data: {compact(fields)}\n\n".encode()
