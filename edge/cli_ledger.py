"""`tailrace ledger`: look into a ledger, beside the origins that write it.

Like edge/cli.py, only typer is imported before a command runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ledger.errors import ConfigError

if TYPE_CHECKING:
    from ledger.interface import Ledger
    from ledger.sqlite.storage import StreamRow
    from ledger.tools.reader import LedgerReader

ledger_app = typer.Typer(
    help="Look into the ledger: its streams, whether they are whole, what they take.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

PathOption = Annotated[
    Path | None,
    typer.Option("--path", metavar="FILE", help="The ledger file; default from the settings."),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="The database of a shared ledger, postgresql://…; with a password rather in"
        " TAILRACE_LEDGER_URL, as others can see a command line.",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings; default tailrace.toml if present."),
]
StreamArgument = Annotated[str, typer.Argument(metavar="STREAM", help="32 hex digits.")]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]


@ledger_app.command()
def status(
    path: PathOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count streams, frames and bytes."""
    from dataclasses import asdict

    with _reading(path, url, config) as reader:
        figures = asdict(reader.status())
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        typer.echo(f"{name:16} {_readable(name, value)}")


@ledger_app.command()
def show(
    stream: StreamArgument,
    path: PathOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell of one stream: its state, its text so far, what it takes."""
    from dataclasses import asdict

    from ledger.tools.export import stream_document
    from ledger.tools.reader import parse_stream
    from ledger.tools.story import TEXT_CHARS, story

    with _reading(path, url, config) as reader:
        row = reader.stream(parse_stream(stream))
        told, stored = story(reader, row), asdict(reader.stored(row))
    document = stream_document(row) | {
        "expires_ms": row.expires_ms if row.ended else None,
        "state": told.state,
        "frames": told.frames,
        "tokens": told.tokens,
        "frame_bytes": told.frame_bytes,
        **stored,
        "text": told.text,
    }
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=False))
        return
    text = document.pop("text")
    document["recipe"] = _shortened(json.dumps(document["recipe"], ensure_ascii=False), 200)
    for name, value in document.items():
        typer.echo(f"{name:14} {_readable(name, value)}")
    typer.echo(f"\n{_shortened(text, TEXT_CHARS)}")


@ledger_app.command()
def tail(
    stream: StreamArgument,
    after: Annotated[
        int | None, typer.Option(min=0, metavar="INDEX", help="Begin behind this index.")
    ] = None,
    live: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Wait for what is still to come.")
    ] = True,
    path: PathOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A line of JSON for each frame, ids included.")
    ] = False,
) -> None:
    """Print a stream's text as it grows, until it ends."""
    from ledger.frame import ScoredToken, Token, decode
    from ledger.tools.export import frame_document
    from ledger.tools.follow import follow
    from ledger.tools.reader import parse_stream

    start = 0 if after is None else after + 1
    for _, record in follow(_place(path, url, config), parse_stream(stream), start, live=live):
        _, frame = decode(record.frame)
        if as_json:
            typer.echo(json.dumps(frame_document(record), ensure_ascii=False))
        elif isinstance(frame, Token | ScoredToken):
            typer.echo(frame.text, nl=False)
        sys.stdout.flush()
    if not as_json:
        typer.echo()


@ledger_app.command()
def verify(
    path: PathOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove that every stream is contiguous, ends once and matches its checksums."""
    from dataclasses import asdict

    from ledger.tools.verify import verify as check

    with _reading(path, url, config) as reader:
        verdict = check(reader, _progress("verifying", reader.stream_count()))
    if as_json:
        typer.echo(json.dumps(asdict(verdict) | {"whole": verdict.whole}))
    else:
        for finding in verdict.findings:
            typer.echo(f"{finding.stream or 'the ledger':32}  {finding.what}")
        state = "whole" if verdict.whole else f"{len(verdict.findings)} findings"
        typer.echo(
            f"{verdict.streams} streams ({verdict.ended} ended), {verdict.frames} frames,"
            f" {verdict.tokens} tokens: {state}"
        )
    if not verdict.whole:
        raise typer.Exit(1)


@ledger_app.command()
def export(
    streams: Annotated[
        list[str] | None, typer.Argument(metavar="[STREAM]…", help="Default: all of them.")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="jsonl, frames (wire frames) or copy (a whole file).")
    ] = "jsonl",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: standard output.", dir_okay=False)
    ] = None,
    path: PathOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Write streams for other programs, or a consistent copy of a file."""
    from ledger.tools.export import json_lines, raw_frames
    from ledger.tools.reader import parse_stream, reading

    place = _place(path, url, config)
    if form == "copy":
        _copy(place, streams, out)
        return
    if form not in ("jsonl", "frames"):
        raise ConfigError(f"no format {form!r}", field="--format", hint="jsonl, frames or copy")
    with reading(place) as reader:
        rows = (
            (reader.stream(parse_stream(stream)) for stream in streams)
            if streams
            else _with_progress(reader)
        )
        if form == "frames":
            _write_bytes(raw_frames(reader, rows), out)
        else:
            lines = json_lines(reader, rows)
            _write_bytes((f"{line}\n".encode() for line in lines), out)


@ledger_app.command()
def gc(
    path: PathOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go; change nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what has expired and give the space back; needs a file to itself.

    A running origin does this by itself, every `ledger.sweep_s`.
    """
    import time
    from dataclasses import asdict

    from ledger.tools.collect import collect
    from ledger.tools.reader import reading

    place = _place(path, url, config)
    if dry_run:
        with reading(place) as reader:
            figures = {
                "expired_streams": reader.expired(time.time_ns() // 1_000_000),
                "ledger_bytes": reader.ledger_bytes(),
            }
    else:
        figures = asdict(collect(place, _opening(place, config)))
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        typer.echo(f"{name:18} {_readable(name, value)}")


# ---- the ledger ----


def _place(path: Path | None, url: str | None, config: Path | None) -> Path | str:
    """The file, or the URL of the database, that flags and settings name."""
    if path is not None and url is not None:
        raise ConfigError("give --path or --url, not both")
    if path is not None:
        return path
    if url is None:
        from origin.config import LedgerConfig, OriginConfig

        settings = LedgerConfig.load(config)
        if settings.url is None:
            return settings.path or OriginConfig.load(config).data / "ledger.db"
        url = settings.url.get_secret_value()
    from edge.cli import extra

    with extra("postgres"):
        import psycopg  # noqa: F401 - only to say what is missing, before it is used
    return url


@contextmanager
def _reading(path: Path | None, url: str | None, config: Path | None) -> Iterator[LedgerReader]:
    from ledger.tools.reader import reading

    with reading(_place(path, url, config)) as reader:
        yield reader


def _opening(place: Path | str, config: Path | None) -> Callable[[], Awaitable[Ledger]]:
    """Opens the ledger as one more origin, with the settings of one."""
    import time

    from pydantic import SecretStr

    from ledger.log import configure_logging
    from origin.config import LedgerConfig, OriginConfig
    from origin.open_ledger import open_ledger

    configure_logging("warning")  # on stderr, as the figures go to stdout
    file, url = (place, None) if isinstance(place, Path) else (None, SecretStr(place))
    given = {"path": file, "url": url, "owner": "gc"}  # a name of its own: it takes no streams
    settings = LedgerConfig.load(config).model_copy(update=given)
    data = OriginConfig.load(config).data
    return lambda: open_ledger(settings, data, lambda: time.time_ns() // 1_000_000)


def _copy(place: Path | str, streams: list[str] | None, out: Path | None) -> None:
    if not isinstance(place, Path):
        raise ConfigError(
            "only a file can be copied",
            field="--format",
            hint="pg_dump --schema=tailrace copies a ledger on PostgreSQL",
        )
    if out is None or streams:
        raise ConfigError(
            "a copy is of the whole ledger, in a file", field="--format", hint="give --out alone"
        )
    from ledger.tools.sqlite_reader import reading_file

    with reading_file(place) as reader:
        reader.copy_to(out)


def _write_bytes(pieces: Iterator[bytes], out: Path | None) -> None:
    if out is None:
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return
    with out.open("xb") as file:
        file.writelines(pieces)


# ---- for people ----


def _progress(what: str, total: int) -> Callable[[int], None] | None:
    """A counter on a terminal; nothing where nobody looks."""
    if not sys.stderr.isatty():
        return None

    def show_count(done: int) -> None:
        if done % 100 == 0 or done == total:
            print(f"\r{what} {done}/{total} streams", end="", file=sys.stderr, flush=True)
        if done == total:
            print(file=sys.stderr)

    return show_count


def _with_progress(reader: LedgerReader) -> Iterator[StreamRow]:
    show_count = _progress("exporting", reader.stream_count())
    for done, row in enumerate(reader.streams(), 1):
        yield row
        if show_count is not None:
            show_count(done)


def _readable(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name.endswith("_ms") and isinstance(value, int) and name != "ttl_ms":
        from datetime import UTC, datetime

        return datetime.fromtimestamp(value / 1000, UTC).isoformat(timespec="seconds")
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value:,}"
    return str(value)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
