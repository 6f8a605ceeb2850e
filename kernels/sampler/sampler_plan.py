"""Sizes of the sampler's launches; none of them changes a result."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.kernels.launch import next_power_of_2

SCORE_BINS = 2048
"""Number of histogram bins of a row; scores up to -SCORE_BINS / BINS_PER_UNIT are in none."""
BINS_PER_UNIT = 64
SMALLEST_BLOCK = 1024
LARGEST_BLOCK = 4096
MAX_SMALL_BLOCKS = 2048
"""Maximum number of small blocks in a batch; beyond it blocks are large, to start fewer programs.
"""
CANDIDATE_BLOCK = 1024
EDGE_WAYS = 8
"""Number of pivots of one pass of a selection, so that each pass finds 3 bits."""
SETTLE_WARPS = 2


@dataclass(frozen=True, slots=True)
class SamplerPlan:
    """Sizes that the launches of one call share; they change no result."""

    block: int
    """Number of vocabulary ids per program."""
    blocks: int
    warps: int

    @classmethod
    def of(cls, rows: int, vocab: int) -> SamplerPlan:
        """Plan small blocks for small batches, so that one row occupies the whole GPU."""
        small = rows * -(-vocab // SMALLEST_BLOCK) <= MAX_SMALL_BLOCKS
        block = SMALLEST_BLOCK if small else LARGEST_BLOCK
        return cls(block, -(-vocab // block), 4 if small else 8)

    @property
    def scan(self) -> dict[str, int]:
        """Constants of `scan`, whose programs together clear all bins."""
        return {"BLOCK": self.block, "CLEARED": next_power_of_2(-(-SCORE_BINS // self.blocks))}

    @property
    def spread(self) -> dict[str, int]:
        """Constants of `spread` and `split`."""
        return {"BLOCK": self.block, "PARTS": next_power_of_2(self.blocks)}

    @property
    def settle(self) -> dict[str, int]:
        """Constants of `settle`."""
        return {
            "PARTS": next_power_of_2(self.blocks), "BLOCK": CANDIDATE_BLOCK, "WAYS": EDGE_WAYS
        }  # fmt: skip
