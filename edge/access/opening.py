"""The gate of an edge as it starts: with keys, or without where only this machine can ask."""

from __future__ import annotations

from datetime import UTC, datetime
from time import monotonic

import structlog

from edge.access.gate import Gate
from edge.access.key_file import read_keys
from edge.access.keys import KeyRing
from edge.config import EdgeConfig
from ledger.errors import ConfigError

log = structlog.get_logger("tailrace.edge")


def require_keys(config: EdgeConfig) -> KeyRing | None:
    """The API keys, if there are any.

    Raises ConfigError for keys that cannot be read, or that are needed and not there.
    """
    path = config.api_keys
    if "api_keys" in config.model_fields_set or path.exists():
        return read_keys(path).ring()
    if config.listens_on_loopback_alone or config.allow_public_without_keys:
        return None
    raise ConfigError(
        "others can reach an address that this edge listens on, and there are no API keys",
        field="edge.api_keys",
        hint=f"tailrace key add NAME --keys {path}; or listen on 127.0.0.1; or say"
        " --allow-public-without-keys",
    )


def open_gate(config: EdgeConfig) -> Gate:
    """Raises ConfigError as `require_keys` does."""
    ring = require_keys(config)
    if ring is None and config.listens_on_loopback_alone:
        log.info("no API keys: everybody on this machine may use this edge")
    elif ring is None:
        log.warning("no API keys: everybody who reaches this edge may use it")
    return Gate(ring, monotonic, lambda: datetime.now(UTC))
