"""What a caller may do, and for whom: the rights of API keys and of resume tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntFlag

from tailrace.ledger.errors import CallerError

_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class Right(IntFlag):
    """The first three may be said of one stream, by its resume token."""

    READ = 1
    CANCEL = 2
    STEER = 4
    GENERATE = 8
    STREAM_READ = 16
    STREAM_WRITE = 32
    ADMIN = 64

    @property
    def words(self) -> tuple[str, ...]:
        """As people write them: `stream-read`."""
        return tuple(_word(right) for right in Right if right in self)


OF_A_STREAM = Right.READ | Right.CANCEL | Right.STEER
ALL_RIGHTS = Right(sum(Right))
DEFAULT_TENANT = "default"
"""The tenant of keys for which none is named, and the only one whose keys can be operators'."""


def parse_rights(words: Iterable[str]) -> Right:
    """The rights that the words name, `admin` all of them; CallerError for one that names none."""
    known = {_word(right): right for right in Right}
    rights = Right(0)
    for word in words:
        if word not in known:
            raise CallerError(f"{word!r} is no right", field="rights", hint=", ".join(known))
        rights |= known[word]
    return ALL_RIGHTS if Right.ADMIN in rights else rights


def check_tenant(name: str) -> str:
    """The name as given; CallerError unless it is one that a tenant can have."""
    if _TENANT.fullmatch(name) is None:
        raise CallerError(
            f"{name!r} is no name of a tenant",
            field="tenant",
            hint="1 to 63 of a-z, 0-9, dot, hyphen and underscore; a letter or digit first",
        )
    return name


def _word(right: Right) -> str:
    return (right.name or "").lower().replace("_", "-")
