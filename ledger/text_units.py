"""Words, phrases, sentences and paragraphs: where each unit of a text ends. Sans-I/O.

A unit includes the white space after it. So its end is known when the first character of the next
unit is known. The ends depend on the text alone, not on the pieces in which it comes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

_STOPS, _PAUSES = ".!?\u2026", ",;:\u2013\u2014"
_CJK_STOPS, _CJK_PAUSES = "\u3002\uff01\uff1f", "\uff0c\u3001\uff1b\uff1a"
_CLOSING_MARKS = "\"'\u201d\u2019\u00bb)]}\u300d\u300f"
"""Quotation marks and brackets that may follow the punctuation at the end of a sentence."""
_CLOSING = re.escape(_CLOSING_MARKS)
_PARAGRAPH_END = r"\S[^\S\n]*\n[^\S\n]*\n\s*(?=\S)"


def _phrase_end(marks: str, cjk_marks: str) -> re.Pattern[str]:
    """Return a pattern for a phrase's end: white space must follow `marks`, but not `cjk_marks`."""
    begins_next = rf"[^\s{_CJK_STOPS}{_CJK_PAUSES}{_CLOSING}]"
    return re.compile(
        rf"[{marks}][{_CLOSING}]*\s+(?=\S)"
        rf"|[{cjk_marks}][{_CLOSING}]*\s*(?={begins_next})"
        rf"|{_PARAGRAPH_END}"
    )


class Unit(StrEnum):
    """The size of the pieces into which text is cut."""

    WORD = "word"
    PHRASE = "phrase"
    SENTENCE = "sentence"
    PARAGRAPH = "paragraph"


ENDS: Mapping[Unit, re.Pattern[str]] = {
    Unit.WORD: re.compile(r"\S\s+(?=\S)"),
    Unit.PHRASE: _phrase_end(_STOPS + _PAUSES, _CJK_STOPS + _CJK_PAUSES),
    Unit.SENTENCE: _phrase_end(_STOPS, _CJK_STOPS),
    Unit.PARAGRAPH: re.compile(_PARAGRAPH_END),
}
"""Patterns that match the end of a unit: its last characters, and the white space after them."""


def unsettled_from(text: str) -> int:
    """Return the position from which more text may complete the end of a unit.

    `text` has no end of a unit. An end that later text completes begins at the last character that
    is neither white space nor a closing mark, or behind it. So a search in the longer text can
    begin there.
    """
    return max(0, len(text.rstrip().rstrip(_CLOSING_MARKS)) - 1)
