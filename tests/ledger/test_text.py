from __future__ import annotations

import pytest

from ledger.frame import Frame, Notice, Revision, ScoredToken, Token
from ledger.text import StreamText


def text_of(*frames: Frame) -> str:
    text = StreamText()
    for frame in frames:
        text.add(frame)
    return text.text


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ((), ""),
        ((Token("a", 0), Notice("inexact", "x", 1), ScoredToken("b", (), 2)), "ab"),
        ((Token("a", 0), Revision(1, "b", False, 1), Revision(1, "c", True, 2)), "ac"),
        # A revision that replaces nothing yet is text like any other.
        ((Revision(0, "a", True, 0), Revision(1, "b", True, 1)), "ab"),
        # From the middle of what an earlier revision gave on: that was one frame.
        (
            (Token("a", 0), Token("b", 1), Revision(1, "c", False, 2), Revision(2, "d", True, 3)),
            "ad",
        ),
        ((Token("a", 0), Token("b", 1), Revision(0, "", True, 2), Token("c", 3)), "c"),
    ],
)
def test_the_text_is_what_has_not_been_replaced(frames: tuple[Frame, ...], text: str) -> None:
    assert text_of(*frames) == text
