"""The interface of speech recognisers, and the stability of what they hear."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from tailrace.origin.pipelines.speech.items import Word

STABILITY_WINDOW = 4
"""Number of earlier interim results that a new one is compared with."""


class Recogniser(Protocol):
    """Recognises the utterances of one stream, one after the other.

    What it hears must depend on the samples alone, and not on other streams.
    """

    def begin(self) -> None:
        """Begin an utterance."""

    def feed(self, pcm: bytes) -> tuple[Word, ...]:
        """Take samples, and return the words of the utterance so far.

        Their positions count from the begin of the utterance.
        """

    def end(self) -> tuple[Word, ...]:
        """End the utterance, and return its words."""

    def close(self) -> None:
        """Release the recogniser, also within an utterance."""


class Stability:
    """Estimates how likely the words of an interim result will not change any more."""

    def __init__(self) -> None:
        """Begin without results."""
        self._earlier: deque[tuple[str, ...]] = deque(maxlen=STABILITY_WINDOW)

    def of(self, words: tuple[str, ...]) -> float:
        """Return the share of words that the last results had in the same place, and note these."""
        same = sum(_common(words, earlier) for earlier in self._earlier)
        self._earlier.append(words)
        return round(same / (STABILITY_WINDOW * len(words)), 2) if words else 0.0


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Return the number of words that two results have in common at their begin."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
