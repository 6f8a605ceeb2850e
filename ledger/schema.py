"""The client schema, ledger/tailrace.bare, as Python: one class per struct, one table of tags.

The annotations are what the codec is compiled from (ledger/bare.py), and a test holds every
one of them to the schema file. PROTOCOL.md says what the frames mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Self

from ledger.bare import (
    SCHEMA_ID_BYTES,
    Float32,
    Float64,
    U16Int,
    U64Int,
    Uint,
    fixed_data,
)
from ledger.errors import CallerError

# The first 8 bytes of SHA-256 over the canonical text of ledger/tailrace.bare. A constant,
# so that a running process needs no schema file; a test holds it to the file.
SCHEMA_HASH = bytes.fromhex("e37adea4aabc03e0")
STREAM_ID_BYTES = 16

StreamId = Annotated[bytes, fixed_data(STREAM_ID_BYTES, "StreamId")]
SchemaId = Annotated[bytes, fixed_data(SCHEMA_ID_BYTES)]


class Word(IntEnum):
    """An enum that people read and write as a lower-case word, `origin-lost`."""

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", "-")

    @classmethod
    def from_word(cls, word: str) -> Self:
        """The member that `word` names; CallerError for any other word."""
        for member in cls:
            if member.word == word:
                return member
        raise CallerError(
            f"unknown {cls.__name__} {word!r}",
            field=re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower(),
            hint="one of " + ", ".join(member.word for member in cls),
        )


class Durability(Word):
    RELAXED = 0
    PROCESS = 1
    POWER = 2


class Priority(Word):
    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2


class FinishReason(Word):
    STOP = 0
    LENGTH = 1
    CANCELLED = 2
    FILTERED = 3
    FAILED = 4
    ORIGIN_LOST = 5


class StreamState(Word):
    RUNNING = 0
    ENDED = 1


class Overflow(Word):
    """What happens to a conversation that is longer than the context."""

    REFUSE = 0
    DROP_OLDEST = 1


class FormatKind(Word):
    JSON_SCHEMA = 0
    REGEX = 1


# Why frozen slotted dataclasses, for every struct: equality holds within one class only,
# and reading a field costs 11 ns against a named tuple's 22 ns. Their one weakness, an
# __init__ of 0.5 us, is passed by where it matters (see `decode`).


# ---- server to client: logged, each with its index in the stream ----


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    index: Uint


@dataclass(frozen=True, slots=True)
class StreamEnd:
    total_tokens: Uint
    finish_reason: FinishReason
    index: Uint
    prompt_tokens: Uint
    message: str | None = None
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class Classification:
    label: str
    confidence: Float32
    index: Uint


@dataclass(frozen=True, slots=True)
class Embedding:
    values: tuple[Float32, ...]
    index: Uint


@dataclass(frozen=True, slots=True)
class Chunk:
    data: bytes
    last: bool
    index: Uint


@dataclass(frozen=True, slots=True)
class Revision:
    """Text that takes the place of all text since the frame at index `replaces`."""

    replaces: Uint
    text: str
    final: bool
    index: Uint


@dataclass(frozen=True, slots=True)
class Score:
    """One token's bytes and the logarithm of its chance, before temperature and filters."""

    id: Uint
    token: bytes
    logprob: Float32


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The token that was drawn, and the likeliest ones, best first."""

    chosen: Score
    top: tuple[Score, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A Token of a request for logprobs, with the scores of each token that made its text."""

    text: str
    scores: tuple[TokenScores, ...]
    index: Uint


@dataclass(frozen=True, slots=True)
class Notice:
    """Something about the stream that its readers should know, such as `inexact`."""

    code: str
    message: str
    index: Uint


# ---- server to client: about a connection or a request, never logged ----


@dataclass(frozen=True, slots=True)
class StreamError:
    code: str
    message: str
    retryable: bool
    status: U16Int
    field: str | None = None
    hint: str | None = None
    retry_after_ms: Uint | None = None


@dataclass(frozen=True, slots=True)
class Metrics:
    queue_ms: Uint
    ttft_ms: Uint
    tokens: Uint
    tokens_per_s: Float32


@dataclass(frozen=True, slots=True)
class Heartbeat:
    clock_ms: U64Int
    ready: bool
    reasons: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another stream of the same request, and the resume token for it."""

    stream: StreamId
    token: str


@dataclass(frozen=True, slots=True)
class Opened:
    stream: StreamId
    next_index: Uint
    token: str
    model: str
    prompt_tokens: Uint
    siblings: tuple[Sibling, ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    stream: StreamId
    state: StreamState
    next_index: Uint


@dataclass(frozen=True, slots=True)
class Header:
    """One field line of an HTTP message; `name` is in lower case."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an object's answer to a Call; Body frames and a BodyEnd follow."""

    status: U16Int
    headers: tuple[Header, ...] = ()


@dataclass(frozen=True, slots=True)
class Body:
    """A piece of an answer; each takes one of the credit."""

    data: bytes


@dataclass(frozen=True, slots=True)
class BodyEnd:
    pass


# ---- either way ----


@dataclass(frozen=True, slots=True)
class Hello:
    schema: SchemaId
    software: str


# ---- client to server ----


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What the generated text must match; `source` is a JSON schema or a regular expression."""

    kind: FormatKind
    source: str


@dataclass(frozen=True, slots=True)
class Open:
    """A request to generate; exactly one of `prompt` and `messages` is given."""

    model: str
    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    max_tokens: Uint | None = None
    temperature: Float64 | None = None
    top_k: Uint | None = None
    top_p: Float64 | None = None
    min_p: Float64 | None = None
    repetition_penalty: Float64 | None = None
    presence_penalty: Float64 | None = None
    frequency_penalty: Float64 | None = None
    seed: U64Int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: Uint | None = None
    format: OutputFormat | None = None
    overflow: Overflow = Overflow.REFUSE
    n: Uint = 1
    durability: Durability = Durability.PROCESS
    priority: Priority = Priority.STANDARD
    idempotency_key: str | None = None
    credit: Uint = 0


@dataclass(frozen=True, slots=True)
class Resume:
    """Frames of an existing stream with index > `after`, or all of them."""

    stream: StreamId
    after: Uint | None = None
    token: str | None = None
    follow: bool = True
    credit: Uint = 0


@dataclass(frozen=True, slots=True)
class Credit:
    limit: Uint


@dataclass(frozen=True, slots=True)
class Cancel:
    stream: StreamId
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Detach:
    pass


@dataclass(frozen=True, slots=True)
class Steer:
    stream: StreamId
    token: str | None
    text: str


# ---- edge to origin: never from a client ----


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request, whole, for the object of class `object` called `name`.

    `url` is absolute, as the client sent it; `credit` counts Body frames.
    """

    object: str
    name: str
    method: str
    url: str
    headers: tuple[Header, ...] = ()
    body: bytes = b""
    credit: Uint = 0


class Tag(IntEnum):
    TOKEN = 0
    STREAM_END = 1
    STREAM_ERROR = 2
    CLASSIFICATION = 3
    EMBEDDING = 4
    CHUNK = 5
    REVISION = 6
    METRICS = 7
    HEARTBEAT = 8
    OPENED = 9
    STATUS = 10
    HELLO = 11
    ANSWER = 12
    BODY = 13
    BODY_END = 14
    SCORED_TOKEN = 15
    OPEN = 16
    RESUME = 17
    CREDIT = 18
    CANCEL = 19
    DETACH = 20
    STEER = 21
    CALL = 22
    NOTICE = 24


Logged = Token | StreamEnd | Classification | Embedding | Chunk | Revision | ScoredToken | Notice
Frame = (
    Logged
    | StreamError
    | Metrics
    | Heartbeat
    | Opened
    | Status
    | Hello
    | Answer
    | Body
    | BodyEnd
    | Open
    | Resume
    | Credit
    | Cancel
    | Detach
    | Steer
    | Call
)

FRAMES: dict[int, type[Frame]] = {
    Tag.TOKEN: Token,
    Tag.STREAM_END: StreamEnd,
    Tag.STREAM_ERROR: StreamError,
    Tag.CLASSIFICATION: Classification,
    Tag.EMBEDDING: Embedding,
    Tag.CHUNK: Chunk,
    Tag.REVISION: Revision,
    Tag.METRICS: Metrics,
    Tag.HEARTBEAT: Heartbeat,
    Tag.OPENED: Opened,
    Tag.STATUS: Status,
    Tag.HELLO: Hello,
    Tag.ANSWER: Answer,
    Tag.BODY: Body,
    Tag.BODY_END: BodyEnd,
    Tag.SCORED_TOKEN: ScoredToken,
    Tag.OPEN: Open,
    Tag.RESUME: Resume,
    Tag.CREDIT: Credit,
    Tag.CANCEL: Cancel,
    Tag.DETACH: Detach,
    Tag.STEER: Steer,
    Tag.CALL: Call,
    Tag.NOTICE: Notice,
}

LOGGED: frozenset[int] = frozenset(
    (
        Tag.TOKEN,
        Tag.STREAM_END,
        Tag.CLASSIFICATION,
        Tag.EMBEDDING,
        Tag.CHUNK,
        Tag.REVISION,
        Tag.SCORED_TOKEN,
        Tag.NOTICE,
    )
)
CLOSING: frozenset[int] = frozenset((Tag.STREAM_END, Tag.STREAM_ERROR, Tag.STATUS, Tag.BODY_END))
# What each side may send; Hello is either side's. An edge sends what its clients do, and
# Calls, which it makes of their HTTP requests.
EDGE: frozenset[int] = frozenset(tag for tag in Tag if Tag.OPEN <= tag <= Tag.CALL) | {Tag.HELLO}
CLIENT: frozenset[int] = EDGE - {Tag.CALL}
SERVER: frozenset[int] = frozenset(Tag) - EDGE | {Tag.HELLO}
