"""Linears compiled for GPUs other than a Hopper, which takes no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.kernels.gpu_limits import LIMITS, Capability

ROOT = Path(__file__).resolve().parents[3]
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tailrace.kernels.gate.machine_code import compile_options
from tailrace.kernels.gpu_limits import LIMITS
from tailrace.kernels.linear import float_triton
from tailrace.kernels.shapes import LLAMA_8B

major, minor = map(int, sys.argv[1:3])
wanted = {f"llama-8b.{name}" for name in sys.argv[3:]}
for variant in float_triton.variants(LLAMA_8B, LIMITS[major, minor]):
    if variant.name in wanted:
        names = variant.kernel.arg_names
        given = {**variant.signature, **dict.fromkeys(variant.constants, "constexpr")}
        source = ASTSource(
            variant.kernel,
            {name: given[name] for name in names},
            variant.constants,
            {(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible},
        )
        target = GPUTarget("cuda", 10 * major + minor, 32)
        kernel = triton.compile(source, target=target, options=compile_options(variant))
        print(json.dumps([variant.name, kernel.metadata.shared]))
"""
LINEARS = ("o dense bf16 rows=1", "qkv dense bf16 rows=64", "o int8 rows=64", "o int4 rows=1")
"""Every format, with and without splits, and the most rows that a program serves."""


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)], ids=str)
def test_linears_compile_for_and_fit_a_gpu_with_less_shared_memory(capability: Capability) -> None:
    command = [sys.executable, "-c", COMPILE, *map(str, capability), *LINEARS]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    shared = dict(map(json.loads, ran.stdout.splitlines()))
    assert len(shared) == len(LINEARS)
    assert max(shared.values()) <= LIMITS[capability].shared_bytes
