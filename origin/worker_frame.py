"""The frames between a supervisor and its workers (origin/worker.bare), and their codec.

Same framing as the client schema, tags from 32 on. corr is the run's id, chosen by the
supervisor and unique on one worker connection; 0 is the connection. Both sides send
`Hello` first, with this schema's hash.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import IntEnum

from ledger.bare import Float64, U32Int, U64Int, Uint
from ledger.codec import Codec, Raw
from ledger.frame import Hello
from ledger.frame import Tag as ClientTag
from ledger.splitter import FrameSplitter

# The first 8 bytes of SHA-256 over the canonical text of origin/worker.bare.
SCHEMA_HASH = bytes.fromhex("d98af735612237fb")

# A prompt of 2^20 tokens, at most 3 bytes each, fits; so does a Step of many emissions.
MAX_WORKER_FRAME_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading has come: `done` of `total` units of the named stage."""

    stage: str
    done: Uint
    total: Uint


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded; `context` and `vocab` in tokens.

    A worker of kind `tokens` takes Runs; one of kind `text` takes Asks, and knows of no tokens
    (`context` and `vocab` are 0).
    """

    kind: str
    model: str
    fingerprint: str
    device: str
    context: Uint
    vocab: Uint
    load_ms: Uint


@dataclass(frozen=True, slots=True)
class Emission:
    """One frame of one run: a whole encoded logged frame of the client schema, corr 0.

    `ids` are all tokens generated since the run's previous emission, up to and including
    the one whose text completes this frame: a token whose text is held back (incomplete
    UTF-8, a possible stop sequence) yields no frame, and its id rides in the next emission.
    `steers` counts the run's Steer orders whose ids are among those of its emissions up to
    this one; the ids of one order are all in one emission.
    """

    run: U32Int
    index: Uint
    ids: tuple[Uint, ...]
    steers: Uint
    frame: bytes


@dataclass(frozen=True, slots=True)
class Step:
    """All that one engine step produced; the last emission of a run is its StreamEnd."""

    emissions: tuple[Emission, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is; counts without another word are of the worker's life so far.

    waiting, running: runs now, by priority class. batch_limit: tokens that a step may take now;
    row_limit: rows of decoding for which runs are started; turn_limit: rows of a step beyond which
    less urgent classes take turns. pages, pages_free: of the KV cache, now; free ones may hold a
    reusable prefix. step_us: time of the last step. prompt_tokens: prefilled; reused_tokens: found
    in the cache instead. drafted, accepted: tokens of speculative decoding.
    """

    waiting: tuple[Uint, ...]
    running: tuple[Uint, ...]
    batch_limit: Uint
    row_limit: Uint
    turn_limit: Uint
    pages: Uint
    pages_free: Uint
    step_us: Uint
    tokens: Uint
    prompt_tokens: Uint
    reused_tokens: Uint
    preemptions: Uint
    drafted: Uint
    accepted: Uint


@dataclass(frozen=True, slots=True)
class Format:
    """What the text must match; `kind` is a `ledger.frame.FormatKind`."""

    kind: Uint
    source: str


@dataclass(frozen=True, slots=True)
class Run:
    """Generate, or go on: `generated_ids` are those already in the ledger, at first none.

    `sent_bytes` counts the UTF-8 bytes of text in the stream's frames so far, `next_index`
    is the index of the next one. `max_tokens` counts the `generated_ids` too. Temperature 0
    is greedy, `top_k` 0, `top_p` 1, `min_p` 0 and penalties of 1, 0, 0 are off. `priority` is a
    `ledger.frame.Priority`. With `logprobs` every text frame is a ScoredToken with so many
    alternatives.
    """

    prompt_ids: tuple[Uint, ...]
    generated_ids: tuple[Uint, ...]
    sent_bytes: Uint
    next_index: Uint
    max_tokens: Uint
    temperature: Float64 = 0.0
    top_k: Uint = 0
    top_p: Float64 = 1.0
    seed: U64Int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    priority: Uint = 1
    min_p: Float64 = 0.0
    repetition: Float64 = 1.0
    presence: Float64 = 0.0
    frequency: Float64 = 0.0
    logprobs: Uint | None = None
    format: Format | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A Run for a worker of kind `text`, or the rest of one.

    `recipe` is the JSON of `origin.recipe.Recipe`; `delivered` is the stream's text so far and
    `next_index` the index of its next frame.
    """

    recipe: str
    delivered: str
    next_index: Uint


@dataclass(frozen=True, slots=True)
class Steer:
    """Tokens that a run goes on with, as if it had drawn them next."""

    ids: tuple[Uint, ...]


@dataclass(frozen=True, slots=True)
class Halt:
    """Cancel a run; it still ends with its StreamEnd emission."""


class Tag(IntEnum):
    HELLO = ClientTag.HELLO
    LOAD_PROGRESS = 32
    READY = 33
    STEP = 34
    LOAD = 35
    RUN = 40
    HALT = 41
    STEER = 42
    ASK = 43


Frame = Hello | LoadProgress | Ready | Step | Load | Run | Halt | Steer | Ask

FRAMES: dict[int, type[Frame]] = {
    Tag.HELLO: Hello,
    Tag.LOAD_PROGRESS: LoadProgress,
    Tag.READY: Ready,
    Tag.STEP: Step,
    Tag.LOAD: Load,
    Tag.RUN: Run,
    Tag.HALT: Halt,
    Tag.STEER: Steer,
    Tag.ASK: Ask,
}

CODEC: Codec[Frame] = Codec(FRAMES, MAX_WORKER_FRAME_BYTES)
WORKER: frozenset[int] = frozenset((Tag.HELLO, Tag.LOAD_PROGRESS, Tag.READY, Tag.STEP, Tag.LOAD))
SUPERVISOR: frozenset[int] = frozenset((Tag.HELLO, Tag.RUN, Tag.HALT, Tag.STEER, Tag.ASK))


class Splitter(FrameSplitter):
    """Cuts a worker connection's bytes into raw frames of this schema."""

    def __init__(
        self,
        max_frame_bytes: int = MAX_WORKER_FRAME_BYTES,
        tags: Container[int] = frozenset(FRAMES),
    ) -> None:
        super().__init__(tags, max_frame_bytes)


def encode(frame: Frame, corr: int = 0) -> bytes:
    """One whole frame; FrameError if a value is outside its type."""
    return CODEC.encode(frame, corr)


def decode(raw: Raw) -> tuple[int, Frame]:
    """(corr, frame) of exactly one whole frame; FrameError, and nothing else, if it is not."""
    return CODEC.decode(raw)
