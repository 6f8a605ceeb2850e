"""The file of API keys: readable by its owner alone, written whole or not at all."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from edge.access.keys import ApiKey, KeyRing, Limits
from ledger.errors import CallerError, ConfigError
from ledger.rights import check_tenant, parse_rights


def _checked_tenant(text: str) -> str:
    try:
        return check_tenant(text)
    except CallerError as error:
        raise ValueError(error.message) from None


Tenant = Annotated[str, AfterValidator(_checked_tenant)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StoredKey(_Model):
    id: str = Field(pattern="^[0-9a-f]{12}$")
    name: str
    tenant: Tenant
    rights: tuple[str, ...]
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    created: datetime
    expires: datetime | None = None
    revoked: datetime | None = None

    def key(self) -> ApiKey:
        return ApiKey(
            id=self.id,
            name=self.name,
            tenant=self.tenant,
            rights=parse_rights(self.rights),
            digest=bytes.fromhex(self.sha256),
            created=self.created,
            expires=self.expires,
            revoked=self.revoked,
        )


class StoredLimits(_Model):
    """Of a tenant; what is absent is not bounded."""

    requests_per_s: float | None = Field(None, gt=0)
    max_concurrent: int | None = Field(None, ge=1)
    max_unfinished: int | None = Field(None, ge=1)
    tokens_per_s: int | None = Field(None, ge=1)

    def limits(self) -> Limits:
        return Limits(**self.model_dump())


class KeyFile(_Model):
    keys: list[StoredKey] = []
    tenants: dict[Tenant, StoredLimits] = {}

    def ring(self) -> KeyRing:
        limits = {tenant: stored.limits() for tenant, stored in self.tenants.items()}
        return KeyRing((stored.key() for stored in self.keys), limits)


def read_keys(path: Path) -> KeyFile:
    """What is in the file. Raises ConfigError, which names what is wrong with it."""
    try:
        stored = KeyFile.model_validate_json(path.read_bytes())
        stored.ring()
        return stored
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
