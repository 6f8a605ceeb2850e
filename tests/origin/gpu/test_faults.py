"""The rules for GPUs, on facts that are made up; test_probe.py reads real ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tailrace.origin.gpu.faults import GpuDevice, GpuFacts, judge

H100 = GpuDevice(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    shared_bytes=227 << 10,
    multiprocessors=132,
    free_bytes=79 << 30,
    total_bytes=80 << 30,
)
HEALTHY = GpuFacts(
    has_device_file=True,
    has_driver_library=True,
    driver="580.65.06",
    driver_cuda=(13, 0),
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    devices=(H100,),
    triton="3.7.1",
    compiler="/usr/bin/gcc",
    python_header="/usr/include/python3.11/Python.h",
    python="3.11",
    has_run=True,
)
NO_DRIVER = {"has_device_file": False, "has_driver_library": False, "driver_cuda": None}
NOT_RUN = {"has_run": False}

CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "another system": ({"platform": "darwin"}, "platform", "on darwin", "on Linux"),
    "no driver": (NO_DRIVER, "driver_missing", "libcuda.so.1", "install NVIDIA's driver, 580"),
    "no driver in a container": (
        {**NO_DRIVER, "is_container": True},
        "driver_missing",
        "no NVIDIA GPU",
        "`--gpus all`",
    ),
    "no driver library": (
        {"has_driver_library": False, "devices": ()},
        "driver_library",
        "libcuda.so.1 is missing",
        "ldconfig",
    ),
    "no driver library in a container": (
        {"has_driver_library": False, "devices": (), "is_container": True},
        "driver_library",
        "libcuda.so.1 is missing",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    "no device file": (
        {"has_device_file": False, "devices": ()},
        "no_device_file",
        "/dev/nvidiactl",
        "modprobe nvidia",
    ),
    "no torch": (
        {"torch": "", "torch_cuda": "", "devices": ()},
        "torch_missing",
        "PyTorch is not installed",
        "pip install 'tailrace[gpu]'",
    ),
    "a torch that cannot be imported": (
        {"torch_error": "libcudart.so.13: cannot open", "torch_cuda": "", "devices": ()},
        "torch_broken",
        "libcudart.so.13",
        "--force-reinstall",
    ),
    "an old torch": (
        {"torch": "2.4.1+cu124", "torch_cuda": "12.4"},
        "torch_old",
        "PyTorch 2.4.1+cu124 is too old: Tailrace needs 2.11",
        "--upgrade",
    ),
    "a torch for the CPU": (
        {"torch": "2.13.0+cpu", "torch_cuda": "", "devices": ()},
        "torch_without_cuda",
        "PyTorch 2.13.0+cpu was built without CUDA",
        "docs/gpu.md",
    ),
    "an old driver": (
        {"driver": "570.86.15", "driver_cuda": (12, 8), "devices": ()},
        "driver_old",
        "built for CUDA 13.0, and driver 570.86.15 supports CUDA 12.8 at most",
        "update the driver to 580 or newer, or install PyTorch's build for CUDA 12",
    ),
    "hidden devices": (
        {"devices": (), "visible_devices": "", "cuda_error": "No CUDA GPUs are available"},
        "no_device",
        "No CUDA GPUs are available",
        "CUDA_VISIBLE_DEVICES is ''",
    ),
    "a driver that fails": (
        {"devices": (), "cuda_error": "Traceback\nCUDA unknown error"},
        "no_device",
        "CUDA shows no GPU: CUDA unknown error",
        "nvidia-smi",
    ),
    "an old GPU": (
        {"devices": (replace(H100, name="Tesla T4", capability=(7, 5), shared_bytes=64 << 10),)},
        "capability",
        "GPU 0 (Tesla T4) is sm_75: the kernels need sm_80",
        "set device to cpu",
    ),
    "too little shared memory": (
        {"devices": (replace(H100, shared_bytes=64 << 10),)},
        "shared_memory",
        "64 KiB of shared memory per program: the kernels need 99",
        "another GPU",
    ),
    "a GPU that is full": (
        {"devices": (replace(H100, free_bytes=100 << 20),)},
        "memory",
        "has 100 MiB of 81920 free",
        "nvidia-smi",
    ),
    "no Triton": ({"triton": ""}, "triton_missing", "Triton is not installed", "tailrace[gpu]"),
    "an old Triton": (
        {"triton": "3.2.0"},
        "triton_version",
        "Triton 3.2.0 is not known to work: the kernels need 3.6 to 3.7",
        "tailrace[gpu]",
    ),
    "a new Triton": ({"triton": "3.9.0"}, "triton_version", "Triton 3.9.0", "tailrace[gpu]"),
    "the interpreter": (
        {"is_interpreted": True, **NOT_RUN},
        "interpreted",
        "TRITON_INTERPRET is set",
        "unset TRITON_INTERPRET",
    ),
    "no compiler": ({"compiler": "", **NOT_RUN}, "compiler", "no C compiler", "install gcc"),
    "a wrong CC": (
        {"compiler": "", "wanted_compiler": "icc", **NOT_RUN},
        "compiler",
        "CC names, 'icc'",
        "install gcc",
    ),
    "no headers": (
        {"python_header": "", **NOT_RUN},
        "python_header",
        "Python.h is missing",
        "python3.11-dev",
    ),
    "a kernel that fails": (
        {"run_error": "RuntimeError: Triton Error [CUDA]: no kernel image", **NOT_RUN},
        "kernel",
        "no kernel image",
        "tailrace gpu check --json",
    ),
}


def test_a_machine_in_order_has_no_faults() -> None:
    assert judge(HEALTHY) == []


@pytest.mark.parametrize(("changes", "code", "problem", "cure"), CASES.values(), ids=CASES)
def test_each_fault_is_named_alone_with_its_cure(
    changes: dict[str, Any], code: str, problem: str, cure: str
) -> None:
    faults = judge(replace(HEALTHY, **changes))
    assert [fault.code for fault in faults] == [code]
    assert problem in faults[0].problem
    assert cure in faults[0].cure
    assert "\n" not in str(faults[0])


def test_a_build_for_an_older_minor_version_or_an_older_cuda_runs_on_a_newer_driver() -> None:
    for torch_cuda, driver_cuda in (("13.2", (13, 0)), ("12.8", (13, 0)), ("12.8", (12, 4))):
        facts = replace(HEALTHY, torch_cuda=torch_cuda, driver_cuda=driver_cuda)
        assert judge(facts) == []


def test_faults_that_do_not_depend_on_each_other_are_all_named() -> None:
    facts = replace(
        HEALTHY,
        torch="2.13.0+cpu",
        torch_cuda="",
        triton="",
        compiler="",
        devices=(),
        has_run=False,
    )
    codes = [fault.code for fault in judge(facts)]
    assert codes == ["torch_without_cuda", "triton_missing", "compiler"]


def test_what_follows_from_a_fault_is_not_named_beside_it() -> None:
    facts = replace(HEALTHY, compiler="", has_run=False, run_error="Failed to find C compiler")
    assert [fault.code for fault in judge(facts)] == ["compiler"]


def test_a_kernel_that_ran_needs_no_compiler_any_more() -> None:
    assert judge(replace(HEALTHY, compiler="", python_header="")) == []


def test_a_device_is_described_in_one_line() -> None:
    assert str(H100) == (
        "GPU 0: NVIDIA H100 80GB HBM3, sm_90, 132 multiprocessors, 227 KiB of shared memory per"
        " program, 79.0 of 80.0 GiB free"
    )
