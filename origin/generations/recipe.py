"""Recipes: the settings of generations, stored in the ledger.

With the recipe and the stored token ids of a stream, any worker can continue the stream.
"""

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
from tailrace.origin.workers.worker_frame import StartRun, StartTextRun


def _one_of(words: Iterable[Word]) -> str:
    return f"^({'|'.join(member.word for member in words)})$"


def packed_ids(given: Any) -> memoryview:
    """Return token ids as a view of u32 numbers, from a list of ids or from their base64 text."""
    if isinstance(given, memoryview):
        return given
    try:
        return view_u32s(b64decode(given) if isinstance(given, str) else pack_u32s(given))
    except (OverflowError, TypeError) as error:
        raise ValueError("not token ids") from error


def _text_of(ids: memoryview) -> str:
    return b64encode(pack_u32s(ids)).decode()


# JSON holds token ids as one base64 text, because parsing a million JSON numbers would block the
# event loop.
PackedIds = Annotated[memoryview, PlainValidator(packed_ids), PlainSerializer(_text_of)]
FormatWord = Annotated[str, Field(pattern=_one_of(FormatKind))]
PriorityWord = Annotated[str, Field(pattern=_one_of(Priority))]
UnreadWord = Annotated[str, Field(pattern=_one_of(Unread))]


class Recipe(BaseModel):
    """The settings of a generation: stored as JSON with the stream, and never sent to clients.

    Attributes:
        fingerprint: Identity of the engine: its weights, kernels and versions. An engine with
            another fingerprint may continue with other tokens. The field is empty if the model was
            not loaded when the stream was created; then the first record of an engine has the
            fingerprint (`RecordExtra`).
        prompt_ids: The prompt for a worker of kind `tokens`, as packed ids.
        prompt: The prompt for a worker of kind `text`, unless the request has `messages`.
        messages: Messages for a worker of kind `text`: role and content of each, followed by the
            tool fields of a `Message` if the message calls tools or answers a call.
        completes: True if the output continues the text of the prompt.
        format: The format of the output: its `FormatKind` as a word, and its schema or pattern.
        notices: Code and message of each notice that is logged before any output.
        siblings: Ids of the other streams of the same request, in hex.
        tenant: The tenant of the caller; empty if the edge has no API keys.
        key: The id of the caller's API key; empty if the edge has no API keys.
        note: The request's own text for the readers of the stream.
        given: Names of the `sampling` settings that the request itself set. Upstream servers, which
            have defaults of their own, are sent only these. It is None for workers of kind
            `tokens`, and in recipes of earlier versions.
        trace: The traceparent of the request.
        base: Index of the stream's first own frame. The frames before it, which only a branch has,
            are those of its parent.
        begin: Index of the first frame of the output. It is 0, except for a branch that was given
            an instruction: then the frames before the branch are part of the prompt.
        inserted_ids: Token ids of a text with which the own output of a branch begins.
        skipped_stages: Names of the optional stages of a pipeline that the request switches off.
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
    key: str = ""
    note: str | None = None
    trace: str | None = None
    base: int = 0
    begin: int = 0
    inserted_ids: PackedIds = Field(default_factory=lambda: packed_ids(()))
    skipped_stages: tuple[str, ...] = ()

    def run(self, history: History) -> StartRun:
        """Return the order for a worker of kind `tokens` to start, or continue after `history`."""
        form = self.format
        return StartRun(
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
            inserted_ids=self.inserts(history),
        )

    def inserts(self, history: History) -> memoryview:
        """Return the `inserted_ids` if the log does not have them yet, otherwise no ids."""
        return packed_ids(()) if history.last_output >= self.base else self.inserted_ids

    def ask(self, history: History, stream: bytes) -> StartTextRun:
        """Return the order for a worker of kind `text` to start, or continue after `history`."""
        return StartTextRun(
            self.model_dump_json(),
            history.text.text,
            history.next_index,
            history.calls,
            tuple(history.retried),
            stream,
        )

    def made_by(self, fingerprint: str) -> Recipe:
        """Return a copy of the recipe with another fingerprint."""
        return self.model_copy(update={"fingerprint": fingerprint})

    def first_notices(self, logged: int) -> list[Notice]:
        """Return those of the recipe's notices that are not in the stream's log yet.

        `logged` is the number of frames in the log. The notices take the indexes from `base` on.
        """
        notices = enumerate(self.notices, self.base)
        return [Notice(code, text, index) for index, (code, text) in notices if index >= logged]


def prompt_hash(prompt_ids: Iterable[int]) -> str:
    """Return the SHA-256 of token ids as little-endian u32, in hex."""
    return hashlib.sha256(pack_u32s(prompt_ids)).hexdigest()
