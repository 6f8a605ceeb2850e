"""Stop sequences in text that comes piece by piece."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.origin.engine.transcript import StopMatcher


def feed_all(matcher: StopMatcher, *texts: str) -> list[str]:
    return [matcher.feed(text) for text in texts]


def test_text_passes_at_once_when_no_stop_begins_in_it() -> None:
    assert feed_all(StopMatcher(["END"]), "a", "bc") == ["a", "bc"]
    assert feed_all(StopMatcher([]), "a", "") == ["a", ""]


def test_a_possible_beginning_is_held_until_it_is_decided() -> None:
    matcher = StopMatcher(["END"])
    assert feed_all(matcher, "xE", "N", "x", "E") == ["x", "", "ENx", ""]
    assert matcher.flush() == "E"
    assert matcher.flush() == ""


def test_a_stop_sequence_and_all_after_it_are_dropped() -> None:
    matcher = StopMatcher(["END"])
    assert feed_all(matcher, "one E", "ND two", "three") == ["one ", "", ""]
    assert matcher.matched
    assert matcher.flush() == ""


def test_the_earliest_of_several_stops_cuts() -> None:
    matcher = StopMatcher(["three", "two"])
    assert feed_all(matcher, "one two three") == ["one "]
    assert matcher.matched == "two"


def test_a_stop_that_begins_inside_a_false_start_is_found() -> None:
    matcher = StopMatcher(["aab"])
    assert feed_all(matcher, "a", "a", "a", "b") == ["", "", "a", ""]
    assert matcher.matched


def test_the_longer_of_two_possible_beginnings_is_held() -> None:
    matcher = StopMatcher(["abcd", "cx"])
    assert feed_all(matcher, "abc", "x") == ["", "ab"]
    assert matcher.matched


def test_an_empty_stop_sequence_stops_nothing() -> None:
    matcher = StopMatcher([""])
    assert matcher.feed("abc") == "abc"
    assert not matcher.matched


def test_a_stop_inside_the_text_of_one_token_counts_before_a_longer_one_around_it() -> None:
    whole, cut = StopMatcher(["abcd", "b"]), StopMatcher(["abcd", "b"])
    assert feed_all(whole, "xabcd") == ["xa"]
    assert "".join(feed_all(cut, *"xabcd")) == "xa"
    assert whole.matched and cut.matched


def test_of_two_stops_that_end_together_the_longer_one_cuts() -> None:
    matcher = StopMatcher(["bc", "abc"])
    assert feed_all(matcher, "xabc") == ["x"]
    assert matcher.matched == "abc"


def test_after_a_flush_the_text_before_is_no_part_of_a_stop() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("EN") + matcher.flush() == "EN"
    assert matcher.feed("D") == "D"
    assert not matcher.matched


def before_the_first_stop_to_be_complete(text: str, stops: list[str]) -> str | None:
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


@given(st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1, max_size=4)))
def test_what_comes_out_is_the_text_before_the_first_stop_to_be_completed(
    texts: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    out = "".join(feed_all(matcher, *texts))
    expected = before_the_first_stop_to_be_complete("".join(texts), stops)
    assert (matcher.matched is not None) == (expected is not None)
    assert matcher.matched is None or matcher.matched in stops
    assert out + matcher.flush() == ("".join(texts) if expected is None else expected)


@given(st.lists(st.text("ab", max_size=3)), st.lists(st.text("ab", min_size=1, max_size=4)))
def test_no_more_is_held_than_may_become_a_stop(texts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out, seen = "", ""
    for text in texts:
        out, seen = out + matcher.feed(text), seen + text
        if matcher.matched:
            break
        held = seen.removeprefix(out)
        begins = {""} | {stop[:n] for stop in stops for n in range(len(stop))}
        longest = max((b for b in begins if seen.endswith(b)), key=len)
        assert held == longest
