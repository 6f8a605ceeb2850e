"""A route whose answers are choices, whole or in chunks: what is asked of it, and how it answers.

What `responses` has instead of choices is its own; see `AnswerShape` for the words of an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from edge.generate import asked_to_read
from edge.openai.events import AnswerShape, ChunkEncoder
from edge.openai.request import StreamOptions, flag
from ledger.errors import CallerError
from ledger.frame import Caller, Resume


@dataclass(frozen=True, slots=True)
class Dialect:
    """One route."""

    path: str
    body: type[Any]
    """Of pydantic's models, `StreamedSettings` with `opens`."""
    example: str
    shape: AnswerShape

    def encoder(self, options: StreamOptions | None, *, resumes: bool = False) -> ChunkEncoder:
        options = options or StreamOptions()
        return ChunkEncoder(
            self.shape,
            resumes=resumes,
            usage=bool(options.include_usage),
            continuous=bool(options.continuous_usage_stats),
        )

    def resume(
        self,
        name: str,
        query: Iterable[tuple[str, str]],
        token: str | None,
        caller: Caller | None,
    ) -> tuple[Resume, bool, StreamOptions]:
        """What a GET asks for; whether as a stream, and what beside it."""
        said: dict[str, str] = {}
        for key, value in query:
            said.setdefault(key, value)
        after: Sequence[str] = [said["starting_after"]] if "starting_after" in said else []
        try:
            resume = asked_to_read(
                name.removeprefix(self.shape.prefix),
                after,
                None,
                token or said.get("token"),
                caller,
            )
        except CallerError as error:
            error.field = "starting_after" if error.field == "after" else error.field
            raise
        options = StreamOptions(
            include_usage=flag(said, "include_usage"),
            continuous_usage_stats=flag(said, "continuous_usage_stats"),
        )
        return resume, flag(said, "stream"), options
