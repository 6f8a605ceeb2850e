"""Text filters, and what an origin holds back for them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.frame import FinishReason
from tailrace.origin.filter import MAX_HELD_CHARS, PASS, FilterGate, Verdict, load_filter
from tests.origin import blocked_phrase
from tests.origin.blocked_phrase import MESSAGE, BlockedPhrases

HERE = "tests.origin.test_filter"


class Scripted:
    """Gives one answer after the other, or raises it."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def check(self, text: str, last: bool) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def gate(*answers: Any) -> FilterGate:
    return FilterGate(lambda: Scripted(*answers))


# ---- what goes out ----


def test_without_a_filter_everything_passes() -> None:
    open_gate = FilterGate(None)
    assert [open_gate.feed("a"), open_gate.feed(""), open_gate.feed("b", last=True)] == [
        *"a",
        "",
        "b",
    ]
    assert open_gate.reason is None


def test_what_is_held_goes_out_once_it_is_decided() -> None:
    held = gate(Verdict(hold=2), Verdict(hold=3), PASS)
    assert [held.feed("abc"), held.feed("d"), held.feed("e")] == ["a", "", "bcde"]


def test_a_verdict_to_end_lets_out_what_is_before_and_nothing_after() -> None:
    ended = gate(Verdict(hold=1), Verdict(hold=2, end="enough"))
    assert [ended.feed("ab"), ended.feed("cd"), ended.feed("e"), ended.feed("", last=True)] == [
        "a",
        "b",
        "",
        "",
    ]
    assert (ended.reason, ended.message) == (FinishReason.FILTERED, "enough")


def test_no_text_is_not_checked_but_the_last_is() -> None:
    late = gate(Verdict(hold=1), Verdict(hold=1, end="at last"))
    assert [late.feed("ab"), late.feed(""), late.feed("", last=True)] == ["a", "", ""]
    assert late.message == "at last"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([RuntimeError("no model")], "RuntimeError: no model"),
        ([True], "check gave a bool, not a Verdict"),
        ([Verdict(hold=4)], "hold is 4, but must be from 0 to 3 (characters not sent yet)"),
        ([Verdict(hold=-1)], "hold is -1, but must be from 0 to 3 (characters not sent yet)"),
        ([PASS, Verdict(hold=1)], "hold is 1, but must be from 0 to 0 (characters not sent yet)"),
        ([Verdict(hold=1)] * 2, "hold is 1 at the end of the text, but must be 0 there"),
    ],
)
def test_a_filter_that_fails_ends_its_stream_as_failed(answers: list[Any], message: str) -> None:
    failed = gate(*answers)
    failed.feed("abc")
    assert failed.feed("", last=True) == ""
    assert failed.reason is FinishReason.FAILED
    assert failed.message == f"the filter failed: {message}"


def test_a_factory_that_fails_on_a_stream_ends_it_as_failed() -> None:
    def broken() -> Scripted:
        raise OSError("gone")

    failed = FilterGate(broken)
    assert failed.feed("abc") == ""
    assert (failed.reason, failed.message) == (
        FinishReason.FAILED,
        "the filter failed: OSError: gone",
    )


def test_a_filter_may_hold_so_many_characters_and_no_more() -> None:
    at_limit = gate(Verdict(hold=MAX_HELD_CHARS), Verdict(hold=MAX_HELD_CHARS + 1))
    assert at_limit.feed("a" * MAX_HELD_CHARS) == ""
    assert at_limit.reason is None
    assert at_limit.feed("b") == ""
    assert at_limit.message is not None and str(MAX_HELD_CHARS) in at_limit.message


# ---- the example ----


@given(st.lists(st.sampled_from(["se", "cret", " hill", "s", "ecret ", "hill", "hi", "狐", "🐻"])))
def test_of_a_blocked_phrase_not_even_the_beginning_goes_out(texts: list[str]) -> None:
    blocking = FilterGate(lambda: BlockedPhrases(blocked_phrase.PHRASES))
    out = "".join(map(blocking.feed, texts)) + blocking.feed("", last=True)
    text = "".join(texts)
    starts = [at for phrase in blocked_phrase.PHRASES if (at := text.find(phrase)) >= 0]
    assert out == (text[: min(starts)] if starts else text)
    assert blocking.message == (MESSAGE if starts else None)


# ---- loading ----

not_callable = "a string"


def fails() -> Scripted:
    raise LookupError("no words")


def gives_nothing() -> None: ...


def test_a_factory_is_found_by_name() -> None:
    assert load_filter("tests.origin.blocked_phrase:make") is blocked_phrase.make


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_colon", "'no_colon' is not MODULE:NAME"),
        (":make", "':make' is not MODULE:NAME"),
        ("tests.origin.nowhere:make", "cannot import tests.origin.nowhere: ModuleNotFoundError: "),
        (f"{HERE}:missing", f"{HERE} has no function or class missing"),
        (f"{HERE}:not_callable", f"{HERE} has no function or class not_callable"),
        (f"{HERE}:fails", f"{HERE}:fails() failed: LookupError: no words"),
        (f"{HERE}:gives_nothing", f"{HERE}:gives_nothing() gives a NoneType without check"),
    ],
)
def test_what_is_no_filter_is_refused_when_it_is_loaded(spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_filter(spec)
    assert message in caught.value.message
    assert caught.value.field == "origin.filter"
    assert caught.value.hint is not None and "check(text, last) -> Verdict" in caught.value.hint
