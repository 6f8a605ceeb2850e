"""API keys: whose they are, what they allow, how much of it.

A key is `tr_ID_SECRET`. The secret has 256 random bits, so that a plain SHA-256 of the key is all
that needs to be kept of it, and a slow hash would protect nothing: there is nothing to guess.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from ledger.errors import Unauthorized
from ledger.rights import Right

ID_BYTES = 6
SECRET_BYTES = 32
PREFIX = "tr_"
_KEY = re.compile(r"tr_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")
_NO_DIGEST = bytes(32)


class Limits(NamedTuple):
    """What bounds a tenant; None is no bound."""

    requests_per_s: float | None = None
    max_concurrent: int | None = None
    max_unfinished: int | None = None
    tokens_per_s: int | None = None


class ApiKey(NamedTuple):
    """What is kept of a key; `digest` is the SHA-256 of all its text."""

    id: str
    name: str
    tenant: str
    rights: Right
    digest: bytes
    created: datetime
    expires: datetime | None = None
    revoked: datetime | None = None

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
        """The key that `text` is; Unauthorized, with one text for all causes, if it is none."""
        found = _KEY.fullmatch(text)
        key = self._keys.get(found[1]) if found else None
        # An unknown key costs the same work as a known one: timing tells nothing.
        expected = _NO_DIGEST if key is None else key.digest
        matches = hmac.compare_digest(digest_of(text), expected)
        if key is None or not matches or key.state(now) != "active":
            raise Unauthorized(
                "the API key is not valid",
                code="bad_key",
                field="Authorization",
                hint="it may be mistyped, revoked or expired: tailrace key list",
            )
        return key

    def limits(self, tenant: str) -> Limits:
        return self._limits.get(tenant, Limits())


def make_key(random: Callable[[int], bytes]) -> tuple[str, str]:
    """A new key's id and its whole text, which is kept nowhere."""
    id_ = random(ID_BYTES).hex()
    secret = base64.urlsafe_b64encode(random(SECRET_BYTES)).rstrip(b"=").decode()
    return id_, f"{PREFIX}{id_}_{secret}"


def digest_of(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()
