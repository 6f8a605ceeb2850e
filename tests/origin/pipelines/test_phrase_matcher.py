"""Phrases and patterns are found whatever the pieces of the text, and none of them leaks."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.origin.pipelines.phrase_matcher import PhraseMatcher, Phrases

WORDS = ("bad", "bad word", "bad word indeed", "badly", "ab", "a", "über", "x-y")
ALPHABET = "abdrow lyüUBx-\n"


def marked(phrases: Phrases, pieces: list[str]) -> str:
    """Return the text with each match in brackets."""
    matcher, found = PhraseMatcher(phrases), []
    for nth, piece in enumerate(pieces, 1):
        found += matcher.feed(piece, last=nth == len(pieces))
    return "".join(f"[{one.text}]" if one.blocked else one.text for one in found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a bad, BAD day", "a [bad], [BAD] day"),
        ("bade badly abad 2bad bad2", "bade badly abad 2bad bad2"),
        ("bad  word", "[bad]  word"),
        ("bad\nword", "[bad\nword]"),
        ("bad words", "[bad] words"),
        ("bad word indee", "[bad word] indee"),
        ("bad word indeed", "[bad word indeed]"),
        ("ÜBER bad", "[ÜBER] [bad]"),
        ("İbad bad", "İbad [bad]"),
        ("bad", "[bad]"),
        ("", ""),
    ],
)
def test_whole_words_in_any_case_are_found(text: str, expected: str) -> None:
    phrases = Phrases(("bad", "bad word", "bad word indeed", "über"))
    assert marked(phrases, [text]) == expected
    assert marked(phrases, list(text) or [""]) == expected


def test_a_pattern_sees_a_bounded_part_of_the_text() -> None:
    phrases = Phrases((), (r"\b\d{4}-\d+\b",), 8)
    for text, expected in (
        ("call 1234-56.", "call [1234-56]."),
        ("call 1234-56789012", "call [1234-567]89012"),
        ("11234-56 1234", "11234-56 1234"),
    ):
        assert marked(phrases, [text]) == expected
        assert marked(phrases, list(text)) == expected


def test_patterns_have_groups_and_flags_of_their_own() -> None:
    phrases = Phrases((), (r"(x)y", r"(?s)(a)b\1", r"abab"), 8)
    assert marked(phrases, ["xyz aba abab"]) == "[xy]z [aba] [abab]"


@given(st.text(ALPHABET, max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_pieces_change_nothing(text: str, cuts: list[int]) -> None:
    phrases = Phrases(WORDS, (r"r[dw]+o", r"\bl"), 5)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    assert marked(phrases, pieces) == marked(phrases, [text])


@given(st.text(ALPHABET, max_size=40))
def test_phrases_are_those_of_a_regular_expression(text: str) -> None:
    longest_first = sorted(WORDS, key=len, reverse=True)
    words = "|".join(re.escape(word).replace(r"\ ", r"\s") for word in longest_first)
    border = r"(?:(?<=[^\W_])(?=[^\W_]))"  # between two letters or digits
    expected = re.sub(rf"(?!{border})({words})(?!{border})", r"[\1]", text, flags=re.IGNORECASE)
    assert marked(Phrases(WORDS), list(text) or [""]) == expected


@given(st.text(ALPHABET, max_size=40))
def test_text_is_held_only_while_it_may_become_a_phrase(text: str) -> None:
    matcher = PhraseMatcher(Phrases(WORDS))
    matcher.feed(text)
    held = matcher.held.lower().replace("\n", " ")
    assert not held or any(word.startswith(held) for word in WORDS)
