"""Rules for which worker gets which GPU; nothing here reads the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"
"""Value of CUDA_DEVICE_ORDER that makes CUDA number GPUs in the order of nvidia-smi and NVML."""


def named_gpus(value: str) -> tuple[str, ...]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names, by index or UUID.

    As in CUDA, the list ends before the first negative index or empty name.
    """
    found: list[str] = []
    for name in (one.strip() for one in value.split(",")):
        if not name or name.startswith("-"):
            break
        found.append(name)
    return tuple(found)


def place(sizes: Sequence[float], gpus: Sequence[str], held: Mapping[str, float]) -> list[str]:
    """Choose a GPU for each worker of one model, and return them in the order of the workers.

    Each worker gets one of the GPUs with the fewest workers of this model, and among these the GPU
    with the least memory in use.

    Args:
        sizes: The memory of each worker.
        gpus: The GPUs to choose from.
        held: The memory on each GPU that other models may take, in the unit of `sizes`.
    """
    own = dict.fromkeys(gpus, 0)
    taken = {gpu: held.get(gpu, 0.0) for gpu in gpus}
    found = []
    for size in sizes:
        gpu = min(gpus, key=lambda one: (own[one], taken[one]))
        own[gpu] += 1
        taken[gpu] += size
        found.append(gpu)
    return found


def gpu_environment(gpu: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that hide all GPUs but `gpu` from a worker.

    There are none if `gpu` is None.

    If the operator has set CUDA_VISIBLE_DEVICES, the order of GPUs is not changed, because the
    operator's indices refer to it.
    """
    if gpu is None:
        return {}
    found = {VISIBLE: gpu}
    if VISIBLE not in environment and ORDER not in environment:
        found[ORDER] = BY_BUS
    return found
