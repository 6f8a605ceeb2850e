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
    """Remembers pins over restarts; what the settings pin is not among them."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PINS_FILE
        self._models = _read(self._path)
        self._turn = asyncio.Lock()

    @property
    def models(self) -> list[str]:
        """The pinned models by name, of this origin's settings or not."""
        return sorted(self._models)

    async def keep(self, model: str, *, pinned: bool) -> None:
        """Store a change of a pin; raises `Unavailable` where the folder cannot be written."""
        async with self._turn:
            wanted = self._models | {model} if pinned else self._models - {model}
            if wanted == self._models:
                return
            try:
                await asyncio.to_thread(_write, self._path, sorted(wanted))
            except OSError as error:
                raise Unavailable(
                    f"the pin holds until the origin ends: {self._path} cannot be written:"
                    f" {error.strerror or error}"
                ) from error
            self._models = wanted


def _read(path: Path) -> frozenset[str]:
    """Return the pins of a file, none where there is no file."""
    try:
        stored = json.loads(path.read_text("utf-8"))
        models = stored["models"] if stored["version"] == VERSION else None
        if isinstance(models, list) and all(isinstance(one, str) for one in models):
            return frozenset(models)
        error = f"it is not of version {VERSION}"
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, TypeError, KeyError) as damage:
        error = repr(damage)
    log.error("pins.unreadable", path=str(path), error=error)
    return frozenset()


def _write(path: Path, models: list[str]) -> None:
    """Replace the file; it is on the disk when this returns."""
    replace_file(path, json.dumps({"version": VERSION, "models": models}).encode())
