"""Settings of an edge: where it listens, which origins it serves, its limits."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Annotated, ClassVar, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from tailrace.edge.access.connections import RESERVED_FILES, ConnectionLimits
from tailrace.edge.access.head import Proxies
from tailrace.edge.access.rules import (
    ANY_ORIGIN,
    Authenticator,
    HostRule,
    OriginRule,
    Rules,
    is_loopback,
)
from tailrace.edge.origins.open_requests import OpenRequests
from tailrace.edge.quic.reuseport_bpf import MAX_PROCESSES, can_route_by_connection_id
from tailrace.edge.unread import DEFAULT_AFTER_S, UnreadDefault
from tailrace.ledger.frame import MAX_CALL_BODY_BYTES, Unread
from tailrace.ledger.links.transport import (
    Credentials,
    LinkAddress,
    LinkText,
    check_link,
    secret_bytes,
)
from tailrace.ledger.process.settings import (
    MAX_PORT,
    Address,
    CollectorUrl,
    Settings,
    parse_address,
    split_at_commas,
)


def _checked_origin(text: str) -> str:
    """A web origin as browsers spell it (RFC 6454, 6.2), or `*`."""
    if text in (ANY_ORIGIN, "null"):
        return text
    parts = urlsplit(text)
    if (
        not parts.scheme
        or not parts.netloc
        or f"{parts.scheme}://{parts.netloc}".lower() != text.lower()
    ):
        raise ValueError("write an origin, such as https://app.example, without a path; or *")
    return text.lower()


def _checked_network(text: str) -> str:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        raise ValueError("write an address or a network, such as 10.0.0.0/8") from None
    return text


One = TypeVar("One")
Several = Annotated[tuple[One, ...], NoDecode, BeforeValidator(split_at_commas)]
Origins = Several[Annotated[str, AfterValidator(_checked_origin)]]
Networks = Several[Annotated[str, AfterValidator(_checked_network)]]

MANY_CONNECTIONS = 20_000
MANY_PER_ADDRESS = 1_000
MANY_STREAMS_PER_ADDRESS = 8_192
MANY_STREAMS_PER_TENANT = 16_384


class EdgeConfig(Settings):
    """`[edge]`; an address is `HOST:PORT`, several are a list or `a:1,b:2`."""

    table: ClassVar[str] = "edge"
    retired: ClassVar[Mapping[str, str]] = {
        "host_models": "a TLS handshake no longer announces requests for a model",
        "max_unfinished_per_connection": "origins bound the streams that have not ended, with"
        " origin.max_streams and with the limit max_unfinished of an API key",
    }
    model_config = SettingsConfigDict(env_prefix="TAILRACE_EDGE_")

    http: Several[Address] = Field(("127.0.0.1:8080",), description="HTTP without TLS")
    https: Several[Address] = Field(
        ("127.0.0.1:8443",), description="HTTPS; only with a certificate"
    )
    http3: bool = Field(
        True, description="HTTP/3 too, over QUIC at the addresses of https, told by Alt-Svc"
    )
    processes: int = Field(
        1,
        ge=1,
        le=MAX_PROCESSES,
        description="that serve at the same addresses, each on a core; bounds of connections and"
        " rates are those of each",
    )
    origin: Several[LinkText] = Field(
        ("127.0.0.1:8470",),
        min_length=1,
        description="links of the origins: HOST:PORT, tls://HOST:PORT or unix:///PATH; a new stream"
        " goes to one that is ready, has the model and little to do, and when that one is lost to"
        " another of the same ledger",
    )
    origin_ca: Path | None = Field(
        None, description="PEM file of the CA that signs origins with tls://; default the system's"
    )
    origin_certificate: Path | None = Field(
        None, description="PEM file that this edge shows to origins with tls://"
    )
    origin_key: Path | None = Field(None, description="PEM file of its private key")
    origin_secret: SecretStr | None = Field(
        None,
        description="text that this edge and its origins know, by which each sees that the other"
        " is the one that is meant; origin.link_secret there",
    )
    certificate: Path | None = Field(None, description="PEM file, the chain's leaf first")
    key: Path | None = Field(None, description="PEM file of the certificate's private key")
    max_body_bytes: int = Field(
        1 << 20, ge=1024, le=MAX_CALL_BODY_BYTES, description="of a request; 413 beyond"
    )
    allowed_origins: Origins = Field(
        (),
        description="web origins whose pages may use this edge, besides pages that it is the"
        " origin of itself; * is any",
    )
    hosts: Several[str] = Field(
        (),
        description="names that requests may ask for in Host, besides localhost and addresses;"
        " 421 for others; by default any, but none where the edge listens on loopback alone",
    )
    api_keys: Path = Field(
        Path(".tailrace/api-keys.json"),
        description="file of API keys, which `tailrace key add` makes; where it is there nobody is"
        " served without a key or a resume token; read again when it changes",
    )
    allow_public_without_keys: bool = Field(
        False,
        description="listen on addresses that others can reach although there are no API keys",
    )
    operator_without_key: bool = Field(
        False,
        description="without API keys, let programs and pages on this machine use /v1/admin and"
        " the console's pages for operators; only where the edge listens on loopback alone and no"
        " proxy passes requests of others on to it",
    )
    trusted_proxies: Networks = Field(
        (),
        description="addresses or networks of proxies whose word on client, scheme and host counts",
    )
    forwarded_header: Literal["x-forwarded", "forwarded"] = Field(
        "x-forwarded",
        description="where those proxies say it: in X-Forwarded-For, -Proto and -Host, or in"
        " Forwarded (RFC 7239)",
    )
    max_connections: int = Field(
        MANY_CONNECTIONS, ge=1, description="open connections in all; more are closed at once"
    )
    max_connections_per_address: int = Field(
        MANY_PER_ADDRESS,
        ge=1,
        description="open connections of one address, or of one /64 of IPv6; those of loopback and"
        " of trusted proxies do not count by address",
    )
    max_streams_per_connection: int = Field(
        256, ge=1, le=65_536, description="open streams of one WebSocket; 429 beyond"
    )
    max_streams_per_address: int = Field(
        MANY_STREAMS_PER_ADDRESS,
        ge=1,
        description="open streams and other requests of one address, or of one /64 of IPv6, over"
        " all of its connections to one process; 429 beyond; those of loopback and of trusted"
        " proxies do not count by address",
    )
    max_streams_per_tenant: int = Field(
        MANY_STREAMS_PER_TENANT,
        ge=1,
        description="open streams and other requests of one tenant at one process; 429 beyond",
    )
    header_timeout_s: float = Field(
        10.0, gt=0, description="for a request's head to come; 408 beyond"
    )
    body_timeout_s: float = Field(
        30.0, gt=0, description="for a request's body to come, after its head; 408 beyond"
    )
    stalled_timeout_s: float = Field(
        300.0,
        gt=0,
        description="a client that takes nothing of what is sent to it for so long is cut off",
    )
    unread: Literal["run", "pause", "cancel"] = Field(
        "run",
        description="what becomes of a stream that was opened at this edge when nobody reads it any"
        " more, if its request does not say: whether closing a connection pauses or cancels it; the"
        " same on all edges",
    )
    unread_after_s: int = Field(
        DEFAULT_AFTER_S,
        ge=1,
        le=86_400,
        description="seconds without a reader until then; a client that resumes needs some",
    )
    lame_duck_s: float = Field(
        0.0,
        ge=0,
        description="after SIGTERM /readyz says 503 for so long before anything else happens, so"
        " that load balancers learn of it",
    )
    drain_s: float = Field(
        3.0,
        ge=0,
        description="then requests under way may end for so long; streams that have not are to be"
        " resumed on another edge",
    )
    telemetry: bool = Field(
        True, description="count and time requests, streams and frames: what /metrics shows"
    )
    metrics: Address | None = Field(
        None,
        description="HOST:PORT that serves Prometheus metrics under /metrics without a key, on a"
        " private network; each of several processes has the next port; default none, but on"
        " loopback, and for an administrator's key, /metrics is with everything else",
    )
    traces: CollectorUrl | None = Field(
        None,
        description="http:// or https:// address of an OpenTelemetry collector, which gets traces"
        " by OTLP over HTTP; needs the extra telemetry; default none",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key are given together or not at all")
        if self.certificate is None and self.https and "https" in self.model_fields_set:
            raise ValueError(
                f"https: {', '.join(self.https)} cannot be served without a certificate; give"
                " edge.certificate and edge.key (--certificate, --key), or leave https out"
            )
        credentials = self.origin_credentials
        check_link("origin", self.origin_addresses, credentials, needs_certificate=False)
        if not self.http and self.certificate is None:
            raise ValueError("give an http address, or a certificate and key for https")
        if (
            self.processes > 1
            and self.http3
            and self.certificate is not None
            and not can_route_by_connection_id()
        ):
            raise ValueError("several processes serve HTTP/3 on Linux only; give http3 = false")
        return self

    @model_validator(mode="after")
    def _operators_without_key_are_here(self) -> Self:
        if self.operator_without_key and not self.is_private:
            raise ValueError(
                "operator_without_key: others can reach this edge, by its addresses or through"
                " trusted_proxies; make a key instead: tailrace key add NAME --rights admin"
            )
        return self

    @model_validator(mode="after")
    def _every_process_has_a_port_for_metrics(self) -> Self:
        if self.traces is not None and not self.telemetry:
            raise ValueError("traces: without telemetry there are none")
        if self.metrics is not None:
            if not self.telemetry:
                raise ValueError("metrics: without telemetry nothing is counted")
            port = parse_address(self.metrics)[1]
            if port and port + self.processes - 1 > MAX_PORT:
                raise ValueError(
                    "metrics: each process has the next port, and there are not enough"
                )
        return self

    def metrics_address(self, process: int) -> tuple[str, int] | None:
        """Where one of the processes shows what it counts."""
        if self.metrics is None:
            return None
        host, port = parse_address(self.metrics)
        return host, port + process if port else 0

    @property
    def is_private(self) -> bool:
        """Nobody but this machine asks it, not even by way of a proxy."""
        return self.listens_on_loopback_alone and not self.trusted_proxies

    @property
    def listens_on_loopback_alone(self) -> bool:
        listening = (*self.http, *(self.https if self.certificate is not None else ()))
        return all(is_loopback(parse_address(text)[0]) for text in listening)

    @property
    def unread_default(self) -> UnreadDefault:
        return UnreadDefault(Unread.from_word(self.unread), self.unread_after_s)

    @property
    def origin_addresses(self) -> tuple[LinkAddress, ...]:
        return tuple(map(LinkAddress.parse, self.origin))

    @property
    def origin_credentials(self) -> Credentials:
        return Credentials(
            "edge.origin",
            self.origin_ca,
            self.origin_certificate,
            self.origin_key,
            secret_bytes(self.origin_secret),
        )

    @property
    def proxies(self) -> Proxies:
        networks = [ipaddress.ip_network(text) for text in self.trusted_proxies]
        return Proxies(networks, self.forwarded_header)


def too_few_files(config: EdgeConfig, open_files: int) -> bool:
    """Return True if the limit of open files is too low for the connections that are wanted.

    Those are `max_connections` where it is set, and half of its default otherwise: on most
    systems the default does not quite fit, and few edges come near it.
    """
    is_set = "max_connections" in config.model_fields_set
    wanted = config.max_connections if is_set else MANY_CONNECTIONS // 2
    return open_files < wanted + RESERVED_FILES


def access_rules(config: EdgeConfig, authenticator: Authenticator | None = None) -> Rules:
    """Who may ask an edge with these settings; without a `authenticator` nobody needs a key."""
    return Rules(
        proxies=config.proxies,
        hosts=HostRule(config.hosts, on=bool(config.hosts) or config.is_private),
        pages=OriginRule(config.allowed_origins),
        authenticator=authenticator or Authenticator(None, monotonic, lambda: datetime.now(UTC)),
    )


def open_requests(config: EdgeConfig) -> OpenRequests:
    """Return the count of what clients have open at the origins, with its limits."""
    proxies = config.proxies
    return OpenRequests(
        config.max_streams_per_address,
        config.max_streams_per_tenant,
        exempt=lambda address: is_loopback(address) or proxies.trusts(address),
    )


def connection_limits(config: EdgeConfig, open_files: int) -> ConnectionLimits:
    """How many clients may be connected, where so many files may be open."""
    proxies = config.proxies
    return ConnectionLimits(
        max(1, min(config.max_connections, open_files - RESERVED_FILES)),
        config.max_connections_per_address,
        exempt=lambda address: is_loopback(address) or proxies.trusts(address),
    )
