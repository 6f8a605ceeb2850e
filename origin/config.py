"""Settings of an origin and of its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
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
from tailrace.ledger.usage import DEFAULT_USAGE_RETENTION_S
from tailrace.origin.formats import Formats, HeadFormat, KvFormat, WeightsFormat

DEMO_MODEL = Path(__file__).parent / "demo" / "model"
MAX_RETENTION_S = 100 * 365 * 86_400
"""Maximum retention of a stream, and maximum time before it is compressed, in seconds."""
URL_SCHEMES = ("postgresql://", "postgres://")
MIN_SILENCE_TIMEOUT_S = 2.0
"""Minimum of silence_timeout_s in seconds, since a busy event loop may be silent for a second."""
HEARTBEATS_PER_TIMEOUT = 4
MOST_HEARTBEAT_S = 5.0
"""Maximum interval between two Heartbeats in seconds, which PROTOCOL.md promises."""

ANY_HOST = ("0.0.0.0", "::", "*")
"""Host names in the address of a socket that listens on all interfaces."""


def _is_open_url(value: str) -> bool:
    """Return True if `value` is an http or https URL without user name and password."""
    try:
        parts = urlsplit(value)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc


def gpu_names(value: object) -> object:
    """Convert the setting `gpus` to GPU names; it is a list or a comma-separated text."""
    if isinstance(value, list | tuple):
        return tuple(str(one) for one in value)
    return split_at_commas(value)


class LedgerConfig(Settings):
    """Settings of `[ledger]`: where streams are stored, and for how long."""

    table: ClassVar[str] = "ledger"
    model_config = SettingsConfigDict(env_prefix="TAILRACE_LEDGER_")

    path: Path | None = Field(
        None, description="SQLite file of the ledger. Default: ledger.db in the folder origin.data."
    )
    url: SecretStr | None = Field(
        None,
        description="PostgreSQL database that holds the ledger instead of a SQLite file:"
        " postgresql://USER:PASSWORD@HOST/DATABASE. Origins with the same database share their"
        " streams. To keep the password out of this file, set TAILRACE_LEDGER_URL.",
    )
    owner: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="Name of this origin in a shared ledger. A random part is added to it."
        " Default: HOST:PID.",
    )
    lease_s: float = Field(
        3.0,
        ge=0.5,
        le=60,
        description="Lease time in seconds. An origin that has not renewed its lease in a shared"
        " ledger for this long is considered dead, and other origins take over its streams. Edges"
        " drop their link to an origin that has sent nothing for this long, but not before 2 s.",
    )
    retention_s: float = Field(
        86_400,
        gt=0,
        le=MAX_RETENTION_S,
        description="Seconds for which an ended stream is kept after it was last read or written.",
    )
    usage_retention_s: float = Field(
        DEFAULT_USAGE_RETENTION_S,
        ge=40 * 86_400,
        le=MAX_RETENTION_S,
        description="Seconds for which the usage of a stream (its numbers of tokens, not its text)"
        " is kept after its end. At least 40 days, because monthly budgets are computed from it."
        " Default: 400 days.",
    )
    sweep_s: float = Field(
        60, gt=0, le=86_400, description="Interval in seconds at which expired streams are removed."
    )
    max_stream_bytes: int = Field(
        64 * 1024 * 1024,
        ge=64 * 1024,
        description="Maximum size of one stream in the ledger, in bytes. A generation that reaches"
        " it ends with finish reason `length`.",
    )
    max_ledger_bytes: int | None = Field(
        None,
        ge=1024 * 1024,
        description="Maximum size of the ledger file, in bytes. When it is reached, ended streams"
        " are removed before their retention time is over. If that is not enough, new streams are"
        " refused. Default: 80 % of the disk.",
    )
    object_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Share of max_ledger_bytes for Durable Streams and their subscriptions, from 0"
        " to 1. Generations have the rest, and neither can use the other's share.",
    )
    cold_after_s: float = Field(
        600,
        ge=0,
        le=MAX_RETENTION_S,
        description="Seconds without a reader after which an ended stream is compressed in the"
        " ledger file.",
    )

    history: Path | None = Field(
        None,
        description="SQLite file with the history of the warm pool: requests for models, loads and"
        " decisions. Default: history.db next to the ledger. With a shared ledger the history is"
        " in the same database.",
    )
    history_days: float = Field(
        30,
        ge=0,
        le=3650,
        description="Days for which the history keeps individual requests, loads and decisions."
        " After that it keeps only hourly counts. 0: record nothing.",
    )
    history_requests: int = Field(
        5_000_000,
        ge=1000,
        description="Maximum number of individual requests in the history. The oldest are removed"
        " first.",
    )

    @property
    def silence_timeout_s(self) -> float:
        """Seconds of silence after which an edge considers this origin dead."""
        return max(self.lease_s, MIN_SILENCE_TIMEOUT_S)

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two Heartbeats of an origin, so that one or two may be late."""
        return min(self.silence_timeout_s / HEARTBEATS_PER_TIMEOUT, MOST_HEARTBEAT_S)

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        # A validator of the single field would quote the URL's password in its error.
        if self.url is not None and self.path is not None:
            raise ValueError("give path or url, not both")
        if self.url is not None and not self.url.get_secret_value().startswith(URL_SCHEMES):
            raise ValueError("url: write postgresql://USER:PASSWORD@HOST/DATABASE")
        return self


class OriginConfig(Settings):
    """Settings of `[origin]`: the model, its workers and the link for edges."""

    table: ClassVar[str] = "origin"
    model_config = SettingsConfigDict(env_prefix="TAILRACE_ORIGIN_")

    link: LinkText = Field(
        "127.0.0.1:8470",
        description="Address on which the origin listens for edges: HOST:PORT,"
        " tls://HOST:PORT or unix:///PATH.",
    )
    link_certificate: Path | None = Field(
        None,
        description="PEM file with the certificate chain that the origin presents on a tls://"
        " link, leaf first.",
    )
    link_key: Path | None = Field(
        None, description="PEM file with the private key of link_certificate."
    )
    link_ca: Path | None = Field(
        None,
        description="PEM file with the CA that signs the certificates of edges, and of origins"
        " that share the ledger. A tls:// link refuses peers without such a certificate.",
    )
    link_secret: SecretStr | None = Field(
        None,
        description="Shared secret, at least 16 characters, with which edges and origins prove"
        " their identity on the link. Edges (edge.origin_secret) and origins that share the ledger"
        " need the same text. It works with and without TLS.",
    )
    address: Address | None = Field(
        None,
        description="HOST:PORT at which other origins that share the ledger reach this origin's"
        " link. Default: the address of the link, or, if that means all interfaces (0.0.0.0), the"
        " address from which this origin connects to the database.",
    )
    data: Path = Field(
        Path(".tailrace"),
        description="Folder for the ledger and for the keys that sign resume tokens.",
    )
    keys: Path | None = Field(
        None,
        description="File with the keys that sign resume tokens. It is created on first use."
        " Origins that share a ledger need the same file. Default: resume-keys.json in the folder"
        " origin.data.",
    )
    model: Path = Field(
        DEMO_MODEL, description="Folder of the model checkpoint to serve. Default: the demo model."
    )
    model_name: str | None = Field(
        None,
        min_length=1,
        description="Name by which requests select the model. Default: demo for the demo model,"
        " otherwise the name of its folder.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Device on which the model runs. auto: a GPU if there is one that the kernels"
        " support, otherwise the CPU.",
    )
    gpus: Annotated[tuple[str, ...], NoDecode, BeforeValidator(gpu_names)] = Field(
        (),
        description="GPUs for the workers, by index or UUID as in CUDA_VISIBLE_DEVICES. A new"
        " worker gets the GPU with the fewest workers of its model, and among equals the GPU with"
        " the least memory in use. Default: all GPUs that the origin sees.",
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of worker processes. Each of them loads the model, on a GPU of its own"
        " as long as there are enough GPUs.",
    )
    worker_silence_s: float = Field(
        30.0,
        ge=2,
        le=3600,
        description="Seconds without a message after which a worker is considered hung. It is then"
        " killed, and another worker continues its streams. Set a higher value for models whose"
        " steps take longer.",
    )
    worker_start_s: float = Field(
        600.0,
        ge=10,
        le=86_400,
        description="Seconds without a message after which a worker is considered hung while it"
        " loads a model or compiles kernels, which takes longer than a step.",
    )
    step_ms: float = Field(
        50.0,
        gt=0,
        le=60_000,
        description="Target duration of an engine step, in ms: the time that a running stream"
        " waits for its next token. A step takes as many prompt tokens and streams as it can"
        " process in this time.",
    )
    running_streams: int = Field(
        64,
        ge=1,
        le=4096,
        description="Maximum number of streams that one worker decodes at a time. The engine uses"
        " a lower limit while steps take longer than step_ms.",
    )
    fork_workers: bool = Field(
        True,
        description="Fork the workers of a model from one process that has already imported their"
        " modules, where that is safe. false: each worker does its own imports, which takes"
        " seconds.",
    )
    kv_mib: int | None = Field(
        None,
        ge=1,
        description="Size of the KV cache of one worker, in MiB. Default: 512 on a CPU; on a GPU"
        " 80 % of the memory that is free after loading the weights.",
    )
    weights: WeightsFormat = Field(
        "auto",
        description="Number format of the layers' weights, converted while loading. auto: the"
        " format of the checkpoint.",
    )
    kv_cache: KvFormat = Field(
        "auto",
        description="Number format of the keys and values in the KV cache. auto: fp32 on a CPU; on"
        " a GPU bf16, or fp32 for a small model. fp8 needs a GPU of sm_89 or newer, or a CPU.",
    )
    head: HeadFormat = Field(
        "auto",
        description="Number format of the LM head, converted while loading. auto: the format of"
        " the checkpoint.",
    )
    dependent_launches: bool = Field(
        False,
        description="On a GPU of sm_90 or newer, start a kernel launch while earlier launches"
        " still run. It never changes a generated token. Off by default, because its gain has not"
        " been measured.",
    )
    speculate: Literal["off", "prompt-lookup"] = Field(
        "off",
        description="Speculative decoding. prompt-lookup guesses tokens from the text so far and"
        " checks several in one step. It never changes the text. It is faster if a step with"
        " several rows costs little more than a step with one row, as on a GPU.",
    )
    draft_model: Path | None = Field(
        None,
        description="Folder of a smaller checkpoint with the same tokenizer. It guesses tokens for"
        " speculative decoding.",
    )
    open_objects: bool = Field(
        False,
        description="For output that follows a JSON schema: true lets an object have properties"
        " that its schema does not list, as JSON Schema does. false: an object has only the listed"
        " properties, unless its schema has a rule for others, such as additionalProperties.",
    )
    filter: str | None = Field(
        None,
        pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*$",
        description="Python filter that sees each stream's text before it is stored, and may end"
        " the stream. Written as module:factory.",
    )
    objects: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_at_commas)] = Field(
        (),
        description="Your own Python classes of Durable Objects, each written as module:class."
        " Edges refer to them in their wrangler files. They run in the origin's process.",
    )
    operator_text: bool = Field(
        True,
        description="Let operators read the prompts and texts of streams through the API under"
        " /v1/admin. Each access is logged.",
    )
    cpu_memory_mib: int | None = Field(
        None,
        ge=1,
        description="Memory cap in MiB for all models that are loaded on the CPU together, if the"
        " origin serves several models. Default: no cap.",
    )
    gpu_memory_mib: int | None = Field(
        None,
        ge=1,
        description="Memory cap in MiB for all models that are loaded on one GPU. The same cap"
        " holds for each GPU. Required if several models share a GPU.",
    )
    policy: str = Field(
        "adaptive-ttl",
        description="Policy that decides which idle models stay loaded, if the origin serves"
        " several models. adaptive-ttl learns from past requests how long to keep each model;"
        " greedy-dual keeps a model until another model needs its memory. docs/warm-pools.md lists"
        " the others.",
    )
    shadow_policy: str | None = Field(
        None,
        description="Second policy that is evaluated but not carried out, for comparison. Its"
        " decisions are recorded in the history beside the decisions of `policy`.",
    )
    cold_cost_gpu_s: float = Field(
        60.0,
        gt=0,
        le=1e6,
        description="Price of a cold start, in seconds of keeping an idle model loaded. A"
        " higher price keeps models loaded longer.",
    )
    cold_wait_s: float = Field(
        120.0,
        gt=0,
        le=3600,
        description="Maximum time in seconds that a request waits for its model to load. After"
        " that it is refused with 503.",
    )
    cache: Literal["none", "exact"] = Field(
        "none",
        description="Default for requests that do not give `cache`: whether an answer may come"
        " from the ledger. `exact`: a request that is greedy or names its seed gets the tokens of"
        " a finished stream, if an identical request of the same tenant has made one. `none`:"
        " every request is computed.",
    )
    max_streams: int = Field(
        256,
        ge=1,
        description="Maximum number of running and waiting streams together. Further requests are"
        " refused with 503.",
    )
    slo_interactive_ms: int = Field(
        300,
        ge=0,
        le=3_600_000,
        description="Promised time in milliseconds from the admission of a stream of class"
        " interactive to its first token. Metrics and an alert report streams that miss it;"
        " nothing else depends on it. 0: no promise.",
    )
    slo_standard_ms: int = Field(
        1_000,
        ge=0,
        le=3_600_000,
        description="Promised time in milliseconds to the first token of a stream of class"
        " standard, as in slo_interactive_ms. 0: no promise.",
    )
    slo_batch_ms: int = Field(
        0,
        ge=0,
        le=3_600_000,
        description="Promised time in milliseconds to the first token of a stream of class batch,"
        " as in slo_interactive_ms. 0: no promise.",
    )
    overload_wait_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Waiting time in seconds at which load shedding starts: a stream of class"
        " interactive or standard has waited this long to start. docs/origins.md describes the"
        " levels of load shedding.",
    )
    idle_stream_s: float = Field(
        21_600.0,
        ge=60,
        le=2_592_000,
        description="Seconds after which a stream ends as failed and retryable if no client reads"
        " it and it generates nothing. Otherwise a stream that hangs would occupy one of"
        " max_streams for ever.",
    )
    drain_s: float = Field(
        0.0,
        ge=0,
        description="Seconds after SIGTERM in which running streams may finish, while edges send"
        " new requests to other origins. Streams that are still unfinished are continued by"
        " another origin on the same ledger, or by this origin after its restart.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Minimum level of the lines that are logged."
    )
    require_token: bool = Field(
        False,
        description="Refuse requests to resume, cancel or steer a stream if they have no resume"
        " token.",
    )
    traces: CollectorUrl | None = Field(
        None,
        description="URL of an OpenTelemetry collector to which the origin sends one span for each"
        " stream by OTLP over HTTP, such as http://127.0.0.1:4318. Needs the package extra"
        " `telemetry`. Default: no traces.",
    )
    metrics: Address | None = Field(
        None,
        description="HOST:PORT that serves Prometheus metrics at /metrics, without a key. Default:"
        " metrics are not served.",
    )
    producer: str | None = Field(
        None,
        description="Python code that produces the streams instead of a model. Written as"
        " module:factory.",
    )
    upstream: str | None = Field(
        None,
        description="URL, ending in /v1, of an OpenAI-compatible server that generates the text"
        " instead of a model of this origin.",
    )
    upstream_model: str | None = Field(
        None,
        min_length=1,
        description="Name of the model on the upstream server. Default: the only model that the"
        " server lists.",
    )
    upstream_key_env: str | None = Field(
        None,
        min_length=1,
        description="Name of the environment variable that holds the API key for the upstream"
        " server.",
    )
    upstream_lost: Literal["continue", "end"] = Field(
        "continue",
        description="What to do if the upstream server fails in the middle of a text. continue:"
        " request the rest of the text, which may differ from an uninterrupted text. end: end the"
        " stream with finish reason `origin_lost`.",
    )
    upstream_connect_s: float = Field(
        5.0, gt=0, le=600, description="Timeout in seconds for connecting to the upstream server."
    )
    upstream_first_token_s: float = Field(
        120.0,
        gt=0,
        le=3600,
        description="Timeout in seconds for the upstream server's first token, counted from the"
        " request.",
    )
    upstream_between_tokens_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="Timeout in seconds for each further token of the upstream server. A slower"
        " server counts as stalled.",
    )
    upstream_retry_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="Maximum time in seconds for which a stream retries an upstream server that"
        " has failed. After that the stream ends.",
    )
    text_streams: int = Field(
        64,
        ge=1,
        le=4096,
        description="Maximum number of streams that one worker runs at a time, if it serves a"
        " Python producer or an upstream server.",
    )

    @field_validator("producer")
    @classmethod
    def _check_producer(cls, value: str | None) -> str | None:
        module, _, factory = (value or "m:f").partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), factory)):
            raise ValueError("write module:factory, such as speech.serve:make")
        return value

    @model_validator(mode="after")
    def _serves_one_thing(self) -> Self:
        # A validator of the single field would quote the URL's password in its error.
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
        """Number formats of weights, KV cache and LM head."""
        return Formats(self.weights, self.kv_cache, self.head)

    @property
    def slo_s(self) -> dict[str, float]:
        """Promised seconds to the first token, by priority class, for classes with a promise."""
        given = {
            "interactive": self.slo_interactive_ms,
            "standard": self.slo_standard_ms,
            "batch": self.slo_batch_ms,
        }
        return {word: ms / 1000 for word, ms in given.items() if ms}

    @property
    def served_name(self) -> str:
        """Name by which requests call the model of the checkpoint."""
        if self.model_name is not None:
            return self.model_name
        return "demo" if self.model == DEMO_MODEL else self.model.resolve().name

    @model_validator(mode="after")
    def _check_link(self) -> Self:
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
        """Host and port at which other origins reach this origin's link.

        If the host is None, they use the address that the database sees. The result is None if the
        link is a Unix socket, which other origins cannot reach.
        """
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


class PipelineConfig(OriginConfig):
    """Settings of a pipeline's workers. The origin makes them; no settings file contains them.

    `pipeline` is the pipeline's table, and `socket` the Unix socket at which its workers read the
    streams of other models from the origin.
    """

    pipeline: dict[str, Any]
    socket: Path | None = None

    @property
    def max_input_bytes(self) -> int:
        """Maximum size of the input of one stream in bytes; 0 for a pipeline without input."""
        from tailrace.origin.pipelines.table import PipelineTable

        return PipelineTable.model_validate(self.pipeline).max_input_bytes

    @property
    def has_device(self) -> bool:
        """True if a stage is of kind `gpu`, so the setting `device` applies."""
        from tailrace.origin.pipelines.stage import StageKind
        from tailrace.origin.pipelines.table import PipelineTable, stage_class

        stages = PipelineTable.model_validate(self.pipeline).stages
        return any(stage_class(one.stage, "stage").kind is StageKind.GPU for one in stages)


class StreamsConfig(Settings):
    """Settings of `[streams]`: Durable Streams and their subscriptions."""

    table: ClassVar[str] = "streams"
    model_config = SettingsConfigDict(env_prefix="TAILRACE_STREAMS_")

    long_poll_s: float = Field(
        20,
        gt=0,
        le=3600,
        description="Maximum time in seconds that a long poll of a Durable Stream waits for new"
        " data.",
    )
    sse_s: float = Field(
        60,
        gt=0,
        le=86_400,
        description="Seconds after which the origin ends an SSE response of a Durable Stream. The"
        " client then reconnects at the offset that it has reached.",
    )
    durability: Literal["process", "power"] = Field(
        "process",
        description="What appended data survives once an append has been acknowledged. process:"
        " kill -9 of every process. power: also a power cut; each append then waits for the disk.",
    )
    subscriptions: bool = Field(
        False,
        description="Allow clients to subscribe to Durable Streams: a change of a stream then"
        " calls a webhook or wakes a worker. Off by default, because anyone who may write could"
        " make the origin send requests.",
    )
    webhook_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_at_commas)] = Field(
        (),
        description="Hosts that webhooks may call even if they have private addresses or use"
        " http://. Public hosts are always allowed over https://.",
    )
