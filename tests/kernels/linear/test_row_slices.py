"""Quantising a weight takes little memory beside it, and slices change no bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tailrace.kernels.linear import row_slices as slices
from tailrace.kernels.linear.int8_linear import quantise_rows
from tailrace.kernels.linear.row_slices import SLICE_ELEMENTS, row_slices
from tailrace.kernels.linear.weight_only import quantise_int4, quantise_int8
from tests.kernels.linear.test_weight_only import normal

ROOT = Path(__file__).parents[3]
ROWS, COLUMNS = 16_384, 4096
RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Lets glibc return freed memory at once, so that the peak is that of the memory in use."""
PEAK = """
import sys, torch
from tailrace.kernels.linear import int8_linear, weight_only

def kib(field):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])

quantise = {**vars(int8_linear), **vars(weight_only)}[sys.argv[1]]
weight = torch.ones(int(sys.argv[2]), int(sys.argv[3]), dtype=torch.bfloat16)
quantise(weight[:16])
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = kib("VmRSS")
result = quantise(weight)
print(kib("VmHWM") - before)
"""


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, SLICE_ELEMENTS // 3), (5, 2**24)])
def test_slices_cover_all_rows_in_order(rows: int, columns: int) -> None:
    covered = [range(rows)[each] for each in row_slices(rows, columns)]
    assert [row for some in covered for row in some] == [*range(rows)]
    assert all(len(some) == 1 or len(some) * columns <= SLICE_ELEMENTS for some in covered)


@pytest.mark.parametrize("quantise", [quantise_rows, quantise_int8, quantise_int4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slices_change_no_bit_and_not_the_weight(
    quantise: Callable[[torch.Tensor], object],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = normal(37, 256).to(dtype)
    kept = weight.clone()
    whole = parts_of(quantise(weight))
    monkeypatch.setattr(slices, "SLICE_ELEMENTS", 5 * 256)
    for ours, expected in zip(parts_of(quantise(weight)), whole, strict=True):
        assert ours.equal(expected)
    assert weight.equal(kept)


def parts_of(quantised: object) -> list[torch.Tensor]:
    parts = quantised if isinstance(quantised, tuple) else vars_of(quantised)
    return [part for part in parts if isinstance(part, torch.Tensor)]


def vars_of(quantised: object) -> list[object]:
    return [getattr(quantised, name) for name in ("words", "scale", "zero")]


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("quantise", ["quantise_rows", "quantise_int8", "quantise_int4"])
def test_the_peak_is_the_result_and_a_few_slices(quantise: str) -> None:
    """In whole it would be several copies of the weight in fp32, 268 MB each."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, quantise, str(ROWS), str(COLUMNS)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | RETURNS_MEMORY,
    )
    result = ROWS * COLUMNS // (2 if quantise == "quantise_int4" else 1)
    assert int(done.stdout) * 1024 - result < 6 * 4 * SLICE_ELEMENTS
