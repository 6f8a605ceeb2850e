"""Settings of one of several models of an origin: `[models.NAME]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.process.settings import file_of, finding, read_table
from tailrace.origin.config import DEMO_MODEL, OriginConfig, PipelineConfig
from tailrace.origin.formats import HeadFormat, KvFormat, WeightsFormat

SINGLE_MODEL_SETTINGS = "model model_name producer upstream upstream_model upstream_key_env".split()
"""Settings of `[origin]` that select the model of an origin with one model."""
SOURCE_SETTINGS = ("folder", "producer", "upstream")
"""Exactly one of these settings selects what is served."""


def _inherited(setting: str) -> Any:
    """Return a field whose limits, description and default are those of a setting of `[origin]`."""
    text, limits = _field_of_origin(setting)
    return Field(
        None, description=f"{text.partition(' Default:')[0]} Default: origin.{setting}.", **limits
    )


def _alike(setting: str) -> Any:
    """Return a field with the limits and the description of a setting of `[origin]`."""
    text, limits = _field_of_origin(setting)
    return Field(None, description=text, **limits)


def _field_of_origin(setting: str) -> tuple[str, dict[str, Any]]:
    field = OriginConfig.model_fields[setting]
    limits = {
        name: getattr(limit, name)
        for limit in field.metadata
        for name in ("ge", "le", "min_length")
        if hasattr(limit, name)
    }
    return field.description or "", limits


class ModelTable(BaseModel):
    """Settings of one model.

    A setting that is absent has the value of the same setting of `[origin]`; `folder` is called
    `model` there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path | None = Field(None, description="Folder of the model checkpoint to serve.")
    producer: str | None = _alike("producer")
    upstream: str | None = _alike("upstream")
    upstream_model: str | None = _alike("upstream_model")
    upstream_key_env: str | None = _alike("upstream_key_env")
    device: Literal["auto", "cpu", "cuda"] | None = _inherited("device")
    memory_mib: int | None = Field(
        None,
        ge=1,
        description="Memory of one worker in MiB, as counted against cpu_memory_mib or"
        " gpu_memory_mib. Default: the size of its weights and its KV cache; 0 for a producer or"
        " an upstream server.",
    )
    minimum_warm: int = Field(
        0,
        ge=0,
        le=64,
        description="Minimum number of workers that stay loaded. A lower `workers` is raised to"
        " this number. 0: the model may be unloaded when other models need its memory.",
    )
    pin: bool = Field(
        False, description="Keep the model loaded all the time, with all of its workers."
    )
    policy: str | None = Field(
        None,
        description="Policy that decides how long the model stays loaded while it is idle."
        " Default: origin.policy.",
    )
    schedule: tuple[str, ...] = Field(
        (),
        max_length=16,
        description="Times in which the model is kept loaded, whatever its policy decides, such as"
        " 'mon-fri 08:00-18:00 Europe/Berlin'. Times without a time zone are UTC.",
    )
    workers: int | None = _inherited("workers")
    kv_mib: int | None = _inherited("kv_mib")
    weights: WeightsFormat | None = _inherited("weights")
    kv_cache: KvFormat | None = _inherited("kv_cache")
    head: HeadFormat | None = _inherited("head")
    running_streams: int | None = _inherited("running_streams")
    speculate: Literal["off", "prompt-lookup"] | None = _inherited("speculate")
    draft_model: Path | None = _inherited("draft_model")
    open_objects: bool | None = _inherited("open_objects")
    filter: str | None = _inherited("filter")

    @model_validator(mode="after")
    def _serves_one_thing(self) -> Self:
        given = [name for name in SOURCE_SETTINGS if getattr(self, name) is not None]
        if len(given) != 1:
            said = " and ".join(given) or "nothing"
            raise ValueError(f"set exactly one of {', '.join(SOURCE_SETTINGS)}, not {said}")
        return self

    @property
    def is_kept(self) -> bool:
        """True if the model is never unloaded."""
        return self.pin or self.minimum_warm > 0

    def alone(self, name: str, origin: OriginConfig) -> OriginConfig:
        """Return the settings of an origin that serves only this model."""
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


class PipelineModel(ModelTable):
    """A pipeline, which is served like a model; `pipeline` is its table in the settings file."""

    pipeline: dict[str, Any]

    @model_validator(mode="after")
    def _serves_one_thing(self) -> Self:
        return self

    def alone(self, name: str, origin: OriginConfig) -> PipelineConfig:
        """Return the settings of the workers of this pipeline.

        They are those of `[origin]` without its filter, which the pipeline's models apply already.
        """
        given = {key: getattr(origin, key) for key in origin.model_fields_set}
        own = {"model_name": name, "pipeline": self.pipeline, "filter": None}
        return PipelineConfig(**(given | own))


Tables = dict[str, ModelTable]
"""Maps the name that requests use for a model to its table, in the order of the settings file."""


def load_tables(path: Path | None) -> Tables:
    """Read the models and pipelines of a settings file, by default of tailrace.toml.

    Raises:
        ConfigError: A table is invalid.
    """
    file = file_of(path)
    tables: Tables = {}
    for name, said in (read_table(file, "models") if file else {}).items():
        if not isinstance(said, dict):
            hint = "write [models.NAME], with the model's settings below it"
            raise ConfigError(f"{file}: {name} is not a table", field=f"models.{name}", hint=hint)
        try:
            tables[name] = ModelTable.model_validate(said)
        except ValidationError as error:
            raise _explained(name, error, file) from error
    return tables | _pipelines(file, tables) if file else tables


def _pipelines(file: Path, models: Tables) -> Tables:
    said = read_table(file, "pipelines")
    if not said:
        return {}
    # Imported here, because few origins have pipelines.
    from tailrace.origin.pipelines.table import check_pipelines, load_pipelines

    pipelines = load_pipelines(said, file)
    if both := next((name for name in pipelines if name in models), None):
        hint = "give one of them another name"
        message = f"a model has the name {both!r}, too"
        raise ConfigError(message, field=f"pipelines.{both}", hint=hint)
    check_pipelines(pipelines, models)
    return {
        name: PipelineModel(
            pipeline=pipeline.model_dump(mode="json", exclude_unset=True),
            memory_mib=pipeline.memory_mib,
        )
        for name, pipeline in pipelines.items()
    }


def chosen(tables: Tables, models: Sequence[str], origin: OriginConfig) -> Tables:
    """Return the tables of the models that the origin serves.

    `models` has names in `tables` and folders of models. If it is empty, all `tables` are served.
    If both are empty, the result is empty, and the settings of `origin` select a single model.

    Raises:
        ConfigError: `origin` selects another model, too, or two models have the same name.
    """
    one = SINGLE_MODEL_SETTINGS[2:] if models else SINGLE_MODEL_SETTINGS
    also = [key for key in one if key in origin.model_fields_set]
    if also and (models or tables):
        raise ConfigError(
            f"both the model {models[0] if models else next(iter(tables))!r} and"
            f" origin.{also[0]} select what is served",
            field=f"origin.{also[0]}",
            hint=f"remove origin.{also[0]}, or move it to a [models.NAME] of its own",
        )
    if not models:
        return tables
    found: Tables = {}
    for model in models:
        name = model if model in tables else _name_of(Path(model))
        if name in found:
            raise ConfigError(
                f"two models have the name {name!r}",
                field="--model",
                hint="give each its own name with [models.NAME] in tailrace.toml",
            )
        found[name] = tables[model] if model in tables else ModelTable(folder=Path(model))
    return found


def _name_of(folder: Path) -> str:
    return "demo" if folder == DEMO_MODEL else folder.resolve().name


def _explained(name: str, error: ValidationError, file: Path | None) -> ConfigError:
    where = f"see {file}" if file else None
    return finding(error.errors()[0], f"models.{name}", ModelTable.model_fields, where)
