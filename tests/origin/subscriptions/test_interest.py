"""Patterns of stream names, compared with a regular expression, and the streams they find."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import CallerError
from tailrace.origin.subscriptions.request import CreateBody, parse
from tailrace.origin.subscriptions.subscription import (
    MAX_ANY,
    MAX_SEGMENTS,
    Directory,
    Glob,
    Interest,
)

PARTS = st.sampled_from(["a", "b", "*", "**"])
WHOLE_PATTERNS = (
    st.lists(PARTS, min_size=1, max_size=5)
    .filter(lambda parts: parts.count("**") <= MAX_ANY)
    .map("/".join)
)
WHOLE_NAMES = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=7).map("/".join)

SEGMENTS = st.sampled_from(["a", "b", "*", "**", "%2A"])
PATTERNS = st.one_of(
    st.none(),
    st.lists(SEGMENTS, min_size=1, max_size=3)
    .filter(lambda parts: parts.count("**") < 2)
    .map("/".join),
)
NAMES = st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3).map("/".join)
ENTRIES = st.builds(
    lambda pattern, streams, wake: json.dumps(
        {"pattern": pattern, "streams": streams, "wake_stream": wake}
    ).encode(),
    PATTERNS,
    st.lists(NAMES, max_size=2),
    st.one_of(st.none(), NAMES),
)
IDS = st.sampled_from(["one", "two", "three"])


def oracle(pattern: str) -> re.Pattern[str]:
    """Return every segment with a slash behind it, so that none is a special case."""
    parts = {"*": "[^/]+/", "**": "(?:[^/]+/)*"}
    return re.compile("".join(parts.get(p, re.escape(p) + "/") for p in pattern.split("/")))


@given(WHOLE_PATTERNS, WHOLE_NAMES)
def test_a_pattern_matches_what_its_regular_expression_does(pattern: str, name: str) -> None:
    glob = Glob(pattern)
    assert glob.matches(name) == bool(oracle(pattern).fullmatch(name + "/"))
    assert not glob.matches(name) or name.startswith(glob.prefix)


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


@pytest.mark.parametrize("pattern", ["**/a/**/b", "**/**", "a/" * MAX_SEGMENTS + "b"])
def test_a_pattern_that_takes_long_to_match_is_refused(pattern: str) -> None:
    wanted = {"type": "pull-wake", "wake_stream": "w", "pattern": pattern}
    with pytest.raises(CallerError, match="at most") as refused:
        parse(CreateBody, json.dumps(wanted).encode())
    assert (refused.value.code, refused.value.field) == ("INVALID_REQUEST", "pattern")


def test_the_longest_pattern_is_as_long_as_it_may_be() -> None:
    glob = Glob("**/" + "a/" * (MAX_SEGMENTS - 2) + "b")
    assert not glob.matches("/".join("a" * 200))
    assert glob.matches("/".join("a" * 200 + "b"))


@given(st.lists(st.tuples(IDS, st.one_of(st.none(), ENTRIES))), NAMES)
def test_the_directory_finds_whom_asking_everybody_would_find(
    changes: list[tuple[str, bytes | None]], path: str
) -> None:
    directory, model = Directory(), dict[str, bytes]()
    for name, entry in changes:
        if entry is None:
            directory.leave(name)
            model.pop(name, None)
        else:
            directory.enter(name, entry)
            model[name] = entry
    wanted = [
        name
        for name, entry in model.items()
        if Interest.unpack(entry).covers(path, path.split("/"))
    ]
    assert sorted(directory.interested(path)) == sorted(wanted)
    assert {name: directory.entry(name) for name in directory} == model
