"""Patterns of stream names, held to a regular expression."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.subscriptions.glob import Glob

PARTS = st.sampled_from(["a", "b", "*", "**"])
NAMES = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=7).map("/".join)


def oracle(pattern: str) -> re.Pattern[str]:
    """Every segment with a slash behind it, so that none is a special case."""
    parts = {"*": "[^/]+/", "**": "(?:[^/]+/)*"}
    return re.compile("".join(parts.get(p, re.escape(p) + "/") for p in pattern.split("/")))


@given(st.lists(PARTS, min_size=1, max_size=5).map("/".join), NAMES)
def test_a_pattern_matches_what_its_regular_expression_does(pattern: str, name: str) -> None:
    assert Glob(pattern).matches(name) == bool(oracle(pattern).fullmatch(name + "/"))


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("events/*", "events/a", True),
        ("events/*", "events", False),
        ("events/*", "events/a/b", False),
        ("events/**", "events", True),
        ("**", "any/thing/at/all", True),
        ("**/end", "end", True),
        ("a/**/z", "a/z", True),
        ("/a/b/", "a/b", True),
        ("%2A", "*", True),
        ("%2A", "a", False),
        ("%2A%2A", "**", True),
        ("caf%C3%A9", "café", True),
        ("a*", "ab", False),
        ("a.c", "abc", False),
        ("[a]", "a", False),
    ],
)
def test_only_whole_segments_are_wild(pattern: str, name: str, matches: bool) -> None:
    assert Glob(pattern).matches(name) == matches


def test_a_pattern_made_to_be_slow_is_not() -> None:
    """It would take an expression with backtracking longer than the universe has been."""
    assert not Glob("**/a/" * 100 + "b").matches("/".join("a" * 200))
