"""What was known of models when they were loaded last, so that requests for one that is not can be
admitted: its fingerprint, its vocabulary, and how long a load takes.

Kept in a file of the origin's data folder, each by what its files and settings were. What cannot
be read, or is of another version, is learnt again by loading.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ledger.version import tailrace_version
from origin.checkpoint.file_digests import identities
from origin.config import OriginConfig
from origin.workers.worker_frame import Ready

VERSION = 1
KNOWN_FILE = "models.json"
LIBRARIES = ("torch", "triton", "tokenizers")
"""Whose versions make another engine; see `Model.fingerprint`."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """`ready` is what its worker said, without spans; `load_s` how long its start took."""

    ready: Ready
    load_s: float


class KnownModels:
    """Those of one data folder."""

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
        new = self._path.with_suffix(".new")
        with suppress(OSError):
            new.write_text(json.dumps({"version": VERSION, "models": self._stored}), "utf-8")
            new.replace(self._path)


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
