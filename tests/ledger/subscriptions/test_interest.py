"""The directory finds the same subscriptions as asking each of them."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from ledger.subscriptions.interest import Directory, Interest

SEGMENTS = st.sampled_from(["a", "b", "*", "**", "%2A"])
PATTERNS = st.one_of(st.none(), st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join))
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
    wanted = [name for name, entry in model.items() if Interest.unpack(entry).covers(path)]
    assert sorted(directory.interested(path)) == sorted(wanted)
    assert {name: directory.entry(name) for name in directory} == model
