"""What a worker of a model takes of its device, and its first load of time, from its files; no
torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ledger.errors import ConfigError
from origin.checkpoint.finding import Findings
from origin.checkpoint.layout import examine_weights
from origin.checkpoint.model_config import examine_config
from origin.checkpoint.model_memory import cpu_footprint, gpu_footprint
from origin.config import OriginConfig
from origin.formats import AS_STORED, Formats
from origin.model_table import ModelTable
from origin.warm.prices import LOAD_S
from origin.workers.program import makes_tokens

MIB = 1 << 20
CPU, GPU = "cpu", "cuda"
KV_MIB = {CPU: 512, GPU: 2048}
"""Of the KV cache of one of several models, where nothing says how large it is."""
BESIDE_MIB = {CPU: 0, GPU: 1024}
"""What a process takes of its device beside weights and KV cache; an allowance, not measured."""
FIRST_START_S = {CPU: 2.0, GPU: 20.0}
"""Of the first load of a model: imports, and kernels to be compiled."""
FIRST_BYTES_PER_S = 1e9
"""At which its weights are read, hashed, looked through and moved; the hash alone has 1.3e9."""
NVIDIA = Path("/dev/nvidiactl")


def device_of(config: OriginConfig) -> str:
    """Whose cap a model counts against, before a worker has said where it runs."""
    if config.device == "auto":
        return GPU if NVIDIA.exists() else CPU
    return config.device


def needed(name: str, table: ModelTable, config: OriginConfig) -> tuple[int, OriginConfig]:
    """Bytes of each worker of a model, and its settings with a KV cache that fits in them.

    Raises ModelError for a folder that cannot be served, ConfigError for too little memory.
    """
    if not makes_tokens(config):
        return (table.memory_mib or 0) * MIB, config
    device = device_of(config)
    beside = BESIDE_MIB[device] * MIB + _weights(config.model, device, config.formats)
    caches = 1
    if config.draft_model is not None:
        beside += _weights(config.draft_model, device, AS_STORED)
        caches = 2
    if config.kv_mib is None and table.memory_mib is not None:
        kv_mib = (table.memory_mib - -(-beside // MIB)) // caches
    else:
        kv_mib = config.kv_mib or KV_MIB[device]
    total = beside + caches * max(kv_mib, 1) * MIB
    if table.memory_mib is not None and total > table.memory_mib * MIB:
        raise ConfigError(
            f"{table.memory_mib} MiB, and weights and KV cache take {-(-total // MIB)} at least",
            field=f"models.{name}.memory_mib",
            hint="more, or a smaller kv_mib",
        )
    size = total if table.memory_mib is None else table.memory_mib * MIB
    return size, config.model_copy(update={"kv_mib": kv_mib})


def first_load_s(config: OriginConfig) -> float:
    """What a load is taken to take until one was measured."""
    if not makes_tokens(config):
        return LOAD_S
    with suppress(OSError):
        size = sum(path.stat().st_size for path in config.model.iterdir())
        return FIRST_START_S[device_of(config)] + size / FIRST_BYTES_PER_S
    return LOAD_S


def _weights(folder: Path, device: str, formats: Formats) -> int:
    findings = Findings()
    config = examine_config(folder, findings)
    findings.refuse()
    assert config is not None
    stored = examine_weights(folder, config, findings)
    findings.refuse()
    footprint = gpu_footprint if device == GPU else cpu_footprint
    return footprint(config, stored, formats).weights_bytes
