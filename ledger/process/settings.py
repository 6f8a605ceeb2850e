"""Settings of every part: a flag wins over the environment, and the environment over the TOML file.

`tailrace.toml` has one table per part (`[edge]`, `[origin]`, `[ledger]`); the environment spells
the same keys `TAILRACE_EDGE_HTTP` and so on.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.validation import closest_name, fault_of

DEFAULT_FILE = Path("tailrace.toml")
TABLES = ("edge", "origin", "models", "pipelines", "ledger", "streams")
MAX_PORT = 65_535
log = logging.getLogger("tailrace.settings")
MISSPELT = 0.9
"""Least similarity, from 0 to 1, of a variable with a misspelt prefix to the one that was meant."""
_OF_A_SERVICE = re.compile(r"_(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_(TCP|UDP)\w*)$")
"""Matches variables that Kubernetes sets in every pod for a Service such as tailrace-edge."""


def parse_address(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT` or `[IPV6]:PORT`.

    Raises:
        ValueError: The text is not an address.
    """
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    well_bracketed = host in (bare, f"[{bare}]") and (":" in bare) == host.startswith("[")
    if not bare or not well_bracketed or not (port.isascii() and port.isdigit()):
        raise ValueError("write HOST:PORT, such as 127.0.0.1:8080 or [::1]:8080")
    if int(port) > MAX_PORT:
        raise ValueError(f"a port is at most {MAX_PORT}")
    return bare, int(port)


def split_at_commas(value: object) -> object:
    """Split `a,b` of the environment or a flag into several values."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _checked_url(text: str) -> str:
    if re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", text) is None:
        raise ValueError("write http://HOST:PORT, such as http://127.0.0.1:4318")
    return text


Address = Annotated[str, AfterValidator(lambda text: parse_address(text) and text)]
CollectorUrl = Annotated[str, AfterValidator(_checked_url)]


class Settings(BaseSettings):
    """Base class of the settings in one table of the settings file; a subclass sets `table`."""

    table: ClassVar[str]
    retired: ClassVar[Mapping[str, str]] = {}
    """Settings of earlier releases that have no effect now, each with the reason.

    They are accepted with a warning, so that a server whose file sets them starts after an upgrade.
    """
    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True)

    @classmethod
    def load(cls, path: Path | None = None, **flags: Any) -> Self:
        """Load the settings. `flags` that are None count as not given.

        Without `path`, `tailrace.toml` in the working directory is read if that file exists.
        Raises `ConfigError` naming the key, where it came from and what would be right.
        """
        file = file_of(path)
        table = cls._without_retired(read_table(file, cls.table), file) if file else {}
        for name in cls.retired:
            variable = f"{cls.model_config['env_prefix']}{name}".upper()
            if variable in os.environ:
                cls._warn_of_retired(name, variable)
        given = {key: value for key, value in flags.items() if value is not None}
        try:
            return cls(**(table | cls.environment() | given))
        except ValidationError as error:
            raise cls.explain(error, file) from error

    @classmethod
    def _without_retired(cls, table: Mapping[str, Any], file: Path) -> dict[str, Any]:
        for name in cls.retired.keys() & table.keys():
            cls._warn_of_retired(name, str(file))
        return {name: value for name, value in table.items() if name not in cls.retired}

    @classmethod
    def _warn_of_retired(cls, name: str, where: str) -> None:
        log.warning(
            "%s.%s has no effect any more: %s; remove it from %s",
            *(cls.table, name, cls.retired[name], where),
        )

    @classmethod
    def environment(cls) -> dict[str, Any]:
        """Return the settings that environment variables set, by their names.

        Raises `ConfigError` for a variable that has this part's prefix but belongs to no setting,
        and for one whose prefix is misspelt.
        """
        unknown = [_unknown_variable(cls, name) for name in sorted(unknown_variables(cls))]
        unknown += _misspelt_prefixes(cls)
        if unknown:
            raise all_of(unknown)
        return EnvSettingsSource(cls)()

    @classmethod
    def explain(cls, error: ValidationError, file: Path | None) -> ConfigError:
        """Return one error with all findings, each with the places where its value may be set."""
        found = error.errors()
        # An invalid item also makes its list too short; report the item only.
        within = {each["loc"][:-1] for each in found if len(each["loc"]) > 1}
        return all_of([cls._finding(each, file) for each in found if each["loc"] not in within])

    @classmethod
    def _finding(cls, found: ErrorDetails, file: Path | None) -> ConfigError:
        if not found["loc"]:  # the error is about several settings
            return finding(found, cls.table, ())
        variable = f"TAILRACE_{cls.table}_{found['loc'][0]}".upper()
        where = f"see {file}, {variable} or the flag" if file else f"see {variable} or the flag"
        return finding(found, cls.table, cls.model_fields, where)


def unknown_variables(part: type[Settings]) -> list[str]:
    """Return the environment variables that have the prefix of `part` but belong to no setting."""
    prefix = part.model_config["env_prefix"]
    return [
        name
        for name in os.environ
        if name.upper().startswith(prefix)
        and name[len(prefix) :].lower() not in part.model_fields
        and name[len(prefix) :].lower() not in part.retired
        and _OF_A_SERVICE.search(name) is None
    ]


def _unknown_variable(part: type[Settings], name: str) -> ConfigError:
    prefix = part.model_config["env_prefix"]
    closest = closest_name(name[len(prefix) :].lower(), part.model_fields)
    guess = "unset it; tailrace config check lists the settings"
    if closest:
        guess = f"did you mean {prefix}{closest.upper()}?"
    return ConfigError("unknown environment variable", field=name, hint=guess)


def _misspelt_prefixes(part: type[Settings]) -> list[ConfigError]:
    """Return an error for each variable such as `TAILRACE_EGDE_HTTP` that resembles one of `part`.

    The prefixes of the other parts are right, and a name such as `TAILRACE_API_KEY` resembles none.
    """
    prefixes = tuple(f"TAILRACE_{table}_".upper() for table in TABLES)
    variables = [f"{part.model_config['env_prefix']}{name}".upper() for name in part.model_fields]
    guesses = {
        name: closest_name(name.upper(), variables, least=MISSPELT)
        for name in sorted(os.environ)
        if name.upper().startswith("TAILRACE_") and not name.upper().startswith(prefixes)
    }
    return [
        ConfigError("unknown environment variable", field=name, hint=f"did you mean {guess}?")
        for name, guess in guesses.items()
        if guess is not None
    ]


def finding(
    found: ErrorDetails, table: str, fields: Iterable[str], where: str | None = None
) -> ConfigError:
    """Return the error for one fault in `table`, whose settings are `fields`.

    The hint ends with `where`, a text that lists the places in which the setting can be set.
    """
    fault = fault_of(found)
    message, hints = fault.message, [fault.right, where]
    if fault.kind == "extra_forbidden":
        message = "unknown setting"
        closest = closest_name(fault.field, fields)
        hints = [closest and f"did you mean {closest}?", where]
    field = f"{table}.{fault.field}" if fault.field else table
    return ConfigError(message, field=field, hint="; ".join(filter(None, hints)) or None)


def all_of(errors: Sequence[ConfigError]) -> ConfigError:
    """Combine several errors into one, with each message on its own line and no message twice."""
    said = dict.fromkeys(map(str, errors))
    return errors[0] if len(said) == 1 else ConfigError("\n  ".join(said))


def file_of(path: Path | None) -> Path | None:
    """Return the settings file: `path`, or the default file if it exists."""
    return path or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)


def read_table(file: Path, table: str) -> dict[str, Any]:
    """Read one table of a settings file.

    Raises:
        ConfigError: The file is not a valid settings file.
    """
    try:
        document = tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        hint = f"tailrace config init {file} writes one"
        raise ConfigError(f"{file} does not exist", hint=hint) from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}", hint="give a readable TOML file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
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
