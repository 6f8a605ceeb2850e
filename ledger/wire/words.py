"""The enums of the client schema, with their words for JSON and headers."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Self

from tailrace.ledger.errors import CallerError


class Word(IntEnum):
    """An enum whose members are written as lower-case words, such as `origin-lost`."""

    def __init__(self, _: int) -> None:
        self.word = self._name_.lower().replace("_", "-")

    @classmethod
    def from_word(cls, word: str) -> Self:
        """Return the member that is written as `word`.

        Raises:
            CallerError: No member is written in that way.
        """
        member = cls.__members__.get(word.upper().replace("-", "_"))
        if member is not None and member.word == word:
            return member
        raise CallerError(
            f"unknown {cls.__name__} {word!r}",
            field=re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower(),
            hint="one of " + ", ".join(member.word for member in cls),
        )


class Durability(Word):
    """The failures that a frame must be able to survive before readers get the frame.

    RELAXED: no failure; the frame is written within 10 ms. PROCESS: a kill of every process.
    POWER: a power cut.
    """

    RELAXED = 0
    PROCESS = 1
    POWER = 2


class Priority(Word):
    """Priority class of a stream."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2


class Compression(Word):
    """Format of compressed payloads."""

    ZSTD = 0


class FinishReason(Word):
    """The reason why a stream ended."""

    STOP = 0
    LENGTH = 1
    CANCELLED = 2
    FILTERED = 3
    FAILED = 4
    ORIGIN_LOST = 5
    TOOL_CALLS = 6


class StreamState(Word):
    """State of a stream."""

    RUNNING = 0
    ENDED = 1


class Overflow(Word):
    """Treatment of a conversation that is longer than the context."""

    REFUSE = 0
    DROP_OLDEST = 1


class Unread(Word):
    """Treatment of a stream that no client reads."""

    RUN = 0
    PAUSE = 1
    CANCEL = 2


class Cache(Word):
    """Permission to answer a request with tokens from the ledger, without generating them.

    EXACT permits the tokens of a finished stream of an identical request.
    """

    NONE = 0
    EXACT = 1


class FormatKind(Word):
    """Language of an output format."""

    JSON_SCHEMA = 0
    REGEX = 1


class ToolChoice(Word):
    """Permission or duty of a model to call tools."""

    AUTO = 0
    NONE = 1
    REQUIRED = 2
