"""Settings of an origin and of its ledger."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from ledger.settings import Settings

DEMO_MODEL = Path(__file__).parent / "demo" / "model"


class LedgerConfig(Settings):
    """`[ledger]`: where the streams are kept, and for how long."""

    table: ClassVar[str] = "ledger"
    model_config = SettingsConfigDict(env_prefix="TAILRACE_LEDGER_")

    path: Path | None = Field(None, description="SQLite file; default DATA/ledger.db")
    retention_s: float = Field(
        86_400, gt=0, description="a stream is kept this long after its last read or write"
    )
    sweep_s: float = Field(60, gt=0, description="time between removals of expired streams")


class OriginConfig(Settings):
    """`[origin]`: the model, its workers and the link that edges connect to."""

    table: ClassVar[str] = "origin"
    model_config = SettingsConfigDict(env_prefix="TAILRACE_ORIGIN_")

    link: str = Field("127.0.0.1:8470", description="HOST:PORT that edges connect to")
    data: Path = Field(Path(".tailrace"), description="folder of ledger and signing keys")
    model: Path = Field(DEMO_MODEL, description="checkpoint folder")
    model_name: str = Field("demo", min_length=1, description="name in requests")
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
