"""Sentences: capital letters, commas at pauses, full stops, and sentences over a cut."""

from __future__ import annotations

import pytest

from tailrace.origin.pipelines.speech.items import Transcript, Word
from tailrace.origin.pipelines.stage import Item, Prompt
from tailrace.origin.producer import Data, Revision, Text
from tests.origin.pipelines.speech.heard import punctuate, through


def said(text: str, *, final: bool = True, pause_ms: int = 0, cut: bool = False) -> Transcript:
    """Return a result whose words of 100 ms have pauses between them."""
    words = tuple(
        Word(word, at * (100 + pause_ms), at * (100 + pause_ms) + 100)
        for at, word in enumerate(text.split())
    )
    return Transcript(text, final, 1.0, words, 0, cut)


def texts(*items: Item) -> list[str]:
    """Return the texts after the stage."""
    return [one.text for one in through([punctuate()], items) if isinstance(one, Revision)]


def test_a_final_result_is_a_sentence() -> None:
    assert texts(said("one two"), said(" i think i'm late")) == ["One two.", " I think I'm late."]


def test_an_interim_result_has_no_full_stop() -> None:
    assert texts(said("one two", final=False), said("one three")) == ["One two", "One three."]


def test_a_pause_becomes_a_comma() -> None:
    assert texts(said("one two three", pause_ms=250)) == ["One, two, three."]
    assert texts(said("one two three", pause_ms=249)) == ["One two three."]


def test_a_sentence_goes_on_after_a_cut() -> None:
    assert texts(said("one two", cut=True), said(" three", final=False), said(" three four")) == [
        "One two",
        " three",
        " three four.",
    ]
    assert texts(said("one", cut=True), said(" two"), said(" three")) == ["One", " two.", " Three."]


def test_a_text_that_another_stage_changed_has_no_commas() -> None:
    changed = Transcript("[removed] three", True, 1.0, said("one two three", pause_ms=400).words)
    assert texts(changed) == ["[removed] three."]


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("really?", "Really?"), ("  so", "  So."), ("élan", "Élan.")],
)
def test_plain_revisions_are_sentences_too(before: str, after: str) -> None:
    assert texts(Revision(before, True)) == [after]


def test_other_items_are_passed_on() -> None:
    items: list[Item] = [Prompt("a"), Text("b"), Data(b"c")]
    assert through([punctuate()], items) == items
