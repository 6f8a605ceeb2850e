"""Regular expressions in the options of stages."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

MAX_PATTERN_CHARS = 500
"""Maximum number of characters of a regular expression."""


def check_pattern(pattern: str) -> str:
    """Return a regular expression that is valid, and does not match an empty text.

    Raises:
        ValueError: The pattern is too long, is malformed or matches an empty text.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ValueError(f"{pattern!r:.40} has more than {MAX_PATTERN_CHARS} characters")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r:.40} is not a regular expression: {error}") from error
    if compiled.match("") is not None:
        raise ValueError(f"{pattern!r:.40} matches an empty text")
    return pattern


Pattern = Annotated[str, AfterValidator(check_pattern)]
"""The type of a stage option that is a regular expression."""


def matches(pattern: str, text: str) -> bool:
    """Return True if a part of a text matches a pattern, ignoring case."""
    return re.search(pattern, text, re.IGNORECASE) is not None
