"""Content codings (RFC 9110, 8.4.1) that clients accept, and the choice of one for a stream."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

from tailrace.ledger.errors import CallerError

_ACCEPTED = re.compile(r"\s*([a-z*]+)\s*(?:;\s*q\s*=\s*([01](?:\.[0-9]{0,3})?))?\s*", re.IGNORECASE)


class StreamCoding(Enum):
    """When to compress a response that is sent while its stream runs."""

    NEVER = "never"
    REPLAYS = "replays"
    """Compress if enough frames exist already when the response begins."""
    ALWAYS = "always"
    """Compress every response, because the client refuses an uncompressed one."""


def coding_weights(values: Sequence[str]) -> dict[str, float]:
    """Return the weight of each coding in the values of Accept-Encoding (RFC 9110, 12.5.3).

    Members that are malformed, or that have other parameters, are left out.
    """
    weights: dict[str, float] = {}
    for member in ",".join(values).split(","):
        found = _ACCEPTED.fullmatch(member)
        if found is not None:
            weights[found[1].lower()] = float(found[2] or 1)
    return weights


def stream_coding(values: Sequence[str]) -> StreamCoding:
    """Return when to compress a stream for a client with these values of Accept-Encoding.

    Raises:
        CallerError: The client accepts neither zstd nor an uncompressed response.
    """
    weights = coding_weights(values)
    others = weights.get("*", 0.0)
    zstd = weights.get("zstd", others)
    # Without a weight of its own, `identity` is acceptable unless `*` excludes it.
    plain = weights.get("identity", others if "*" in weights else None)
    if zstd == 0:
        if plain == 0:
            raise CallerError(
                f"{', '.join(values)!r:.100} accepts no content coding in which streams are sent",
                code="not_acceptable",
                status=406,
                field="Accept-Encoding",
                hint="accept zstd or identity",
            )
        return StreamCoding.NEVER
    if plain == 0:
        return StreamCoding.ALWAYS
    prefers_plain = weights.get("identity", 0.0) > zstd
    return StreamCoding.NEVER if prefers_plain else StreamCoding.REPLAYS
