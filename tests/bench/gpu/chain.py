"""The one-row chain of dependent launches, run many times beside the same chain of ordinary ones.

A race between launches need not show in a few steps. So the same graph runs thousands of times, and
a checksum of its logits is compared each time with that of ordinary launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tailrace.kernels.block_tables import BlockTables
from tailrace.kernels.sampler.sampler_rows import SamplerWorkspace
from tailrace.kernels.shapes import DecoderShape
from tailrace.kernels.step_graph import DrawnStep, capture_for
from tests.bench.gpu.place import Place
from tests.bench.gpu.supervisor import found
from tests.kernels.random_decoder import Recipe, random_decoder

STEPS = 20_000
DENSE_SHARE = 20
"""A dense model of 8 billion weights does this many times fewer steps, each ten times as long."""
PRIME = 1_000_003
"""Factor of a checksum, so that values that change places change it."""


def chain(place: Place, steps: int = STEPS) -> None:
    """Tell how many steps of one row differ between dependent and ordinary launches."""
    steps = 2 if place.few else steps
    kinds = ((place.bitnet, True, steps), (place.llama, False, max(2, steps // DENSE_SHARE)))
    for shape, int8_head, count in kinds:
        ordinary, dependent = (
            _checksums(place, shape, count, int8_head, dependent) for dependent in (False, True)
        )
        differ = int((ordinary != dependent).sum())
        head = " int8 head" if int8_head else ""
        name = f"{shape.name}: {count} dependent steps of one row{head} = ordinary ones"
        print(f"  {name:80} {'equal' if differ == 0 else f'{differ} DIFFER'}", flush=True)
        found("parity", name, differ)
        if differ:
            found("parity_failed", name, differ)


def _checksums(
    place: Place, shape: DecoderShape, steps: int, int8_head: bool, dependent: bool
) -> Tensor:
    """Return a checksum of the logits of each of `steps` steps, int64 [steps]."""
    device = place.device
    length = place.length
    recipe = Recipe(shape, device, 1, 1, length, int8_head=int8_head, dependent=dependent, seed=12)
    decoder = random_decoder(recipe)
    workspace = SamplerWorkspace(1, shape.vocab, device)
    kept = BlockTables(1, recipe.pages, device)
    before = torch.zeros(1, dtype=torch.int32, device=device)
    step = DrawnStep(decoder, workspace, kept, before, 1, length, capture_for(device))
    pages = recipe.tables().tolist()
    factors = (torch.arange(shape.vocab, device=device) * PRIME) | 1
    sums = torch.zeros(steps, dtype=torch.int64, device=device)
    for at in range(steps):
        step.inputs.fill([at % shape.vocab], [at % length], [0], pages)
        step()
        sums[at] = (step.logits[0].view(torch.int32).long() * factors).sum()
    return sums.cpu()
