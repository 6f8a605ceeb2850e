"""The id of a chat, which its client chooses."""

from __future__ import annotations

from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import RESERVED_NAME

MAX_CHAT_CHARS = 128
"""Maximum length of a chat's id, in characters."""
_RESERVED = (".", "..", RESERVED_NAME)


def check_chat(name: str, field: str = "id") -> str:
    """Return the id of a chat. Raises CallerError if it could not be part of a URL."""
    fits = 0 < len(name) <= MAX_CHAT_CHARS and name.isprintable()
    if fits and not {"/", "\\"} & {*name} and name not in _RESERVED:
        return name
    raise CallerError(
        "not a valid chat id",
        field=field,
        hint=f"1 to {MAX_CHAT_CHARS} printable characters without a slash or a backslash",
    )
