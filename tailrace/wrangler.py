"""`--wrangler FILE`: an edge's settings from the file that Workers have, and what each key does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from edge.config import EdgeConfig
from edge.wrangler.file import PREFIX, DevVars, Reading, read
from ledger.errors import ConfigError
from tailrace.commands.options import columns

DEV_VARS = ".dev.vars"


def load(file: Path, environment: str | None) -> Reading:
    """Read `file` and the secrets beside it. Raises ConfigError where they cannot be read."""
    names = {f"{PREFIX}{setting}".upper() for setting in EdgeConfig.environment()}
    return read(
        _text(file),
        str(file),
        environment=environment,
        dev_vars=_dev_vars(file.parent, environment),
        outside=names | os.environ.keys(),
    )


def settings_of(reading: Reading, **flags: Any) -> EdgeConfig:
    """Flags over the environment over the file; raises ConfigError, which shows no secret."""
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
        message = first["msg"].removeprefix("Value error, ") + f", not {first['input']!r}"
        raise ConfigError(
            "does not fit" if source.secret else message,
            field=source.key if source.secret else f"{reading.file}: {source.key}",
            hint=f"it is edge.{setting}, which tailrace config init explains",
        ) from None


def report_on(reading: Reading, *, as_json: bool) -> str:
    """Every finding as text for a person, or as a JSON array of objects; no values."""
    if as_json:
        return json.dumps([one._asdict() for one in reading.findings], indent=2)
    rows = [("key", "effect", "why")]
    for one in reading.findings:
        hint = f" ({one.hint})" if one.hint else ""
        rows.append((one.key, str(one.effect), one.why + hint))
    return columns(rows)


def _dev_vars(folder: Path, environment: str | None) -> DevVars | None:
    """That of the environment alone where there is one, as wrangler has it."""
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
