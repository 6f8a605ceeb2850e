"""A route whose answers are choices, whole or in chunks: what is asked of it, and how it answers.

What `responses` has instead of choices is its own; see `ChunkShape` for the words of an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edge.document import Collected
from edge.generate import asked_to_read
from edge.openai.events import ChunkEncoder, ChunkShape
from edge.openai.request import StreamOptions
from ledger.errors import CallerError
from ledger.frame import Caller, Open, Resume

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class AnswerShape(ChunkShape, Protocol):
    """The words of whole answers, too."""

    whole: str
    """The `object` of one."""

    def choice(self, index: int, collected: Collected, reason: str | None) -> dict[str, Any]: ...


class RequestBody(Protocol):
    """What the document of a request says."""

    @property
    def stream(self) -> bool | None: ...

    @property
    def stream_options(self) -> StreamOptions | None: ...

    def opens(self, key: str | None, caller: Caller | None) -> list[Open]:
        """The streams that are asked for, one for each prompt; CallerError for what cannot be."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One route."""

    path: str
    body: type[Any]
    """Of pydantic's models; a `RequestBody`."""
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
            include_usage=_flag(said, "include_usage"),
            continuous_usage_stats=_flag(said, "continuous_usage_stats"),
        )
        return resume, _flag(said, "stream"), options


def _flag(said: dict[str, str], name: str) -> bool:
    value = _FLAGS.get(said.get(name, "false"))
    if value is None:
        raise CallerError(f"{said[name]!r} is neither true nor false", field=name)
    return value
