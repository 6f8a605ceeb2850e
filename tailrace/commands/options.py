"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings; default tailrace.toml if present."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]
