"""`tailrace chat`: one answer, streamed to the terminal; stdout carries its text alone."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console

from ledger.frame import FinishReason, StreamEnd
from tailrace.client import Client, Stream
from tailrace.commands.options import api_key
from tailrace.viewer import Summary, Viewer, printable

PATIENCE_S = 15.0  # without a new frame; a person watches
FAILURES = {FinishReason.FAILED, FinishReason.ORIGIN_LOST}


async def chat(
    edges: Sequence[str], request: Mapping[str, Any], *, cut_after: int | None, as_json: bool
) -> bool:
    """Stream one answer; `request` holds the arguments of `generate`.

    Returns whether it ended well. Raises TailraceError.
    """
    notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    viewer = Viewer(
        # With --json the text comes at the end.
        write=(lambda _text: None) if as_json else _write,
        # On a terminal a note stands inside the text; in a log it is a line.
        note=partial(notes.print, style="bold cyan", end="" if notes.is_terminal else "\n"),
        cut_after=cut_after,
    )
    async with Client(
        edges, api_key=api_key(), on_state=viewer.on_state, patience_s=PATIENCE_S
    ) as client:
        stream = client.generate(**request)
        try:
            end, summary = await viewer.follow(stream)
        except asyncio.CancelledError:
            if stream.id is not None:
                notes.print(f"\nthe stream runs on: {edges[0]}/v1/generate/{stream.id}")
            raise
    if as_json:
        print(_document(stream, viewer.text, end, summary))
        return end.finish_reason not in FAILURES
    print(flush=True)
    if end.message:
        notes.print(end.message, style="red")
    notes.print(str(summary), style="dim")
    return end.finish_reason not in FAILURES


def _write(text: str) -> None:
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _document(stream: Stream, text: str, end: StreamEnd, summary: Summary) -> str:
    fields = {"id": stream.id, "text": text, "prompt_tokens": end.prompt_tokens, **asdict(summary)}
    if end.message:
        fields["message"] = end.message
    return json.dumps(fields, ensure_ascii=False)
