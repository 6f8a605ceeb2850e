"""The file of API keys: readable by its owner alone, written whole or not at all."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from edge.access.keys import ApiKey, KeyRing, Limits, Tenant
from ledger.errors import CallerError, ConfigError


class KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[ApiKey] = []
    tenants: dict[Tenant, Limits] = {}

    def ring(self) -> KeyRing:
        return KeyRing(self.keys, self.tenants)


def read_keys(path: Path) -> KeyFile:
    """What is in the file. Raises ConfigError, which names what is wrong with it."""
    try:
        return KeyFile.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _unusable(path, f"{where}: {first['msg']}" if where else first["msg"]) from None
    except CallerError as error:
        raise _unusable(path, str(error)) from None
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}",
            field="edge.api_keys",
            hint="tailrace key add makes one",
        ) from error


@contextmanager
def changing(path: Path) -> Iterator[KeyFile]:
    """What is in the file, to be changed; one process at a time. A new file is made.

    It is replaced when the block ends without an error, and keeps its owner.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        stored = read_keys(path) if path.exists() else KeyFile()
        yield stored
        _replace(path, stored)
    except PermissionError as error:
        raise ConfigError(
            f"{path}: {error.strerror}", field="edge.api_keys", hint="run this as its owner"
        ) from error
    finally:
        os.close(folder)


def _replace(path: Path, stored: KeyFile) -> None:
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(stored.model_dump_json(indent=1, exclude_none=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
            if path.exists():  # root may change what is the edge's
                owner = path.stat()
                if (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} holds no API keys: {why}", field="edge.api_keys", hint="see tailrace key list"
    )
