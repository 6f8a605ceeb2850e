"""Settings of an edge: where it listens, which origins it serves, its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from edge.session import MAX_UNFINISHED
from ledger.frame import MAX_CALL_BODY_BYTES
from ledger.settings import Address, Settings, parse_address, split_at_commas

Names = Annotated[tuple[str, ...] | None, NoDecode, BeforeValidator(split_at_commas)]
Addresses = Annotated[tuple[Address, ...], NoDecode, BeforeValidator(split_at_commas)]

ANY_ORIGIN = "*"
"""Pages of every origin."""


class EdgeConfig(Settings):
    """`[edge]`; an address is `HOST:PORT`, several are a list or `a:1,b:2`."""

    table: ClassVar[str] = "edge"
    model_config = SettingsConfigDict(env_prefix="TAILRACE_EDGE_")

    http: Addresses = Field(("127.0.0.1:8080",), description="HTTP without TLS")
    https: Addresses = Field(("127.0.0.1:8443",), description="HTTPS; only with a certificate")
    http3: bool = Field(
        False, description="HTTP/3 too, over QUIC at the addresses of https, told by Alt-Svc"
    )
    origin: Addresses = Field(
        ("127.0.0.1:8470",),
        min_length=1,
        description="links of the origins that share a ledger; the first that answers is used,"
        " the next one when it is lost",
    )
    certificate: Path | None = Field(None, description="PEM file, the chain's leaf first")
    key: Path | None = Field(None, description="PEM file of the certificate's private key")
    max_body_bytes: int = Field(
        1 << 20, ge=1024, le=MAX_CALL_BODY_BYTES, description="of a request; 413 beyond"
    )
    allowed_origins: Names = Field(
        None,
        description="web origins whose pages may use /v1/stream and /v1/generate; * is any;"
        " by default any may use /v1/stream and none /v1/generate",
    )
    max_streams_per_connection: int = Field(
        256, ge=1, le=65_536, description="open streams of one WebSocket; 429 beyond"
    )
    max_unfinished_per_connection: int = Field(
        MAX_UNFINISHED,
        ge=1,
        le=65_536,
        description="streams that one WebSocket has opened and not seen end; 429 beyond",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )

    @model_validator(mode="after")
    def _certificate_and_key_go_together(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key are given together or not at all")
        return self

    @model_validator(mode="after")
    def _listens_somewhere(self) -> Self:
        if not self.http and self.certificate is None:
            raise ValueError("give an http address, or a certificate and key for https")
        return self

    @property
    def stream_origins(self) -> tuple[str, ...]:
        return (ANY_ORIGIN,) if self.allowed_origins is None else self.allowed_origins

    @property
    def generate_origins(self) -> tuple[str, ...]:
        """None unless they are named: any page that somebody here opens could use the model."""
        return self.allowed_origins or ()

    @property
    def origin_addresses(self) -> tuple[tuple[str, int], ...]:
        return tuple(parse_address(text) for text in self.origin)
