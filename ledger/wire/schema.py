"""The frames of the client schema, and the structs inside them, as classes.

The codec is compiled from the annotations (ledger/wire/bare.py). The schema as text, its identity
and the tables of other languages are generated from them too: after a change run
`make schemas`. PROTOCOL.md says what the frames mean.
"""

from __future__ import annotations

# ruff: noqa: F403, F405  (this module also exports the enums)
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
"""Length in bytes of an HMAC-SHA256, and of a nonce."""
MAX_IDEMPOTENCY_KEY_CHARS = 255
MAX_MESSAGES = 1024
"""Maximum length of a list in a client's frame, such as the messages of a conversation.

A frame of 64 KiB could hold 32,000 empty messages, which both the edge and the origin would take
32 ms to decode.
"""

MAX_STAGE_SWITCHES = 16
"""Maximum number of stages that a request can switch on or off: a pipeline has no more."""

StreamId = Annotated[bytes, fixed_data(STREAM_ID_BYTES, "StreamId")]
Mac = Annotated[bytes, fixed_data(MAC_BYTES)]
SchemaId = Annotated[bytes, fixed_data(SCHEMA_ID_BYTES)]


# All structs are frozen dataclasses with slots: instances of different classes are never equal, and
# reading a field takes 11 ns instead of the 22 ns of a named tuple. But their __init__ takes 0.5
# us, so code that runs for every token avoids it (see `decode`).


class Frame(Tagged):
    """Base class of the frames of this schema."""

    __slots__ = ()


class Logged(Frame):
    """Base class of frames that are stored in a stream; `index` is their place in it."""

    __slots__ = ()
    index: Uint


FRAMES: dict[int, type[Frame]] = {}


@dataclass_transform(frozen_default=True)
def frame(tag: int) -> Callable[[type[F]], type[F]]:
    """Return a decorator that makes a class the frame with this tag."""
    return framed(FRAMES, tag)


# ---- server to client: logged, each with its index in the stream ----


@frame(0)
class Token(Logged):
    """Text that extends the output."""

    text: str
    index: Uint


@frame(1)
class StreamEnd(Logged):
    """The last frame of a stream."""

    total_tokens: Uint
    finish_reason: FinishReason
    index: Uint
    prompt_tokens: Uint
    message: str | None = None
    retryable: bool = False


@frame(3)
class Classification(Logged):
    """The label that a classification model chose."""

    label: str
    confidence: Float32
    index: Uint


@frame(4)
class Embedding(Logged):
    """The vector that an embedding model computed."""

    values: tuple[Float32, ...]
    index: Uint


@frame(5)
class Chunk(Logged):
    """A piece of bulk output."""

    data: bytes
    last: bool
    index: Uint


@frame(6)
class Revision(Logged):
    """Text that replaces the text of all frames from index `replaces` on.

    `stability` is an estimate, from 0 to 1, of how likely this text will not change any more. It is
    1 if `final` is true, and 0 if there is no estimate.
    """

    replaces: Uint
    text: str
    final: bool
    index: Uint
    stability: Float32 = 0.0


@dataclass(frozen=True, slots=True)
class Score:
    """A token's bytes and the logarithm of its probability, before temperature and filters."""

    id: Uint
    token: bytes
    logprob: Float32


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The scores of the drawn token, and of the most likely tokens, best first."""

    chosen: Score
    top: tuple[Score, ...] = ()


@frame(15)
class ScoredToken(Logged):
    """A Token for a request with `logprobs`: its text, and the scores of each token of the text."""

    text: str
    scores: tuple[TokenScores, ...]
    index: Uint


@frame(24)
class Notice(Logged):
    """Information about the stream for its readers, such as `inexact`."""

    code: str
    message: str
    index: Uint


@frame(25)
class Reasoning(Logged):
    """Text of a model's reasoning before its answer; it is not part of the stream's text."""

    text: str
    index: Uint


@frame(29)
class ToolCall(Logged):
    """A piece of the stream's tool call number `call`; it is not part of the stream's text.

    Only the first piece of a call has the call's `id` and the `name` of the function. The
    `arguments` of all pieces together are JSON, unless the stream was cut off.
    """

    call: Uint
    id: str
    name: str
    arguments: str
    index: Uint


# ---- server to client: about a connection or a request, never logged ----


@frame(7)
class Snapshot(Frame):
    """The merged text of the frames `first` to `index`, for a Resume with `snapshot`.

    These are Token, ScoredToken and final Revision frames, or Reasoning frames if `reasoning` is
    true. The next frame has the index after `index`.
    """

    first: Uint
    text: str
    index: Uint
    reasoning: bool = False


@frame(30)
class TokenRun(Frame):
    """Consecutive Tokens as one frame, for a client whose Hello has `compression`.

    Token n, counted from 0, has the index `first` + n. `text` in UTF-8 has the texts of all Tokens,
    one after the other; that of Token n has `lengths[n]` bytes.
    """

    first: Uint
    lengths: bytes
    text: str


@frame(2)
class StreamError(Frame):
    """The refusal or failure of a request, or of the whole connection if sent on channel 0."""

    code: str
    message: str
    retryable: bool
    status: U16Int
    field: str | None = None
    hint: str | None = None
    retry_after_ms: Uint | None = None


@dataclass(frozen=True, slots=True)
class ModelTier:
    """The tier of a model in an origin's warm pool, and the ms until the model should be ready.

    `reason` says why the model cannot be served; it is empty if the model can be served.
    """

    model: str
    tier: str
    expected_ms: Uint = 0
    reason: str = ""


@frame(8)
class Heartbeat(Frame):
    """The state of a server, sent regularly.

    A sender that is silent for more than `patience_ms` is considered dead. The fields after that
    are for edges: the number of running and waiting streams, its maximum (`room`), the maximum
    number of open channels on a link (`corrs`), the name of the origin's ledger, and, if the origin
    has several models, the tier of each.
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
    """Another stream of the same request, with its resume token."""

    stream: StreamId
    token: str


@frame(9)
class Opened(Frame):
    """The answer to Open and Resume.

    `created_ms` is the Unix time at which the stream was created. `note` is that of the Open that
    created the stream. `first` is the index of the first frame that follows on this channel.
    """

    stream: StreamId
    next_index: Uint
    token: str
    model: str
    prompt_tokens: Uint
    siblings: tuple[Sibling, ...] = ()
    created_ms: U64Int = 0
    note: str | None = None
    first: Uint = 0


@frame(10)
class Status(Frame):
    """The state of a stream: the answer to Cancel, Steer and SwitchStages.

    It is also the last frame for a Resume that has got all frames, but no StreamEnd.
    """

    stream: StreamId
    state: StreamState
    next_index: Uint


@dataclass(frozen=True, slots=True)
class Header:
    """A header field of an HTTP message; `name` is in lower case."""

    name: str
    value: str


@frame(12)
class Answer(Frame):
    """Status and headers of an object's answer to a Call; Body frames and BodyEnd follow."""

    status: U16Int
    headers: tuple[Header, ...] = ()


@frame(13)
class Body(Frame):
    """A piece of the body of an object's answer; each Body uses one unit of `Call.credit`."""

    data: bytes


@frame(14)
class BodyEnd(Frame):
    """The end of the body of an object's answer."""


# ---- either way ----


@frame(11)
class Hello(Frame):
    """The first frame of both sides of a connection."""

    schema: SchemaId
    software: str
    compression: Compression | None = None
    """From a client: it takes compressed frames and TokenRuns. From a server: it can send them."""


# ---- client to server ----


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation.

    `tool_calls` of an assistant's message is JSON: a list of objects with `id`, `name` and
    `arguments` (JSON as text). `tool_call_id` of a tool's message is the id of the call.
    """

    role: str
    content: str
    tool_calls: str | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that a model may call.

    `functions` is JSON: a list of objects with `name` and optionally `description` and
    `parameters` (a JSON schema). `only` is the function that must be called if `choice` is
    REQUIRED; None permits any function. Without `parallel` the model makes at most one call.
    """

    functions: str
    choice: ToolChoice = ToolChoice.AUTO
    only: str | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The format of the generated text; `source` is a JSON schema or a regular expression."""

    kind: FormatKind
    source: str


class SamplingRange(NamedTuple):
    """The range of a sampling parameter.

    With `above` the value must be greater than `least`. `neutral` is the value that has no effect.
    `hint` describes the range in an error.
    """

    least: float
    most: float
    neutral: float
    hint: str
    above: bool = False

    def allows(self, value: float) -> bool:
        """Return True if a value is in the range; NaN never is."""
        return self.least <= value <= self.most and not (self.above and value == self.least)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. None means the model's default, or off if the model has none."""

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
    """The caller for whom an edge makes a request; clients must not set this field.

    It is absent if the edge has no API keys. A caller with only a resume token has an empty tenant.
    `rights` are the bits of the key's `Right`. `max_unfinished` and `tokens_per_s` limit all of the
    tenant's streams together. `key` is the id of the API key. `tokens_per_day` and
    `tokens_per_month` are the key's budgets, by days and months in UTC.
    """

    tenant: str
    rights: Uint
    max_unfinished: Uint | None = None
    tokens_per_s: Uint | None = None
    key: str = ""
    tokens_per_day: Uint | None = None
    tokens_per_month: Uint | None = None


@dataclass(frozen=True, slots=True)
class Branch:
    """The point at which a new stream leaves another stream, after sharing frames before `index`.

    `token` is the resume token of the other stream. At that point the new stream continues with
    `text`, as if the model had written it. `instruction` is given to the model there as the user's
    next message.
    """

    stream: StreamId
    index: Uint
    token: str | None = None
    text: str | None = None
    instruction: str | None = None


@dataclass(frozen=True, slots=True)
class StageSwitch:
    """Switches an optional stage of a pipeline, named `stage`, on or off."""

    stage: str
    on: bool


@frame(16)
class Open(Frame):
    """A request to generate, with exactly one of `prompt`, `messages` and `branch`.

    A `branch` has the model of its parent, so `model` must be empty or name that model. Without
    `cache` the operator's setting applies.

    `note` is returned to the stream's readers in Opened and not read by the server. `trace` is a
    traceparent (W3C Trace Context). `stages` switches optional stages of a pipeline.
    """

    start: ClassVar[int] = 0  # index of the first requested frame

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
    branch: Branch | None = None
    cache: Cache | None = None
    stages: Annotated[
        tuple[StageSwitch, ...], list_of(struct_of(StageSwitch), MAX_STAGE_SWITCHES)
    ] = ()


@frame(17)
class Resume(Frame):
    """A request for the frames of a stream with an index above `after`, or for all frames.

    Instead of `after`, `tail` requests that number of the newest frames, and `since_ms` the frames
    stored at or after that Unix time. At most one of the three is given. With `snapshot` an edge
    merges the text of the frames that exist so far into Snapshot frames.
    """

    stream: StreamId
    after: Uint | None = None
    token: str | None = None
    follow: bool = True
    credit: Uint = 0
    caller: Caller | None = None
    credit_bytes: Uint | None = None
    tail: Uint | None = None
    since_ms: Uint | None = None
    snapshot: bool = False

    @property
    def start(self) -> int:
        """Index of the first requested frame; with `tail` or `since_ms` Opened has that index."""
        return 0 if self.after is None else self.after + 1


@frame(18)
class Credit(Frame):
    """Permission to send frames on this channel.

    Frames with an index below `limit` may be sent. With `bytes`, a frame may be sent only while the
    frames sent so far have fewer bytes in total.
    """

    limit: Uint
    bytes: Uint | None = None


@frame(19)
class Cancel(Frame):
    """A request to end a stream; `forget` also deletes it."""

    stream: StreamId
    token: str | None = None
    caller: Caller | None = None
    forget: bool = False


@frame(20)
class Detach(Frame):
    """A request to stop sending on this channel."""


@frame(21)
class Steer(Frame):
    """A request to add text to a running generation."""

    stream: StreamId
    token: str | None
    text: str
    caller: Caller | None = None


@frame(31)
class Input(Frame):
    """Bytes for the input of a stream whose pipeline takes input; answered by InputStored.

    `offset` is the number of bytes before `data`. Bytes that the origin has stored already are left
    out, so a client may send them again. `last` completes the input.
    """

    stream: StreamId
    token: str | None
    offset: Uint
    data: bytes
    last: bool = False
    caller: Caller | None = None


@frame(64)
class InputStored(Frame):
    """The answer to Input: the number of bytes of the input that are durable."""

    stream: StreamId
    bytes: Uint
    complete: bool


@frame(65)
class SwitchStages(Frame):
    """A request to switch optional stages of a running pipeline; answered by Status.

    A stage is switched at one of its next items. The answer comes when the request is durable.
    """

    stream: StreamId
    token: str | None
    stages: Annotated[tuple[StageSwitch, ...], list_of(struct_of(StageSwitch), MAX_STAGE_SWITCHES)]
    caller: Caller | None = None


# ---- between an edge and an origin: never from or to a client ----


STREAM_PATH = "/v1/stream/"
"""Path before the name of a stream, which is the percent-decoded rest of the path."""
RESERVED_NAME = "__ds"
"""First segment of the subscription API's paths, which are not names of streams."""
CALL_METHODS = ("PUT", "POST", "GET", "HEAD", "DELETE")
"""HTTP methods of Calls from clients. Objects use further methods for each other."""
SAFE_METHODS = ("GET", "HEAD")
"""Methods that change nothing, so that they may be repeated or cut off (RFC 9110, 9.2.1)."""


@frame(23)
class Challenge(Frame):
    """A request for the Proof that the peer knows the shared secret."""

    nonce: Mac


@frame(26)
class Proof(Frame):
    """The answer to a Challenge."""

    mac: Mac


@frame(27)
class Pass(Frame):
    """A resumption capability, which an origin sends to an edge before Opened.

    After the link was lost, the edge sends it back in a Renew, so that its client can read on even
    if the client's token has expired.
    """

    mac: Mac


@frame(28)
class Renew(Frame):
    """A Resume by an edge that has opened the stream before: it has a Pass instead of a token."""

    stream: StreamId
    after: Uint | None
    follow: bool
    credit: Uint
    credit_bytes: Uint | None
    mac: Mac

    @property
    def start(self) -> int:
        """Index of the first requested frame."""
        return 0 if self.after is None else self.after + 1


@frame(22)
class Call(Frame):
    """A whole HTTP request for the object `name` of class `object`.

    `url` is absolute, as the client sent it. `credit` counts Body frames, `credit_bytes` their
    bytes.
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
SCHEMA_HASH = schema_identity(FRAMES)
"""Identity of this schema. Clients with another schema are refused."""
LOGGED = frozenset(tag for tag, cls in FRAMES.items() if issubclass(cls, Logged))
CLOSING = frozenset((StreamEnd.tag, StreamError.tag, Status.tag, BodyEnd.tag, InputStored.tag))
# CLIENT has the tags that a client may send, EDGE the tags that an edge may send on a link.
_OPEN_TO_STEER = frozenset(tag for tag in FRAMES if Open.tag <= tag <= Steer.tag)
CLIENT = _OPEN_TO_STEER | {Hello.tag, Input.tag, SwitchStages.tag}
EDGE = CLIENT | {Call.tag, Challenge.tag, Proof.tag, Renew.tag, Heartbeat.tag}
