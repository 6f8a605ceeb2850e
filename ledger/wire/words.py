"""The enums of the client schema, which people read and write as words."""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Self

from tailrace.ledger.errors import CallerError


class Word(IntEnum):
    """An enum that people read and write as a lower-case word, `origin-lost`."""

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", "-")

    @classmethod
    def from_word(cls, word: str) -> Self:
        """The member that `word` names; CallerError for any other word."""
        for member in cls:
            if member.word == word:
                return member
        raise CallerError(
            f"unknown {cls.__name__} {word!r}",
            field=re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower(),
            hint="one of " + ", ".join(member.word for member in cls),
        )


class Durability(Word):
    RELAXED = 0
    PROCESS = 1
    POWER = 2


class Priority(Word):
    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2


class FinishReason(Word):
    STOP = 0
    LENGTH = 1
    CANCELLED = 2
    FILTERED = 3
    FAILED = 4
    ORIGIN_LOST = 5
    TOOL_CALLS = 6


class StreamState(Word):
    RUNNING = 0
    ENDED = 1


class Overflow(Word):
    """What happens to a conversation that is longer than the context."""

    REFUSE = 0
    DROP_OLDEST = 1


class Unread(Word):
    """What happens to a stream that nobody reads."""

    RUN = 0
    PAUSE = 1
    CANCEL = 2


class FormatKind(Word):
    JSON_SCHEMA = 0
    REGEX = 1


class ToolChoice(Word):
    AUTO = 0
    NONE = 1
    REQUIRED = 2
