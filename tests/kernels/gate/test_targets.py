"""The architectures of the gate; what is compiled for them is in test_aot.py."""

from __future__ import annotations

import pytest

from tailrace.kernels.attention import attention_triton
from tailrace.kernels.gate.aot_worker import kernel_modules, planned
from tailrace.kernels.gate.targets import (
    DEPENDENT_ARCH,
    FP8_ARCH,
    OTHERS,
    SM_90,
    TARGETS,
    names,
)
from tailrace.kernels.gpu_limits import LIMITS
from tailrace.kernels.shapes import LLAMA_8B
from tailrace.origin.models.gpu_model import DEPENDENT_CAPABILITY, FP8_CAPABILITY

HELP = """
        Allowed values for this option:  'compute_80','compute_90a','compute_120',
        'sm_80','sm_89','sm_90','sm_90a','sm_100',
"""


def test_an_architecture_is_known_if_ptxas_lists_it_as_triton_spells_it() -> None:
    known = {arch: names(HELP, arch) for arch in TARGETS}
    assert known == {90: True, 80: True, 89: True, 100: False, 120: False}


@pytest.mark.parametrize("target", [SM_90, *OTHERS], ids=lambda target: target.name)
def test_every_architecture_has_limits(target: object) -> None:
    assert target in TARGETS.values()
    assert TARGETS[SM_90.arch].limits == LIMITS[9, 0]


def test_what_the_origin_refuses_on_an_older_gpu_is_not_compiled_for_it() -> None:
    assert divmod(FP8_ARCH, 10) == FP8_CAPABILITY
    assert divmod(DEPENDENT_ARCH, 10) == DEPENDENT_CAPABILITY
    variants = list(attention_triton.variants(LLAMA_8B))
    ran = {arch: [v.name for v in variants if TARGETS[arch].runs(v)] for arch in TARGETS}
    assert ran[90] == ran[100] == [variant.name for variant in variants]
    assert not any("dependent" in name for name in ran[89])
    assert any("float8" in name for name in ran[89])
    assert ran[80] == [name for name in ran[89] if "float8" not in name]


def test_plans_that_follow_a_gpus_limits_follow_those_of_the_target() -> None:
    modules = kernel_modules("tailrace.kernels.linear")
    stages = {
        arch: max(entry.variant.num_stages for entry in planned(modules, TARGETS[arch]))
        for arch in (90, 89)
    }
    assert stages[89] < stages[90]
