"""An experiment: linears of float weights with products of 64 columns instead of 16.

Wider products would feed the tensor cores at their full rate in prefill. They may be used only if a
row keeps its bits. Shown here: the tiles of inputs are added in the same order, and each
accumulator goes through as many products over the same 16 inputs. Not shown, since only a GPU can:
that the tensor cores add the 16 products of one instruction in the same way for any width.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton.language as tl
from torch import Tensor

from tailrace.kernels.linear import linear_triton
from tailrace.kernels.linear.float_triton import float_linear, float_plan
from tailrace.kernels.linear.linear_plan import MAX_GROUPS, LinearWorkspace

ROOT = Path(__file__).resolve().parents[3]
WIDE = 64
"""Columns of a wide product."""
COMPILE = """
import json, re, sys
from collections import Counter
from dataclasses import replace
import triton.language as tl
from tailrace.kernels.gate.machine_code import compile_variant, compiled
from tailrace.kernels.linear import float_triton, linear_triton
from tailrace.kernels.shapes import LLAMA_8B

columns = int(sys.argv[1])
linear_triton._ROWS = tl.constexpr(columns)
name = f"{LLAMA_8B.name}.qkv dense bf16 rows=64"
[variant] = [v for v in float_triton.variants(LLAMA_8B) if v.name == name]
variant = replace(variant, constants=variant.constants | {"GROUPS": 64 // columns})
products = re.findall(r"wgmma.mma_async.sync.aligned.(m\\w+)", compile_variant(variant).asm["ptx"])
print(json.dumps([Counter(products), compiled(variant).spill_bytes]))
"""


def test_wider_products_add_tiles_of_inputs_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Sums within a tile are exact here, and those of tiles are rounded, so their order shows."""
    out, inputs, rows = 128, 640, WIDE
    random = torch.Generator().manual_seed(5)
    w = torch.randint(-8, 9, (out, inputs), generator=random).float()
    x = torch.randint(-8, 9, (rows, inputs), generator=random).float()
    chunk = torch.arange(inputs) // 64
    w *= 2.0 ** (5 * (chunk % 4))[None, :]
    x *= torch.where(chunk % 2 == 0, 1.0, 1 + 2.0**-7)[None, :]
    weight, rounded = w.to(torch.bfloat16).to(device), x.to(torch.bfloat16).to(device)
    workspace = LinearWorkspace([float_plan(weight)], MAX_GROUPS * WIDE, device)

    def product() -> Tensor:
        y = torch.full((rows, out), 7.0, device=device)
        float_linear(rounded, weight, y, workspace=workspace)
        return y

    narrow = product()
    if device.type == "cpu":  # the interpreter reads the constant at every call
        monkeypatch.setattr(linear_triton, "_ROWS", tl.constexpr(WIDE))
        assert torch.equal(product(), narrow)
    exact = rounded.double() @ weight.double().T
    assert bool((narrow.double() - exact).abs().max() < 1e-6 * exact.abs().max())
    tiles = [slice(first, first + 64) for first in range(0, inputs, 64)]
    parts = [(rounded[:, t].double() @ weight[:, t].double().T).float() for t in tiles]
    backwards = torch.zeros(rows, out, device=device)
    for part in reversed(parts):
        backwards += part
    assert not torch.equal(backwards, narrow), "another order would show"


def test_wider_products_are_a_quarter_as_many_over_the_same_inputs() -> None:
    assert products_of(16) == ({"m64n16k16": 32}, 0)
    assert products_of(WIDE) == ({"m64n64k16": 8}, 0)


def products_of(columns: int) -> tuple[dict[str, int], int]:
    """Compile a linear of 64 rows: its products by shape, and the bytes that it spills."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE, str(columns)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    products, spilled = json.loads(ran.stdout)
    return products, spilled
