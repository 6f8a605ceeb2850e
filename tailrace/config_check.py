"""`tailrace config check`: the settings of every part, each with where it came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ledger.errors import ConfigError
from ledger.settings import DEFAULT_FILE, Settings, all_of
from origin.config import OriginConfig
from origin.model_table import Tables, load_tables
from origin.workers.program import unused
from tailrace.commands.options import columns


class Setting(NamedTuple):
    """One setting; `source` is `default`, a file, or the name of an environment variable.

    `has_effect` is false for what is set and does not go with what is served.
    """

    name: str
    value: object
    source: str
    has_effect: bool = True


def report(parts: Sequence[type[Settings]], file: Path | None, *, as_json: bool) -> str:
    """Every setting of `parts` as text for a person, or as a JSON array of objects.

    Without `file`, `tailrace.toml` is read if it is there. Raises ConfigError.
    """
    if file is not None and not file.is_file():
        raise ConfigError(f"{file} is not a file", hint="name a TOML file, such as tailrace.toml")
    settings = load_all(parts, file)
    if as_json:
        return json.dumps([setting._asdict() for setting in settings], indent=2)
    rows = [("setting", "value", "from")]
    for name, value, source, has_effect in settings:
        effect = "" if has_effect else ", has no effect on what is served"
        rows.append((name, json.dumps(value), source + effect))
    return columns(rows)


def load_all(parts: Sequence[type[Settings]], file: Path | None) -> list[Setting]:
    """The settings of every part, in the order in which the parts declare them; then what is said
    of each of several models. Raises one ConfigError for all that is wrong in any part."""
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
        for key, value in model.model_dump(mode="json", exclude_unset=True).items():
            settings.append(Setting(f"models.{name}.{key}", value, str(file or DEFAULT_FILE)))
    return settings


def _of_part(part: type[Settings], file: Path | None, tables: Tables) -> Iterator[Setting]:
    loaded, environment = part.load(file), part.environment()
    idle = _idle(loaded, tables) if isinstance(loaded, OriginConfig) else []
    for key, value in loaded.model_dump(mode="json").items():
        source = "default"
        if key in environment:  # flags apart, it wins over the file
            source = f"{part.model_config['env_prefix']}{key}".upper()
        elif key in loaded.model_fields_set:
            source = str(file or DEFAULT_FILE)
        yield Setting(f"{part.table}.{key}", value, source, has_effect=key not in idle)


def _idle(origin: OriginConfig, tables: Tables) -> list[str]:
    served = [table.alone(name, origin) for name, table in tables.items()]
    return unused(*served or [origin])
