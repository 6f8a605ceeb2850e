"""Text in larger pieces: where each unit ends, and that the pieces do not depend on the input's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tailrace.ledger.text_units import Unit
from tailrace.origin.pipelines.stage import Item, Prompt
from tailrace.origin.pipelines.stages.group import Group, GroupOptions
from tailrace.origin.producer import Data, Reasoning, Remark, Revision, Text
from tests.origin.pipelines.staged import cut_at, stage_of, synchronous

CUTS = st.lists(st.integers(0, 60), max_size=8)


def grouped(items: list[Item], **options: Any) -> list[Item]:
    """Return what the stage makes of items."""
    return synchronous(stage_of(Group, options=GroupOptions(**options)), items)


def pieces(text: str, **options: Any) -> list[str]:
    """Return the pieces of a text, which are the same if it comes character by character."""
    made = grouped([Text(text)], **options)
    assert made == grouped([Text(char) for char in text], **options)
    return [one.text for one in made if isinstance(one, Text)]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("word", ["Well, ", '"he ', 'said." ', "Then\n\n  ", "3.5 ", "km."]),
        ("phrase", ["Well, ", '"he said." ', "Then\n\n  ", "3.5 km."]),
        ("sentence", ['Well, "he said." ', "Then\n\n  ", "3.5 km."]),
        ("paragraph", ['Well, "he said." Then\n\n  ', "3.5 km."]),
    ],
)
def test_where_a_unit_ends(by: str, expected: list[str]) -> None:
    assert pieces('Well, "he said." Then\n\n  3.5 km.', by=by) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Really?! Yes… no", ["Really?! ", "Yes… ", "no"]),
        ("「好。」他说。对", ["「好。」", "他说。", "对"]),
        ("# Title\n \nText\ngoes on", ["# Title\n \n", "Text\ngoes on"]),
        ("\n\n Hello. ", ["\n\n Hello. "]),
        ("", []),
    ],
)
def test_where_a_sentence_ends(text: str, expected: list[str]) -> None:
    assert pieces(text, by="sentence") == expected


def test_a_longer_unit_is_cut_between_words() -> None:
    assert pieces("one two three. Four", by="sentence", chars=9) == ["one two ", "three. ", "Four"]
    assert pieces("one two. Four", by="sentence", chars=9) == ["one two. ", "Four"]
    assert pieces("abcdefgh ij k", chars=4) == ["abcd", "efgh", " ij ", "k"]


@given(st.text("ab .,!?。」\n\"'", max_size=60), CUTS, st.sampled_from([None, *Unit]))
def test_pieces_depend_on_the_text_alone(text: str, cuts: list[int], by: Unit | None) -> None:
    for chars in (1, 7, 100):
        whole = grouped([Text(text)], by=by, chars=chars)
        assert grouped([Text(piece) for piece in cut_at(text, cuts)], by=by, chars=chars) == whole
        made = [one.text for one in whole if isinstance(one, Text)]
        assert "".join(made) == text
        assert all(0 < len(piece) <= chars for piece in made)


def test_reasoning_is_grouped_alike_and_held_text_comes_before_any_other_item() -> None:
    said: list[Item] = [Prompt("a b"), Reasoning("so"), Reasoning(" I th")]
    said += [
        Text("ye"),
        Text("s, n"),
        Data(b"x"),
        Text("o"),
        Remark("code", "why"),
        Revision("no", True),
        Text("!"),
    ]
    assert grouped(said, by="word") == [
        Prompt("a b"),
        Reasoning("so "),
        Reasoning("I "),
        Reasoning("th"),
        Text("yes, "),
        Text("n"),
        Data(b"x"),
        Text("o"),
        Remark("code", "why"),
        Revision("no", True),
        Text("!"),
    ]


def test_held_text_is_given_back() -> None:
    stage = stage_of(Group, options=GroupOptions(by=Unit.WORD))
    assert synchronous(stage, [Reasoning("one tw")], end=None) == [Reasoning("one ")]
    assert list(stage.held()) == [Reasoning("tw")]
    assert synchronous(stage, []) == [Reasoning("tw")]
    assert not list(stage.held())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "give by or chars"),
        ({"by": "line"}, "'word', 'phrase', 'sentence' or 'paragraph'"),
        ({"chars": 0}, "chars"),
        ({"chars": 100_000}, "chars"),
    ],
)
def test_options_that_are_wrong_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        GroupOptions(**options)
