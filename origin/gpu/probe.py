"""Reads the facts from this machine by which `origin.gpu.faults` decides if a GPU can be used."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import structlog

from tailrace.ledger.errors import ModelError
from tailrace.origin.gpu.faults import GpuDevice, GpuFacts, is_absent, judge

DRIVER_LIBRARY = "libcuda.so.1"
DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Device files of a GPU: of NVIDIA's kernel module on Linux, and of WSL on Windows."""
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
KUBERNETES = "KUBERNETES_SERVICE_HOST"

log = structlog.get_logger("gpu")


def probe(*, run: bool = True, environment: Mapping[str, str] = os.environ) -> GpuFacts:
    """Return the facts about this machine.

    If `run` is True and no other fault is found, a kernel is compiled and run on every GPU. CUDA is
    initialised in this process only if there is a driver and a torch that was built for CUDA.
    """
    facts = GpuFacts(
        platform=sys.platform,
        is_container=any(path.exists() for path in CONTAINER_MARKS) or KUBERNETES in environment,
        has_device_file=any(path.exists() for path in DEVICE_FILES),
        driver=_driver_version(),
        visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
        triton=_installed("triton"),
        is_interpreted=environment.get("TRITON_INTERPRET", "0") not in ("", "0"),
        wanted_compiler=environment.get("CC", ""),
        compiler=_compiler(environment),
        python_header=_python_header(),
        python=".".join(map(str, sys.version_info[:2])),
    )
    has_library, supported = _driver_library()
    facts = replace(facts, has_driver_library=has_library, driver_cuda=supported)
    facts = _with_cuda(facts)
    if run and facts.devices and not judge(replace(facts, has_run=True)):
        facts = _with_run(facts)
    return facts


def require_gpu() -> None:
    """Raise ModelError, with the first fault and its cure, unless a GPU can be used.

    Called before a checkpoint is read, because that takes minutes for a large one.
    """
    if faults := judge(probe()):
        first, more = faults[0], len(faults) - 1
        rest = f"; `tailrace gpu check` names {more} more" if more else ""
        raise ModelError(
            f"the GPU cannot be used: {first.problem}",
            field="device",
            hint=f"{first.cure}, or set device to cpu{rest}",
        )


def gpu_is_usable() -> bool:
    """Return True if a GPU can be used, and log why not, for `device = auto`."""
    facts = probe()
    faults = judge(facts)
    if is_absent(facts):
        log.info("device.cpu", reason="this machine has no NVIDIA GPU")
    elif faults:
        reasons = [fault.problem for fault in faults]
        log.warning("device.cpu", reasons=reasons, hint="`tailrace gpu check` names the cures")
    return not faults


def _driver_library() -> tuple[bool, tuple[int, int] | None]:
    """Return True if the driver's library loads, and the newest CUDA version it supports."""
    try:
        library = ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        return False, None
    number = ctypes.c_int()
    # The number is 1000 * major + 10 * minor. The call works without a GPU and before cuInit.
    if library.cuDriverGetVersion(ctypes.byref(number)) == 0 and number.value:
        return True, (number.value // 1000, number.value % 1000 // 10)
    return True, None


def _driver_version() -> str:
    try:
        text = DRIVER_VERSION.read_text("utf-8")
    except OSError:
        return ""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else ""


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _compiler(environment: Mapping[str, str]) -> str:
    """Return the path of the compiler that Triton will call: $CC, else gcc, else clang."""
    path = environment.get("PATH")
    names = [environment["CC"]] if environment.get("CC") else ["gcc", "clang"]
    return next((found for name in names if (found := shutil.which(name, path=path))), "")


def _python_header() -> str:
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme points to /usr/local, but its package installs the headers in /usr.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_paths(scheme=scheme)["include"], "Python.h")
    return str(header) if header.is_file() else ""


def _with_cuda(facts: GpuFacts) -> GpuFacts:
    """Return the facts, with those that torch reports about itself and about the GPUs."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError means that a library of CUDA is missing
        return replace(facts, torch=_installed("torch"), torch_error=str(error))
    facts = replace(facts, torch=torch.__version__, torch_cuda=torch.version.cuda or "")
    if not facts.torch_cuda or not facts.has_driver_library:
        return facts
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        devices = tuple(map(_device, range(torch.cuda.device_count())))
    except (AssertionError, RuntimeError) as error:
        return replace(facts, cuda_error=str(error))
    return replace(facts, devices=devices)


def _device(index: int) -> GpuDevice:
    import torch

    from tailrace.kernels.gpu_limits import limits_of

    properties = torch.cuda.get_device_properties(index)
    limits = limits_of(torch.device("cuda", index))
    free, total = torch.cuda.mem_get_info(index)
    return GpuDevice(
        index=index,
        name=properties.name,
        capability=(properties.major, properties.minor),
        shared_bytes=limits.shared_bytes,
        multiprocessors=limits.multiprocessors,
        free_bytes=free,
        total_bytes=total,
    )


def _with_run(facts: GpuFacts) -> GpuFacts:
    """Compile and run a kernel on every GPU, and return the facts with the result."""
    import torch

    try:
        from tailrace.kernels.self_test import run_self_test

        for device in facts.devices:
            with torch.cuda.device(device.index):
                run_self_test(torch.device("cuda", device.index))
    except Exception as error:  # noqa: BLE001 - the compiler and the driver raise what they like
        return replace(facts, run_error=f"{type(error).__name__}: {error}")
    return replace(facts, has_run=True)
