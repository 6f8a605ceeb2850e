"""Which object a path under /v1/stream/ names, and the URL that its request had."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from starlette.types import Scope

from ledger.errors import CallerError, NotFound

PREFIX = b"/v1/stream/"
RESERVED = b"__ds"
"""The segment below which the subscription API lies, not streams."""
MAX_NAME_CHARS = 512

_HOST = re.compile(r"[A-Za-z0-9._~-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
# An encoded slash would make two names out of one for whoever decodes at another place.
_ENCODED_SLASH = re.compile(rb"%2f", re.IGNORECASE)


class Target(NamedTuple):
    """An object's class and name."""

    object: str
    name: str


def parse_target(raw_path: bytes) -> Target:
    """The object that a path, as it came, names.

    A stream's name is the rest of the path, percent-decoded; that of the subscription API is
    left as it is. Raises NotFound for whatever can be no name, CallerError for one too long.
    """
    if not raw_path.startswith(PREFIX) or not raw_path.isascii():
        raise _nothing_here()
    rest = raw_path.removeprefix(PREFIX)
    if len(rest) > 12 * MAX_NAME_CHARS:  # four bytes a character, each written as three
        raise _too_long()
    segments = rest.split(b"/")
    if segments[0] == RESERVED:
        return Target("subscription", b"/".join(segments[1:]).decode("ascii") or "/")
    return Target("stream", _stream_name(rest, segments))


def _stream_name(rest: bytes, segments: list[bytes]) -> str:
    decoded = [unquote_to_bytes(segment) for segment in segments]
    if _ENCODED_SLASH.search(rest) or decoded[0] == RESERVED:
        raise _nothing_here()
    if not all(map(_is_segment, decoded)):
        raise _nothing_here()
    try:
        name = b"/".join(decoded).decode("utf-8")
    except UnicodeDecodeError:
        raise _nothing_here() from None
    if len(name) > MAX_NAME_CHARS:
        raise _too_long()
    return name


def _is_segment(segment: bytes) -> bool:
    """Not empty, no step up or down, nothing that a log or a terminal would act on."""
    return segment not in (b"", b".", b"..") and not any(
        byte < 0x20 or byte == 0x7F for byte in segment
    )


def request_url(scope: Scope) -> str:
    """The absolute URL as the client sent it; CallerError for a Host that is none."""
    host = next((value for name, value in scope["headers"] if name == b"host"), None)
    if host is None:  # HTTP/1.0 needs none
        address, port = scope["server"]
        host = f"{address}:{port}".encode()
    text = host.decode("latin-1")
    if _HOST.fullmatch(text) is None:
        raise CallerError("not a host", field="Host")
    target = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    return f"{scope['scheme']}://{text}{target.decode('ascii')}"


def _nothing_here() -> NotFound:
    return NotFound(
        "no such stream",
        code="unknown_stream",
        field="path",
        hint="a stream's name is one or more segments, none of them empty, . or ..",
    )


def _too_long() -> CallerError:
    return CallerError(
        "the stream's name is too long",
        field="path",
        hint=f"at most {MAX_NAME_CHARS} characters",
    )
