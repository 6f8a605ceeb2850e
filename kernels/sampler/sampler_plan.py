"""Sizes of blocks, bins and passes in the sampler's launches; none of them changes a result."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.kernels.launch import next_power_of_2

SCORE_BINS = 2048
"""Number of histogram bins of a row. Scores of -SCORE_BINS / BINS_PER_UNIT = -32 and below are in
no bin."""
BINS_PER_UNIT = 64
SMALLEST_BLOCK = 1024
LARGEST_BLOCK = 4096
MAX_SMALL_BLOCKS = 2048
"""Maximum number of programs with blocks of SMALLEST_BLOCK ids. If a batch would need more, blocks
have LARGEST_BLOCK ids, so that fewer programs are started."""
CANDIDATE_BLOCK = 1024
EDGE_WAYS = 8
"""Number of pivots that one pass of a radix selection compares; 8 pivots give 3 bits of the
result."""
SETTLE_WARPS = 2


@dataclass(frozen=True, slots=True)
class SamplerPlan:
    """Sizes of the launches for one batch; they change no result."""

    block: int
    """Number of vocabulary ids per program."""
    blocks: int
    warps: int

    @classmethod
    def of(cls, rows: int, vocab: int) -> SamplerPlan:
        """Plan small blocks for small batches, so that even one row keeps the whole GPU busy."""
        small = rows * -(-vocab // SMALLEST_BLOCK) <= MAX_SMALL_BLOCKS
        block = SMALLEST_BLOCK if small else LARGEST_BLOCK
        return cls(block, -(-vocab // block), 4 if small else 8)

    @property
    def scan(self) -> dict[str, int]:
        """Constants of the kernel `scan`. CLEARED: bins that each of its programs clears."""
        return {"BLOCK": self.block, "CLEARED": next_power_of_2(-(-SCORE_BINS // self.blocks))}

    @property
    def spread(self) -> dict[str, int]:
        """Constants of the kernels `spread` and `split`."""
        return {"BLOCK": self.block, "PARTS": next_power_of_2(self.blocks)}

    @property
    def settle(self) -> dict[str, int]:
        """Constants of the kernel `settle`."""
        return {
            "PARTS": next_power_of_2(self.blocks), "BLOCK": CANDIDATE_BLOCK, "WAYS": EDGE_WAYS
        }  # fmt: skip
