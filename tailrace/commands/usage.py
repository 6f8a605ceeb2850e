"""`tailrace usage`: what generations have used, summed from a ledger.

As in tailrace/cli.py, only typer is imported before the command runs.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tailrace.commands.ledger import PathOption, UrlOption, reading_ledger
from tailrace.commands.options import ConfigOption, JsonOption, columns

COLUMNS = ("prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
READ_COLUMNS = ("delivered_tokens", "unread_tokens")


def usage(
    by: Annotated[
        str,
        typer.Option(
            metavar="GROUP,…",
            help="Groups of the sums: day, month, tenant, key, model, class, finish. Empty: one"
            " sum.",
        ),
    ] = "day",
    since: Annotated[
        str | None,
        typer.Option("--from", metavar="DAY", help="First day (UTC), such as 2026-11-01."),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--to", metavar="DAY", help="Last day (UTC), included.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only streams of this tenant.")] = None,
    key: Annotated[
        str | None, typer.Option(metavar="ID", help="Only streams of the API key with this id.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only streams of this model.")] = None,
    path: PathOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sum the tokens of ended streams by day, key, tenant, model, class or finish reason.

    Each stream is counted once, when it ends. The ledger is read while origins write it.
    """
    given = {"by": by, "from": since, "to": until, "tenant": tenant, "key": key, "model": model}
    wanted = {name: value for name, value in given.items() if value is not None}
    document = asyncio.run(_sums(wanted, path, url, config))
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=False))
        return
    typer.echo(columns(_table(document)))


async def _sums(
    given: dict[str, str], path: Path | None, url: str | None, config: Path | None
) -> dict[str, Any]:
    from tailrace.ledger.usage_report import parse_query, usage_document

    query = parse_query(given, time.time_ns() // 1_000_000)
    async with reading_ledger(path, url, config) as reader:
        return usage_document(query, await reader.usage(query))


def _table(document: dict[str, Any]) -> list[tuple[str, ...]]:
    counted = ("streams", *COLUMNS, *READ_COLUMNS)
    by: list[str] = document["by"]
    heads = (name.removesuffix("_tokens") for name in counted)
    rows: list[tuple[str, ...]] = [(*by, *heads)]
    rows += [
        (*(str(row[name]) or "-" for name in by), *_numbers(row, counted))
        for row in document["usage"]
    ]
    if by:
        total = ["total", *[""] * (len(by) - 1)]
        rows.append((*total, *_numbers(document["total"], counted)))
    return rows


def _numbers(row: dict[str, Any], counted: tuple[str, ...]) -> list[str]:
    return [f"{row[name]:,}" for name in counted]
