"""What continuing a generation needs, besides the token ids that the ledger holds."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ledger.frame import FormatKind, Notice, Priority, ScoredToken, Token, decode
from ledger.interface import Record
from ledger.schema import Word
from ledger.text import StreamText
from origin.worker_frame import Ask, Format, Run


def _one_of(words: Iterable[Word]) -> str:
    return f"^({'|'.join(member.word for member in words)})$"


FormatWord = Annotated[str, Field(pattern=_one_of(FormatKind))]
PriorityWord = Annotated[str, Field(pattern=_one_of(Priority))]


class Recipe(BaseModel):
    """Stored as JSON with the stream, never sent to clients.

    `fingerprint` names the weights, kernels and versions that make the tokens: another
    engine would continue with other tokens than the uninterrupted run.

    For a worker of kind `tokens` the prompt is `prompt_ids`; one of kind `text` knows of no
    tokens, and gets `prompt`, or `messages` as pairs of role and content. `format` is a word of
    `FormatKind` and the source. `notices`, pairs of code and message, are to be logged before
    anything else. `siblings` are the other streams of the same request, in hex.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    fingerprint: str
    prompt_ids: tuple[int, ...]
    prompt_sha256: str
    prompt: str | None = None
    messages: tuple[tuple[str, str], ...] = ()
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int
    stop: tuple[str, ...]
    ignore_eos: bool
    logprobs: int | None = None
    format: tuple[FormatWord, str] | None = None
    priority: PriorityWord
    notices: tuple[tuple[str, str], ...] = ()
    siblings: tuple[str, ...] = ()

    def run(self, records: Sequence[Record]) -> Run:
        """The order for a worker of kind `tokens` to start, or to go on after `records`."""
        sent_bytes = 0
        for record in records:
            _, frame = decode(record.frame)
            sent_bytes += len(frame.text.encode()) if isinstance(frame, Token | ScoredToken) else 0
        return Run(
            prompt_ids=self.prompt_ids,
            generated_ids=tuple(i for record in records for i in record.ids),
            sent_bytes=sent_bytes,
            next_index=len(records),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            priority=Priority.from_word(self.priority),
            min_p=self.min_p,
            repetition=self.repetition,
            presence=self.presence,
            frequency=self.frequency,
            logprobs=self.logprobs,
            format=self._worker_format(),
        )

    def ask(self, records: Sequence[Record]) -> Ask:
        """The same for a worker of kind `text`."""
        delivered = StreamText()
        for record in records:
            delivered.add(decode(record.frame)[1])
        return Ask(self.model_dump_json(), delivered.text, len(records))

    def first_notices(self, records: Sequence[Record]) -> list[Notice]:
        """Those that are not in the log yet, numbered: they are its first frames."""
        missing = list(enumerate(self.notices))[len(records) :]
        return [Notice(code, message, index) for index, (code, message) in missing]

    def _worker_format(self) -> Format | None:
        if self.format is None:
            return None
        word, source = self.format
        return Format(FormatKind.from_word(word), source)


def prompt_hash(prompt_ids: tuple[int, ...]) -> str:
    """SHA-256 over the ids as little-endian u32, hex."""
    return hashlib.sha256(struct.pack(f"<{len(prompt_ids)}I", *prompt_ids)).hexdigest()
