from hypothesis import given
from hypothesis import strategies as st

from origin.stops import StopMatcher


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
    assert matcher.matched


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


@given(st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1, max_size=4)))
def test_what_comes_out_is_the_text_before_the_first_stop_to_be_completed(
    texts: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    out, seen = "", ""
    for text in texts:
        out += matcher.feed(text)
        seen += text
        if matcher.matched:
            break
    if matcher.matched:
        assert out == seen[: min(at for stop in stops if (at := seen.find(stop)) >= 0)]
    else:
        assert out + matcher.flush() == seen
        assert not any(stop in seen for stop in stops)
