"""The stability of interim results."""

from __future__ import annotations

from tailrace.origin.pipelines.speech.recogniser import Stability


def test_a_text_becomes_stable_with_each_result_that_agrees() -> None:
    stability = Stability()
    assert [stability.of(("a", "b")) for _ in range(7)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_new_word_is_less_stable_than_those_before_it() -> None:
    stability = Stability()
    for _ in range(6):
        stability.of(("a",))
    assert stability.of(("a", "b")) == 0.5
    assert stability.of(("a", "b")) == 0.62


def test_words_behind_a_changed_one_do_not_count() -> None:
    stability = Stability()
    for _ in range(6):
        stability.of(("a", "b", "c"))
    assert stability.of(("a", "x", "c")) == 0.33
    assert stability.of(("x", "b", "c")) == 0.0


def test_no_words_are_not_stable() -> None:
    stability = Stability()
    assert [stability.of(()) for _ in range(9)] == [0.0] * 9
