"""Launch plans of linears with float activations: their tiles, splits, groups and workspace.

Tile, splits, warps and stages decide the order of a sum. They depend on the weight's shape and
format and on the GPU's limits, but never on the number of rows, so that a row has the same bits in
any batch. Since the limits decide bits, they are part of a model's fingerprint. A GPU with less
shared memory gets fewer stages of the same tile.

Reasoning behind the tiles, for one H200 (132 SMs, 4.3 TB/s of copy bandwidth, 227 KiB of shared
memory per program, about 0.8 us of loaded latency; computed, to be measured):

- Little's law asks for 4.3 TB/s * 0.8 us = 3.4 MB in flight, 26 KB per SM. A tile of 128 x 64
  bf16 is 16 KB; with four stages a program has 32 to 48 KB in flight, and two programs share an
  SM: 64 to 96 KB, thrice what is needed, so that an SM with fewer programs than others still uses
  its share of the bandwidth, and a few last programs keep the memory busy. So the number of
  programs need not fill whole waves: a gate_up of 224 programs, where two programs on each of 132
  SMs would be 264, is one wave.
- A weight with fewer tiles than SMs is split along its inputs until `target_programs` run and
  `MIN_IN_FLIGHT` is met. More splits than needed would make the merge expensive: at 64 rows the
  partial sums are splits * 64 * out * 4 bytes, written and read through the L2 cache, and the last
  program of a tile reads splits * 32 KB alone. If the result is one program per SM, it gets six
  stages: 64 to 80 KB in flight.
- 128 weight rows per tile, not 64: for a batch of 64 rows, each input costs 128 bytes of bf16
  activations from L2 and 256 bytes of weights. So L2 has 1.5 times the traffic of the weight, and
  its bandwidth is about 5.5 TB/s. With 64 weight rows, or with fp32 activations, it would have
  twice the traffic of the weight; so batches above 16 rows should pass bf16.
- 64 inputs per tile: 128 bytes per weight row are one line, and the activations' stages
  (4 KB of fp32 at up to 16 rows, 8 KB of bf16 at 64) leave room for two programs per SM.
- Tensor cores: 64 x 16 x 16 products read 2 KB of weights from shared memory in 16 cycles; four
  groups of rows take 64 cycles, of the 110 in which an SM's share of the bandwidth delivers these
  weights.
- int8 unpacks in 1.75 instructions per weight (400 issue slots per warp and 16 KB tile, of 880
  cycles), so it is bound by memory. int4 unpacks in 1.4 instructions (350 issue slots per 8 KB
  tile, of 440 cycles), close to both limits.

A benchmark may try other tiles. The committed tiles are in this file, because it is part of the
fingerprint and changing tiles changes bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from tailrace.kernels.gpu_limits import HOPPER, GpuLimits

NORM_MAX_ROWS = 4
"""Maximum rows for which a linear computes the norms itself. Every program repeats them for all
rows, so for more rows a norm in a launch of its own is faster."""
NORM_MAX_INPUTS = 8192
"""Maximum inputs for which a linear computes the norm itself: a program holds a row in
registers."""
ROWS = 16
"""Rows of activations per group: the columns of one product on the tensor cores."""
MAX_GROUPS = 4
"""Maximum groups of ROWS rows that a program multiplies by a tile of the weight read once."""
BUSY_PERCENT = 91
"""Programs per 100 multiprocessors that keep a GPU busy. A weight is split into no more programs
than this number and MIN_IN_FLIGHT require."""
LONE_STAGES = 6
"""Stages of a program that has a multiprocessor to itself, if they fit its shared memory."""
LEAST_STAGES = 2
"""Minimum stages of a program: one tile is loaded while another is multiplied."""
MIN_IN_FLIGHT = 6 << 20
"""Minimum bytes in flight of all programs together on HOPPER: what the memory delivers in 1.4 us.
For other GPUs it is scaled by the number of multiprocessors."""
MIN_CHUNKS = 4
"""Minimum number of tiles along the inputs that each split gets."""
WIDEST_ACTIVATION_BYTES = 4
"""Bytes of an fp32 activation, the widest that a linear reads."""
SHARED_MARGIN = 8 << 10
"""Bytes of shared memory that a program needs besides its stages, for converted activations and for
exchanges between threads."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a weight that a program loads in one stage.

    block_out: weight rows; with a gate one half of them is gate and the other half is up.
    block_words: words per weight row. In a dense weight a word is one input, in a quantised one it
    holds 16 / bits inputs.
    """

    block_out: int
    block_words: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """Launch plan of a linear for any number of rows; `inputs` and `out` are the weight's sizes."""

    out: int
    inputs: int
    word_bytes: int
    bits: int
    """Bits of a quantised weight; 0 for a dense one."""
    gated: bool
    tile: Tile
    splits: int
    limits: GpuLimits = HOPPER

    @property
    def block_in(self) -> int:
        """Inputs per tile."""
        return self.tile.block_words * (16 // self.bits if self.bits else 1)

    @property
    def tiles(self) -> int:
        """Number of tiles along the weight's rows."""
        return _tiles(self.out, self.tile.block_out, self.gated)

    def groups(self, rows: int, x_bytes: int) -> int:
        """Return the groups of 16 rows per program: 1, 2 or 4, as many as shared memory holds."""
        groups = 1
        while groups < MAX_GROUPS and groups * ROWS < rows:
            if self.shared(2 * groups, x_bytes) > self.limits.shared_bytes:
                break
            groups *= 2
        return groups

    def shared(self, groups: int, x_bytes: int) -> int:
        """Return the maximum bytes of shared memory per program.

        x_bytes: size of an activation.
        """
        words = self.tile.block_out * self.tile.block_words * self.word_bytes
        activations = groups * ROWS * self.block_in * x_bytes
        return self.tile.num_stages * (words + activations) + SHARED_MARGIN

    def counters(self, rows: int) -> int:
        """Return the number of counters that a launch needs to count finished splits."""
        return -(-rows // ROWS) * self.tiles if self.splits > 1 else 0

    def partials(self, rows: int) -> int:
        """Return the maximum number of fp32 partial sums of a launch."""
        padded = (-(-rows // (ROWS * MAX_GROUPS))) * ROWS * MAX_GROUPS
        return padded * self.tiles * self.tile.block_out * self.splits if self.splits > 1 else 0

    def bytes_moved(self, rows: int, x_bytes: int = 4) -> int:
        """Return the minimum bytes that a launch moves: the weight, the activations, the result."""
        weight = self.out * self.inputs * (self.bits or 8 * self.word_bytes) // 8
        scales = {0: 0, 8: self.out * 4, 4: self.out * self.inputs // 128 * 4}[self.bits]
        width = self.out // 2 if self.gated else self.out
        return weight + scales + rows * (x_bytes * self.inputs + 4 * width)


def _tiles(out: int, block_out: int, gated: bool) -> int:
    return -(-out // block_out) if not gated else -(-(out // 2) // (block_out // 2))


def default_tile(word_bytes: int, bits: int) -> Tile:
    """Return the committed tile for a weight's format; `plan_linear` may change its stages."""
    if word_bytes == 4:
        return Tile(64, 32, num_warps=4, num_stages=4)
    return Tile(128, 32, 4, num_stages=6) if bits == 4 else Tile(128, 64, 4, num_stages=4)


def target_programs(limits: GpuLimits) -> int:
    """Return the number of programs that keep a GPU busy without splits: 120 on HOPPER."""
    return limits.multiprocessors * BUSY_PERCENT // 100


@lru_cache(maxsize=256)
def plan_linear(
    out: int,
    inputs: int,
    word_bytes: int,
    bits: int = 0,
    gated: bool = False,
    tile: Tile | None = None,
    limits: GpuLimits = HOPPER,
) -> LinearPlan:
    """Plan a linear of a weight [out, inputs] for a GPU with these limits.

    `tile` overrides the committed tile, for benchmarks. Raises ValueError if not even LEAST_STAGES
    of a tile fit the GPU's shared memory.
    """
    chosen = tile or default_tile(word_bytes, bits)
    plan = LinearPlan(out, inputs, word_bytes, bits, gated, chosen, splits=1, limits=limits)
    if tile is None:
        plan = _fitted(plan, chosen.num_stages)
    chunks = -(-inputs // plan.block_in)
    stage = chosen.block_out * chosen.block_words * word_bytes
    in_flight = MIN_IN_FLIGHT * limits.multiprocessors // HOPPER.multiprocessors
    wanted = max(target_programs(limits), in_flight // (stage * (plan.tile.num_stages - 1)))
    even = [s for s in range(1, chunks // MIN_CHUNKS + 1) if chunks % s == 0] or [1]
    enough = [s for s in even if s * plan.tiles >= wanted]
    splits = enough[0] if enough else even[-1]
    if tile is None and splits * plan.tiles <= limits.multiprocessors:
        plan = _fitted(plan, LONE_STAGES)
    return replace(plan, splits=splits)


def _fitted(plan: LinearPlan, stages: int) -> LinearPlan:
    """Return the plan with as many stages as fit the shared memory, at most `stages`."""
    for count in range(stages, LEAST_STAGES - 1, -1):
        fitted = replace(plan, tile=replace(plan.tile, num_stages=count))
        if fitted.shared(1, WIDEST_ACTIVATION_BYTES) <= plan.limits.shared_bytes:
            return fitted
    raise ValueError(
        f"limits: {plan.limits.shared_bytes} bytes of shared memory per program, expected at"
        f" least {fitted.shared(1, WIDEST_ACTIVATION_BYTES)} for {LEAST_STAGES} stages of"
        f" {plan.tile}"
    )


class LinearWorkspace:
    """Partial sums and counters of linears that run one after another on one stream.

    Each stream that runs linears needs a workspace of its own. The counters are 0 between launches,
    since the last program to finish a tile resets the tile's counter.
    """

    def __init__(self, plans: Iterable[LinearPlan], rows: int, device: torch.device) -> None:
        """Allocate a workspace that is large enough for each of `plans` with up to `rows` rows."""
        needs = [(plan.partials(rows), plan.counters(rows)) for plan in plans] or [(0, 0)]
        self.partials: Tensor = torch.empty(
            max(1, *(need[0] for need in needs)), dtype=torch.float32, device=device
        )
        self.counters: Tensor = torch.zeros(
            max(1, *(need[1] for need in needs)), dtype=torch.int32, device=device
        )

    def check(self, plan: LinearPlan, rows: int) -> None:
        """Raise ValueError if a launch needs more partial sums or counters than there are."""
        need = plan.partials(rows), plan.counters(rows)
        have = self.partials.numel(), self.counters.numel()
        if need[0] > have[0] or need[1] > have[1]:
            raise ValueError(f"workspace: {have} partial sums and counters, {need} needed")
