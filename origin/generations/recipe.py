"""The recipe of a generation: all that a worker needs to go on, besides the stored token ids."""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator

from tailrace.ledger.frame import FormatKind, Notice, OutputFormat, Priority, Sampling, Unread
from tailrace.ledger.wire.bare import pack_u32s, view_u32s
from tailrace.ledger.wire.schema import Word
from tailrace.origin.generations.stream_log import History
from tailrace.origin.tool_calls import ToolUse
from tailrace.origin.workers.worker_frame import Ask, Run


def _one_of(words: Iterable[Word]) -> str:
    return f"^({'|'.join(member.word for member in words)})$"


def packed_ids(given: Any) -> memoryview:
    """Return token ids of four bytes each, from their base64 text in JSON or from a list."""
    if isinstance(given, memoryview):
        return given
    try:
        return view_u32s(b64decode(given) if isinstance(given, str) else pack_u32s(given))
    except (OverflowError, TypeError) as error:
        raise ValueError("not token ids") from error


def _text_of(ids: memoryview) -> str:
    return b64encode(pack_u32s(ids)).decode()


# As one text, because reading a million numbers one by one would hold up every stream.
PackedIds = Annotated[memoryview, PlainValidator(packed_ids), PlainSerializer(_text_of)]
FormatWord = Annotated[str, Field(pattern=_one_of(FormatKind))]
PriorityWord = Annotated[str, Field(pattern=_one_of(Priority))]
UnreadWord = Annotated[str, Field(pattern=_one_of(Unread))]


class Recipe(BaseModel):
    """The settings of a generation: stored as JSON with the stream, and never sent to clients.

    `fingerprint` names the weights, kernels and versions that make the tokens: another
    engine would continue with other tokens than the uninterrupted run. It is empty where the model
    was never loaded before: then the first record that an engine makes says it (`RecordExtra`).

    A worker of kind `tokens` gets the prompt as packed `prompt_ids`. A worker of kind `text` knows
    of no tokens and gets `prompt`, or `messages`: pairs of role and content, followed by the tool
    fields of a `Message` if a turn calls tools or answers a call. `completes` is True if the text
    goes on from a `prompt`. `format` is a word of `FormatKind` and the source. `notices` are pairs
    of code and message, which are logged first. `siblings` are the other streams of the same
    request, in hex. `tenant` is empty if the edge knows no API keys. `note` is the request's own
    text for its readers. `given` names the settings in `sampling` that the request itself gave: a
    server with defaults of its own is sent no others. It is None for workers of kind `tokens`, and
    in recipes of earlier versions. `trace` is the traceparent that the request came with.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    fingerprint: str
    prompt_ids: PackedIds
    prompt_sha256: str
    prompt: str | None = None
    messages: tuple[tuple[str | None, ...], ...] = ()
    max_tokens: int
    sampling: Sampling
    given: tuple[str, ...] | None = None
    stop: tuple[str, ...]
    ignore_eos: bool
    completes: bool = False
    logprobs: int | None = None
    format: tuple[FormatWord, str] | None = None
    tools: ToolUse | None = None
    priority: PriorityWord
    unread: UnreadWord = Unread.RUN.word
    unread_after_s: int = 0
    notices: tuple[tuple[str, str], ...] = ()
    siblings: tuple[str, ...] = ()
    tenant: str = ""
    note: str | None = None
    trace: str | None = None

    def run(self, history: History) -> Run:
        """Return the order for a worker of kind `tokens` to start, or to go on after `history`."""
        form = self.format
        return Run(
            prompt_ids=self.prompt_ids,
            generated_ids=tuple(history.ids),
            steered=tuple(history.steered),
            sent_bytes=history.sent_bytes,
            next_index=history.next_index,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            completes=self.completes,
            priority=Priority.from_word(self.priority),
            logprobs=self.logprobs,
            format=form and OutputFormat(FormatKind.from_word(form[0]), form[1]),
            tools=None if self.tools is None else self.tools.model_dump_json(),
        )

    def ask(self, history: History) -> Ask:
        """Return the order for a worker of kind `text` to start, or to go on after `history`."""
        text = history.text.text
        return Ask(self.model_dump_json(), text, history.next_index, history.calls)

    def made_by(self, fingerprint: str) -> Recipe:
        """Return the recipe of a stream that the engine of this fingerprint makes."""
        return self.model_copy(update={"fingerprint": fingerprint})

    def first_notices(self, logged: int) -> list[Notice]:
        """Return the notices that are not among the first `logged` frames of a log, numbered."""
        missing = list(enumerate(self.notices))[logged:]
        return [Notice(code, message, index) for index, (code, message) in missing]


def prompt_hash(prompt_ids: Iterable[int]) -> str:
    """Return the SHA-256 of token ids as little-endian u32, in hex."""
    return hashlib.sha256(pack_u32s(prompt_ids)).hexdigest()
