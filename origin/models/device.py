"""A model that is asked for whole steps, whose results may be read one step late.

A device takes a batch and answers at once; the next batch may be launched before the results of
this one are read. An id below 0 in it stands for a token that the host does not know yet:
`drawn_before(n)` for what the n-th draw of the launch before gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from origin.models.model import Draw, Drawn, Model, Piece


def drawn_before(draw: int) -> int:
    """The id that stands for the token of this draw; it is its own inverse."""
    return -1 - draw


class Results(NamedTuple):
    """Of one launch, on the host."""

    fine: Sequence[bool]
    """Of each row, in the order of the pieces: whether it is numbers."""
    drawn: Sequence[Drawn]


class Launched(Protocol):
    def read(self) -> Results:
        """Wait for the device; once, and in the order of launches."""


class StepDevice(Protocol):
    def launch(
        self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw]
    ) -> Launched:
        """Push pieces, and draw from these of their rows; see `Model.forward` and `Model.draw`.

        Raises what those do.
        """


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """What is there already."""

    results: Results

    def read(self) -> Results:
        return self.results


class AtOnce:
    """A device whose results are there when `launch` returns."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._drawn: Sequence[Drawn] = ()

    def launch(
        self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw]
    ) -> ComputedStep:
        known = [
            piece if piece.ids[0] >= 0 else replace(piece, ids=self._known(piece.ids))
            for piece in pieces
        ]
        hidden = self._model.forward(known)
        fine = hidden.isfinite().all(-1).tolist()
        self._drawn = self._model.draw(hidden[list(rows)], draws) if draws else ()
        return ComputedStep(Results(fine, self._drawn))

    def _known(self, ids: Sequence[int]) -> list[int]:
        # What was no number is 0 to the next launch, whose results nobody looks at.
        return [max(self._drawn[drawn_before(token)].token, 0) for token in ids]
