"""Interim results are passed on at most once in a time of sound, and the newest is never lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tailrace.origin.pipelines.speech.debounce import DebounceOptions
from tailrace.origin.pipelines.speech.items import Transcript
from tailrace.origin.pipelines.stage import Item
from tailrace.origin.producer import Data, Remark, Revision
from tests.origin.pipelines.speech.heard import debounce, through, transcripts


def interim(text: str, at_ms: int) -> Transcript:
    """Return an interim result."""
    return Transcript(text, at_ms=at_ms)


def final(text: str, at_ms: int) -> Transcript:
    """Return a final result."""
    return Transcript(text, True, 1.0, at_ms=at_ms)


def test_an_interim_result_waits_for_its_time_and_is_replaced_by_a_newer_one() -> None:
    given_ = [interim(str(at), at) for at in (0, 40, 80, 120, 160, 200)]
    made = through([debounce(80)], given_)
    assert [one.text for one in made if isinstance(one, Transcript)] == ["0", "80", "160", "200"]


def test_a_final_result_comes_at_once_and_an_interim_one_before_it_is_dropped() -> None:
    items = [interim("a", 0), interim("b", 40), final("c", 50), interim("d", 100)]
    assert through([debounce(80)], items) == [items[0], items[2], items[3]]


def test_the_end_of_the_input_passes_on_what_is_held() -> None:
    items = [interim("a", 0), interim("b", 40)]
    assert through([debounce(80)], items) == items


@pytest.mark.parametrize("item", [Remark("a", "b"), Data(b"a"), Revision("plain")])
def test_other_items_keep_their_place(item: Item) -> None:
    items = [interim("a", 0), interim("b", 40), item, final("c", 60)]
    assert through([debounce(80)], items) == items


TIMES = st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=30)


@given(TIMES, st.integers(50, 320))
def test_interim_results_keep_their_distance(steps: list[tuple[int, bool]], ms: int) -> None:
    items, now_ms = [], 0
    for step, is_final in steps:
        now_ms += step
        items.append((final if is_final else interim)(str(now_ms), now_ms))
    made = synchronous_without_end(items, ms)
    assert transcripts(made, final=True) == transcripts(items, final=True)
    passed = transcripts(made, final=False)
    assert all(after.at_ms - one.at_ms >= ms for one, after in pairwise(passed))
    # A result that is not passed on is replaced by a later one, or the stage still holds it.
    if items and not items[-1].final:
        stage = debounce(ms)
        for item in items:
            list(stage.process(item))  # type: ignore[arg-type]
        assert (made and made[-1] == items[-1]) or list(stage.held()) == [items[-1]]


def synchronous_without_end(items: list[Transcript], ms: int) -> list[Item]:
    """Return what the stage passes on while the input goes on."""
    stage = debounce(ms)
    return [one for item in items for one in stage.process(item)]  # type: ignore[union-attr]


@pytest.mark.parametrize("ms", [49, 321])
def test_the_time_has_bounds(ms: int) -> None:
    with pytest.raises(ValidationError):
        DebounceOptions(ms=ms)
