"""The frames of the client schema: a class for each frame, and for each struct inside one.

The codec is compiled from the annotations (ledger/wire/bare.py). The schema as text, its identity
and the tables of other languages are generated from them too: after a change run
`make schemas`. PROTOCOL.md says what the frames mean.
"""

from __future__ import annotations

# ruff: noqa: F403, F405  (the enums are this module's too)
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, dataclass_transform

from tailrace.ledger.wire.bare import (
    SCHEMA_ID_BYTES,
    STR,
    U64_MAX,
    Float32,
    Float64,
    U16Int,
    U64Int,
    Uint,
    fixed_data,
    list_of,
    struct_of,
)
from tailrace.ledger.wire.bare_schema import schema_identity, schema_text
from tailrace.ledger.wire.codec import F, Tagged, framed
from tailrace.ledger.wire.words import *

STREAM_ID_BYTES = 16
MAC_BYTES = 32
"""Of an HMAC-SHA256, and of a nonce."""
MAX_IDEMPOTENCY_KEY_CHARS = 255
MAX_MESSAGES = 1024
"""Of one conversation; no list of a client's frame is longer. 64 KiB have room for 32,000 messages
without text, which took 32 ms to decode, at the edge and again at its origin."""

StreamId = Annotated[bytes, fixed_data(STREAM_ID_BYTES, "StreamId")]
Mac = Annotated[bytes, fixed_data(MAC_BYTES)]
SchemaId = Annotated[bytes, fixed_data(SCHEMA_ID_BYTES)]


# Why frozen slotted dataclasses, for every struct: equality holds within one class only,
# and reading a field costs 11 ns against a named tuple's 22 ns. Their one weakness, an
# __init__ of 0.5 us, is passed by where it matters (see `decode`).


class Frame(Tagged):
    """A struct that is a frame of this schema."""

    __slots__ = ()


class Logged(Frame):
    """A frame of a stream's log, with its index in the stream."""

    __slots__ = ()
    index: Uint


FRAMES: dict[int, type[Frame]] = {}


@dataclass_transform(frozen_default=True)
def frame(tag: int) -> Callable[[type[F]], type[F]]:
    """Makes a class the frame of this schema that has this tag."""
    return framed(FRAMES, tag)


# ---- server to client: logged, each with its index in the stream ----


@frame(0)
class Token(Logged):
    text: str
    index: Uint


@frame(1)
class StreamEnd(Logged):
    total_tokens: Uint
    finish_reason: FinishReason
    index: Uint
    prompt_tokens: Uint
    message: str | None = None
    retryable: bool = False


@frame(3)
class Classification(Logged):
    label: str
    confidence: Float32
    index: Uint


@frame(4)
class Embedding(Logged):
    values: tuple[Float32, ...]
    index: Uint


@frame(5)
class Chunk(Logged):
    data: bytes
    last: bool
    index: Uint


@frame(6)
class Revision(Logged):
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


@frame(15)
class ScoredToken(Logged):
    """A Token of a request for logprobs, with the scores of each token that made its text."""

    text: str
    scores: tuple[TokenScores, ...]
    index: Uint


@frame(24)
class Notice(Logged):
    """Something about the stream that its readers should know, such as `inexact`."""

    code: str
    message: str
    index: Uint


@frame(25)
class Reasoning(Logged):
    """What a model thinks before it answers, or in between: no part of the stream's text."""

    text: str
    index: Uint


@frame(29)
class ToolCall(Logged):
    """A piece of the stream's `call`-th call of a tool, which is no part of its text either.

    The first piece of a call has its `id` and the `name` of the function, later ones neither;
    the `arguments` of all of them together are JSON, if the stream was not cut off.
    """

    call: Uint
    id: str
    name: str
    arguments: str
    index: Uint


# ---- server to client: about a connection or a request, never logged ----


@frame(2)
class StreamError(Frame):
    code: str
    message: str
    retryable: bool
    status: U16Int
    field: str | None = None
    hint: str | None = None
    retry_after_ms: Uint | None = None


@dataclass(frozen=True, slots=True)
class ModelTier:
    """How near one of several models is to answering, and in how long it should.

    `tier` is a word of the pool's; `reason` says why no request for it can be served, if so.
    """

    model: str
    tier: str
    expected_ms: Uint = 0
    reason: str = ""


@frame(8)
class Heartbeat(Frame):
    """`patience_ms`: a sender that says nothing for so long is to be taken for dead.

    What an origin tells its edges besides, and no client is told: how many streams run or wait
    there, of how many that there is room for; how many corrs one link may have open; and the name
    of its ledger, which only origins that share it have in common; and the tier of each model, of
    an origin that has several.
    """

    clock_ms: U64Int
    ready: bool
    reasons: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    patience_ms: Uint = 0
    streams: Uint = 0
    room: Uint = 0
    corrs: Uint = 0
    ledger: str = ""
    tiers: tuple[ModelTier, ...] = ()


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another stream of the same request, and the resume token for it."""

    stream: StreamId
    token: str


@frame(9)
class Opened(Frame):
    """`created_ms`: Unix time at which the stream was made; `note` is its Open's."""

    stream: StreamId
    next_index: Uint
    token: str
    model: str
    prompt_tokens: Uint
    siblings: tuple[Sibling, ...] = ()
    created_ms: U64Int = 0
    note: str | None = None


@frame(10)
class Status(Frame):
    stream: StreamId
    state: StreamState
    next_index: Uint


@dataclass(frozen=True, slots=True)
class Header:
    """One field line of an HTTP message; `name` is in lower case."""

    name: str
    value: str


@frame(12)
class Answer(Frame):
    """The head of an object's answer to a Call; Body frames and a BodyEnd follow."""

    status: U16Int
    headers: tuple[Header, ...] = ()


@frame(13)
class Body(Frame):
    """A piece of an answer; each takes one of the credit."""

    data: bytes


@frame(14)
class BodyEnd(Frame):
    pass


# ---- either way ----


@frame(11)
class Hello(Frame):
    schema: SchemaId
    software: str


# ---- client to server ----


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `tool_calls` is JSON, of an assistant's turn: a list of objects with `id`, `name`
    and `arguments` (text, which is JSON); `tool_call_id` says which of them a tool's turn answers.
    """

    role: str
    content: str
    tool_calls: str | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Tools:
    """What a model may call. `functions` is JSON: a list of objects with `name` and, if wanted,
    `description` and `parameters` (a JSON schema). `only` names the one that is REQUIRED;
    without `parallel` it is one call at most.
    """

    functions: str
    choice: ToolChoice = ToolChoice.AUTO
    only: str | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What the generated text must match; `source` is a JSON schema or a regular expression."""

    kind: FormatKind
    source: str


class SamplingRange(NamedTuple):
    """A setting of Sampling: its range, where `above` leaves `least` out; what it is where nobody
    says, which changes nothing; and what an error on it says."""

    least: float
    most: float
    neutral: float
    hint: str
    above: bool = False

    def allows(self, value: float) -> bool:
        # NaN is in no range: every comparison with it is false.
        return self.least <= value <= self.most and not (self.above and value == self.least)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; what is None is as the model is generated with, or off."""

    temperature: Float64 | None = None
    top_k: Uint | None = None
    top_p: Float64 | None = None
    min_p: Float64 | None = None
    repetition_penalty: Float64 | None = None
    presence_penalty: Float64 | None = None
    frequency_penalty: Float64 | None = None
    seed: U64Int | None = None


_PENALTY = SamplingRange(-2, 2, 0, "a number from -2 to 2; 0 is off")  # as in OpenAI's API
SAMPLING: dict[str, SamplingRange] = {
    "temperature": SamplingRange(0, 2, 1, "a number from 0 to 2"),
    "top_k": SamplingRange(0, 1 << 20, 0, "an integer from 0 to 2^20; 0 is off"),
    "top_p": SamplingRange(0, 1, 1, "a number above 0, at most 1; 1 is off", above=True),
    "min_p": SamplingRange(0, 1, 0, "a number from 0 to 1; 0 is off"),
    "repetition_penalty": SamplingRange(
        0, 10, 1, "a number above 0, at most 10; 1 is off", above=True
    ),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "seed": SamplingRange(0, U64_MAX, 0, "an integer from 0 to 2^64-1"),
}


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom an edge asks: never said by a client. Where it is absent the edge knows no keys.

    Without a tenant it is somebody whom only the resume token speaks for. `rights` are those of
    the API key, as the bits of `Right`; the others bound what all of the tenant's streams take.
    """

    tenant: str
    rights: Uint
    max_unfinished: Uint | None = None
    tokens_per_s: Uint | None = None


@frame(16)
class Open(Frame):
    """A request to generate; exactly one of `prompt` and `messages` is given.

    `note` is for those who read the stream, who find it in their Opened; no one else reads it.
    `trace` is a traceparent (W3C Trace Context): of which trace it is a part.
    """

    start: ClassVar[int] = 0  # the index of the first frame that is wanted

    model: str
    prompt: str | None = None
    messages: Annotated[tuple[Message, ...], list_of(struct_of(Message), MAX_MESSAGES)] = ()
    max_tokens: Uint | None = None
    sampling: Sampling = Sampling()
    stop: Annotated[tuple[str, ...], list_of(STR, MAX_MESSAGES)] = ()
    ignore_eos: bool = False
    logprobs: Uint | None = None
    format: OutputFormat | None = None
    overflow: Overflow = Overflow.REFUSE
    n: Uint = 1
    durability: Durability = Durability.PROCESS
    priority: Priority = Priority.STANDARD
    unread: Unread = Unread.RUN
    unread_after_s: Uint | None = None
    idempotency_key: str | None = None
    credit: Uint = 0
    caller: Caller | None = None
    credit_bytes: Uint | None = None
    tools: Tools | None = None
    note: str | None = None
    trace: str | None = None


@frame(17)
class Resume(Frame):
    """Frames of an existing stream with index > `after`, or all of them."""

    stream: StreamId
    after: Uint | None = None
    token: str | None = None
    follow: bool = True
    credit: Uint = 0
    caller: Caller | None = None
    credit_bytes: Uint | None = None

    @property
    def start(self) -> int:
        """The index of the first frame that is wanted."""
        return 0 if self.after is None else self.after + 1


@frame(18)
class Credit(Frame):
    """What may be sent on this corr: frames with an index below `limit`, and while those that
    were sent on it have fewer than `bytes` bytes together."""

    limit: Uint
    bytes: Uint | None = None


@frame(19)
class Cancel(Frame):
    """`forget`: from then on it is as if the stream had never been."""

    stream: StreamId
    token: str | None = None
    caller: Caller | None = None
    forget: bool = False


@frame(20)
class Detach(Frame):
    pass


@frame(21)
class Steer(Frame):
    stream: StreamId
    token: str | None
    text: str
    caller: Caller | None = None


# ---- between an edge and an origin: never from or to a client ----


STREAM_PATH = "/v1/stream/"
"""What follows it is the name of a stream: the rest of the path, percent-decoded."""
RESERVED_NAME = "__ds"
"""The first segment of names that are no streams: the subscription API lies below it."""
CALL_METHODS = ("PUT", "POST", "GET", "HEAD", "DELETE")
"""Those of clients. Objects have other methods for each other."""
SAFE_METHODS = ("GET", "HEAD")
"""Calls that change nothing: they may be sent twice, or stop half way (RFC 9110, 9.2.1)."""


@frame(23)
class Challenge(Frame):
    """Asks the peer for the Proof that it holds the secret of both."""

    nonce: Mac


@frame(26)
class Proof(Frame):
    mac: Mac


@frame(27)
class Pass(Frame):
    """Comes before Opened: with it an edge may renew what its client reads, whatever becomes of
    the token."""

    mac: Mac


@frame(28)
class Renew(Frame):
    """A Resume by the edge that had the stream open, with the Pass for it."""

    stream: StreamId
    after: Uint | None
    follow: bool
    credit: Uint
    credit_bytes: Uint | None
    mac: Mac

    @property
    def start(self) -> int:
        """The index of the first frame that is wanted."""
        return 0 if self.after is None else self.after + 1


@frame(22)
class Call(Frame):
    """An HTTP request, whole, for the object of class `object` called `name`.

    `url` is absolute, as the client sent it; `credit` counts Body frames,
    `credit_bytes` their bytes.
    """

    object: str
    name: str
    method: str
    url: str
    headers: tuple[Header, ...] = ()
    body: bytes = b""
    credit: Uint = 0
    caller: Caller | None = None
    credit_bytes: Uint | None = None


SCHEMA_TEXT = schema_text(FRAMES, vars())
SCHEMA_HASH = schema_identity(SCHEMA_TEXT)
"""The identity of this schema. Clients that were built with another one are refused."""
LOGGED = frozenset(tag for tag, cls in FRAMES.items() if issubclass(cls, Logged))
CLOSING = frozenset((StreamEnd.tag, StreamError.tag, Status.tag, BodyEnd.tag))
# What a client may send; an edge sends what its clients do, and what is between it and origins.
CLIENT = frozenset(tag for tag in FRAMES if Open.tag <= tag <= Steer.tag) | {Hello.tag}
EDGE = CLIENT | {Call.tag, Challenge.tag, Proof.tag, Renew.tag, Heartbeat.tag}
