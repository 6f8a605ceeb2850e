"""`[models.NAME]`: what is said of one of several models that an origin serves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.process.settings import file_of, finding, read_table
from tailrace.origin.config import DEMO_MODEL, OriginConfig
from tailrace.origin.formats import HeadFormat, KvFormat, WeightsFormat

OF_ONE = ("model", "model_name", "producer", "upstream", "upstream_model", "upstream_key_env")
"""Settings of `[origin]` that say which one model it serves."""
OF_WHAT = ("folder", "producer", "upstream")
"""Exactly one of these says what is served."""


class ModelTable(BaseModel):
    """One model; what is left out is as `[origin]` says. `folder` is `model` there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path | None = Field(None, description="checkpoint folder")
    producer: str | None = Field(None, description="module:factory of a Python producer instead")
    upstream: str | None = Field(
        None, description="URL that ends in /v1 of an OpenAI-compatible server instead"
    )
    upstream_model: str | None = Field(
        None, min_length=1, description="the model's name there; default the only one it lists"
    )
    upstream_key_env: str | None = Field(
        None, min_length=1, description="environment variable that holds that server's key"
    )
    device: Literal["auto", "cpu", "cuda"] | None = Field(None, description="where it runs")
    memory_mib: int | None = Field(
        None,
        ge=1,
        description="what a worker of it may take of its device; default what its weights and its"
        " KV cache take, of a producer or an upstream server nothing",
    )
    minimum_warm: int = Field(
        0,
        ge=0,
        le=64,
        description="workers of it that are always loaded; 0: it may leave when others need room",
    )
    pin: bool = Field(False, description="always loaded, with all of its workers")
    policy: str | None = Field(
        None, description="how long it stays loaded while nobody asks; default origin.policy"
    )
    schedule: tuple[str, ...] = Field(
        (),
        max_length=16,
        description="when it is loaded whatever the policy says, such as 'mon-fri 08:00-18:00"
        " Europe/Berlin'; without a zone, UTC",
    )
    workers: int | None = Field(
        None, ge=1, le=64, description="worker processes; at least minimum_warm"
    )
    kv_mib: int | None = Field(None, ge=1, description="size of the KV cache of each worker")
    weights: WeightsFormat | None = Field(None, description="format of the layers' weights")
    kv_cache: KvFormat | None = Field(None, description="format of keys and values")
    head: HeadFormat | None = Field(None, description="format of the LM head")
    running_streams: int | None = Field(
        None, ge=1, le=4096, description="streams that are decoded at a time at most"
    )
    speculate: Literal["off", "prompt-lookup"] | None = Field(None, description="guess tokens")
    draft_model: Path | None = Field(None, description="smaller checkpoint that guesses instead")
    open_objects: bool | None = Field(
        None, description="JSON objects may have members that their schema does not list"
    )
    filter: str | None = Field(None, description="module:factory of a filter")

    @model_validator(mode="after")
    def _serves_one_thing(self) -> Self:
        given = [name for name in OF_WHAT if getattr(self, name) is not None]
        if len(given) != 1:
            said = " and ".join(given) or "nothing"
            raise ValueError(f"give one of {', '.join(OF_WHAT)}, not {said}")
        return self

    @property
    def is_kept(self) -> bool:
        """Whether it never leaves."""
        return self.pin or self.minimum_warm > 0

    def alone(self, name: str, origin: OriginConfig) -> OriginConfig:
        """The settings of an origin that serves this model and no other."""
        said = self.model_dump(exclude={"memory_mib", "minimum_warm", "pin", "folder", "workers"})
        del said["policy"], said["schedule"]
        settings = {key: value for key, value in said.items() if value is not None}
        workers = self.workers if self.workers is not None else origin.workers
        settings |= {"model_name": name, "workers": max(workers, self.minimum_warm)}
        if self.folder is not None:
            settings["model"] = self.folder
        given = {key: getattr(origin, key) for key in origin.model_fields_set}
        try:
            return OriginConfig(**(given | settings))
        except ValidationError as error:
            raise _explained(name, error, None) from error


Tables = dict[str, ModelTable]
"""By name in requests, in the order of the file."""


def load_tables(path: Path | None) -> Tables:
    """The `[models.NAME]` of a file, or of the default one; raises `ConfigError`."""
    file = file_of(path)
    tables: Tables = {}
    for name, said in (read_table(file, "models") if file else {}).items():
        if not isinstance(said, dict):
            hint = "write [models.NAME], with what is served below it"
            raise ConfigError(f"{file}: {name} is no model", field=f"models.{name}", hint=hint)
        try:
            tables[name] = ModelTable.model_validate(said)
        except ValidationError as error:
            raise _explained(name, error, file) from error
    return tables


def chosen(tables: Tables, models: Sequence[str], origin: OriginConfig) -> Tables:
    """Those that are served: of `models`, each a name of `tables` or a folder; or all tables.

    Empty where it is one model, as `origin` says. Raises `ConfigError`.
    """
    one = OF_ONE[2:] if models else OF_ONE
    also = [key for key in one if key in origin.model_fields_set]
    if also and (models or tables):
        raise ConfigError(
            f"{models[0] if models else next(iter(tables))!r} is to be served, and so is what"
            f" origin.{also[0]} says",
            field=f"origin.{also[0]}",
            hint="leave it out, or give it a [models.NAME] of its own",
        )
    if not models:
        return tables
    found: Tables = {}
    for model in models:
        name = model if model in tables else _name_of(Path(model))
        if name in found:
            raise ConfigError(
                f"two models are called {name!r}",
                field="--model",
                hint="give each a name of its own with [models.NAME] in tailrace.toml",
            )
        found[name] = tables[model] if model in tables else ModelTable(folder=Path(model))
    return found


def _name_of(folder: Path) -> str:
    return "demo" if folder == DEMO_MODEL else folder.resolve().name


def _explained(name: str, error: ValidationError, file: Path | None) -> ConfigError:
    where = f"see {file}" if file else None
    return finding(error.errors()[0], f"models.{name}", ModelTable.model_fields, where)
