"""API keys and the file that stores them: their tenants, their rights, and the tenants' limits.

A key is `tr_ID_SECRET`. The secret has 256 random bits and cannot be guessed, so a plain SHA-256 of
the key is stored: a slow hash would add no protection.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
)

from tailrace.ledger.errors import CallerError, ConfigError, Unauthorized
from tailrace.ledger.frame import Priority
from tailrace.ledger.links.rights import DEFAULT_TENANT, Right, check_tenant, parse_rights
from tailrace.ledger.process.durable_file import OWNER_MODE, replace_file
from tailrace.ledger.validation import invalid_document

ID_BYTES = 6
SECRET_BYTES = 32
PREFIX = "tr_"
_KEY = re.compile(r"tr_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")
_NO_DIGEST = "0" * 64
MAX_BUDGET_TOKENS = 10**15 - 1
"""Maximum of a budget, in tokens: the largest integer of a structured field (RFC 9651, 3.3.1), in
which response headers show budgets."""


def _checked_tenant(text: str) -> str:
    try:
        return check_tenant(text)
    except CallerError as error:
        raise ValueError(error.message) from None


Tenant = Annotated[str, AfterValidator(_checked_tenant)]
Rights = Annotated[
    Right,
    BeforeValidator(lambda said: said if isinstance(said, Right) else parse_rights(said)),
    PlainSerializer(lambda right: right.words),
]
"""The rights of a key, which the file stores as words."""


def _class_of(said: object) -> object:
    if not isinstance(said, str):
        return said
    try:
        return Priority.from_word(said)
    except CallerError as error:
        raise ValueError(f"{said!r} is not a priority class: use {error.hint}") from None


KeyClass = Annotated[
    Priority, BeforeValidator(_class_of), PlainSerializer(lambda priority: priority.word)
]
"""The priority class that a key is bound to, which the file stores as a word."""


def _checked_budget(given: object) -> object:
    if given == 0 and not isinstance(given, bool):
        raise ValueError("a budget of 0 would refuse every request; revoke the key instead")
    return given


Budget = Annotated[int, BeforeValidator(_checked_budget), Field(ge=1, le=MAX_BUDGET_TOKENS)]
"""A number of tokens, prompts included."""


class Limits(BaseModel):
    """The limits of one tenant; None means no limit."""

    model_config = ConfigDict(extra="forbid")

    requests_per_s: float | None = Field(None, gt=0)
    max_concurrent: int | None = Field(None, ge=1)
    max_unfinished: int | None = Field(None, ge=1)
    tokens_per_s: int | None = Field(None, ge=1)


UNBOUNDED = Limits()


class ApiKey(BaseModel):
    """A stored key, without its secret.

    `sha256` is the hash of the whole key, in hex digits. `priority`, which the file calls `class`,
    is the most urgent priority class that the key's requests may have, and their default class.
    None means that the key is not bound to a class.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    id: str = Field(pattern="^[0-9a-f]{12}$")
    name: str
    tenant: Tenant
    rights: Rights
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    created: datetime
    expires: datetime | None = None
    revoked: datetime | None = None
    priority: KeyClass | None = Field(None, validation_alias="class", serialization_alias="class")
    tokens_per_day: Budget | None = None
    tokens_per_month: Budget | None = None

    @property
    def granted(self) -> Right:
        """The rights that the key really grants.

        `admin` opens the streams of all tenants, so only keys of the default tenant can have it,
        whatever the file says.
        """
        return self.rights if self.tenant == DEFAULT_TENANT else self.rights & ~Right.ADMIN

    def state(self, now: datetime) -> str:
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "active"


class KeyRing:
    """The keys of one file."""

    def __init__(self, keys: Iterable[ApiKey], limits: Mapping[str, Limits]) -> None:
        self._keys = {key.id: key for key in keys}
        self._limits = dict(limits)

    def find(self, text: str, now: datetime) -> ApiKey:
        """Return the stored key that `text` matches; raise Unauthorized if there is none.

        The error is the same for all causes, so that it reveals nothing about keys. Only an expired
        key gets an error of its own: its sender has shown that it knows the key.
        """
        found = _KEY.fullmatch(text)
        key = self._keys.get(found[1]) if found else None
        # Compare hashes even if the key is unknown, so that timing reveals nothing.
        expected = _NO_DIGEST if key is None else key.sha256
        matches = hmac.compare_digest(digest_of(text), expected)
        if key is not None and matches and key.state(now) == "expired":
            raise Unauthorized(
                f"the API key expired on {key.expires:%Y-%m-%d}",
                code="bad_key",
                field="Authorization",
                hint="ask the operator for a new one (tailrace key add)",
            )
        if key is None or not matches or key.state(now) != "active":
            raise Unauthorized(
                "the API key is not valid",
                code="bad_key",
                field="Authorization",
                hint="check the key; the operator can list valid keys with: tailrace key list",
            )
        return key

    def limits(self, tenant: str) -> Limits:
        return self._limits.get(tenant, UNBOUNDED)

    @property
    def curtailed(self) -> list[ApiKey]:
        """The keys whose right `admin` is ignored: they do not belong to the default tenant."""
        return [key for key in self._keys.values() if key.granted != key.rights]


def make_key(random: Callable[[int], bytes]) -> tuple[str, str]:
    """Return the id of a new key and the whole key, which is not stored."""
    id_ = random(ID_BYTES).hex()
    secret = base64.urlsafe_b64encode(random(SECRET_BYTES)).rstrip(b"=").decode()
    return id_, f"{PREFIX}{id_}_{secret}"


def digest_of(text: str) -> str:
    """Return the SHA-256 of a whole key, in hex digits."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


class KeyFile(BaseModel):
    """The contents of a file of API keys, which only its owner may read."""

    model_config = ConfigDict(extra="forbid")

    keys: list[ApiKey] = []
    tenants: dict[Tenant, Limits] = {}

    def ring(self) -> KeyRing:
        return KeyRing(self.keys, self.tenants)


def read_keys(path: Path) -> KeyFile:
    """Return the contents of the file; raise ConfigError if it is missing or not valid."""
    try:
        return KeyFile.model_validate_json(path.read_bytes())
    except ValidationError as error:
        # Do not show values: an operator may have written a key where its hash belongs.
        raise _unusable(path, str(invalid_document(error, shows_value=False))) from None
    except CallerError as error:
        raise _unusable(path, str(error)) from None
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}",
            field="edge.api_keys",
            hint="create the file with: tailrace key add NAME",
        ) from error


@contextmanager
def changing(path: Path) -> Iterator[KeyFile]:
    """Yield the contents of the file, and write them back when the block ends without an error.

    A lock keeps other processes out meanwhile. The file is replaced atomically and keeps its
    owner; it is created if it does not exist. Raises ConfigError if permissions are missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        stored = read_keys(path) if path.exists() else KeyFile()
        yield stored
        text = stored.model_dump_json(indent=1, exclude_none=True, by_alias=True) + "\n"
        replace_file(path, text.encode(), mode=OWNER_MODE, keeps_owner=True)
    except PermissionError as error:
        raise ConfigError(
            f"{path}: {error.strerror}",
            field="edge.api_keys",
            hint="run this command as the owner of the file",
        ) from error
    finally:
        os.close(folder)


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a valid file of API keys: {why}",
        field="edge.api_keys",
        hint="correct the file, or move it away and create keys with: tailrace key add NAME",
    )
