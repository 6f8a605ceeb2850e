"""Settings of a pipeline: `[pipelines.NAME]`, and a `[[pipelines.NAME.stages]]` for each stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.process.settings import finding
from tailrace.ledger.validation import closest_name
from tailrace.origin.pipelines.speech.debounce import Debounce
from tailrace.origin.pipelines.speech.punctuate import Punctuate
from tailrace.origin.pipelines.speech.transcribe import Transcribe
from tailrace.origin.pipelines.speech.voice_activity import VoiceActivity
from tailrace.origin.pipelines.stage import AnyStage, Stage, StageOptions
from tailrace.origin.pipelines.stages.blocklist import Blocklist
from tailrace.origin.pipelines.stages.classifier import Classifier
from tailrace.origin.pipelines.stages.group import Group
from tailrace.origin.pipelines.stages.markdown_safe import MarkdownSafe
from tailrace.origin.pipelines.stages.model import ModelStage
from tailrace.origin.pipelines.stages.route import Route
from tailrace.origin.plugin import load_plugin

SHIPPED: Mapping[str, type[AnyStage]] = {
    "model": ModelStage,
    "route": Route,
    "blocklist": Blocklist,
    "classifier": Classifier,
    "group": Group,
    "markdown-safe": MarkdownSafe,
    "voice-activity": VoiceActivity,
    "transcribe": Transcribe,
    "punctuate": Punctuate,
    "debounce": Debounce,
}
"""The stages that a settings file can name without a module."""
MAX_STAGES = 16
"""Maximum number of stages of a pipeline."""
SHAPE = "write module:Class, where Class is a tailrace.origin.pipelines.stage.Stage"


class StageTable(BaseModel):
    """Settings of one stage: those named here, and the options of the stage itself."""

    model_config = ConfigDict(extra="allow", frozen=True)

    stage: str = Field(
        min_length=1,
        description=f"What the stage does: {', '.join(SHIPPED)}, or a class of your own, written as"
        " module:Class.",
    )
    name: str | None = Field(
        None,
        pattern=r"^[\w-]{1,40}$",
        description="Name of the stage in errors and notices. Default: the word in `stage`.",
    )
    optional: bool = Field(
        False,
        description="true: if the stage fails, it is skipped from then on, and a Notice says so;"
        " clients can switch it off and on. false: if the stage fails, the stream ends.",
    )
    limit_s: float | None = Field(
        None,
        gt=0,
        le=3600,
        description="Maximum time in seconds that a stage may take for each item, if it is of kind"
        " cpu or gpu, or asynchronous. Default: no limit.",
    )
    processes: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of processes that run the stage, if it is of kind cpu or gpu.",
    )

    @property
    def options(self) -> dict[str, Any]:
        """The options of the stage itself."""
        return dict(self.model_extra or {})

    @property
    def named(self) -> str:
        """Name of the stage in errors and notices."""
        return self.name or self.stage.rpartition(":")[2]


class InputFormat(StrEnum):
    """The format of the input of a pipeline."""

    BYTES = "bytes"
    PCM = "pcm"


class PipelineTable(BaseModel):
    """Settings of one pipeline."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stages: tuple[StageTable, ...] = Field(
        min_length=1, max_length=MAX_STAGES, description="The stages, in their order."
    )
    input: InputFormat | None = Field(
        None,
        description="Format of the bytes that clients send to a stream while it runs. bytes: any."
        " pcm: 16-bit little-endian samples of one channel at 16 kHz, for the stages of speech."
        " Default: requests have a prompt only.",
    )
    max_input_mib: int = Field(
        64, ge=1, le=4096, description="Maximum size of the input of one stream, in MiB."
    )
    input_wait_s: float = Field(
        60,
        gt=0,
        le=86_400,
        description="Maximum time in seconds without new input. After that the stream ends as"
        " failed.",
    )
    memory_mib: int | None = Field(
        None,
        ge=1,
        description="Memory in MiB that each worker of the pipeline takes, for the memory caps of"
        " origin.gpu_memory_mib or origin.cpu_memory_mib. Default: it is not counted.",
    )

    @property
    def max_input_bytes(self) -> int:
        """Maximum size of the input of one stream in bytes; 0 for a pipeline without input."""
        return 0 if self.input is None else self.max_input_mib << 20

    @model_validator(mode="after")
    def _has_a_name_for_each(self) -> Self:
        [(name, count)] = Counter(each.named for each in self.stages).most_common(1)
        if count > 1:
            raise ValueError(f"two stages have the name {name!r}: give one of them a name")
        return self


def load_pipelines(said: Mapping[str, Any], file: Path) -> dict[str, PipelineTable]:
    """Return the pipelines of a settings file, whose table `pipelines` is `said`.

    Raises:
        ConfigError: A table is not valid.
    """
    pipelines = {}
    for name, table in said.items():
        try:
            pipelines[name] = PipelineTable.model_validate(table)
        except ValidationError as error:
            names = [*PipelineTable.model_fields, *StageTable.model_fields]
            raise finding(error.errors()[0], f"pipelines.{name}", names, f"see {file}") from error
    return pipelines


def stage_class(stage: str, field: str) -> type[AnyStage]:
    """Return the class of a stage.

    Raises:
        ConfigError: No stage has this name, or the class is not a Stage.
    """
    if stage in SHIPPED:
        return SHIPPED[stage]
    if ":" not in stage:
        closest = closest_name(stage, SHIPPED)
        hint = f"did you mean {closest}?" if closest else f"use {', '.join(SHIPPED)}; or {SHAPE}"
        raise ConfigError(f"no stage has the name {stage!r}", field=field, hint=hint)
    found = load_plugin(stage, field, SHAPE)
    if not (isinstance(found, type) and issubclass(found, Stage)):
        raise ConfigError(f"{stage} is not a class of stages", field=field, hint=SHAPE)
    return found


def stage_options(table: StageTable, kind: type[AnyStage], field: str) -> StageOptions:
    """Return the checked options of a stage.

    Raises:
        ConfigError: An option is unknown or has a wrong value.
    """
    try:
        return kind.Options.model_validate(table.options)
    except ValidationError as error:
        names = [*kind.Options.model_fields, *StageTable.model_fields]
        raise finding(error.errors()[0], field, names) from error


def check_pipelines(pipelines: Mapping[str, PipelineTable], models: Mapping[str, object]) -> None:
    """Check the stages of each pipeline; `models` has the other models of the origin by name.

    Raises:
        ConfigError: A stage, an option or a model is unknown, or pipelines ask each other in a
            circle.
    """
    known = [*models, *pipelines]
    asked = {name: _check_stages(name, table, known) for name, table in pipelines.items()}
    for name in pipelines:
        _check_circle((name,), asked)


def _check_stages(name: str, pipeline: PipelineTable, known: list[str]) -> list[str]:
    """Check the stages of one pipeline, and return the names of the models that they may ask."""
    asked: list[str] = []
    has_answer = False
    for number, table in enumerate(pipeline.stages, 1):
        field = f"pipelines.{name}.stages[{number}]"
        kind = stage_class(table.stage, f"{field}.stage")
        options = stage_options(table, kind, field)
        for model in options.asked_models:
            if model not in known:
                hint = f"the models are {', '.join(known)}"
                raise ConfigError(f"no model has the name {model!r}", field=field, hint=hint)
        if kind.answers_prompts and table.optional:
            hint = "remove it: without its model a pipeline has no output"
            raise ConfigError("a model cannot be optional", field=f"{field}.optional", hint=hint)
        if kind.takes_input and pipeline.input is None:
            hint = f'add input = "pcm" to [pipelines.{name}]'
            message = f"the stage {table.named} needs the bytes of an input"
            raise ConfigError(message, field=f"pipelines.{name}.input", hint=hint)
        if number == 1 and pipeline.input is not None and not kind.is_deterministic:
            hint = "put a stage before it that cuts the input, such as voice-activity"
            message = (
                "the input comes in other pieces each time, and this stage is not deterministic"
            )
            raise ConfigError(message, field=f"{field}.stage", hint=hint)
        asked += options.asked_models
        has_answer |= kind.answers_prompts
    if not has_answer:
        hint = 'add one with stage = "model"'
        raise ConfigError("no stage is a model", field=f"pipelines.{name}", hint=hint)
    return asked


def _check_circle(path: tuple[str, ...], asked: Mapping[str, list[str]]) -> None:
    """Raise ConfigError if the last pipeline of `path` asks one of those before it."""
    for model in asked[path[-1]]:
        if model in path:
            circle = " -> ".join([*path[path.index(model) :], model])
            raise ConfigError(
                f"the pipelines ask each other in a circle: {circle}",
                field=f"pipelines.{path[0]}",
                hint="let one of them ask a model",
            )
        if model in asked:
            _check_circle((*path, model), asked)
