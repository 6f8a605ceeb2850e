"""What each of several models is to be given, and what is known of it, before it is loaded."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.process.durable_file import replace_file
from tailrace.ledger.process.version import tailrace_version
from tailrace.origin.checkpoint.file_digests import identities
from tailrace.origin.config import OriginConfig
from tailrace.origin.formats import AS_STORED, Formats
from tailrace.origin.gpu.placement import place
from tailrace.origin.pool.model_table import ModelTable, Tables
from tailrace.origin.pool.policies.policies import LOAD_S
from tailrace.origin.workers.program import gpus_of, makes_tokens
from tailrace.origin.workers.worker_frame import Ready

VERSION = 1
KNOWN_FILE = "models.json"
LIBRARIES = ("torch", "triton", "tokenizers")
"""Whose versions make another engine; see `Model.fingerprint`."""

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
CAP_SETTINGS = {CPU: "cpu_memory_mib", GPU: "gpu_memory_mib"}
"""The setting of each device's cap."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """`ready` is what its worker said, without spans; `load_s` how long its start took."""

    ready: Ready
    load_s: float


class KnownModels:
    """What was known of models when they were loaded last, so that requests for one that is not can
    be admitted.

    Kept in a file of the origin's data folder, each by what its files and settings were. What
    cannot be read, or is of another version, is learnt again by loading.
    """

    def __init__(self, folder: Path, configs: Mapping[str, OriginConfig]) -> None:
        self._path = folder / KNOWN_FILE
        self._identities = {name: _identity(config) for name, config in configs.items()}
        self._stored = _read(self._path)

    def find(self, name: str) -> KnownModel | None:
        """None where it was never loaded, or has changed since."""
        stored = self._stored.get(name)
        if not isinstance(stored, dict) or stored.get("identity") != self._identities[name]:
            return None
        with suppress(KeyError, TypeError, ValueError):
            said = stored["ready"]
            ready = Ready(**(said | {"offers": tuple(said["offers"]), "spans": ()}))
            return KnownModel(ready, float(stored["load_s"]))
        return None

    def learn(self, name: str, known: KnownModel) -> None:
        """Keep it; a folder that cannot be written to is left alone."""
        said = asdict(known.ready)
        del said["spans"]
        entry = {"identity": self._identities[name], "ready": said, "load_s": known.load_s}
        self._stored[name] = entry
        document = {"version": VERSION, "models": self._stored}
        with suppress(OSError):
            # The event loop does not wait for the disk here: what is lost is learnt again.
            replace_file(self._path, json.dumps(document).encode(), sync=False)


def _identity(config: OriginConfig) -> str:
    """Changes with the settings, the files and the software."""
    parts = [tailrace_version(), config.model_dump_json()]
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            parts.append(f"{library} {version(library)}")
    if config.producer is None and config.upstream is None:
        with suppress(OSError):
            parts.append(json.dumps(identities(config.model), sort_keys=True))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _read(path: Path) -> dict[str, object]:
    try:
        stored = json.loads(path.read_text("utf-8"))
        models = stored["models"] if stored["version"] == VERSION else {}
        return models if isinstance(models, dict) else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


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
    # only a checkpoint needs them: they import tokenizers, which an upstream server does without
    from tailrace.origin.checkpoint.finding import Findings
    from tailrace.origin.checkpoint.layout import examine_weights
    from tailrace.origin.checkpoint.model_config import examine_config
    from tailrace.origin.checkpoint.model_memory import cpu_footprint, gpu_footprint

    findings = Findings()
    config = examine_config(folder, findings)
    findings.refuse()
    assert config is not None
    stored = examine_weights(folder, config, findings)
    findings.refuse()
    footprint = gpu_footprint if device == GPU else cpu_footprint
    return footprint(config, stored, formats).weights_bytes


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """`config` is that of its workers, `size_mib` what all of them take together.

    `gpus` has the GPU of each worker, if GPUs are given out.
    """

    name: str
    table: ModelTable
    config: OriginConfig
    device: str
    size_mib: float
    gpus: tuple[str, ...] = ()

    @property
    def shares_mib(self) -> dict[str, float]:
        """Memory by device; a GPU that is given out is a device of its own."""
        workers = Counter(map(gpu_device, self.gpus)) or Counter([self.device])
        return {one: self.size_mib * count / workers.total() for one, count in workers.items()}


def gpu_device(gpu: str) -> str:
    """Return the name of a GPU in the accounts of memory."""
    return f"{GPU}:{gpu}"


def planned(tables: Tables, origin: OriginConfig) -> list[ModelPlan]:
    """Raises ConfigError or ModelError for what cannot be."""
    plans: list[ModelPlan] = []
    held: Counter[str] = Counter()
    for name, table in tables.items():
        size, config = needed(name, table, table.alone(name, origin))
        device, workers = device_of(config), config.workers
        gpus: list[str] = []
        if device == GPU and (visible := gpus_of(config)):
            gpus = place([float(size)] * workers, visible, held)
            for gpu in gpus:
                held[gpu] += size
        plans.append(ModelPlan(name, table, config, device, size * workers / MIB, tuple(gpus)))
    for device in dict.fromkeys(device for plan in plans for device in plan.shares_mib):
        _check_cap([plan for plan in plans if device in plan.shares_mib], device, origin)
    return plans


def caps(origin: OriginConfig, plans: Iterable[ModelPlan] = ()) -> dict[str, float]:
    """In MiB, of the devices that have one; each GPU has the same."""
    devices = dict.fromkeys([*CAP_SETTINGS, *(one for plan in plans for one in plan.shares_mib)])
    given = {device: getattr(origin, _cap_setting(device)) for device in devices}
    return {device: float(cap) for device, cap in given.items() if cap is not None}


def _cap_setting(device: str) -> str:
    return CAP_SETTINGS[device.partition(":")[0]]


def _check_cap(plans: list[ModelPlan], device: str, origin: OriginConfig) -> None:
    setting = _cap_setting(device)
    cap, field = getattr(origin, setting), f"origin.{setting}"
    shares = {plan.name: plan.shares_mib[device] for plan in plans}
    on_gpu = [plan for plan in plans if plan.device == GPU and shares[plan.name]]
    if cap is None and len(on_gpu) > 1:
        raise ConfigError(
            f"{on_gpu[0].name!r} and {on_gpu[1].name!r} are to share a GPU",
            field=field,
            hint="say how much of its memory they may take together",
        )
    if cap is None:
        return
    for plan in plans:
        if shares[plan.name] > cap:
            raise ConfigError(
                f"{plan.name!r} takes {shares[plan.name]:.0f} MiB, and the cap is {cap}",
                field=field,
                hint="a cap that holds the largest model, or a smaller kv_mib for it",
            )
    kept = [plan for plan in plans if plan.table.is_kept]
    taken = sum(shares[plan.name] for plan in kept)
    largest = max((shares[plan.name] for plan in plans if plan not in kept), default=0)
    if taken + largest > cap:
        what = ", ".join(plan.name for plan in kept)
        beside = f", and another one needs {largest:.0f}" if largest else ""
        raise ConfigError(
            f"what is always loaded ({what}) takes {taken:.0f} MiB{beside}; the cap is {cap}",
            field=field,
            hint="a larger cap, or fewer models with pin or minimum_warm",
        )
