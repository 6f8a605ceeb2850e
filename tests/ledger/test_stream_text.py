"""The text of a stream, from its frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.frame import Frame, Notice, Revision, ScoredToken, Token
from tailrace.ledger.stream_text import AppendedText, StreamText


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


@given(st.lists(st.tuples(st.integers(0, 6), st.text("ab", max_size=3)), max_size=12))
def test_what_is_added_is_the_text_again_wherever_that_still_begins_with_it(
    steps: list[tuple[int, str]],
) -> None:
    appended, shown = AppendedText(), ""
    for index, (back, said) in enumerate(steps):
        frame = Revision(max(0, index - back), said, False, index) if back else Token(said, index)
        shown += appended.added(frame)
        # Whatever was shown stays shown; it is the text, or the text has departed from it.
        assert appended.departed != (appended.text == shown)
        assert appended.departed != appended.text.startswith(shown)
