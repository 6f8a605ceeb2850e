"""`tailrace config`: writes a file of all settings, and reports the source of each value.

`init` writes a `tailrace.toml` that explains every setting. `check` reports where the value of each
setting comes from, and with `--wrangler FILE` what each key of a wrangler file does for an edge.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tailrace.commands.options import columns
from tailrace.config_schema import SCHEMA_FILE
from tailrace.edge.config import EdgeConfig
from tailrace.edge.wrangler.file import PREFIX, DevVars, Reading, read
from tailrace.ledger.errors import ConfigError
from tailrace.ledger.process.settings import DEFAULT_FILE, Settings, all_of
from tailrace.ledger.validation import fault_of
from tailrace.origin.config import OriginConfig
from tailrace.origin.pipelines.table import StageTable
from tailrace.origin.pool.model_table import ModelTable, PipelineModel, Tables, load_tables
from tailrace.origin.workers.program import unused

WIDTH = 96
HEAD = f"""\
#:schema ./{SCHEMA_FILE}
# For an editor that knows the line above: tailrace config schema > {SCHEMA_FILE}
#
# Settings of Tailrace. `tailrace config check` shows every value and where it comes from.
# The environment (TAILRACE_EDGE_HTTP, …) wins over this file, and a flag over both.
# Lines that are commented out show the defaults. A setting without a value has no default.
"""
BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def commented(parts: Sequence[type[Settings]]) -> str:
    """Return the text of a new `tailrace.toml`, with every setting commented out.

    It has the settings of `parts`, and those of one table for a model and for a stage.
    """
    lines = [line for part in parts for line in _table(part, f"[{part.table}]")]
    lines += _table(ModelTable, "# [models.NAME]")
    lines += _table(StageTable, "# [[pipelines.NAME.stages]]")
    return HEAD + "".join(f"\n{line}" for line in lines) + "\n"


def write(file: Path, parts: Sequence[type[Settings]]) -> None:
    """Write a new settings file.

    Raises:
        ConfigError: The file exists already, or cannot be written.
    """
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(commented(parts))
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror or error}", hint="name a file that does not exist yet"
        ) from error


def _table(part: type[BaseModel], head: str) -> Iterator[str]:
    yield f"\n{head}"
    shown = part.model_construct().model_dump(mode="json")
    for name, info in part.model_fields.items():
        about = " ".join(map(_sentence, [info.description or name, "; ".join(_ranges(info))]))
        lines = textwrap.wrap(about.strip(), WIDTH - 2, break_on_hyphens=False)
        yield "\n" + "\n".join(f"# {line}" for line in lines)
        yield f"# {name} ={_literal(shown, name, info)}"


def _sentence(text: str) -> str:
    """Return `text` with a capital letter and a full stop; nothing for an empty text."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") or not text else ".")


def _literal(shown: Mapping[str, Any], name: str, info: FieldInfo) -> str:
    value = shown.get(name)
    # An absolute path depends on where Tailrace is installed, so it is not shown as a default.
    is_here = isinstance(info.default, Path) and info.default.is_absolute()
    return "" if value is None or is_here else f" {json.dumps(value, ensure_ascii=False)}"


def _ranges(info: FieldInfo) -> Iterator[str]:
    """Yield descriptions of a setting's choices and bounds, such as "at least 1"."""
    for each in (info.annotation, *get_args(info.annotation)):
        if get_origin(each) is Literal:
            yield "one of " + ", ".join(map(str, get_args(each)))
    for metadata in info.metadata:
        for bound, words in BOUNDS.items():
            if (limit := getattr(metadata, bound, None)) is not None:
                yield words.format(f"{limit:g}" if isinstance(limit, float) else limit)


# ---- what holds ----


class Setting(NamedTuple):
    """One setting with its value and the source of the value.

    `source` is `default`, a file, or the name of an environment variable. `has_effect` is False if
    the setting does not apply to the kind of model that is served.
    """

    name: str
    value: object
    source: str
    has_effect: bool = True


def report(parts: Sequence[type[Settings]], file: Path | None, *, as_json: bool) -> str:
    """Return every setting of `parts` as a table for people, or as a JSON array of objects.

    Without `file`, `tailrace.toml` is read if it exists.

    Raises:
        ConfigError: A setting is invalid, or the file cannot be read.
    """
    if file is not None and not file.is_file():
        raise ConfigError(f"{file} is not a file", hint="name a TOML file, such as tailrace.toml")
    settings = load_all(parts, file)
    if as_json:
        return json.dumps([setting._asdict() for setting in settings], indent=2)
    rows = [("setting", "value", "from")]
    for name, value, source, has_effect in settings:
        effect = "" if has_effect else ", has no effect on the served model"
        rows.append((name, json.dumps(value), source + effect))
    return columns(rows)


def load_all(parts: Sequence[type[Settings]], file: Path | None) -> list[Setting]:
    """Return the settings of every part in declaration order, then those of each model.

    Raises:
        ConfigError: Settings are invalid. One error lists the faults of all parts.
    """
    tables = load_tables(file)
    settings, errors = list[Setting](), list[ConfigError]()
    for part in parts:
        try:
            settings += _of_part(part, file, tables)
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise all_of(errors)
    for name, model in tables.items():
        table = f"models.{name}"
        shown = model.model_dump(mode="json", exclude_unset=True)
        if isinstance(model, PipelineModel):
            table, shown = f"pipelines.{name}", model.pipeline
        for key, value in shown.items():
            settings.append(Setting(f"{table}.{key}", value, str(file or DEFAULT_FILE)))
    return settings


def _of_part(part: type[Settings], file: Path | None, tables: Tables) -> Iterator[Setting]:
    loaded, environment = part.load(file), part.environment()
    idle = _idle(loaded, tables) if isinstance(loaded, OriginConfig) else []
    for key, value in loaded.model_dump(mode="json").items():
        source = "default"
        if key in environment:  # the environment overrides the file
            source = f"{part.model_config['env_prefix']}{key}".upper()
        elif key in loaded.model_fields_set:
            source = str(file or DEFAULT_FILE)
        yield Setting(f"{part.table}.{key}", value, source, has_effect=key not in idle)


def _idle(origin: OriginConfig, tables: Tables) -> list[str]:
    served = [table.alone(name, origin) for name, table in tables.items()]
    return unused(*served or [origin])


DEV_VARS = ".dev.vars"


def load(file: Path, environment: str | None) -> Reading:
    """Read a wrangler file and the `.dev.vars` file in its folder.

    Raises:
        ConfigError: One of these files cannot be read.
    """
    names = {f"{PREFIX}{setting}".upper() for setting in EdgeConfig.environment()}
    return read(
        _text(file),
        str(file),
        environment=environment,
        dev_vars=_dev_vars(file.parent, environment),
        outside=names | os.environ.keys(),
    )


def settings_of(reading: Reading, **flags: Any) -> EdgeConfig:
    """Return the edge's settings: flags override the environment, which overrides the file.

    Raises:
        ConfigError: A setting is invalid. The message shows no secret.
    """
    reading.check()
    said: dict[str, Any] = {name: source.value for name, source in reading.settings.items()}
    over = EdgeConfig.environment()
    over |= {name: value for name, value in flags.items() if value is not None}
    try:
        return EdgeConfig(**(said | over))
    except ValidationError as error:
        first = error.errors()[0]
        setting = str(first["loc"][0]) if first["loc"] else None
        source = None if setting in over else reading.settings.get(setting or "")
        if source is None:
            raise EdgeConfig.explain(error, Path(reading.file)) from None
        fault = fault_of(first, shows_value=not source.secret)
        raise ConfigError(
            fault.message,
            field=source.key if source.secret else f"{reading.file}: {source.key}",
            # The text of the fault may quote the value, so this text is left out for a secret.
            hint=("" if source.secret else f"{fault.right}; ")
            + f"it is edge.{setting}, which tailrace config init explains",
        ) from None


def report_on(reading: Reading, *, as_json: bool) -> str:
    """Return the findings, without values, as a table for people or as a JSON array."""
    if as_json:
        return json.dumps([one._asdict() for one in reading.findings], indent=2)
    rows = [("key", "effect", "why")]
    for one in reading.findings:
        hint = f" ({one.hint})" if one.hint else ""
        rows.append((one.key, str(one.effect), one.why + hint))
    return columns(rows)


def _dev_vars(folder: Path, environment: str | None) -> DevVars | None:
    """Return `.dev.vars.NAME` of the environment if it exists, else `.dev.vars`, else None."""
    names = [DEV_VARS] if environment is None else [f"{DEV_VARS}.{environment}", DEV_VARS]
    for file in (folder / name for name in names):
        if file.exists():
            return DevVars(str(file), _text(file))
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = "give a wrangler.toml or a wrangler.jsonc" if DEV_VARS not in file.name else None
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError(f"{file}: {reason}", hint=hint) from None
