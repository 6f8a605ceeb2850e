"""`tailrace ledger`: inspect a ledger, even while origins write it.

As in tailrace/cli.py, only typer is imported before a command runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from tailrace.commands.options import ConfigOption, JsonOption, command_group, extra, progress
from tailrace.ledger.errors import ConfigError

if TYPE_CHECKING:
    from tailrace.ledger.inspection.reader import LedgerReader
    from tailrace.ledger.interface import Ledger
    from tailrace.ledger.sqlite.storage import StreamRow

ledger_app = command_group("Inspect the ledger: streams, integrity, size.")

PathOption = Annotated[
    Path | None,
    typer.Option("--path", metavar="FILE", help="Ledger file. Default: from the settings."),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Database of a shared ledger, postgresql://…. If the URL has a password, put it into"
        " TAILRACE_LEDGER_URL instead, because other users can see command lines.",
    ),
]
StreamArgument = Annotated[str, typer.Argument(metavar="STREAM", help="Stream id: 32 hex digits.")]

P = ParamSpec("P")


def command(work: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """Register an async function as a command, which runs in its own event loop."""

    @ledger_app.command()
    @wraps(work)
    def run(*arguments: P.args, **options: P.kwargs) -> None:
        import asyncio

        asyncio.run(work(*arguments, **options))

    return run


@command
async def status(
    path: PathOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the numbers of streams, frames and bytes."""
    from dataclasses import asdict

    async with reading_ledger(path, url, config) as reader:
        figures = asdict(await reader.status())
    _tell(figures, as_json=as_json)


@command
async def show(
    stream: StreamArgument,
    path: PathOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one stream: state, text so far, size."""
    from tailrace.ledger.inspection.commands import TEXT_CHARS, stream_document, summary
    from tailrace.ledger.inspection.reader import parse_stream

    async with reading_ledger(path, url, config) as reader:
        row = await reader.stream(parse_stream(stream))
        told, stored = await summary(reader, row), await reader.stored(row)
    document = stream_document(row) | {
        "expires_ms": row.expires_ms if row.ended else None,
        "state": told.state,
        "frames": told.frames,
        "tokens": told.tokens,
        "frame_bytes": told.frame_bytes,
        "life": None if told.life is None else told.life._asdict(),
        **stored,
        "text": told.text,
    }
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=False))
        return
    text = document.pop("text")
    life = document.pop("life") or {}
    document |= {name: number for name, number in life.items() if number is not None}
    document["recipe"] = _shortened(json.dumps(document["recipe"], ensure_ascii=False), 200)
    for name, value in document.items():
        typer.echo(f"{name:14} {_readable(name, value)}")
    typer.echo(f"\n{_shortened(text, TEXT_CHARS)}")


@command
async def tail(
    stream: StreamArgument,
    after: Annotated[
        int | None,
        typer.Option(min=0, metavar="INDEX", help="Start after the frame with this index."),
    ] = None,
    live: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for new frames.")] = True,
    path: PathOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON per frame, with token ids.")
    ] = False,
) -> None:
    """Print a stream's text as it grows, until it ends."""
    from tailrace.ledger.frame import ScoredToken, Token, decode
    from tailrace.ledger.inspection.commands import follow, frame_document
    from tailrace.ledger.inspection.reader import parse_stream

    start = 0 if after is None else after + 1
    place = _place(path, url, config)
    async for _, record in follow(place, parse_stream(stream), start, live=live):
        _, frame = decode(record.frame)
        if as_json:
            typer.echo(json.dumps(frame_document(record), ensure_ascii=False))
        elif isinstance(frame, Token | ScoredToken):
            typer.echo(frame.text, nl=False)
        sys.stdout.flush()
    if not as_json:
        typer.echo()


@command
async def verify(
    path: PathOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that streams are complete and undamaged.

    No frame of a stream may be missing, each stream may end only once, and its checksums must
    match.
    """
    from dataclasses import asdict

    from tailrace.ledger.inspection.commands import verify as check

    async with reading_ledger(path, url, config) as reader:
        with progress("streams") as told:
            verdict = await check(reader, told)
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


@command
async def export(
    streams: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STREAM]…", help="Stream ids. Default: all streams."),
    ] = None,
    form: Annotated[
        str,
        typer.Option("--format", help="jsonl, frames (wire frames), or copy (the whole file)."),
    ] = "jsonl",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Output file. Default: standard output.", dir_okay=False),
    ] = None,
    path: PathOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
) -> None:
    """Export streams, or copy the whole ledger file, also while an origin writes to it."""
    from tailrace.ledger.inspection.commands import json_lines, raw_frames
    from tailrace.ledger.inspection.reader import parse_stream

    if form == "copy":
        await _copy(_place(path, url, config), streams, out)
        return
    if form not in ("jsonl", "frames"):
        raise ConfigError(
            f"unknown format {form!r}", field="--format", hint="use jsonl, frames or copy"
        )
    ids = [parse_stream(stream) for stream in streams or ()]
    async with reading_ledger(path, url, config) as reader:
        with progress("streams") as told:
            rows = _rows(reader, ids, told)
            if form == "frames":
                await _write_bytes(raw_frames(reader, rows), out)
            else:
                lines = json_lines(reader, rows)
                await _write_bytes((f"{line}\n".encode() async for line in lines), out)


@command
async def gc(
    path: PathOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed; change nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove expired streams and free their space.

    Stop the origin that uses the file first. A running origin does the same every `ledger.sweep_s`.
    """
    from dataclasses import asdict

    from tailrace.ledger.inspection.commands import collect
    from tailrace.origin.config import OriginConfig
    from tailrace.origin.steady_clock import KeptClock

    if dry_run:
        now_ms = KeptClock(OriginConfig.load(config).data)()
        async with reading_ledger(path, url, config) as reader:
            figures = {
                "expired_streams": await reader.expired(now_ms),
                "ledger_bytes": await reader.ledger_bytes(),
            }
    else:
        place = _place(path, url, config)
        figures = asdict(await collect(place, _opening(place, config)))
    _tell(figures, as_json=as_json)


@ledger_app.command()
def accept(path: PathOption = None, config: ConfigOption = None) -> None:
    """Accept that a damaged ledger file has lost stored data, and let origins use it again.

    Use this for a ledger file whose WAL was damaged, if you have no copy to restore. The next
    origin then continues with the remaining frames; the missing ones stay lost.
    """
    from tailrace.ledger.inspection.commands import accept as go_on

    place = _place(path, None, config)
    if not isinstance(place, Path):
        raise ConfigError("this command is for ledger files, not for PostgreSQL", field="--path")
    go_on(place)
    typer.echo(f"the next origin will continue with what {place} has")


# ---- the ledger ----


def _place(path: Path | None, url: str | None, config: Path | None) -> Path | str:
    """Return the ledger's file, or the URL of its database, from flags and settings."""
    if path is not None and url is not None:
        raise ConfigError("give --path or --url, not both")
    if path is not None:
        return path
    if url is None:
        from tailrace.origin.config import LedgerConfig, OriginConfig

        settings = LedgerConfig.load(config)
        if settings.url is None:
            return settings.path or OriginConfig.load(config).data / "ledger.db"
        url = settings.url.get_secret_value()
    with extra("postgres"):
        import psycopg  # noqa: F401 - so that a missing package is reported with the right extra
    return url


def reading_ledger(
    path: Path | None, url: str | None, config: Path | None
) -> AbstractAsyncContextManager[LedgerReader]:
    """Open a snapshot of the ledger that flags or settings name."""
    from tailrace.ledger.inspection.commands import reading

    return reading(_place(path, url, config))


def _opening(place: Path | str, config: Path | None) -> Callable[[], Awaitable[Ledger]]:
    """Return a function that opens the ledger as an origin with these settings would."""
    from pydantic import SecretStr

    from tailrace.ledger.process.logging_setup import configure_logging
    from tailrace.origin.config import LedgerConfig, OriginConfig
    from tailrace.origin.open_ledger import open_ledger
    from tailrace.origin.steady_clock import KeptClock

    configure_logging("warning")  # logs go to stderr, because the results go to stdout
    file, url = (place, None) if isinstance(place, Path) else (None, SecretStr(place))
    # With a name of its own, this process does not take over the streams of an origin.
    given = {"path": file, "url": url, "owner": "gc"}
    settings = LedgerConfig.load(config).model_copy(update=given)
    data = OriginConfig.load(config).data
    return lambda: open_ledger(settings, data, KeptClock(data))


async def _copy(place: Path | str, streams: list[str] | None, out: Path | None) -> None:
    if not isinstance(place, Path):
        raise ConfigError(
            "a ledger on PostgreSQL cannot be copied to a file",
            field="--format",
            hint="use pg_dump --schema=tailrace",
        )
    if out is None or streams:
        raise ConfigError(
            "a copy of the whole ledger needs an output file and cannot be limited to streams",
            field="--format copy",
            hint="give --out FILE, and leave out the stream ids",
        )
    from tailrace.ledger.inspection.sqlite_reader import reading_file

    async with reading_file(place) as reader:
        await reader.copy_to(out)


async def _write_bytes(pieces: AsyncIterator[bytes], out: Path | None) -> None:
    with out.open("xb") if out is not None else nullcontext(sys.stdout.buffer) as file:
        async for piece in pieces:
            file.write(piece)
        file.flush()


async def _rows(
    reader: LedgerReader, streams: list[bytes], told: Callable[[int], None]
) -> AsyncIterator[StreamRow]:
    """Yield the rows of these streams, or of all streams if none is given."""
    done = 0
    for stream in streams:
        yield await reader.stream(stream)
    if not streams:
        async for row in reader.streams():
            yield row
            done += 1
            told(done)


# ---- for people ----


def _tell(figures: Mapping[str, object], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        typer.echo(f"{name:16} {_readable(name, value)}")


TIMES = {"created_ms", "expires_ms", "next_alarm_ms", "next_expiry_ms"}
"""Names of fields that hold a time of day in ms since 1970. Other fields in ms are durations."""


def _readable(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name in TIMES and isinstance(value, int):
        from datetime import UTC, datetime

        return datetime.fromtimestamp(value / 1000, UTC).isoformat(timespec="seconds")
    if name.endswith("_ms") and isinstance(value, int):
        return f"{value:,} ms"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value:,}"
    return str(value)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
