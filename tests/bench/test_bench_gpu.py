"""The bench of a GPU runs where there is none: its cases fit the kernels that they launch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tailrace.kernels.shapes import BITNET_2B4T
from tests.bench.bench_gpu import step_bytes

BENCH = Path(__file__).parent / "bench_gpu.py"


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCH, *arguments], capture_output=True, text=True, check=False
    )


def test_a_rehearsal_ends_with_one_line_of_json() -> None:
    result = run_bench("--rehearse", "--only", "attention,baseline,sampler")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["hardware"]["gpu"] == "no GPU: rehearsal"
    assert set(report["us"]) == {
        "tiny-bitnet.attend bfloat16 rows=1 length=300",
        "tiny-bitnet.attend int8 rows=1 length=300",
        "tiny-llama.attend bfloat16 rows=1 length=300",
        "tiny-llama.attend int8 rows=1 length=300",
        "tiny-llama.compiled rows=1 length=512",
        "tiny-bitnet.sample rows=1",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_can_be_done() -> None:
    result = run_bench()
    assert (result.returncode, result.stdout) == (2, "")
    assert "no CUDA device; try --rehearse" in result.stderr


def test_a_part_that_is_none_is_refused_by_name() -> None:
    result = run_bench("--only", "attention,kernel")
    assert result.returncode == 2
    assert "'kernel' is none of parity, kernels" in result.stderr


def test_the_bytes_of_a_step_are_those_that_memory_must_give() -> None:
    """1,178 MB with a bf16 head and 849 MB with an int8 one, and the cache on top."""
    assert round(step_bytes(BITNET_2B4T, 1, 0, int8_head=False) / 1e6) == 1178
    assert round(step_bytes(BITNET_2B4T, 1, 0, int8_head=True) / 1e6) == 849
