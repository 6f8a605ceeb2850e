"""`tailrace chat`: streams one answer to the terminal; only its text is written to stdout."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from rich.console import Console

from tailrace.client import Client, State, Stream
from tailrace.commands.options import api_key
from tailrace.ledger.errors import Unavailable
from tailrace.ledger.frame import (
    FinishReason,
    Frame,
    Notice,
    Revision,
    ScoredToken,
    StreamEnd,
    Token,
)
from tailrace.ledger.stream_text import StreamText

# Replaces all control characters (C0 and C1) except tab and newline.
CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if chr(code) not in "\t\n"
}


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of a stream as the client measured them; `str` returns a line to be shown."""

    total_tokens: int
    finish_reason: str
    ttft_s: float
    tokens_per_s: float | None  # None if fewer than two tokens arrived
    resumes: int

    def __str__(self) -> str:
        parts = [_count(self.total_tokens, "token"), f"TTFT {self.ttft_s * 1000:.0f} ms"]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.0f} tok/s")
        parts.append(_count(self.resumes, "resume"))
        return " · ".join([*parts, self.finish_reason])


def printable(text: str) -> str:
    """Return `text` with control characters replaced, because they could control the terminal."""
    return text.translate(CONTROLS)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(slots=True)
class Viewer:
    """Shows a stream: calls `write` with its text, and `note` with remarks about the connection.

    Written text cannot be changed. If a revision only extends it, the new part is written.
    Otherwise the whole text is written again on a new line. With `cut_after` the connection is
    dropped once, after that many tokens. Pass `on_state` to the client that reads the stream.
    """

    write: Callable[[str], None]
    note: Callable[[str], None]
    cut_after: int | None = None
    tokens: int = 0
    _text: StreamText = field(default_factory=StreamText)
    _written: str = ""
    _was_cut: bool = False
    _waiting: bool = False

    @property
    def text(self) -> str:
        return self._text.text

    async def follow(self, stream: Stream) -> tuple[StreamEnd, Summary]:
        """Read the stream to its end. Raises TailraceError if the end cannot be reached."""
        asked_s = time.monotonic()
        first_s = last_s = asked_s
        async for frame in stream:
            if isinstance(frame, Token | ScoredToken | Revision):
                last_s = time.monotonic()
                first_s = last_s if self.tokens == 0 else first_s
                self._show(frame, stream)
            elif isinstance(frame, Notice):
                self.note(f"⟨{frame.code}: {frame.message}⟩")
        end = stream.end
        assert end is not None, "a stream that is iterated to its end has one"
        elapsed_s = last_s - first_s
        return end, Summary(
            total_tokens=end.total_tokens,
            finish_reason=end.finish_reason.word,
            ttft_s=first_s - asked_s,
            tokens_per_s=(self.tokens - 1) / elapsed_s if elapsed_s > 0 else None,
            resumes=stream.resumes,
        )

    def on_state(self, state: State, detail: str) -> None:
        match state:
            case "waiting":
                if not self._waiting:  # show one note for each outage, not for each attempt
                    self.note(f"⟨waiting {detail}⟩")
                self._waiting = True
            case "resumed":
                what = "cut" if self._was_cut else "connection lost"
                tokens = _count(self.tokens, "token")
                self.note(f"⟨{what} after {tokens} · resumed on {detail}⟩")
                self._was_cut = self._waiting = False
            case "open":
                self._waiting = False

    def _show(self, frame: Token | ScoredToken | Revision, stream: Stream) -> None:
        self._text.add(frame)
        self.tokens += 1
        self.write(self._news(frame))
        if self.tokens == self.cut_after:
            self._was_cut = True
            stream.cut()

    def _news(self, frame: Frame) -> str:
        """Return what to write next, so that the terminal shows the text after this frame."""
        if isinstance(frame, Token | ScoredToken):
            self._written += frame.text
            return frame.text
        before, self._written = self._written, self.text
        if self._written.startswith(before):
            return self._written[len(before) :]
        return f"\n{self._written}"


# Seconds without a new frame after which the command gives up: short, because a person waits.
PATIENCE_S = 15.0
FAILURES = {FinishReason.FAILED, FinishReason.ORIGIN_LOST}


async def chat(
    edges: Sequence[str], request: Mapping[str, Any], *, cut_after: int | None, as_json: bool
) -> bool:
    """Stream one answer; return True unless the generation failed.

    `request` holds the arguments of `Client.generate`. Raises TailraceError if the stream cannot be
    read to its end.
    """
    notes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    viewer = Viewer(
        # With --json the text is printed at the end.
        write=(lambda _text: None) if as_json else _write,
        # On a terminal a note is written within the text; in a log it gets its own line.
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
        except Unavailable as error:
            if error.code != "edge_unreachable" or stream.id is not None:
                raise
            raise Unavailable(
                f"no edge answers at {' or '.join(edges)}",
                code=error.code,
                hint="start one with tailrace up, or name another: --edge URL",
            ) from error
    if as_json:
        print(_document(stream, viewer.text, end, summary))
        return end.finish_reason not in FAILURES
    print(flush=True)
    if end.message and end.finish_reason is not FinishReason.STOP:
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
