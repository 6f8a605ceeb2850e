"""Tokens from logits on the GPU: one batched call of the sampler for all rows of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.checks import check_tensor
from kernels.sampler.sampler import MASK_BITS
from kernels.sampler.sampler_batch import NO_TOKEN
from kernels.sampler.sampler_rows import SamplerRows, SamplerWorkspace
from kernels.sampler.sampler_triton import FAULT_EMPTY_MASK, sample_rows
from origin.models.logprobs import scores_of
from origin.models.model import Draw, Drawn

EVERY_ID = -1
"""A word of a mask that allows all of its ids."""


class GpuDraw:
    """Up to `rows` rows of `vocab` logits at a time."""

    def __init__(
        self, rows: int, vocab: int, device: torch.device, *, dependent: bool = False
    ) -> None:
        self._dependent = dependent
        self._vocab = vocab
        self._device = device
        self.workspace = SamplerWorkspace(rows, vocab, device)
        self._drawn = torch.zeros(2, rows, dtype=torch.int32, device=device)
        """Ids, and faults."""

    def __call__(self, logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """One token for each row of fp32 [len(draws), vocab]; see `model.Model.draw`."""
        ids, faults = self.launch(logits, self.rows(draws)).tolist()
        if FAULT_EMPTY_MASK in faults:
            raise ValueError("mask: it allows no token")
        tokens = [NO_TOKEN if fault else id for id, fault in zip(ids, faults, strict=True)]
        scores = scores_of(logits, draws, tokens)
        return [Drawn(*pair) for pair in zip(tokens, scores, strict=True)]

    def rows(self, draws: Sequence[Draw]) -> SamplerRows:
        """Their settings, on the device."""
        return SamplerRows.of(
            [draw.sampling for draw in draws],
            [draw.position for draw in draws],
            self._device,
            self._masks(draws),
            self._counts(draws),
        )

    def launch(self, logits: Tensor, rows: SamplerRows) -> Tensor:
        """int32 [2, rows]: ids and faults, of a buffer that the next call overwrites."""
        drawn = self._drawn[:, : len(logits)]
        sample_rows(logits, rows, drawn[0], drawn[1], self.workspace, dependent=self._dependent)
        return drawn

    def _masks(self, draws: Sequence[Draw]) -> Tensor | None:
        """int32 [rows, words]; None if no row has one."""
        if all(draw.mask is None for draw in draws):
            return None
        words = -(-self._vocab // MASK_BITS)
        masks = torch.full((len(draws), words), EVERY_ID, dtype=torch.int32)
        for row, draw in enumerate(draws):
            if draw.mask is not None:
                check_tensor("mask", draw.mask, torch.int32, words)
                masks[row] = draw.mask
        return masks.to(self._device)

    def _counts(self, draws: Sequence[Draw]) -> Tensor | None:
        """int32 [rows, vocab]; only the rows that need theirs are moved. None if none does."""
        if not any(draw.sampling.penalises for draw in draws):
            return None
        size = len(draws), self._vocab
        counts = torch.zeros(size, dtype=torch.int32, device=self._device)
        for row, draw in enumerate(draws):
            if draw.sampling.penalises:
                if draw.counts is None:
                    raise ValueError("counts: missing, but the sampling penalises")
                check_tensor("counts", draw.counts, torch.int32, self._vocab)
                counts[row] = draw.counts.to(self._device)
        return counts
