"""Settings of an origin and of its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from tailrace.ledger.links.transport import (
    UNIX,
    Credentials,
    LinkAddress,
    LinkText,
    check_link,
    secret_bytes,
)
from tailrace.ledger.process.settings import (
    Address,
    CollectorUrl,
    Settings,
    parse_address,
    split_at_commas,
)
from tailrace.origin.formats import Formats, HeadFormat, KvFormat, WeightsFormat

DEMO_MODEL = Path(__file__).parent / "demo" / "model"
MAX_RETENTION_S = 100 * 365 * 86_400
"""Longest time that a stream can be kept, or wait to be packed."""
URL_SCHEMES = ("postgresql://", "postgres://")
LEAST_PATIENCE_S = 2.0
"""An origin whose event loop is busy for a second is not dead, however short its lease."""
HEARTBEATS_IN_PATIENCE = 4
MOST_HEARTBEAT_S = 5.0
"""PROTOCOL.md promises a heartbeat so often."""

ANY_HOST = ("0.0.0.0", "::", "*")
"""What a socket listens on that listens on every address."""


def _is_open_url(value: str) -> bool:
    """Of a web server, and without anything secret."""
    try:
        parts = urlsplit(value)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc


class LedgerConfig(Settings):
    """`[ledger]`: where the streams are kept, and for how long."""

    table: ClassVar[str] = "ledger"
    model_config = SettingsConfigDict(env_prefix="TAILRACE_LEDGER_")

    path: Path | None = Field(None, description="SQLite file; default DATA/ledger.db")
    url: SecretStr | None = Field(
        None,
        description="postgresql://USER:PASSWORD@HOST/DATABASE instead of a file: origins with the"
        " same one share their streams; write it in TAILRACE_LEDGER_URL where files are public",
    )
    owner: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="this origin's name in a shared ledger, to which a random part is added;"
        " default HOST:PID",
    )
    lease_s: float = Field(
        3.0,
        ge=0.5,
        le=60,
        description="an origin that a shared ledger has not heard of for so long is taken for"
        " dead, and its streams go to the others; edges leave a link that is silent for so long,"
        " but for 2 s at least",
    )
    retention_s: float = Field(
        86_400,
        gt=0,
        le=MAX_RETENTION_S,
        description="a stream is kept this long after its last read or write",
    )
    sweep_s: float = Field(
        60, gt=0, le=86_400, description="time between removals of expired streams"
    )
    max_stream_bytes: int = Field(
        64 * 1024 * 1024,
        ge=64 * 1024,
        description="most that one stream may hold in a file; a generation that reaches it ends"
        " as `length`",
    )
    max_ledger_bytes: int | None = Field(
        None,
        ge=1024 * 1024,
        description="most that the file may hold; beyond it ended streams go before their time,"
        " then new ones are refused; default 80 % of the disk",
    )
    object_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="of that, what Durable Streams and their subscriptions may hold; generations"
        " have the rest, and neither pushes the other out",
    )
    cold_after_s: float = Field(
        600,
        ge=0,
        le=MAX_RETENTION_S,
        description="an ended stream that nobody has read for so long is compressed in the file",
    )

    history: Path | None = Field(
        None,
        description="SQLite file of what the warm pool has lived through; default history.db beside"
        " the ledger; a shared ledger's database has one of its own",
    )
    history_days: float = Field(
        30,
        ge=0,
        le=3650,
        description="a request, a load and a decision are kept there so long, and then requests as"
        " counts by the hour; 0: nothing is recorded",
    )
    history_requests: int = Field(
        5_000_000, ge=1000, description="most requests that are kept there one by one"
    )

    @property
    def patience_s(self) -> float:
        """The silence after which an edge takes its origin for dead: so does the ledger then."""
        return max(self.lease_s, LEAST_PATIENCE_S)

    @property
    def heartbeat_s(self) -> float:
        """Between heartbeats of an origin; one may be late, or two."""
        return min(self.patience_s / HEARTBEATS_IN_PATIENCE, MOST_HEARTBEAT_S)

    @model_validator(mode="after")
    def _is_one_place(self) -> Self:
        # About the whole table, because an error of one field quotes it, password and all.
        if self.url is not None and self.path is not None:
            raise ValueError("give path or url, not both")
        if self.url is not None and not self.url.get_secret_value().startswith(URL_SCHEMES):
            raise ValueError("url: write postgresql://USER:PASSWORD@HOST/DATABASE")
        return self


class OriginConfig(Settings):
    """`[origin]`: the model, its workers and the link that edges connect to."""

    table: ClassVar[str] = "origin"
    model_config = SettingsConfigDict(env_prefix="TAILRACE_ORIGIN_")

    link: LinkText = Field(
        "127.0.0.1:8470",
        description="what edges connect to: HOST:PORT, tls://HOST:PORT or unix:///PATH",
    )
    link_certificate: Path | None = Field(
        None, description="PEM file that a link with tls:// shows, the chain's leaf first"
    )
    link_key: Path | None = Field(None, description="PEM file of its private key")
    link_ca: Path | None = Field(
        None,
        description="PEM file of the CA that signs edges, and origins that share the ledger: over"
        " tls:// nobody else is let in",
    )
    link_secret: SecretStr | None = Field(
        None,
        description="text that edges must know, and origins that share the ledger, whatever the"
        " link is; edge.origin_secret there",
    )
    address: Address | None = Field(
        None,
        description="HOST:PORT at which origins that share the ledger reach this one's link;"
        " default link, or where that names no single host the address that the database sees",
    )
    data: Path = Field(Path(".tailrace"), description="folder of ledger and signing keys")
    keys: Path | None = Field(
        None,
        description="file of the keys that sign resume tokens, made on first use; default"
        " DATA/resume-keys.json; origins that share a ledger need the same one",
    )
    model: Path = Field(DEMO_MODEL, description="checkpoint folder")
    model_name: str | None = Field(
        None,
        min_length=1,
        description="name in requests; default demo for the demo model, else the folder's name",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where the model runs; auto: a GPU that the kernels run on"
    )
    workers: int = Field(1, ge=1, le=64, description="worker processes, one loaded model each")
    worker_silence_s: float = Field(
        30.0,
        ge=2,
        le=3600,
        description="a worker that says nothing for so long is taken for hung and killed, and its"
        " streams go on on the next; more for models whose steps take longer",
    )
    worker_start_s: float = Field(
        600.0,
        ge=10,
        le=86_400,
        description="the same for a worker that loads or compiles, whose stages take longer",
    )
    step_ms: float = Field(
        50.0,
        gt=0,
        le=60_000,
        description="how long an engine step should take: what a running stream waits for its next"
        " token; steps take in as many prompt tokens and streams as that allows",
    )
    running_streams: int = Field(
        64,
        ge=1,
        le=4096,
        description="streams of a worker that are decoded at a time at most; fewer where so many"
        " would make steps longer than step_ms",
    )
    fork_workers: bool = Field(
        True,
        description="workers of a model are forked from one process that has imported what they"
        " need, where that is safe; false: each imports for itself",
    )
    kv_mib: int | None = Field(
        None,
        ge=1,
        description="size of the KV cache; default 512 on a CPU, on a GPU 80 % of what is free"
        " after the weights",
    )
    weights: WeightsFormat = Field(
        "auto",
        description="format of the layers' weights, made at load; auto: as the checkpoint has them",
    )
    kv_cache: KvFormat = Field(
        "auto",
        description="format of keys and values; auto: fp32 on a CPU, on a GPU bf16, or fp32 for"
        " a small model; fp8 needs a GPU of sm_89 or a CPU",
    )
    head: HeadFormat = Field(
        "auto", description="format of the LM head, made at load; auto: as the checkpoint has it"
    )
    dependent_launches: bool = Field(
        False,
        description="on a GPU of sm_90 or more, a launch of a step begins while those ahead still"
        " run; never changes a token",
    )
    speculate: Literal["off", "prompt-lookup"] = Field(
        "off",
        description="guess tokens from the text so far and check several at once; never changes"
        " the text, and pays where a step of several rows costs little more than one",
    )
    draft_model: Path | None = Field(
        None, description="smaller checkpoint with the same tokenizer that guesses tokens instead"
    )
    open_objects: bool = Field(
        False,
        description="JSON objects may have members that their schema does not list, as JSON Schema"
        " has it; false: a schema that lists properties and says nothing else allows no others",
    )
    filter: str | None = Field(
        None,
        pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$",
        description="module:factory of a filter that sees each stream's text first and may end it",
    )
    objects: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_at_commas)] = Field(
        (),
        description="module:class of objects of your own, which edges bind by their wrangler"
        " files; they run in the origin's process",
    )
    operator_text: bool = Field(
        True,
        description="operators who ask see prompts and texts of streams; each time is logged",
    )
    cpu_memory_mib: int | None = Field(
        None,
        ge=1,
        description="of several models, most that those that are loaded may take of this machine's"
        " memory together; default no cap",
    )
    gpu_memory_mib: int | None = Field(
        None,
        ge=1,
        description="the same of the GPU's; needed where several models are to run on one",
    )
    policy: str = Field(
        "adaptive-ttl",
        description="how long a model that nobody asks stays loaded, where there are several;"
        " greedy-dual: until another one needs its room; docs/warm-pools.md has the others",
    )
    shadow_policy: str | None = Field(
        None, description="another one that decides beside it, and is not followed"
    )
    cold_cost_gpu_s: float = Field(
        60.0,
        gt=0,
        le=1e6,
        description="what a cold start is worth to you: so many seconds of keeping a model loaded"
        " that nobody asks",
    )
    cold_wait_s: float = Field(
        120.0,
        gt=0,
        le=3600,
        description="a request for a model that is not loaded waits for it so long at most, then"
        " it gets 503",
    )
    max_streams: int = Field(256, ge=1, description="running and waiting streams; 503 beyond")
    overload_wait_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="when a stream that is not of class batch has waited so long to be begun, the"
        " origin does less, step by step; see docs/origins.md",
    )
    idle_stream_s: float = Field(
        21_600.0,
        ge=60,
        le=2_592_000,
        description="a stream that nobody reads and that makes nothing for so long is ended, as"
        " failed and retryable: whatever it waits for, others need its room",
    )
    drain_s: float = Field(
        0.0,
        ge=0,
        description="after SIGTERM streams may end for so long, while edges ask other origins for"
        " new ones; what has not ended goes on at one that shares the ledger, or after a restart",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )
    require_token: bool = Field(
        False, description="refuse resume, cancel and steer without a token"
    )
    traces: CollectorUrl | None = Field(
        None,
        description="http:// or https:// address of an OpenTelemetry collector, which gets a span"
        " for each stream by OTLP over HTTP; needs the extra telemetry; default none",
    )
    metrics: Address | None = Field(
        None, description="HOST:PORT that serves Prometheus metrics under /metrics; default none"
    )
    producer: str | None = Field(
        None,
        description="module:factory of a Python producer that is served instead of a model",
    )
    upstream: str | None = Field(
        None, description="URL that ends in /v1 of an OpenAI-compatible server to serve"
    )
    upstream_model: str | None = Field(
        None, min_length=1, description="the model's name there; default the only one it lists"
    )
    upstream_key_env: str | None = Field(
        None, min_length=1, description="environment variable that holds that server's key"
    )
    upstream_lost: Literal["continue", "end"] = Field(
        "continue",
        description="when that server is lost in the middle of a text: continue asks for the rest,"
        " which cannot be exact; end ends the stream as origin_lost",
    )
    upstream_connect_s: float = Field(5.0, gt=0, le=600, description="time for connecting to it")
    upstream_first_token_s: float = Field(
        120.0, gt=0, le=3600, description="time for its first token, from the request on"
    )
    upstream_between_tokens_s: float = Field(
        30.0, gt=0, le=3600, description="time between its tokens, after which it has stalled"
    )
    upstream_retry_s: float = Field(
        60.0, ge=0, le=3600, description="a stream waits so long for a server that was lost"
    )
    text_streams: int = Field(
        64,
        ge=1,
        le=4096,
        description="streams that a worker of a producer or an upstream server takes at a time",
    )

    @field_validator("producer")
    @classmethod
    def _is_place(cls, value: str | None) -> str | None:
        module, _, factory = (value or "m:f").partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), factory)):
            raise ValueError("write module:factory, such as speech.serve:make")
        return value

    @model_validator(mode="after")
    def _serves_one_thing(self) -> Self:
        # About the whole table, because an error of one field quotes it, password and all.
        if self.upstream is not None and not _is_open_url(self.upstream):
            raise ValueError(
                "upstream: write http://HOST:PORT/v1, without a key or password in it;"
                " upstream_key_env names the variable that holds the key"
            )
        if self.producer is not None and self.upstream is not None:
            raise ValueError("give producer or upstream, not both")
        return self

    @property
    def formats(self) -> Formats:
        """Of the model's numbers."""
        return Formats(self.weights, self.kv_cache, self.head)

    @property
    def served_name(self) -> str:
        """What requests call a checkpoint folder's model."""
        if self.model_name is not None:
            return self.model_name
        return "demo" if self.model == DEMO_MODEL else self.model.resolve().name

    @model_validator(mode="after")
    def _link_is_what_it_is_to_be(self) -> Self:
        check_link("link", (self.link_address,), self.link_credentials, needs_certificate=True)
        return self

    @property
    def link_address(self) -> LinkAddress:
        return LinkAddress.parse(self.link)

    @property
    def link_credentials(self) -> Credentials:
        return Credentials(
            "origin.link",
            self.link_ca,
            self.link_certificate,
            self.link_key,
            secret_bytes(self.link_secret),
        )

    @property
    def reached_at(self) -> tuple[str | None, int] | None:
        """Where other origins reach the link; no host for that which the database sees."""
        if self.address is None and self.link_address.scheme == UNIX:
            return None
        place = self.link_address if self.address is None else parse_address(self.address)
        host, port = place[0], place[1]
        return (None if host in ANY_HOST else host, port) if port else None

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        return None if self.metrics is None else parse_address(self.metrics)

    @property
    def keys_path(self) -> Path:
        return self.keys or self.data / "resume-keys.json"


class StreamsConfig(Settings):
    """`[streams]`: what the streams under /v1/stream/ and their subscriptions may do."""

    table: ClassVar[str] = "streams"
    model_config = SettingsConfigDict(env_prefix="TAILRACE_STREAMS_")

    long_poll_s: float = Field(20, gt=0, le=3600, description="longest a long poll waits")
    sse_s: float = Field(60, gt=0, le=86_400, description="an event stream ends after so long")
    durability: Literal["process", "power"] = Field(
        "process", description="of what is appended: process survives kill -9, power a power cut"
    )
    subscriptions: bool = Field(
        False,
        description="whether clients may have webhooks called, or workers woken, when streams"
        " change",
    )
    webhook_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_at_commas)] = Field(
        (),
        description="hosts that webhooks may call although they are private, or without TLS;"
        " any public host may be called over https",
    )
