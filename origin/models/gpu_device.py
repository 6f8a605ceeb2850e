"""A GPU that is asked for whole steps: their tokens are the next one's before the host has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from origin.models.device import ComputedStep, Launched, Results
from origin.models.gpu_model import GpuModel
from origin.models.model import Draw, Drawn, Piece


class GpuDevice:
    """Rows with masks, penalties or scores are drawn before `launch` returns; all others later.

    Where those others are all that there is to do, they go from ids to ids in one graph.
    """

    def __init__(self, model: GpuModel) -> None:
        self._model = model
        self._drawn = torch.zeros(1, dtype=torch.int32)
        """The ids of the launch before, on the device."""

    @torch.inference_mode()
    def launch(
        self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw]
    ) -> Launched:
        """See `origin.models.device.StepDevice`."""
        step = self._model.launch_step(pieces, rows, draws, self._drawn)
        if step is not None:
            self._drawn = step[0]
            return GpuLaunch.of(step, 0, len(draws))
        hidden = self._model.forward(pieces, self._drawn)
        fine = hidden.isfinite().all(-1)
        chosen = hidden if [*rows] == [*range(len(hidden))] else hidden[[*rows]]
        if not draws or not all(draw.by_settings for draw in draws):
            return ComputedStep(Results(fine.tolist(), self._model.draw(chosen, draws)))
        drawn = self._model.launch_draws(chosen, draws)
        self._drawn = drawn[0]
        return GpuLaunch.of(torch.cat((fine.int(), drawn.flatten())), len(hidden), len(draws))


@dataclass(frozen=True, slots=True)
class GpuLaunch:
    """Flags, ids and faults on their way to the host, in one copy.

    Without flags each row is drawn from, and fine if its draw is.
    """

    numbers: Tensor
    flags: int
    draws: int
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, numbers: Tensor, flags: int, draws: int) -> GpuLaunch:
        if numbers.device.type != "cuda":
            return cls(numbers.flatten().clone(), flags, draws, None)
        host = torch.empty(numbers.numel(), dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers.flatten(), non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return cls(host, flags, draws, arrived)

    def read(self) -> Results:
        if self.arrived is not None:
            self.arrived.synchronize()
        flags, drawn = self.numbers[: self.flags], self.numbers[self.flags :]
        ids, faults = drawn.view(2, -1)[:, : self.draws].tolist()
        fine = flags.bool().tolist() if self.flags else [not fault for fault in faults]
        return Results(fine, tokens_of(ids, faults))


def tokens_of(ids: Sequence[int], faults: Sequence[int]) -> list[Drawn]:
    """No row has a mask, so that what is at fault is no number."""
    return [Drawn(-1 if fault else token) for token, fault in zip(ids, faults, strict=True)]
