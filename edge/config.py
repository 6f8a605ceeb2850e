"""Settings of an edge: where it listens, which origins it serves, its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from ledger.frame import MAX_CALL_BODY_BYTES
from ledger.settings import Settings

MAX_PORT = 65_535


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT` or `[IPV6]:PORT` as (host, port); ValueError for anything else."""
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    well_bracketed = host in (bare, f"[{bare}]") and (":" in bare) == host.startswith("[")
    if not bare or not well_bracketed or not (port.isascii() and port.isdigit()):
        raise ValueError("write HOST:PORT, such as 127.0.0.1:8080 or [::1]:8080")
    if int(port) > MAX_PORT:
        raise ValueError(f"a port is at most {MAX_PORT}")
    return bare, int(port)


def _check_address(text: str) -> str:
    parse_address(text)
    return text


def _split_at_commas(value: object) -> object:
    """The environment and flags write several addresses as `a:1,b:2`."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


Address = Annotated[str, AfterValidator(_check_address)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_at_commas)]
Addresses = Annotated[tuple[Address, ...], NoDecode, BeforeValidator(_split_at_commas)]


class EdgeConfig(Settings):
    """`[edge]`; an address is `HOST:PORT`, several are a list or `a:1,b:2`."""

    table: ClassVar[str] = "edge"
    model_config = SettingsConfigDict(env_prefix="TAILRACE_EDGE_")

    http: Addresses = Field(("127.0.0.1:8080",), description="HTTP without TLS")
    https: Addresses = Field(
        ("127.0.0.1:8443",), description="HTTPS and HTTP/3; only with a certificate"
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
        ("*",), description="web origins whose pages may use /v1/stream; * is any"
    )
    max_streams_per_connection: int = Field(
        256, ge=1, le=65_536, description="open streams of one WebSocket; 429 beyond"
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
    def origin_addresses(self) -> tuple[tuple[str, int], ...]:
        return tuple(parse_address(text) for text in self.origin)
