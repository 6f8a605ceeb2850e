"""Rules for whether a GPU can be used: they turn facts about the machine into faults and cures.

This module does not read the facts from the machine; `origin.gpu.probe` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tailrace.kernels.gpu_limits import LEAST_CAPABILITY, LEAST_SHARED_BYTES, Capability
from tailrace.kernels.triton_version import is_supported, supported_versions

LEAST_FREE_BYTES = 512 << 20
"""Minimum free GPU memory in bytes with which a worker can start, without the memory of its model.
CUDA's context and the kernels take most of it."""
LEAST_TORCH = (2, 11)
"""Minimum version of PyTorch, the same as in the package's extra `torch`."""
LEAST_DRIVERS = {12: "525", 13: "580"}
"""Minimum NVIDIA driver by major version of CUDA.

Source: NVIDIA, CUDA Compatibility, Minor Version Compatibility, table 1.
"""
NEWEST_CUDA = max(LEAST_DRIVERS)
GUIDE = "docs/gpu.md"


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """One GPU as CUDA shows it to this process."""

    index: int
    name: str
    capability: Capability
    shared_bytes: int
    """Maximum bytes of shared memory per program."""
    multiprocessors: int
    free_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        major, minor = self.capability
        free, total = (size / (1 << 30) for size in (self.free_bytes, self.total_bytes))
        return (
            f"GPU {self.index}: {self.name}, sm_{major}{minor}, {self.multiprocessors}"
            f" multiprocessors, {self.shared_bytes >> 10} KiB of shared memory per program,"
            f" {free:.1f} of {total:.1f} GiB free"
        )


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Facts about a machine that GPU workers depend on; empty and None mean absent."""

    platform: str = "linux"
    is_container: bool = False
    has_device_file: bool = False
    """True if /dev/nvidiactl exists, or under WSL /dev/dxg."""
    has_driver_library: bool = False
    """True if libcuda.so.1 can be loaded."""
    driver: str = ""
    """Version of NVIDIA's driver, such as `580.65.06`."""
    driver_cuda: tuple[int, int] | None = None
    """Newest CUDA version that the driver supports."""
    visible_devices: str | None = None
    """Value of CUDA_VISIBLE_DEVICES."""
    torch: str = ""
    torch_cuda: str = ""
    """CUDA version that PyTorch was built for."""
    torch_error: str = ""
    """Why PyTorch could not be imported."""
    cuda_error: str = ""
    """Why CUDA could not be initialised."""
    devices: tuple[GpuDevice, ...] = ()
    triton: str = ""
    is_interpreted: bool = False
    """True if TRITON_INTERPRET is set."""
    compiler: str = ""
    """Path of the C compiler that Triton would call."""
    wanted_compiler: str = ""
    """Value of the environment variable CC, which names a C compiler."""
    python_header: str = ""
    """Path of Python.h, if it exists."""
    python: str = ""
    """Version of Python, such as `3.11`."""
    has_run: bool = False
    """True if a kernel was compiled and run on every device, with the right result."""
    run_error: str = ""
    """Why a kernel could not be compiled or run; empty if that was not tried."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One reason why the GPU cannot be used, and its cure."""

    code: str
    """Name of the fault for programs, in snake_case; it stays the same in later versions."""
    problem: str
    cure: str

    def __str__(self) -> str:
        return f"{self.problem}. Cure: {self.cure}"


def judge(facts: GpuFacts) -> list[Fault]:
    """Return all faults, except those that merely follow from another one."""
    if facts.platform != "linux":
        problem = f"on {facts.platform} there is no NVIDIA GPU that Tailrace can use"
        return [Fault("platform", problem, "run the origin on Linux, or set device to cpu")]
    faults = [*_driver(facts), *_torch(facts)]
    if not faults:
        faults += _devices(facts)
    faults += _triton(facts)
    if not facts.has_run:  # Triton needs a compiler only until its driver module is compiled
        faults += _compiler(facts)
    if facts.run_error and not faults:
        line = _last_line(facts.run_error)
        cure = f"report this with the output of `tailrace gpu check --json`; {GUIDE} lists limits"
        faults.append(Fault("kernel", f"a kernel cannot be compiled or run: {line}", cure))
    return faults


def is_absent(facts: GpuFacts) -> bool:
    """Return True if no fact indicates that this machine has an NVIDIA GPU."""
    return not (facts.has_device_file or facts.has_driver_library)


def _driver(facts: GpuFacts) -> Iterator[Fault]:
    in_container = "start the container with `--gpus all` (NVIDIA Container Toolkit on the host)"
    newest = f"{LEAST_DRIVERS[NEWEST_CUDA]} or newer"
    if is_absent(facts):
        problem = "there is no NVIDIA GPU, or no driver: libcuda.so.1 and /dev/nvidiactl are absent"
        cure = in_container if facts.is_container else f"install NVIDIA's driver, {newest}"
        yield Fault("driver_missing", problem, cure)
    elif not facts.has_driver_library:
        problem = "the driver's library libcuda.so.1 is missing, although a GPU device is there"
        cure = f"install the driver's CUDA library, {newest}, and run ldconfig"
        if facts.is_container:
            cure = f"{in_container} and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        yield Fault("driver_library", problem, cure)
    elif not facts.has_device_file:
        problem = "the driver's library is there, but no GPU device (/dev/nvidiactl)"
        cure = "load the driver's kernel module (`modprobe nvidia`), and see if nvidia-smi works"
        yield Fault("no_device_file", problem, in_container if facts.is_container else cure)


def _torch(facts: GpuFacts) -> Iterator[Fault]:
    if not facts.torch:
        yield Fault("torch_missing", "PyTorch is not installed", "pip install 'tailrace[gpu]'")
        return
    if facts.torch_error:
        problem = f"PyTorch {facts.torch} cannot be imported: {_last_line(facts.torch_error)}"
        cure = "pip install --force-reinstall 'tailrace[gpu]'"
        yield Fault("torch_broken", problem, cure)
        return
    version = _version(facts.torch)
    if version is not None and version < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        problem = f"PyTorch {facts.torch} is too old: Tailrace needs {least} or newer"
        yield Fault("torch_old", problem, "pip install --upgrade 'tailrace[gpu]'")
    elif not facts.torch_cuda:
        problem = f"PyTorch {facts.torch} was built without CUDA"
        cure = f"install one of its CUDA builds, for the driver that you have ({GUIDE})"
        yield Fault("torch_without_cuda", problem, cure)
    elif (
        (needed := _version(facts.torch_cuda))
        and facts.driver_cuda
        and facts.driver_cuda[0] < needed[0]
    ):
        supported = ".".join(map(str, facts.driver_cuda))
        driver = f"driver {facts.driver}" if facts.driver else "the driver"
        fitting = LEAST_DRIVERS.get(needed[0])
        update = f"update the driver to {fitting} or newer" if fitting else "update the driver"
        yield Fault(
            "driver_old",
            f"PyTorch {facts.torch} was built for CUDA {facts.torch_cuda}, and {driver} supports"
            f" CUDA {supported} at most",
            f"{update}, or install PyTorch's build for CUDA {facts.driver_cuda[0]} ({GUIDE})",
        )


def _devices(facts: GpuFacts) -> Iterator[Fault]:
    if not facts.devices:
        why = f": {_last_line(facts.cuda_error)}" if facts.cuda_error else ""
        cure = "see if nvidia-smi lists a GPU; a new driver needs a restart"
        if facts.visible_devices is not None:
            cure = f"CUDA_VISIBLE_DEVICES is {facts.visible_devices!r}: unset it, or name a GPU"
        yield Fault("no_device", f"CUDA shows no GPU{why}", cure)
    for device in facts.devices:
        name = f"GPU {device.index} ({device.name})"
        if device.capability < LEAST_CAPABILITY:
            have, need = (f"sm_{major}{minor}" for major, minor in _capabilities(device))
            problem = f"{name} is {have}: the kernels need {need} or newer"
            yield Fault("capability", problem, "use an Ampere GPU or newer, or set device to cpu")
        elif device.shared_bytes < LEAST_SHARED_BYTES:
            problem = (
                f"{name} has {device.shared_bytes >> 10} KiB of shared memory per program: the"
                f" kernels need {LEAST_SHARED_BYTES >> 10}"
            )
            yield Fault("shared_memory", problem, "use another GPU, or set device to cpu")
        if device.free_bytes < LEAST_FREE_BYTES:
            problem = (
                f"{name} has {device.free_bytes >> 20} MiB of {device.total_bytes >> 20} free:"
                f" a worker needs {LEAST_FREE_BYTES >> 20} beside its model"
            )
            yield Fault("memory", problem, "end one of the processes that nvidia-smi lists")


def _capabilities(device: GpuDevice) -> Sequence[Capability]:
    return device.capability, LEAST_CAPABILITY


def _triton(facts: GpuFacts) -> Iterator[Fault]:
    if not facts.torch:
        return
    if not facts.triton:
        yield Fault("triton_missing", "Triton is not installed", "pip install 'tailrace[gpu]'")
    elif not is_supported(facts.triton):
        yield Fault(
            "triton_version",
            f"Triton {facts.triton} is not known to work: the kernels need {supported_versions()}",
            "pip install 'tailrace[gpu]', which installs a torch and a Triton that fit each other",
        )
    if facts.is_interpreted:
        problem = "TRITON_INTERPRET is set, so kernels would not run on the GPU"
        yield Fault("interpreted", problem, "unset TRITON_INTERPRET")


def _compiler(facts: GpuFacts) -> Iterator[Fault]:
    """Yield a fault for each thing that Triton needs to compile its driver module and lacks."""
    if not facts.compiler:
        named = facts.wanted_compiler
        problem = "there is no C compiler, which Triton needs for its first start"
        if named:
            problem = f"the C compiler that CC names, {named!r}, is missing"
        yield Fault("compiler", problem, "install gcc and libc6-dev, or name a compiler in CC")
    if not facts.python_header:
        yield Fault(
            "python_header",
            "Python.h is missing, which Triton needs for its first start",
            f"install Python's headers (python{facts.python}-dev, or python3-devel)",
        )


def _version(text: str) -> tuple[int, int] | None:
    """Return (major, minor) of a version; None if the text does not begin with two numbers."""
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
