"""Pairs of ternary linears beside two launches of `ternary_gemv`.

In the interpreter the halves before and after the barrier are two launches, so that all programs
have arrived before one goes on. Machine code is checked here, too, since only a compiled kernel has
the barrier.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tailrace.kernels.gpu_limits import HOPPER, LIMITS
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.grid_barrier_triton import addend_of_first
from tailrace.kernels.linear.ternary_pair_triton import PairPlan, ternary_pair, variants
from tailrace.kernels.linear.ternary_triton import ternary_gemv
from tailrace.kernels.shapes import BITNET_2B4T, LLAMA_8B
from tests.kernels.guarded import Guarded
from tests.kernels.linear.ternary_rows import make
from tests.kernels.refusals import assert_refused

ROOT = Path(__file__).resolve().parents[3]
EPS = 1e-5
Case = tuple[int, int, tuple[int, ...], Epilogue]
"""Inputs, hidden, outs of the second linear, its epilogue."""
CASES: list[Case] = [
    (4, 4, (4, 4), Epilogue.RELU2_GATE),  # one word
    (132, 64, (20, 20), Epilogue.RELU2_GATE),  # more programs behind the barrier
    (640, 192, (12, 4, 8), Epilogue.STORE),  # fewer programs, groups that straddle parts
    (2564, 36, (8, 8), Epilogue.RELU2_GATE),  # two lines per warp and one word beyond
]


def normal(*size: int, seed: int = 7) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("width", "hidden", "outs", "epilogue"), CASES)
def test_a_pair_has_the_bits_of_two_launches(
    width: int, hidden: int, outs: tuple[int, ...], epilogue: Epilogue, device: torch.device
) -> None:
    weights, following = make((hidden,), width, device), make(outs, hidden, device)
    x, norm = normal(1, width).to(device), normal(width, seed=8).to(device)
    next_norm = normal(hidden, seed=9).to(device)
    columns = outs[0] if epilogue.gated else sum(outs)
    residual = Guarded(normal(1, hidden, seed=10).to(device))
    out = Guarded(torch.full((1, columns), 0.5, device=device))
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    expected, expected_out = residual.tensor.clone(), out.tensor.clone()
    for _ in range(2):  # a counter serves many launches
        ternary_gemv(x, weights, expected, norm=norm, eps=EPS, epilogue=Epilogue.ADD)
        ternary_gemv(expected, following, expected_out, norm=next_norm, eps=EPS, epilogue=epilogue)
        ternary_pair(
            x, norm, weights, residual.tensor, next_norm, following, out.tensor, counter,
            eps=EPS, epilogue=epilogue,
        )  # fmt: skip
        assert torch.equal(residual.tensor.view(torch.int32), expected.view(torch.int32))
        assert torch.equal(out.tensor.view(torch.int32), expected_out.view(torch.int32))
    assert residual.intact()
    assert out.intact()
    assert bool(expected_out.abs().max() > 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_becomes_nan(bad: float, device: torch.device) -> None:
    weights, following = make((64,), 132, device), make((8, 8), 64, device)
    x = normal(1, 132).to(device)
    x[0, 131] = bad
    residual, out = torch.zeros(1, 64, device=device), torch.zeros(1, 8, device=device)
    ones = partial(torch.ones, device=device)
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    ternary_pair(
        x, ones(132), weights, residual, ones(64), following, out, counter,
        eps=EPS, epilogue=Epilogue.RELU2_GATE,
    )  # fmt: skip
    assert bool(residual.isnan().all())
    assert bool(out.isnan().all())


@pytest.mark.parametrize("programs", [1, 2, 120, 216])
def test_all_programs_together_turn_the_topmost_bit_of_the_counter_alone(programs: int) -> None:
    total = addend_of_first(programs) + (programs - 1)
    assert total % 2**32 == 2**31
    assert -(2**31) <= addend_of_first(programs) < 2**31
    # No sum of fewer additions turns it, in whatever order the programs arrive.
    others = range(programs)
    early = [*others, *(addend_of_first(programs) + n for n in others[:-1])]
    assert all(count % 2**32 < 2**31 for count in early)


def test_a_plan_fits_if_all_programs_are_resident_and_their_registers_hold_a_row() -> None:
    pairs = {"o": (640, 2560, 1728, 2560), "down": (640, 6912, 960, 2560)}
    plans = {step: PairPlan.of(*sizes) for step, sizes in pairs.items()}
    assert [(p.programs, p.next_programs, p.registers) for p in plans.values()] == [
        (80, 216, 64),
        (80, 120, 128),
    ]
    assert all(plan.fits for plan in plans.values())
    small = PairPlan.of(*pairs["o"], replace(HOPPER, multiprocessors=107))
    assert (small.resident, small.fits) == (214, False)
    assert PairPlan.of(*pairs["o"], LIMITS[8, 0]).fits, "216 places on 108 multiprocessors"
    assert not PairPlan.of(640, 20_480, 1728, 2560).fits
    assert list(variants(LLAMA_8B)) == []


def test_arguments_that_do_not_fit_are_refused_by_name(device: torch.device) -> None:
    zeros = partial(torch.zeros, device=device)
    two_rows = {"x": zeros(2, 132), "residual": zeros(2, 64), "out": zeros(2, 8)}
    assert_refused(
        partial(ternary_pair, eps=EPS, epilogue=Epilogue.RELU2_GATE),
        {
            "x": zeros(1, 132),
            "norm": zeros(132),
            "weights": make((64,), 132, device),
            "residual": zeros(1, 64),
            "next_norm": zeros(64),
            "following": make((8, 8), 64, device),
            "out": zeros(1, 8),
            "counter": zeros(1, dtype=torch.int32),
        },
        (ValueError, "x: 2 rows", two_rows),
        (ValueError, "weights", {"weights": make((32, 32), 132, device)}),
        (ValueError, "epilogue", {"epilogue": Epilogue.ADD, "out": zeros(1, 16)}),
        (ValueError, "eps", {"eps": 0.0}),
    )


def test_machine_code_has_one_barrier_between_the_halves_and_no_spills() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tailrace.kernels.gate.aot", "--json", "--jobs", "1"]
        + ["--only", "ternary pair"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    summary = json.loads(ran.stdout.splitlines()[-1])
    assert (summary["kernels"], summary["compilations"], summary["spill_bytes"]) == (1, 2, 0)
    counts, behind = summary["behind_wait"], summary["behind_barrier"]
    assert counts.keys() == behind.keys()
    assert len(counts) == 4
    for name, count in counts.items():
        assert name.startswith(f"{BITNET_2B4T.name}.")
        assert 0 < behind[name] < count < 1100
