"""`tailrace config init`: a `tailrace.toml` with every setting, its meaning and its default."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ledger.errors import ConfigError
from ledger.settings import Settings
from origin.model_table import ModelTable

WIDTH = 96
HEAD = """\
# Settings of Tailrace; `tailrace config check` shows what holds, and where it comes from.
# The environment (TAILRACE_EDGE_HTTP, …) wins over this file, and a flag over both.
# What is commented out is the default. A setting without a value has none.
"""
BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def commented(parts: Sequence[type[Settings]]) -> str:
    """The text of the file: all settings of `parts`, and of one model of several, commented out."""
    lines = [line for part in parts for line in _table(part, f"[{part.table}]")]
    lines += _table(ModelTable, "# [models.NAME]")
    return HEAD + "".join(f"\n{line}" for line in lines) + "\n"


def write(file: Path, parts: Sequence[type[Settings]]) -> None:
    """Raises ConfigError where a file is there already."""
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(commented(parts))
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror or error}", hint="name a file that is not there yet"
        ) from error


def _table(part: type[BaseModel], head: str) -> Iterator[str]:
    yield f"\n{head}"
    shown = part.model_construct().model_dump(mode="json")
    for name, info in part.model_fields.items():
        told = "; ".join([info.description or name, *_ranges(info)])
        yield "\n" + textwrap.fill(told, WIDTH, initial_indent="# ", subsequent_indent="# ")
        yield f"# {name} ={_literal(shown, name, info)}"


def _literal(shown: Mapping[str, Any], name: str, info: FieldInfo) -> str:
    value = shown[name]
    # Where this was installed is nobody's setting.
    is_here = isinstance(info.default, Path) and info.default.is_absolute()
    return "" if value is None or is_here else f" {json.dumps(value, ensure_ascii=False)}"


def _ranges(info: FieldInfo) -> Iterator[str]:
    """What the description does not say: words that may be chosen, bounds of a number."""
    for each in (info.annotation, *get_args(info.annotation)):
        if get_origin(each) is Literal:
            yield "one of " + ", ".join(map(str, get_args(each)))
    for metadata in info.metadata:
        for bound, words in BOUNDS.items():
            if (limit := getattr(metadata, bound, None)) is not None:
                yield words.format(f"{limit:g}" if isinstance(limit, float) else limit)
