"""An example filter: ends a stream before a phrase, of which no reader sees even the beginning."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.origin.filter import Verdict

PHRASES = ("secret hill", "狐🐻")
MESSAGE = "the rest is withheld"


class BlockedPhrases:
    """Holds back what may be the beginning of a phrase, whatever the tokens are."""

    def __init__(self, phrases: Sequence[str]) -> None:
        self._phrases = phrases
        self._undecided = ""

    def check(self, text: str, last: bool) -> Verdict:
        seen = self._undecided + text
        for end in range(1, len(seen) + 1):
            for phrase in self._phrases:
                if seen[:end].endswith(phrase):
                    return Verdict(hold=len(seen) - end + len(phrase), end=MESSAGE)
        hold = 0 if last else self._suspect_length(seen)
        self._undecided = seen[len(seen) - hold :]
        return Verdict(hold)

    def _suspect_length(self, seen: str) -> int:
        return max(
            length
            for phrase in self._phrases
            for length in range(len(phrase))
            if seen.endswith(phrase[:length])
        )


def make() -> BlockedPhrases:
    return BlockedPhrases(PHRASES)
