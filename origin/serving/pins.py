"""The models that operators have pinned, in a file of the origin's data folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import structlog

from tailrace.ledger.errors import Unavailable
from tailrace.ledger.process.durable_file import replace_file

VERSION = 1
PINS_FILE = "pins.json"

log = structlog.get_logger("models")


class Pins:
    """Stores the pins that operators set, so that they survive restarts.

    Pins in the settings are not stored.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / PINS_FILE
        self._models = _read(self._path)
        self._turn = asyncio.Lock()

    @property
    def models(self) -> list[str]:
        """Names of the pinned models, including models that are no longer in the settings."""
        return sorted(self._models)

    async def keep(self, model: str, *, pinned: bool) -> None:
        """Store that a model is pinned or not; raises `Unavailable` if the file is not writable."""
        async with self._turn:
            wanted = self._models | {model} if pinned else self._models - {model}
            if wanted == self._models:
                return
            try:
                await asyncio.to_thread(_write, self._path, sorted(wanted))
            except OSError as error:
                raise Unavailable(
                    f"the change of the pin is lost when the origin ends, because {self._path}"
                    f" cannot be written: {error.strerror or error}"
                ) from error
            self._models = wanted


def _read(path: Path) -> frozenset[str]:
    """Return the pins in a file; none if it is missing, or if it is unreadable, which is logged."""
    try:
        stored = json.loads(path.read_text("utf-8"))
        models = stored["models"] if stored["version"] == VERSION else None
        if isinstance(models, list) and all(isinstance(one, str) for one in models):
            return frozenset(models)
        error = f"it is not a list of pins of version {VERSION}"
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, TypeError, KeyError) as damage:
        error = repr(damage)
    log.error("pins.unreadable", path=str(path), error=error)
    return frozenset()


def _write(path: Path, models: list[str]) -> None:
    """Replace the file; the new one is synced to the disk before this returns."""
    replace_file(path, json.dumps({"version": VERSION, "models": models}).encode())
