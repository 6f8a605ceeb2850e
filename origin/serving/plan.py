"""Plans the memory and settings of each model of an origin that serves several models.

It also stores facts about each model for the time before it is loaded again.
"""

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
from tailrace.origin.config import OriginConfig, PipelineConfig
from tailrace.origin.formats import AS_STORED, Formats
from tailrace.origin.generations.stage_switches import Stages
from tailrace.origin.gpu.placement import place
from tailrace.origin.pool.model_table import ModelTable, Tables
from tailrace.origin.pool.policies.policies import LOAD_S
from tailrace.origin.workers.program import gpus_of, makes_tokens
from tailrace.origin.workers.worker_frame import Ready

VERSION = 1
KNOWN_FILE = "models.json"
LIBRARIES = ("torch", "triton", "tokenizers")
"""Libraries whose versions are part of an engine's identity; see `Model.fingerprint`."""

MIB = 1 << 20
CPU, GPU = "cpu", "cuda"
KV_MIB = {CPU: 512, GPU: 2048}
"""Default size of the KV cache in MiB, by device, if an origin serves several models."""
OVERHEAD_MIB = {CPU: 0, GPU: 1024}
"""Estimated memory in MiB of a worker process beside weights and KV cache, by device."""
FIRST_START_S = {CPU: 2.0, GPU: 20.0}
"""Estimated seconds that imports and the compilation of kernels take at a first load, by device."""
FIRST_BYTES_PER_S = 1e9
"""Estimated speed of a first load, in bytes of the checkpoint per second: reading, hashing,
checking and moving the weights."""
NVIDIA = Path("/dev/nvidiactl")
CAP_SETTINGS = {CPU: "cpu_memory_mib", GPU: "gpu_memory_mib"}
"""Name of the setting that holds the memory cap, by device."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """Facts about a model from its last load.

    `ready` is the Ready frame of its worker, without the times of the load's stages (`spans`).
    `load_s` is how long the load took, in seconds.
    """

    ready: Ready
    load_s: float


class KnownModels:
    """Remembers facts about models from their last load, to admit requests for unloaded models.

    A file in the data folder has an entry for each model, with a hash of the model's files and
    settings. An entry that cannot be read or has another hash is replaced at the next load.
    """

    def __init__(self, folder: Path, configs: Mapping[str, OriginConfig]) -> None:
        self._path = folder / KNOWN_FILE
        self._identities = {name: _identity(config) for name, config in configs.items()}
        self._stored = _read(self._path)

    def find(self, name: str) -> KnownModel | None:
        """Return the facts about a model; None if it was never loaded or has changed since."""
        stored = self._stored.get(name)
        if not isinstance(stored, dict) or stored.get("identity") != self._identities[name]:
            return None
        with suppress(KeyError, TypeError, ValueError):
            said = stored["ready"]
            ready = Ready(**(said | {"offers": tuple(said["offers"]), "spans": ()}))
            return KnownModel(ready, float(stored["load_s"]))
        return None

    def learn(self, name: str, known: KnownModel) -> None:
        """Store facts about a model; if the file cannot be written, they are kept in memory."""
        said = asdict(known.ready)
        del said["spans"]
        entry = {"identity": self._identities[name], "ready": said, "load_s": known.load_s}
        self._stored[name] = entry
        document = {"version": VERSION, "models": self._stored}
        with suppress(OSError):
            # Not synced, because that would block the event loop. If a crash loses the entry, the
            # next load stores it again.
            replace_file(self._path, json.dumps(document).encode(), sync=False)


def _identity(config: OriginConfig) -> str:
    """Return a hash of a model's settings, its files and the versions of the software."""
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
    """Return the expected device of a model, whose memory cap applies to it.

    Which device `auto` chooses is certain only after a worker has started.
    """
    if isinstance(config, PipelineConfig) and not config.has_device:
        return CPU
    if config.device == "auto":
        return GPU if NVIDIA.exists() else CPU
    return config.device


def needed(name: str, table: ModelTable, config: OriginConfig) -> tuple[int, OriginConfig]:
    """Return the bytes that each worker of a model takes, and the model's settings with `kv_mib`.

    Raises:
        ModelError: The checkpoint cannot be served.
        ConfigError: `memory_mib` of the model is too small.
    """
    if not makes_tokens(config):
        return (table.memory_mib or 0) * MIB, config
    device = device_of(config)
    beside = OVERHEAD_MIB[device] * MIB + _weights(config.model, device, config.formats)
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
            f"{table.memory_mib} MiB are too few: weights and KV cache take at least"
            f" {-(-total // MIB)} MiB",
            field=f"models.{name}.memory_mib",
            hint="increase it, or set a smaller kv_mib",
        )
    size = total if table.memory_mib is None else table.memory_mib * MIB
    return size, config.model_copy(update={"kv_mib": kv_mib})


def pipelines_of(plans: Iterable[ModelPlan]) -> dict[str, Stages]:
    """Return the stages of the pipelines among some models, by the name of the pipeline."""
    tables = {
        plan.name: plan.config.pipeline for plan in plans if isinstance(plan.config, PipelineConfig)
    }
    if not tables:
        return {}
    # Imported here, because few origins have pipelines.
    from tailrace.origin.pipelines.table import PipelineTable

    return {
        name: {one.named: one.optional for one in PipelineTable.model_validate(table).stages}
        for name, table in tables.items()
    }


def first_load_s(config: OriginConfig) -> float:
    """Return an estimate of a load's duration in seconds, used until a load was measured."""
    if not makes_tokens(config):
        return LOAD_S
    with suppress(OSError):
        size = sum(path.stat().st_size for path in config.model.iterdir())
        return FIRST_START_S[device_of(config)] + size / FIRST_BYTES_PER_S
    return LOAD_S


def _weights(folder: Path, device: str, formats: Formats) -> int:
    # Imported late: the modules need the package tokenizers, which an origin that serves only
    # upstream servers may lack.
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
    """The plan of one of several models.

    `config` has the settings of its workers, and `size_mib` is the memory of all of them together.
    `gpus` has the GPU of each worker, if GPUs are assigned.
    """

    name: str
    table: ModelTable
    config: OriginConfig
    device: str
    size_mib: float
    gpus: tuple[str, ...] = ()

    @property
    def shares_mib(self) -> dict[str, float]:
        """Memory of the workers in MiB, by device; each assigned GPU is a device of its own."""
        workers = Counter(map(gpu_device, self.gpus)) or Counter([self.device])
        return {one: self.size_mib * count / workers.total() for one, count in workers.items()}


def gpu_device(gpu: str) -> str:
    """Return the device name under which the memory of one GPU is counted, such as `cuda:0`."""
    return f"{GPU}:{gpu}"


def planned(tables: Tables, origin: OriginConfig) -> list[ModelPlan]:
    """Return the plan of each model.

    Raises:
        ConfigError: A memory limit or cap is too small or missing.
        ModelError: A checkpoint cannot be served.
    """
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
    """Return the memory caps in MiB by device, without uncapped devices.

    All GPUs have the same cap.
    """
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
            f"missing, although {on_gpu[0].name!r} and {on_gpu[1].name!r} share a GPU",
            field=field,
            hint="set the memory in MiB that all models on one GPU may take together",
        )
    if cap is None:
        return
    for plan in plans:
        if shares[plan.name] > cap:
            raise ConfigError(
                f"the cap of {cap} MiB is too small: {plan.name!r} takes"
                f" {shares[plan.name]:.0f} MiB",
                field=field,
                hint="set a larger cap, or a smaller kv_mib for the model",
            )
    kept = [plan for plan in plans if plan.table.is_kept]
    taken = sum(shares[plan.name] for plan in kept)
    largest = max((shares[plan.name] for plan in plans if plan not in kept), default=0)
    if taken + largest > cap:
        names = ", ".join(plan.name for plan in kept)
        other = f", and the largest other model needs {largest:.0f} MiB" if largest else ""
        raise ConfigError(
            f"the cap of {cap} MiB is too small: models that are always loaded ({names}) take"
            f" {taken:.0f} MiB{other}",
            field=field,
            hint="set a larger cap, or pin or minimum_warm for fewer models",
        )
