"""Rules for which worker gets which GPU; nothing here reads the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"
"""The order of nvidia-smi and NVML, so that an index means the same GPU to both."""


def named_gpus(value: str) -> tuple[str, ...]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names, by index or UUID.

    As in CUDA, names after a negative index do not count.
    """
    found: list[str] = []
    for name in (one.strip() for one in value.split(",")):
        if not name or name.startswith("-"):
            break
        found.append(name)
    return tuple(found)


def place(sizes: Sequence[float], gpus: Sequence[str], held: Mapping[str, float]) -> list[str]:
    """Return the GPU of each worker of one model: those with the least memory in use.

    sizes: memory of each worker. held: memory by GPU that other models may take, in the unit of
    `sizes`. Workers of one model are spread over as many GPUs as there are.
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
    """Return the variables that hide all GPUs but `gpu` from a worker; empty for None.

    Indices of an operator's own CUDA_VISIBLE_DEVICES keep the order that they were written for.
    """
    if gpu is None:
        return {}
    found = {VISIBLE: gpu}
    if VISIBLE not in environment and ORDER not in environment:
        found[ORDER] = BY_BUS
    return found
