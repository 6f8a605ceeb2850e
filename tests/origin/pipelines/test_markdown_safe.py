"""Pieces of Markdown: where none of them ends, for any pieces of the input."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tailrace.origin.pipelines.markdown_cutter import MarkdownCutter
from tailrace.origin.pipelines.stage import Item
from tailrace.origin.pipelines.stages.markdown_safe import MarkdownSafe, MarkdownSafeOptions
from tailrace.origin.producer import Data, Reasoning, Text
from tests.origin.pipelines.staged import cut_at, stage_of, synchronous


def pieces(text: str, most_chars: int = 500) -> list[str]:
    """Return the pieces of a text that comes character by character."""
    cutter = MarkdownCutter(most_chars)
    made = [piece for char in text for piece in cutter.feed(char)]
    return made + cutter.feed("", last=True)


def elements(text: str, most_chars: int = 500) -> list[str]:
    """Return the pieces of more than one character."""
    return [piece for piece in pieces(text, most_chars) if len(piece) > 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain text, 1 < 2! (so)", ["! "]),
        ("a `b c` d", ["`b c` "]),
        ("a ``b ` c`` d", ["``b ` c`` "]),
        ("a `b\n\nc` d", ["`b\n\n", "` d"]),
        ("see [the page](http://x.y/(z)) now", ["[the page](http://x.y/(z))"]),
        ("![alt [1]](a.png)!", ["![alt [1]](a.png)"]),
        ("[![alt](b.png)](c) d", ["[![alt](b.png)](c)"]),
        ("[1] and [ ] x", ["[1] ", "[ ] "]),
        ("[open\n\nend", ["[open\n\n"]),
        (r"\[no\] \`x", [r"\[", r"\]", r"\`"]),
        ("so **bold** and *it*.", ["**b", "** ", "*i", "*."]),
        ("a\n```py\nx = `1\n  y\n```\nb `c` d", ["```py\n", "  y", "```\n", "`c` "]),
        ("~~~\n```\n~~~~\n**a", ["~~~\n", "```\n", "~~~~\n", "**a"]),
        ("- a\n  ```\n  [x\n  ```\n`b`.", ["  ```\n", "  [", "  ```\n", "`b`."]),
        ("``` a `b` \n", ["``` a `b` \n"]),
    ],
)
def test_elements_are_not_cut(text: str, expected: list[str]) -> None:
    assert "".join(pieces(text)) == text
    assert elements(text) == expected


def test_an_element_that_is_too_long_is_passed_on() -> None:
    assert pieces("[abcdefgh](x) `y`", 6) == ["[abcde", *"fgh](x) ", "`y`"]
    long = "```" + "x" * 50 + "\n**a\n```\n"
    assert "**a" not in pieces(long, 8)  # it is code


@given(
    st.lists(
        st.sampled_from([*"ab `*[]()!\\\n~> ", "```", "\n```", "[a](b)", "\n\n"]), max_size=30
    ),
    st.lists(st.integers(0, 60), max_size=8),
    st.sampled_from([2, 5, 500]),
)
def test_the_places_where_pieces_may_end_depend_on_the_text_alone(
    parts: list[str], cuts: list[int], most_chars: int
) -> None:
    text = "".join(parts)
    allowed = set(accumulate(map(len, pieces(text, most_chars))))
    cutter, made = MarkdownCutter(most_chars), []
    for piece in cut_at(text, cuts):
        made += cutter.feed(piece)
        assert len(cutter.held) < most_chars
    made += cutter.feed("", last=True)
    assert "".join(made) == text
    assert set(accumulate(map(len, made))) <= allowed


def test_text_and_reasoning_are_kept_apart_and_a_code_block_goes_on_behind_other_items() -> None:
    stage = stage_of(MarkdownSafe, options=MarkdownSafeOptions())
    said: list[Item] = [Text("```\n*"), Reasoning("[a"), Text("*"), Data(b"x"), Reasoning("](b)")]
    assert synchronous(stage, said) == [
        Text("```\n*"),
        Reasoning("[a"),
        Text("*"),
        Data(b"x"),
        Reasoning("](b)"),
    ]
    stage = stage_of(MarkdownSafe, options=MarkdownSafeOptions())
    assert synchronous(stage, [Text("a [b")], end=None) == [Text("a ")]
    assert list(stage.held()) == [Text("[b")]


def test_a_limit_that_is_wrong_is_refused() -> None:
    with pytest.raises(ValidationError, match="hold_chars"):
        MarkdownSafeOptions(hold_chars=1)
