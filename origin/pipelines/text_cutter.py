"""Cuts text into larger pieces at the ends of words, sentences and so on. Sans-I/O.

The pieces depend on the text alone, not on the pieces in which it comes: a piece is complete when
the first character of the next one is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tailrace.ledger.text_units import ENDS, Unit


class Cutter(Protocol):
    """The interface of objects that take a text in pieces, and return it in other pieces."""

    held: str
    """Text that is held back."""

    def feed(self, text: str, last: bool = False) -> list[str]:
        """Add text to the held text, and return the pieces that are now complete.

        `last` is True if no text follows, so that all held text is returned.
        """


class TextCutter:
    """Gives a text in units, each of at most `most_chars` characters.

    A longer unit, or any text if `unit` is None, is cut behind the last white space that fits, or
    in the middle of a word that does not fit.
    """

    def __init__(self, unit: Unit | None, most_chars: int) -> None:
        """Begin at the beginning of a text."""
        self._end = None if unit is None else ENDS[unit]
        self._most_chars = most_chars
        self.held = ""

    def feed(self, text: str, last: bool = False) -> list[str]:
        """Add text to the held text, and return the pieces that are now complete.

        `last` is True if no text follows, so that all held text is returned.
        """
        self.held += text
        pieces = list(self._complete(last))
        self.held = self.held[sum(map(len, pieces)) :]
        return pieces

    def _complete(self, last: bool) -> Iterator[str]:
        at = 0
        while (end := self._end_of(at)) is not None:
            yield self.held[at:end]
            at = end
        if last and at < len(self.held):
            yield self.held[at:]

    def _end_of(self, at: int) -> int | None:
        """Return the end of the piece that begins at a position; None if it is not complete."""
        beyond = at + self._most_chars + 1
        if self._end is not None and (found := self._end.search(self.held, at, beyond)) is not None:
            return found.end()
        if len(self.held) < beyond:
            return None
        piece = self.held[at : beyond - 1]
        return at + (_end_of_last_space(piece) or len(piece))


def _end_of_last_space(text: str) -> int:
    """Return the position behind the last white space of a text; 0 if it has none."""
    return next((at for at in range(len(text), 0, -1) if text[at - 1].isspace()), 0)
