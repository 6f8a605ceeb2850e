"""Settings of an origin and of its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from ledger.settings import Settings

DEMO_MODEL = Path(__file__).parent / "demo" / "model"
URL_SCHEMES = ("postgresql://", "postgres://")


def _split_at_commas(value: object) -> object:
    """The environment writes several values as `a,b`."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


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
        " dead, and its streams go to the others",
    )
    retention_s: float = Field(
        86_400, gt=0, description="a stream is kept this long after its last read or write"
    )
    sweep_s: float = Field(60, gt=0, description="time between removals of expired streams")
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
    cold_after_s: float = Field(
        600,
        ge=0,
        description="an ended stream that nobody has read for so long is compressed in the file",
    )

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

    link: str = Field("127.0.0.1:8470", description="HOST:PORT that edges connect to")
    data: Path = Field(Path(".tailrace"), description="folder of ledger and signing keys")
    keys: Path | None = Field(
        None,
        description="file of the keys that sign resume tokens, made on first use; default"
        " DATA/resume-keys.json; origins that share a ledger need the same one",
    )
    model: Path = Field(DEMO_MODEL, description="checkpoint folder")
    model_name: str = Field("demo", min_length=1, description="name in requests")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where the model runs; auto: the GPU if there is one"
    )
    workers: int = Field(1, ge=1, le=64, description="worker processes, one loaded model each")
    max_streams: int = Field(256, ge=1, description="running and waiting streams; 503 beyond")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )
    require_token: bool = Field(False, description="refuse resume and cancel without a token")

    @field_validator("link")
    @classmethod
    def _is_address(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
            raise ValueError("write HOST:PORT, such as 127.0.0.1:8470")
        return value

    @property
    def link_address(self) -> tuple[str, int]:
        host, _, port = self.link.rpartition(":")
        return host.strip("[]"), int(port)

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
    webhook_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_at_commas)] = Field(
        (),
        description="hosts that webhooks may call although they are private, or without TLS;"
        " any public host may be called over https",
    )
