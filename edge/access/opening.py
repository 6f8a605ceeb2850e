"""The gate of an edge as it starts: with keys, or without where only this machine can ask."""

from __future__ import annotations

from datetime import UTC, datetime
from time import monotonic

import structlog

from edge.access.gate import Gate
from edge.access.key_file import read_keys
from edge.config import EdgeConfig
from ledger.errors import ConfigError

log = structlog.get_logger("tailrace.edge")


def open_gate(config: EdgeConfig) -> Gate:
    """Raises ConfigError for keys that cannot be read, or that are needed and not there."""
    path = config.api_keys
    is_named = "api_keys" in config.model_fields_set
    ring = read_keys(path).ring() if is_named or path.exists() else None
    if ring is None and not config.listens_on_loopback_alone:
        if not config.allow_public_without_keys:
            raise ConfigError(
                "others can reach an address that this edge listens on, and there are no API keys",
                field="edge.api_keys",
                hint=f"tailrace key add NAME --keys {path}; or listen on 127.0.0.1; or say"
                " --allow-public-without-keys",
            )
        log.warning("no API keys: everybody who reaches this edge may use it")
    elif ring is None:
        log.info("no API keys: everybody on this machine may use this edge", keys=str(path))
    return Gate(ring, monotonic, lambda: datetime.now(UTC))
