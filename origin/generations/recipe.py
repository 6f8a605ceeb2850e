"""What continuing a generation needs, besides the token ids that the ledger holds."""

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
    """Token ids, four bytes each: from their text in JSON, or from a list of them."""
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
    """Stored as JSON with the stream, never sent to clients.

    `fingerprint` names the weights, kernels and versions that make the tokens: another
    engine would continue with other tokens than the uninterrupted run. It is empty where the model
    was never loaded before: then the first record that an engine makes says it (`RecordExtra`).

    For a worker of kind `tokens` the prompt is `prompt_ids`, which lie packed; one of kind `text`
    knows of no tokens, and gets `prompt`, or `messages` as pairs of role and content,
    with those of a `Message` behind them where a turn calls tools or answers a call. `completes`
    is true where the text goes on from a `prompt`. `format` is a word of
    `FormatKind` and the source. `notices`, pairs of code and message, are to be logged before
    anything else. `siblings` are the other streams of the same request, in hex. `tenant` is whose
    stream it is; of an edge without keys nobody's. `note` is the request's own, for its readers.
    `given` names the settings in `sampling` that the request itself gave: a server with defaults of
    its own is sent no others. It is None for workers of kind `tokens`, and where an earlier version
    stored the recipe without it. `trace` is the traceparent that it came with.
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
        """The order for a worker of kind `tokens` to start, or to go on from there."""
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
        """The same for a worker of kind `text`."""
        text = history.text.text
        return Ask(self.model_dump_json(), text, history.next_index, history.calls)

    def made_by(self, fingerprint: str) -> Recipe:
        """Return the recipe of a stream that the engine of this fingerprint makes."""
        return self.model_copy(update={"fingerprint": fingerprint})

    def first_notices(self, logged: int) -> list[Notice]:
        """Those that are not among so many logged frames, numbered: they are a log's first."""
        missing = list(enumerate(self.notices))[logged:]
        return [Notice(code, message, index) for index, (code, message) in missing]


def prompt_hash(prompt_ids: Iterable[int]) -> str:
    """SHA-256 over the ids as little-endian u32, hex."""
    return hashlib.sha256(pack_u32s(prompt_ids)).hexdigest()
