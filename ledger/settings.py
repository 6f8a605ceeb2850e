"""Settings of every part: flags over environment over one TOML file over defaults.

`tailrace.toml` has one table a part (`[edge]`, `[origin]`, `[ledger]`); the environment
spells the same keys `TAILRACE_EDGE_HTTP` and so on.
"""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from ledger.errors import ConfigError

DEFAULT_FILE = Path("tailrace.toml")
TABLES = ("edge", "origin", "ledger", "streams")


class Settings(BaseSettings):
    """Base of the settings of one part; a subclass names its `table`."""

    table: ClassVar[str]
    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True)

    @classmethod
    def load(cls, path: Path | None = None, **flags: Any) -> Self:
        """Read the settings; `flags` that are None count as not given.

        Without `path`, `tailrace.toml` in the working directory is read if it is there.
        Raises `ConfigError` naming the key, where it came from and what would be right.
        """
        file = path or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)
        table = _read_table(file, cls.table) if file else {}
        given = {key: value for key, value in flags.items() if value is not None}
        try:
            return cls(**given, **{f"{_FROM_FILE}{key}": value for key, value in table.items()})
        except ValidationError as error:
            raise cls._explain(error, file) from error

    @classmethod
    def _explain(cls, error: ValidationError, file: Path | None) -> ConfigError:
        """The first finding, with every place that the value may have come from."""
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # about several settings at once
            return ConfigError(message, field=cls.table)
        key = ".".join(str(part) for part in first["loc"])
        field = f"{cls.table}.{key}"
        variable = f"TAILRACE_{cls.table}_{first['loc'][0]}".upper()
        where = f"see {file}, {variable} or the flag" if file else f"see {variable} or the flag"
        if first["type"] == "extra_forbidden":
            closest = get_close_matches(key, cls.model_fields, n=1)
            guess = f"did you mean {closest[0]}? " if closest else ""
            return ConfigError("unknown setting", field=field, hint=guess + where)
        return ConfigError(f"{message}, not {first['input']!r}", field=field, hint=where)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then file."""
        given = init_settings()
        flags = {k: v for k, v in given.items() if not k.startswith(_FROM_FILE)}
        file = {k.removeprefix(_FROM_FILE): v for k, v in given.items() if k.startswith(_FROM_FILE)}
        return (_Given(settings_cls, flags), env_settings, _Given(settings_cls, file))


_FROM_FILE = "file:"


class _Given(PydanticBaseSettingsSource):
    """A source that is just a dict."""

    def __init__(self, settings_cls: type[BaseSettings], values: dict[str, Any]) -> None:
        super().__init__(settings_cls)
        self._values = values

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._values


def _read_table(file: Path, table: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: {error}", hint="give a readable TOML file") from error
    unknown = sorted(set(document) - set(TABLES))
    if unknown:
        raise ConfigError(
            f"{file}: unknown table [{unknown[0]}]",
            field=unknown[0],
            hint="the tables are " + ", ".join(f"[{name}]" for name in TABLES),
        )
    values = document.get(table, {})
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: {table} must be a table", field=table, hint=f"write [{table}]")
    return values
