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

from tailrace.edge.access.authenticator import Authenticator
from tailrace.edge.access.connections import RESERVED_FILES, ConnectionLimits
from tailrace.edge.access.head import Proxies
from tailrace.edge.access.hosts import HostRule, is_loopback
from tailrace.edge.access.page_origins import ANY_ORIGIN, OriginRule
from tailrace.edge.access.rules import Rules
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
    """Return a web origin as browsers spell it (RFC 6454, 6.2), or `*`; raise ValueError."""
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
    """The settings in `[edge]`.

    An address is HOST:PORT. Several addresses are a list, or a string such as `a:1,b:2`.
    """

    table: ClassVar[str] = "edge"
    retired: ClassVar[Mapping[str, str]] = {
        "host_models": "a TLS handshake no longer announces requests for a model",
        "max_unfinished_per_connection": "origins bound the streams that have not ended, with"
        " origin.max_streams and with the limit max_unfinished of an API key",
    }
    model_config = SettingsConfigDict(env_prefix="TAILRACE_EDGE_")

    http: Several[Address] = Field(
        ("127.0.0.1:8080",), description="Addresses that serve HTTP without TLS."
    )
    https: Several[Address] = Field(
        ("127.0.0.1:8443",),
        description="Addresses that serve HTTPS; needs certificate and key.",
    )
    http3: bool = Field(
        True,
        description="Serve HTTP/3 as well, on the UDP ports of `https`. The Alt-Svc header"
        " advertises it to clients.",
    )
    processes: int = Field(
        1,
        ge=1,
        le=MAX_PROCESSES,
        description="Number of processes that serve the same addresses; at most one per CPU core"
        " is useful. Limits on connections and rates apply to each process separately.",
    )
    origin: Several[LinkText] = Field(
        ("127.0.0.1:8470",),
        min_length=1,
        description="Addresses of the origins: HOST:PORT, tls://HOST:PORT or unix:///PATH. A new"
        " stream goes to a ready origin that serves the model and has a low load. If an origin is"
        " lost, another origin of the same ledger continues its streams.",
    )
    origin_ca: Path | None = Field(
        None,
        description="PEM file of the CA that signs the certificates of tls:// origins. Default:"
        " the CAs of the system.",
    )
    origin_certificate: Path | None = Field(
        None,
        description="PEM file of the client certificate that this edge presents to tls:// origins.",
    )
    origin_key: Path | None = Field(
        None, description="PEM file of the private key of `origin_certificate`."
    )
    origin_secret: SecretStr | None = Field(
        None,
        description="Shared secret with which this edge and its origins prove their identity to"
        " each other. Use the same text in origin.link_secret of the origins.",
    )
    certificate: Path | None = Field(
        None, description="PEM file of the certificate chain for HTTPS, leaf first."
    )
    key: Path | None = Field(None, description="PEM file of the private key of `certificate`.")
    max_body_bytes: int = Field(
        1 << 20,
        ge=1024,
        le=MAX_CALL_BODY_BYTES,
        description="Maximum size of a request body, in bytes. A larger body is refused with 413.",
    )
    allowed_origins: Origins = Field(
        (),
        description="Web origins whose pages may use this edge (CORS), in addition to the edge's"
        " own pages. * allows all.",
    )
    hosts: Several[str] = Field(
        (),
        description="Host names that requests may use. localhost and IP addresses are always"
        " allowed, and requests with other names get 421. Empty (the default): all names are"
        " allowed, unless the edge listens on loopback only.",
    )
    api_keys: Path = Field(
        Path(".tailrace/api-keys.json"),
        description="File of API keys, written by `tailrace key add`. If the file exists, every"
        " request needs a key or a resume token. The file is read again when it changes.",
    )
    allow_public_without_keys: bool = Field(
        False,
        description="Allow the edge to listen on addresses that other machines can reach although"
        " it has no API keys. Everybody who reaches them can then use this edge.",
    )
    operator_without_key: bool = Field(
        False,
        description="On an edge without API keys, let programs and pages on this machine use"
        " /v1/admin and the console's pages for operators. Use it only if the edge listens on"
        " loopback and has no proxy in front of it.",
    )
    trusted_proxies: Networks = Field(
        (),
        description="Addresses or networks of reverse proxies whose forwarded headers are trusted"
        " for the client's address, the scheme and the host.",
    )
    forwarded_header: Literal["x-forwarded", "forwarded"] = Field(
        "x-forwarded",
        description="Headers that the trusted proxies send: x-forwarded stands for"
        " X-Forwarded-For, X-Forwarded-Proto and X-Forwarded-Host, forwarded for Forwarded (RFC"
        " 7239).",
    )
    max_connections: int = Field(
        MANY_CONNECTIONS,
        ge=1,
        description="Maximum number of open connections to each process. Further connections are"
        " closed at once.",
    )
    max_connections_per_address: int = Field(
        MANY_PER_ADDRESS,
        ge=1,
        description="Maximum number of open connections from one client address (or IPv6 /64"
        " network) to each process. Loopback and trusted proxies are exempt.",
    )
    max_streams_per_connection: int = Field(
        256,
        ge=1,
        le=65_536,
        description="Maximum number of open streams on one WebSocket. Further requests are refused"
        " with 429.",
    )
    max_streams_per_address: int = Field(
        MANY_STREAMS_PER_ADDRESS,
        ge=1,
        description="Maximum number of open requests from one client address (or IPv6 /64"
        " network), on all its connections to a process. Further requests are refused with 429."
        " Loopback and trusted proxies are exempt.",
    )
    max_streams_per_tenant: int = Field(
        MANY_STREAMS_PER_TENANT,
        ge=1,
        description="Maximum number of open requests of one tenant at each process. Further"
        " requests are refused with 429.",
    )
    header_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Timeout for receiving the headers of a request, in seconds. A slower request"
        " is refused with 408.",
    )
    body_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Timeout for receiving the body of a request, in seconds. A slower request is"
        " refused with 408.",
    )
    stalled_timeout_s: float = Field(
        300.0,
        gt=0,
        description="Time in seconds after which a client that reads nothing of its response is"
        " disconnected.",
    )
    unread: Literal["run", "pause", "cancel"] = Field(
        "run",
        description="What to do with a stream that has had no reader for unread_after_s. run:"
        " continue generating. pause: stop generating until a reader comes. cancel: end the"
        " stream. A request can override this. Use the same value on all edges.",
    )
    unread_after_s: int = Field(
        DEFAULT_AFTER_S,
        ge=1,
        le=86_400,
        description="Seconds without a reader after which `unread` applies to a stream. Choose a"
        " value that leaves clients enough time to reconnect.",
    )
    lame_duck_s: float = Field(
        0.0,
        ge=0,
        description="Time between SIGTERM and the shutdown, in seconds. /readyz already returns"
        " 503, so that load balancers send no new clients, but all requests are still served.",
    )
    drain_s: float = Field(
        3.0,
        ge=0,
        description="Maximum time in seconds for which a shutdown waits for open requests to end;"
        " it begins after lame_duck_s. Streams that are still open then end with an error, and"
        " their clients resume them on another edge.",
    )
    telemetry: bool = Field(
        True, description="Count and time requests, streams and frames for /metrics."
    )
    metrics: Address | None = Field(
        None,
        description="HOST:PORT on a private network that serves Prometheus metrics at /metrics"
        " without a key; each further process uses the next port. Without this setting, an edge"
        " with one process serves /metrics on its normal addresses, to administrators' keys or, if"
        " it has no API keys, to this machine only.",
    )
    traces: CollectorUrl | None = Field(
        None,
        description="URL of an OpenTelemetry collector to which the edge sends traces by OTLP over"
        " HTTP, such as http://127.0.0.1:4318. Needs the package extra `telemetry`.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Minimum level of the lines that are logged."
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("give certificate and key together, or neither")
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
            raise ValueError("several processes can serve HTTP/3 on Linux only; set http3 = false")
        return self

    @model_validator(mode="after")
    def _operators_without_key_are_here(self) -> Self:
        if self.operator_without_key and not self.is_private:
            raise ValueError(
                "operator_without_key: others can reach this edge, by its addresses or through"
                " trusted_proxies; make a key instead: tailrace key add NAME --rights admin --keys"
                " FILE, where FILE is the setting edge.api_keys"
            )
        return self

    @model_validator(mode="after")
    def _every_process_has_a_port_for_metrics(self) -> Self:
        if self.traces is not None and not self.telemetry:
            raise ValueError("traces: needs telemetry = true")
        if self.metrics is not None:
            if not self.telemetry:
                raise ValueError("metrics: needs telemetry = true")
            port = parse_address(self.metrics)[1]
            if port and port + self.processes - 1 > MAX_PORT:
                raise ValueError(
                    f"metrics: {self.processes} processes need {self.processes} ports from {port}"
                    f" on, which exceeds {MAX_PORT}; use a lower port"
                )
        return self

    def metrics_address(self, process: int) -> tuple[str, int] | None:
        """Return the address at which a process serves its metrics, if there is one."""
        if self.metrics is None:
            return None
        host, port = parse_address(self.metrics)
        return host, port + process if port else 0

    @property
    def is_private(self) -> bool:
        """True if only this machine can reach the edge, and no proxy forwards requests to it."""
        return self.listens_on_loopback_alone and not self.trusted_proxies

    @property
    def listens_on_loopback_alone(self) -> bool:
        """True if every address is a loopback address."""
        listening = (*self.http, *(self.https if self.certificate is not None else ()))
        return all(is_loopback(parse_address(text)[0]) for text in listening)

    @property
    def unread_default(self) -> UnreadDefault:
        """The default policy for streams without a reader."""
        return UnreadDefault(Unread.from_word(self.unread), self.unread_after_s)

    @property
    def origin_addresses(self) -> tuple[LinkAddress, ...]:
        """The addresses of the origins."""
        return tuple(map(LinkAddress.parse, self.origin))

    @property
    def origin_credentials(self) -> Credentials:
        """The credentials of the edge's links, and the CA file for the origins' certificates."""
        return Credentials(
            "edge.origin",
            self.origin_ca,
            self.origin_certificate,
            self.origin_key,
            secret_bytes(self.origin_secret),
        )

    @property
    def proxies(self) -> Proxies:
        """The trusted proxies."""
        networks = [ipaddress.ip_network(text) for text in self.trusted_proxies]
        return Proxies(networks, self.forwarded_header)


def too_few_files(config: EdgeConfig, open_files: int) -> bool:
    """Return True if the limit of open files is too low for the wanted number of connections.

    This number is `max_connections` if it is set, and half of its default otherwise. On most
    systems the limit is slightly below the default, but few edges need so many connections.
    """
    is_set = "max_connections" in config.model_fields_set
    wanted = config.max_connections if is_set else MANY_CONNECTIONS // 2
    return open_files < wanted + RESERVED_FILES


def access_rules(config: EdgeConfig, authenticator: Authenticator | None = None) -> Rules:
    """Return the access rules of these settings; without an authenticator no key is needed."""
    return Rules(
        proxies=config.proxies,
        hosts=HostRule(config.hosts, on=bool(config.hosts) or config.is_private),
        pages=OriginRule(config.allowed_origins),
        authenticator=authenticator or Authenticator(None, monotonic, lambda: datetime.now(UTC)),
    )


def open_requests(config: EdgeConfig) -> OpenRequests:
    """Return the counter of open requests by address and tenant, with the limits of `config`."""
    proxies = config.proxies
    return OpenRequests(
        config.max_streams_per_address,
        config.max_streams_per_tenant,
        exempt=lambda address: is_loopback(address) or proxies.trusts(address),
    )


def connection_limits(config: EdgeConfig, open_files: int) -> ConnectionLimits:
    """Return the limits of connections of a process whose limit of open files is `open_files`."""
    proxies = config.proxies
    return ConnectionLimits(
        max(1, min(config.max_connections, open_files - RESERVED_FILES)),
        config.max_connections_per_address,
        exempt=lambda address: is_loopback(address) or proxies.trusts(address),
    )
