"""Rights and tenants of API keys and resume tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntFlag

from tailrace.ledger.errors import CallerError

_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class Right(IntFlag):
    """A set of rights. A resume token grants only READ, CANCEL and STEER, for one stream."""

    READ = 1
    CANCEL = 2
    STEER = 4
    GENERATE = 8
    STREAM_READ = 16
    STREAM_WRITE = 32
    ADMIN = 64

    @property
    def words(self) -> tuple[str, ...]:
        """The rights as words, such as `stream-read`."""
        return tuple(_word(right) for right in Right if right in self)


OF_A_STREAM = Right.READ | Right.CANCEL | Right.STEER
ALL_RIGHTS = Right(sum(Right))
DEFAULT_TENANT = "default"
"""Tenant of API keys without a tenant. Only keys of this tenant can have the right `admin`."""


def parse_rights(words: Iterable[str]) -> Right:
    """Return the rights that the words name; `admin` includes all others.

    Raises:
        CallerError: A word is not a right.
    """
    known = {_word(right): right for right in Right}
    rights = Right(0)
    for word in words:
        if word not in known:
            hint = "use " + ", ".join(known)
            raise CallerError(f"{word!r} is not a right", field="rights", hint=hint)
        rights |= known[word]
    return ALL_RIGHTS if Right.ADMIN in rights else rights


def check_tenant(name: str) -> str:
    """Return `name` if it is a valid name of a tenant.

    Raises:
        CallerError: The name is not valid.
    """
    if _TENANT.fullmatch(name) is None:
        raise CallerError(
            f"{name!r} is not a valid tenant name",
            field="tenant",
            hint="use 1 to 63 of a-z, 0-9, dot, hyphen and underscore, a letter or digit first",
        )
    return name


def _word(right: Right) -> str:
    return (right.name or "").lower().replace("_", "-")
