"""Finds phrases and patterns in text that comes in pieces. Sans-I/O.

The result depends on the text alone, not on its pieces: a position is decided once no further text
can change the decision. Text from the first undecided position on is held back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

CONTEXT_CHARS = 32
"""Number of characters before the held text that patterns can look back at."""
_END = ""  # key in the trie at the end of a phrase; other keys are characters, never empty
_Trie = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text that further text cannot change; `blocked` is True if it is a match."""

    text: str
    blocked: bool


class Phrases:
    """Phrases and patterns to find; many `PhraseMatcher` may share them.

    A phrase matches in lower and upper case, but only whole words: a match does not begin or end
    inside a word. Any white space matches any other. A pattern is a regular expression of Python's
    `re`, and a match of it has at most `hold_chars` characters.
    """

    def __init__(
        self, words: Iterable[str], patterns: Iterable[str] = (), hold_chars: int = 0
    ) -> None:
        """Compile phrases and patterns; raises `re.error` for a pattern that is not valid."""
        self.trie: _Trie = {}
        for word in words:
            node = self.trie
            for char in _normal(word):
                node = node.setdefault(char, {})
            node[_END] = True
        self.patterns = [re.compile(pattern, re.IGNORECASE) for pattern in patterns]
        self.hold_chars = hold_chars if self.patterns else 0


class PhraseMatcher:
    """Finds the matches of `Phrases` in one text."""

    def __init__(self, phrases: Phrases) -> None:
        """Begin at the beginning of a text."""
        self._phrases = phrases
        self._before = ""  # the last characters before `held`
        self.held = ""
        """Text that is not decided yet."""

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        """Add `text` to the held text, and return the pieces that no further text can change.

        `last` is True if no text follows; then no text is held back.
        """
        self.held += text
        pieces = list(_joined(self._decided(last)))
        decided = "".join(piece.text for piece in pieces)
        self._before = (self._before + decided)[-CONTEXT_CHARS:]
        self.held = self.held[len(decided) :]
        return pieces

    def _decided(self, last: bool) -> Iterator[Piece]:
        text = self._before + self.held
        normal, at, begin = _normal(text), len(self._before), len(self._before)
        while at < len(text):
            end = self._match(text, normal, at, last)
            if end is None:
                break
            if end > at:
                yield Piece(text[begin:at], False)
                yield Piece(text[at:end], True)
                at = begin = end
            else:
                at += 1
        yield Piece(text[begin:at], False)

    def _match(self, text: str, normal: str, at: int, last: bool) -> int | None:
        """Return the end of the match at a position, which is `at` without a match.

        Returns None if that is not decided yet.
        """
        phrases = self._phrases
        if not last and len(text) - at < phrases.hold_chars:
            return None
        end = at
        for pattern in phrases.patterns:
            if (found := pattern.match(text, at, at + phrases.hold_chars)) is not None:
                end = max(end, found.end())
        if at and _is_inside_word(normal, at):
            return end
        node, here = phrases.trie, at
        while here < len(normal):
            node = node.get(normal[here], {})
            here += 1
            if not node:
                return end
            if here == len(normal) and not last:
                return None
            if _END in node and not _is_inside_word(normal, here):
                end = max(end, here)
        return end


def _is_inside_word(text: str, at: int) -> bool:
    """Return True if the characters before and after a position belong to the same word."""
    return at < len(text) and text[at - 1].isalnum() and text[at].isalnum()


def _normal(text: str) -> str:
    """Return text of the same length in lower case, with a space for any white space."""
    lower = text.lower()
    if len(lower) != len(text):  # a few letters have two characters in lower case
        lower = "".join(each if len(each.lower()) > 1 else each.lower() for each in text)
    return "".join([" " if each.isspace() else each for each in lower])


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces whose text is not empty."""
    return (piece for piece in pieces if piece.text)
