"""`tailrace ledger`: look into a ledger file, beside the origin that writes it.

Like edge/cli.py, only typer is imported before a command runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ledger.errors import ConfigError

if TYPE_CHECKING:
    from ledger.reader import LedgerReader
    from ledger.storage import StreamRow

ledger_app = typer.Typer(
    help="Look into the ledger: its streams, whether they are whole, what they take.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

PathOption = Annotated[
    Path | None,
    typer.Option("--path", metavar="FILE", help="The ledger file; default from the settings."),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings; default tailrace.toml if present."),
]
StreamArgument = Annotated[str, typer.Argument(metavar="STREAM", help="32 hex digits.")]
JsonOption = Annotated[bool, typer.Option("--json", help="As JSON.")]


@ledger_app.command()
def status(
    path: PathOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Count streams, frames and bytes."""
    from dataclasses import asdict

    from ledger.status import status as count

    with _reading(path, config) as reader:
        figures = asdict(count(reader))
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        typer.echo(f"{name:16} {_readable(name, value)}")


@ledger_app.command()
def show(
    stream: StreamArgument,
    path: PathOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell of one stream: its state, its text so far, what it takes."""
    from ledger.export import stream_document
    from ledger.reader import parse_stream
    from ledger.status import TEXT_CHARS, story

    with _reading(path, config) as reader:
        row = reader.stream(parse_stream(stream))
        told = story(reader, row, reader.log())
        segments = list(reader.segments(row.sid))
    document = stream_document(row) | {
        "expires_ms": row.expires_ms if row.ended else None,
        "state": told.state,
        "frames": told.frames,
        "tokens": told.tokens,
        "frame_bytes": told.frame_bytes,
        "segments": len(segments),
        "cold_segments": sum(segment.coding > 0 for segment in segments),
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
    config: ConfigOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A line of JSON for each frame, ids included.")
    ] = False,
) -> None:
    """Print a stream's text as it grows, until it ends."""
    from ledger.export import frame_document
    from ledger.follow import follow
    from ledger.frame import Token, decode
    from ledger.reader import parse_stream

    start = 0 if after is None else after + 1
    for _, record in follow(_file(path, config), parse_stream(stream), start, live=live):
        _, frame = decode(record.frame)
        if as_json:
            typer.echo(json.dumps(frame_document(record), ensure_ascii=False))
        elif isinstance(frame, Token):
            typer.echo(frame.text, nl=False)
        sys.stdout.flush()
    if not as_json:
        typer.echo()


@ledger_app.command()
def verify(
    path: PathOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Prove that every stream is contiguous, ends once and matches its checksums."""
    from dataclasses import asdict

    from ledger.verify import verify as check

    with _reading(path, config) as reader:
        total = reader.number("SELECT count(*) FROM stream")
        verdict = check(reader, _progress("verifying", total))
    if as_json:
        typer.echo(json.dumps(asdict(verdict) | {"whole": verdict.whole}))
    else:
        for finding in verdict.findings:
            typer.echo(f"{finding.stream or 'the file':32}  {finding.what}")
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
        str, typer.Option("--format", help="jsonl, frames (wire frames) or copy (the whole file).")
    ] = "jsonl",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: standard output.", dir_okay=False)
    ] = None,
    path: PathOption = None,
    config: ConfigOption = None,
) -> None:
    """Write streams for other programs, or a consistent copy of the file."""
    from ledger.export import json_lines, raw_frames
    from ledger.reader import parse_stream

    _check_form(form, streams, out)
    with _reading(path, config) as reader:
        if form == "copy":
            assert out is not None  # checked
            reader.copy_to(out)
            return
        rows = (
            (reader.stream(parse_stream(stream)) for stream in streams)
            if streams
            else _with_progress(reader)
        )
        if form == "frames":
            _write_bytes(raw_frames(reader, rows, reader.log()), out)
        else:
            lines = json_lines(reader, rows, reader.log())
            _write_bytes((f"{line}\n".encode() for line in lines), out)


@ledger_app.command()
def gc(
    path: PathOption = None,
    config: ConfigOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go; change nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what has expired and give the space back; needs the ledger to itself.

    A running origin does this by itself, every `ledger.sweep_s`.
    """
    import time

    from ledger.collect import collect, expired

    file, now_ms = _file(path, config), time.time_ns() // 1_000_000
    if dry_run:
        with _reading(file, None) as reader:
            figures = {"expired_streams": expired(reader, now_ms), "file_bytes": reader.file_bytes}
    else:
        figures = collect(file, now_ms)
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        typer.echo(f"{name:18} {_readable(name, value)}")


# ---- the file ----


def _file(path: Path | None, config: Path | None) -> Path:
    if path is not None:
        return path
    from origin.config import LedgerConfig, OriginConfig

    settings = LedgerConfig.load(config)
    return settings.path or OriginConfig.load(config).data / "ledger.db"


@contextmanager
def _reading(path: Path | None, config: Path | None) -> Iterator[LedgerReader]:
    from ledger.reader import reading

    with reading(_file(path, config)) as reader:
        yield reader


def _check_form(form: str, streams: list[str] | None, out: Path | None) -> None:
    if form not in ("jsonl", "frames", "copy"):
        raise ConfigError(f"no format {form!r}", field="--format", hint="jsonl, frames or copy")
    if form == "copy" and (out is None or streams):
        raise ConfigError(
            "a copy is of the whole ledger, in a file", field="--format", hint="give --out alone"
        )


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
    show_count = _progress("exporting", reader.number("SELECT count(*) FROM stream"))
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
