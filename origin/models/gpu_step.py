"""Steps from ids to ids, by graphs with the head and the sampler in them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.decoder import Decoder
from kernels.sampler.sampler_rows import SamplerWorkspace
from kernels.step_graph import DrawnStep
from origin.models.device import drawn_before
from origin.models.gpu_forward import STEP_ROWS, step_length
from origin.models.model import Draw, Piece


class GpuStep:
    """Steps of few sizes, each captured once it is needed; they work in the decoder's buffers."""

    def __init__(self, decoder: Decoder, workspace: SamplerWorkspace) -> None:
        self._decoder = decoder
        self._workspace = workspace
        self._most = min(STEP_ROWS[-1], decoder.step_rows)
        self._steps: dict[tuple[int, int], DrawnStep] = {}

    def takes(self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw]) -> bool:
        """Whether they are one row of each of so many sequences, all of them drawn from."""
        return (
            0 < len(draws) == len(pieces) <= self._most
            and all(draw.by_settings for draw in draws)
            and not any(piece.prefill or len(piece.ids) > 1 for piece in pieces)
            and [*rows] == [*range(len(pieces))]
            and min(piece.ids[0] for piece in pieces) >= drawn_before(self._most - 1)
        )

    def __call__(self, pieces: Sequence[Piece], draws: Sequence[Draw], drawn: Tensor) -> Tensor:
        """int32 [2, pieces or more] on the device, ids and faults, which another step overwrites.

        drawn: what ids below 0 stand for, on the device (`device.drawn_before`).
        """
        ids, positions = [piece.ids[0] for piece in pieces], [piece.start for piece in pieces]
        step = self._captured(len(pieces), max(positions) + 1)
        if min(ids) < 0:
            known = drawn[: self._most]
            step.before[: len(known)].copy_(known)
        step.inputs.fill(
            ids,
            positions,
            range(len(pieces)),
            [piece.pages for piece in pieces],
            [draw.sampling for draw in draws],
            [draw.position for draw in draws],
        )
        return step()

    def _captured(self, rows: int, length: int) -> DrawnStep:
        count = min(next(c for c in STEP_ROWS if c >= rows), self._decoder.step_rows)
        longest = min(step_length(length), self._decoder.max_length)
        if (count, longest) not in self._steps:
            self._steps[count, longest] = DrawnStep(self._decoder, self._workspace, count, longest)
        return self._steps[count, longest]
