"""What several commands have: options, checks of what is said by them, and how they show things."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.ledger.errors import CallerError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console


def _check_chart(chart: Path | None) -> Path | None:
    if chart is not None and chart.suffix not in (".png", ".svg"):
        raise CallerError(f"{chart.suffix!r} is no picture", field="--chart", hint=".svg or .png")
    return chart


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings; default tailrace.toml if present."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]
ChartOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Draw it: .svg or .png.", dir_okay=False, callback=_check_chart
    ),
]
LOCAL = "http://127.0.0.1:8080"
"""The edge of `tailrace up`."""
PIPE_COLUMNS = 160


def command_group(about: str) -> typer.Typer:
    """A command that has subcommands. Its help is plain text: loading rich for it costs more than
    everything else together."""
    return typer.Typer(help=about, no_args_is_help=True, rich_markup_mode=None)


def tell(fields: object, text: str, *, as_json: bool) -> None:
    """What a command has done: for programs, or for people."""
    typer.echo(json.dumps(fields) if as_json else text)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Each as wide as its widest cell: plain text, so that a pipe can take it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def check_url(url: str, option: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise CallerError("is no http:// or https:// URL", field=option)


def api_key() -> str | None:
    """Of the environment: a command line is everybody's to see."""
    return os.environ.get("TAILRACE_API_KEY")


def key_headers() -> dict[str, str]:
    key = api_key()
    return {"Authorization": f"Bearer {key}"} if key else {}


def wide_console() -> Console:
    """A file or a pipe has no width of its own to keep to."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


@contextmanager
def progress(unit: str) -> Iterator[Callable[[int], None]]:
    """How many have been done: on stderr, and only where somebody watches."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console

    with Console(stderr=True).status(unit) as status:
        yield lambda done: status.update(f"{done:,} {unit}")


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Imports that need the extra `name`: a missing package says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "tailrace":
            raise  # a fault of ours, not of the installation
        raise ConfigError(
            f"the package {package!r} is not installed",
            hint=f"pip install 'tailrace[{name}]'",
        ) from error
