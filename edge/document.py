"""A stream as one JSON document: what it has made and how it ended, or how far it has got."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from edge.origins.link import Reader
from edge.sse import end_fields, finite, logprobs
from ledger.errors import TooLarge
from ledger.frame import (
    Chunk,
    Classification,
    Embedding,
    Frame,
    Notice,
    Opened,
    Reasoning,
    ScoredToken,
    Status,
    StreamEnd,
    StreamError,
    StreamState,
    TokenScores,
    ToolCall,
    decode,
    to_error,
)
from ledger.text import StreamText

MAX_DOCUMENT_BYTES = 32 << 20
"""Of the frames of one stream that are kept for a document."""


@dataclass(slots=True)
class Call:
    """A call of a tool, as far as it was made; `arguments` is JSON when it is whole."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Collected:
    """What was read of a stream: what its frames add up to, and the one that closed it."""

    text: StreamText = field(default_factory=StreamText)
    scores: list[TokenScores] = field(default_factory=list)
    embeddings: list[Embedding] = field(default_factory=list)
    labels: list[Classification] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    closing: StreamEnd | Status | None = None

    def add(self, frame: Frame) -> None:
        """The stream's next frame; raises what a StreamError says."""
        self.text.add(frame)
        match frame:
            case ScoredToken():
                self.scores += frame.scores
            case Embedding():
                self.embeddings.append(frame)
            case Classification():
                self.labels.append(frame)
            case Notice():
                self.notices.append(frame)
            case Reasoning():
                self.reasoning.append(frame.text)
            case ToolCall():
                self._add_call(frame)
            case Chunk():
                self.data.append(frame.data)
            case StreamEnd() | Status():
                self.closing = frame
            case StreamError():
                raise to_error(frame)

    def _add_call(self, piece: ToolCall) -> None:
        if piece.name or not self.calls:
            self.calls.append(Call(piece.id, piece.name))
        self.calls[-1].arguments += piece.arguments


async def collect(reader: Reader) -> Collected:
    """All frames until one closes the stream; raises what a StreamError says."""
    collected, size = Collected(), 0
    while collected.closing is None:
        for raw in await reader.take():
            size += len(raw)
            collected.add(decode(raw)[1])
        if size > MAX_DOCUMENT_BYTES:
            raise TooLarge(
                f"the stream has over {MAX_DOCUMENT_BYTES} bytes",
                field="Accept",
                hint="read it as events or frames",
            )
    return collected


def answer_document(opened: Opened, collected: Sequence[Collected]) -> dict[str, object]:
    """The answer to the request that started the stream, or several."""
    begin: dict[str, object] = {"id": opened.stream.hex(), "model": opened.model}
    if not opened.siblings:
        return begin | _fields(collected[0]) | {"prompt_tokens": opened.prompt_tokens}
    streams = [opened.stream, *(sibling.stream for sibling in opened.siblings)]
    choices = [
        {"id": stream.hex()} | _fields(each)
        for stream, each in zip(streams, collected, strict=True)
    ]
    return begin | {"choices": choices, "prompt_tokens": opened.prompt_tokens}


def state_document(opened: Opened, collected: Collected) -> dict[str, object]:
    """A stream as a later reader finds it, running or ended."""
    closing = collected.closing
    if isinstance(closing, StreamEnd):
        state, next_index = StreamState.ENDED, closing.index + 1
    else:
        assert closing is not None, "collect ends with the frame that closes"
        state, next_index = closing.state, closing.next_index
    return {
        "id": opened.stream.hex(),
        "model": opened.model,
        "state": state.word,
        "next_index": next_index,
        **_fields(collected),
        "prompt_tokens": opened.prompt_tokens,
    }


def _fields(collected: Collected) -> dict[str, object]:
    """What the frames add up to; all but the text only where there is such a frame."""
    fields: dict[str, object] = {"text": collected.text.text}
    if collected.scores:
        fields["logprobs"] = logprobs(collected.scores)
    if collected.embeddings:
        vectors = [finite(embedding.values) for embedding in collected.embeddings]
        fields |= {"embedding": vectors[0]} if len(vectors) == 1 else {"embeddings": vectors}
    if collected.labels:
        fields["classification"] = [
            {"label": each.label, "confidence": finite(each.confidence)}
            for each in collected.labels
        ]
    if collected.data:
        fields["data"] = base64.b64encode(b"".join(collected.data)).decode()
    if collected.reasoning:
        fields["reasoning"] = "".join(collected.reasoning)
    if collected.calls:
        fields["tool_calls"] = [asdict(call) for call in collected.calls]
    if collected.notices:
        fields["notices"] = [
            {"code": notice.code, "message": notice.message} for notice in collected.notices
        ]
    if isinstance(collected.closing, StreamEnd):
        end = end_fields(collected.closing)
        fields |= {name: end[name] for name in end if name not in ("index", "prompt_tokens")}
    return fields
