"""A device that computes a step only when its results are read, in the order of launches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from tailrace.origin.models.model import AtOnce, Draw, Model, Piece, Results


class LateDevice:
    """`ahead` counts launches before what was launched before them was read."""

    def __init__(self, model: Model) -> None:
        self.ahead = 0
        self._device = AtOnce(model)
        self._waiting: deque[LateLaunch] = deque()

    def launch(
        self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw]
    ) -> LateLaunch:
        self.ahead += bool(self._waiting)
        # Copies, because the host changes its lists while the device works.
        sent = [replace(piece, ids=[*piece.ids], pages=[*piece.pages]) for piece in pieces]
        launched = LateLaunch(self, sent, [*rows], [*draws])
        self._waiting.append(launched)
        return launched

    def compute(self, launched: LateLaunch) -> Results:
        assert self._waiting.popleft() is launched, "results are read in the order of launches"
        return self._device.launch(launched.pieces, launched.rows, launched.draws)


class LateLaunch:
    """A launch whose results are computed when they are read."""

    def __init__(
        self, device: LateDevice, pieces: list[Piece], rows: list[int], draws: list[Draw]
    ) -> None:
        self.first_use = False
        self.pieces, self.rows, self.draws = pieces, rows, draws
        self._device = device

    def read(self) -> Results:
        return self._device.compute(self).read()
