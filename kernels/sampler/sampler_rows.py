"""Sampler settings of every row of a batch, and the working memory of the sampler's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tailrace.kernels.checks import check_same_device, check_tensor
from tailrace.kernels.one_copy import one_copy
from tailrace.kernels.sampler.sampler import MASK_BITS, Sampling
from tailrace.kernels.sampler.sampler_plan import SCORE_BINS, SMALLEST_BLOCK


@dataclass(frozen=True, slots=True)
class SamplerRows:
    """The settings of `sampler.Sampling` for each row, on the device of the logits.

    Settings on the device cannot be checked without waiting for it. So settings that `Sampling`
    would refuse are no error here, and cause no access out of bounds: a temperature that is not
    above 0 is greedy; top_k below 1, top_p of 1 or more and min_p of 0 or less are off; top_p of 0
    or less keeps the best id; min_p above 1 counts as 1; NaN is off.
    """

    temperature: Tensor
    """fp32 [rows], see `Sampling.temperature`."""
    top_k: Tensor
    """int32 [rows], see `Sampling.top_k`."""
    top_p: Tensor
    """fp32 [rows], see `Sampling.top_p`."""
    min_p: Tensor
    """fp32 [rows], see `Sampling.min_p`."""
    seed: Tensor
    """Seeds, which are u64, as int64 [rows] with the same bits."""
    position: Tensor
    """int32 [rows]: index of the token among those generated, from 0."""
    mask: Tensor | None = None
    """int32 [rows, ceil(V / 32)]: bit i of word w allows id 32 w + i."""
    counts: Tensor | None = None
    """int32 [rows, V], how often each id was generated so far; given with `penalties` only."""
    penalties: Tensor | None = None
    """fp32 [rows, 3]: repetition, presence and frequency penalty; 1, 0, 0 change nothing."""

    @classmethod
    def of(
        cls,
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        device: torch.device,
        mask: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> SamplerRows:
        """Gather the settings of requests, one row each.

        Raises ValueError if penalties lack counts.
        """
        if counts is None and any(sampling.penalises for sampling in samplings):
            raise ValueError("counts: missing, but a sampling has penalties, which need them")
        *settings, penalties = one_copy(
            [
                *settings_of(samplings, positions),
                torch.tensor(
                    [(s.repetition, s.presence, s.frequency) for s in samplings],
                    dtype=torch.float32,
                ).view(-1, 3),
            ],
            device,
        )
        penalised = None if counts is None else penalties
        return replace(cls(*settings), mask=mask, counts=counts, penalties=penalised)

    def check(self, rows: int, vocab: int) -> None:
        """Raise TypeError or ValueError that names a setting that does not fit the logits."""
        for name in ("temperature", "top_p", "min_p"):
            check_tensor(name, getattr(self, name), torch.float32, rows)
        for name in ("top_k", "position"):
            check_tensor(name, getattr(self, name), torch.int32, rows)
        check_tensor("seed", self.seed, torch.int64, rows)
        if self.mask is not None:
            check_tensor("mask", self.mask, torch.int32, rows, -(-vocab // MASK_BITS))
        if (self.counts is None) != (self.penalties is None):
            raise ValueError("counts and penalties: expected both or neither")
        if self.counts is not None:
            check_tensor("counts", self.counts, torch.int32, rows, vocab)
        if self.penalties is not None:
            check_tensor("penalties", self.penalties, torch.float32, rows, 3)
        check_same_device(**{field.name: getattr(self, field.name) for field in fields(self)})


def settings_of(samplings: Sequence[Sampling], positions: Sequence[int]) -> list[Tensor]:
    """Return temperature, top_k, top_p, min_p, seed and position as tensors on the host."""
    # Any top_k above the size of the vocabulary is off, so a top_k that exceeds int32 may be cut to
    # the maximum of int32.
    return [
        torch.tensor([s.temperature for s in samplings], dtype=torch.float32),
        torch.tensor([min(s.top_k, 2**31 - 1) for s in samplings], dtype=torch.int32),
        torch.tensor([s.top_p for s in samplings], dtype=torch.float32),
        torch.tensor([s.min_p for s in samplings], dtype=torch.float32),
        torch.tensor([s.seed - (s.seed >> 63 << 64) for s in samplings], dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int32),
    ]


class SamplerWorkspace:
    """Working memory that the kernels of one call share; it holds nothing between calls.

    It is allocated once for `max_rows` rows of `vocab` logits, about 8 * vocab bytes a row, and
    need not be cleared.
    """

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        def room(dtype: torch.dtype, *columns: int) -> Tensor:
            return torch.empty((max_rows, *columns), dtype=dtype, device=device)

        blocks = -(-vocab // SMALLEST_BLOCK)
        self.max_rows = max_rows
        self.vocab = vocab
        self.highs = room(torch.float32, blocks)
        """Best logit of each block; infinity for a block with a NaN or infinite logit."""
        self.high_ids = room(torch.int32, blocks)
        self.winners = room(torch.float32, blocks)
        """Best noisy score in each block, of ids that are not candidates."""
        self.winner_ids = room(torch.int32, blocks)
        self.bin_counts = room(torch.int32, SCORE_BINS)
        self.bin_weights = room(torch.int64, SCORE_BINS)
        self.targets = room(torch.int64, 3)
        """The number and the weight of candidates to keep, for top-k and top-p, and the last bin
        that has candidates."""
        self.sizes = room(torch.int32)
        """Number of candidates of each row."""
        self.keys = room(torch.int32, vocab)
        self.ids = room(torch.int32, vocab)
