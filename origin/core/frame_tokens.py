"""The number of tokens in each frame of a stream, run-length encoded."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class FrameTokens:
    """The tokens of each frame of a stream, added in the order of the frames.

    Nearly all frames of a stream have the same number of tokens, so only changes take memory.
    `latest` is the number of tokens in the latest frame, None before the first one.
    """

    latest: int | None = None
    _starts: array[int] = field(default_factory=lambda: array("Q"))
    _counts: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, index: int, tokens: int) -> None:
        """Note that the frame at `index`, the next one, has this number of tokens."""
        if self.latest != tokens:
            self.latest = tokens
            self._starts.append(index)
            self._counts.append(tokens)

    def before(self, index: int) -> int:
        """Return the number of tokens in the frames before `index`.

        `index` is that of a frame that was added, or of the next one.
        """
        ends = [*self._starts, index]
        return sum(
            count * max(0, min(end, index) - start)
            for count, (start, end) in zip(self._counts, pairwise(ends), strict=True)
        )


def delivered_tokens(reach: int, end: int, output: int, tokens: FrameTokens | None) -> int:
    """Return how many of a stream's `output` tokens are in the frames before index `reach`.

    `end` is the index of the StreamEnd. A reader that has all frames before the StreamEnd has all
    tokens. For a text producer, whose frames have no token ids, `tokens` is None, and each frame
    counts equally.
    """
    if reach >= end:
        return output
    if tokens is None:
        return output * reach // end
    return min(output, tokens.before(reach))
