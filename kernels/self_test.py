"""Self-test: runs one linear with a known result, to check that kernels work on a device."""

from __future__ import annotations

import torch

from tailrace.kernels.linear.float_triton import float_linear, float_plan
from tailrace.kernels.linear.linear_plan import LinearWorkspace

ROWS, INPUTS, OUTPUTS = 3, 512, 256
LARGEST = 3
"""Maximum magnitude of the integer operands. They are exact in bf16, and so are all sums of their
products in fp32, so the result must equal torch's."""


def run_self_test(device: torch.device) -> None:
    """Compile a linear on the tensor cores, run it on `device` and compare it with torch's.

    It needs more than 48 KiB of shared memory, as the models' linears do. Raises RuntimeError for a
    wrong result, and whatever the compiler and the driver raise.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(-LARGEST, LARGEST + 1, (rows, INPUTS), generator=generator)
        for rows in (ROWS, OUTPUTS)
    )
    there = weight.to(device, torch.bfloat16)
    out = torch.empty(ROWS, OUTPUTS, device=device)
    workspace = LinearWorkspace([float_plan(there)], ROWS, device)
    float_linear(x.to(device, torch.float32), there, out, workspace=workspace)
    if not torch.equal(out.cpu(), (x @ weight.t()).float()):
        raise RuntimeError("a linear layer gave wrong numbers")
