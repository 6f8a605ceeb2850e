"""Options, checks and output helpers that several commands share."""

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
        raise CallerError(
            f"unsupported image type {chart.suffix!r}", field="--chart", hint="use .svg or .png"
        )
    return chart


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="Settings file. Default: tailrace.toml, if it exists."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ChartOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also draw a chart: .svg or .png.",
        dir_okay=False,
        callback=_check_chart,
    ),
]
LOCAL = "http://127.0.0.1:8080"
"""URL of the edge that `tailrace up` starts."""
PIPE_COLUMNS = 160


def command_group(about: str) -> typer.Typer:
    """Create a command with subcommands.

    Its help is plain text: to import rich would take longer than all the rest of `--help`.
    """
    return typer.Typer(help=about, no_args_is_help=True, rich_markup_mode=None)


def tell(fields: object, text: str, *, as_json: bool) -> None:
    """Print the result of a command: `fields` as JSON for programs, `text` for people."""
    typer.echo(json.dumps(fields) if as_json else text)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as aligned columns of plain text, without colours or borders."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def check_url(url: str, option: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise CallerError("the URL must begin with http:// or https://", field=option)


def api_key() -> str | None:
    """Return the API key from the environment variable TAILRACE_API_KEY.

    There is no flag for it, because other users can see command lines.
    """
    return os.environ.get("TAILRACE_API_KEY")


def key_headers() -> dict[str, str]:
    key = api_key()
    return {"Authorization": f"Bearer {key}"} if key else {}


def wide_console() -> Console:
    """Create a console that does not wrap at 80 columns when it writes to a file or pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


@contextmanager
def progress(unit: str) -> Iterator[Callable[[int], None]]:
    """Show a counter on stderr if that is a terminal; yield the function that sets the counter."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console

    with Console(stderr=True).status(unit) as status:
        yield lambda done: status.update(f"{done:,} {unit}")


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Turn a failed import into an error that says how to install the extra `name`."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "tailrace":
            raise  # a bug in Tailrace, not a missing package
        raise ConfigError(
            f"the package {package!r} is not installed",
            hint=f"pip install 'tailrace[{name}]'",
        ) from error
