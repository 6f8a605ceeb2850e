"""Names of streams: what may follow `/v1/stream/`, and which of them are generations."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from ledger.errors import NotFound
from ledger.objects.object import MAX_KEY_CHARS

ROOT = "/v1/stream/"
RESERVED = "__ds"
"""The first segment of names that are no streams: the protocol's own resources."""

_GENERATION = re.compile("[0-9a-f]{32}")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\]")


def check_name(name: str) -> str:
    """`name`, if a stream can have it: segments of a path, none of which leads elsewhere.

    Raises NotFound otherwise, as for any stream that is not there.
    """
    segments = name.split("/")
    fits = 0 < len(name) <= MAX_KEY_CHARS and not _UNSAFE.search(name)
    if not fits or segments[0] == RESERVED or any(part in ("", ".", "..") for part in segments):
        raise NotFound("no stream can have this name")
    return name


def named_by(link: str) -> str:
    """The name in a stream's path or URL; NotFound if `link` is neither."""
    try:
        path = urlsplit(link).path
    except ValueError:
        path = ""
    if not path.startswith(ROOT):
        raise NotFound(f"no stream is at {link!r}", hint=f"its path begins with {ROOT}")
    return check_name(unquote(path[len(ROOT) :]))


def generation_id(name: str) -> bytes | None:
    """The id in the name of a generation; None if it can be none."""
    return bytes.fromhex(name) if _GENERATION.fullmatch(name) else None
