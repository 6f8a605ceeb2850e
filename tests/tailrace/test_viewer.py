"""Output of `tailrace chat`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest

from tailrace.chat import Summary, Viewer, printable
from tailrace.client import Stream
from tailrace.ledger.frame import (
    FinishReason,
    Logged,
    Notice,
    Revision,
    ScoredToken,
    StreamEnd,
    Token,
)


class Played:
    """A stream of these frames, as a viewer reads one."""

    resumes = 0
    end: StreamEnd | None = None

    def __init__(self, *frames: Logged) -> None:
        self._frames = frames

    async def __aiter__(self) -> AsyncIterator[Logged]:
        for frame in self._frames:
            yield frame
        self.end = StreamEnd(len(self._frames), FinishReason.STOP, len(self._frames), 1)


async def shown(*frames: Logged) -> tuple[str, list[str], str]:
    """Return what was written, what was noted, and the text that the viewer ends with."""
    written: list[str] = []
    notes: list[str] = []
    viewer = Viewer(written.append, notes.append)
    await viewer.follow(cast(Stream, Played(*frames)))
    return "".join(written), notes, viewer.text


@pytest.mark.anyio
async def test_tokens_are_written_as_they_come_and_notices_beside_them() -> None:
    frames = (Notice("truncated", "2 messages", 0), Token("a", 1), ScoredToken("b", (), 2))
    assert await shown(*frames) == ("ab", ["⟨truncated: 2 messages⟩"], "ab")


@pytest.mark.anyio
async def test_a_revision_that_goes_on_is_written_as_what_it_adds() -> None:
    frames = (Token("I ", 0), Revision(1, "wre", False, 1), Revision(1, "wreck", True, 2))
    assert await shown(*frames) == ("I wreck", [], "I wreck")


@pytest.mark.anyio
async def test_a_revision_that_changes_text_begins_a_line() -> None:
    frames = (
        Token("I ", 0),
        Revision(1, "wreck a nice", False, 1),
        Revision(1, "recognise", True, 2),
        Token(" speech", 3),
    )
    text = "I recognise speech"
    assert await shown(*frames) == (f"I wreck a nice\n{text}", [], text)


def test_text_of_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x9bc\x7f\r") == "a\ufffd[2Jb\ufffdc\ufffd\ufffd"
    assert printable("two\nlines\tZoé 🦊") == "two\nlines\tZoé 🦊"


def test_a_summary_is_one_line() -> None:
    summary = Summary(60, "length", ttft_s=0.0123, tokens_per_s=310.4, resumes=1)
    assert str(summary) == "60 tokens · TTFT 12 ms · 310 tok/s · 1 resume · length"


def test_a_single_token_has_no_rate() -> None:
    summary = Summary(1, "stop", ttft_s=0.5, tokens_per_s=None, resumes=0)
    assert str(summary) == "1 token · TTFT 500 ms · 0 resumes · stop"
