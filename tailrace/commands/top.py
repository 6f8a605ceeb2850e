"""`tailrace top`: shows the streams, rates and workers of an edge and its origins.

As in tailrace/cli.py, only typer is imported before a command runs.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Annotated

import typer

from tailrace.commands.options import LOCAL, JsonOption, check_url, key_headers, wide_console
from tailrace.ledger.errors import CallerError


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="Edge URL.")] = LOCAL,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    rows: Annotated[
        int, typer.Option(min=1, max=1000, help="Maximum number of streams to show.")
    ] = 20,
    once: Annotated[bool, typer.Option("--once", help="Show one reading and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show live streams, rates and workers.

    If the edge has API keys, set TAILRACE_API_KEY to one with the right `admin`.
    """
    check_url(url, "URL")
    if as_json and not once:
        raise CallerError("can be used only together with --once", field="--json")
    with suppress(KeyboardInterrupt):  # the user ends the command with Ctrl-C, which is no error
        asyncio.run(_top(url.rstrip("/"), interval, rows, once, as_json))


async def _top(url: str, interval: float, rows: int, once: bool, as_json: bool) -> None:
    import httpx
    from rich.live import Live

    from tailrace.client import unreachable
    from tailrace.top import TIMEOUT_S, document, look, shown

    async with httpx.AsyncClient(base_url=url, headers=key_headers(), timeout=TIMEOUT_S) as http:
        try:
            before = await look(http, rows)
            await asyncio.sleep(interval)
            now = await look(http, rows)
            if once:
                told = document(before, now)
                if as_json:
                    print(json.dumps({"url": url, **told}))
                else:
                    wide_console().print(shown(url, told))
                return
            with Live(shown(url, document(before, now)), screen=True) as live:
                while True:
                    await asyncio.sleep(interval)
                    before, now = now, await look(http, rows)
                    live.update(shown(url, document(before, now)))
        except httpx.TransportError as error:
            raise unreachable(url, error) from None
