"""`tailrace chat`: one answer, streamed to the terminal; stdout carries its text alone."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from ledger.frame import FinishReason, StreamEnd
from tailrace.client import Client
from tailrace.client_stream import Stream
from tailrace.commands.options import api_key
from tailrace.viewer import Summary, Viewer, printable

DEFAULT_EDGES = ("http://127.0.0.1:8080",)
PATIENCE_S = 15.0  # without a new frame; a person watches
FAILURES = {FinishReason.FAILED, FinishReason.ORIGIN_LOST}


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the command line asked for; `request` holds the arguments of `generate`."""

    edges: Sequence[str] | None
    request: Mapping[str, Any]
    cut_after: int | None = None
    as_json: bool = False


def run(options: ChatOptions) -> bool:
    """Stream one answer; returns whether it ended well. Raises TailraceError."""
    return asyncio.run(_chat(options))


async def _chat(options: ChatOptions) -> bool:
    notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    viewer = Viewer(
        write=_ignore if options.as_json else _write,
        note=lambda text: notes.print(text, style="bold cyan", end=_note_end(notes)),
        cut_after=options.cut_after,
    )
    edges = options.edges or DEFAULT_EDGES
    async with Client(
        edges, api_key=api_key(), on_state=viewer.on_state, patience_s=PATIENCE_S
    ) as client:
        stream = client.generate(**options.request)
        try:
            end, summary = await viewer.follow(stream)
        except asyncio.CancelledError:
            if stream.id is not None:
                notes.print(f"\nthe stream runs on: {edges[0]}/v1/generate/{stream.id}")
            raise
    if options.as_json:
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


def _ignore(_text: str) -> None:
    """With --json the text comes at the end."""


def _note_end(notes: Console) -> str:
    """On a terminal a note stands inside the text; in a log it is a line."""
    return "" if notes.is_terminal else "\n"


def _document(stream: Stream, text: str, end: StreamEnd, summary: Summary) -> str:
    fields = {"id": stream.id, "text": text, "prompt_tokens": end.prompt_tokens, **asdict(summary)}
    if end.message:
        fields["message"] = end.message
    return json.dumps(fields, ensure_ascii=False)
