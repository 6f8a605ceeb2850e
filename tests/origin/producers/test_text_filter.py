"""Filters over the text of a producer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.frame import FinishReason, Notice, StreamEnd, Token, decode
from tailrace.origin.filter import Verdict
from tailrace.origin.producer import (
    About,
    Data,
    End,
    Label,
    Output,
    Request,
    Resumption,
    Revision,
    Text,
)
from tailrace.origin.producers.production import Production, TextFilter
from tests.origin.blocked_phrase import MESSAGE, BlockedPhrases
from tests.origin.producers.asked import request

pytestmark = pytest.mark.anyio

PHRASE = "abba"
FILTERED = FinishReason.FILTERED


def filtering() -> BlockedPhrases:
    return BlockedPhrases([PHRASE])


def seen(texts: Sequence[Output], delivered: str = "", pieces: int = 0) -> tuple[str, list[Output]]:
    """Return the text that comes out, `delivered` first, and what else does."""
    it = TextFilter(filtering, delivered, pieces)
    out: list[Output] = []
    for each in (*texts, End()):
        if not out or not isinstance(out[-1], End):
            out += it.passed(each)
    text = "".join(each.text for each in out if isinstance(each, Text))
    return delivered + text, [each for each in out if not isinstance(each, Text)]


pieces_of_text = st.lists(st.text("abc", max_size=5), max_size=8)


@given(pieces_of_text)
def test_what_comes_out_is_the_text_up_to_the_phrase_however_it_is_cut(said: list[str]) -> None:
    before, phrase, _ = "".join(said).partition(PHRASE)
    text, others = seen([Text(each) for each in said])
    assert text == before
    assert [end.reason for end in others if isinstance(end, End)] == [
        FILTERED if phrase else FinishReason.STOP
    ]


@given(pieces_of_text, st.data())
def test_a_stream_that_goes_on_after_any_cut_has_the_same_text(
    said: list[str], data: st.DataObject
) -> None:
    """The producer goes on from what was delivered: what the filter held is said once more."""
    whole, _ = seen([Text(each) for each in said])
    cut = data.draw(st.integers(0, len(whole)))
    rest = "".join(said)[cut:]
    step = data.draw(st.integers(1, 3))
    again = [Text(rest[at : at + step]) for at in range(0, len(rest), step)]
    assert seen(again, whole[:cut], pieces=1)[0] == whole


def test_the_end_tells_how_many_pieces_were_said() -> None:
    assert seen([Text("x"), Text("abba"), Text("y")])[1] == [End(FILTERED, 2, message=MESSAGE)]
    assert seen([Text("abba")], "xy", 7)[1] == [End(FILTERED, 8, message=MESSAGE)]


def test_a_phrase_that_the_last_text_completes_replaces_the_end_but_not_its_counts() -> None:
    class AtLast:
        def check(self, text: str, last: bool) -> Verdict:
            return Verdict(hold=1, end="no") if last else Verdict(hold=1)

    it = TextFilter(AtLast)
    assert list(it.passed(Text("x"))) == []
    assert list(it.passed(End(FinishReason.LENGTH, 5, 3))) == [End(FILTERED, 5, 3, "no")]


@pytest.mark.parametrize("reason", [FinishReason.FAILED, FinishReason.ORIGIN_LOST])
def test_a_stream_that_failed_is_not_called_filtered(reason: FinishReason) -> None:
    it = TextFilter(filtering)
    assert list(it.passed(Text("xab"))) == [Text("x")]
    assert list(it.passed(End(reason, 1))) == [Text("ab"), End(reason, 1)]


def test_interim_text_is_seen_by_nobody_and_final_text_is_judged() -> None:
    said = [Revision("ab"), Revision("abb"), Revision("abbot ", final=True), Revision("abba")]
    assert seen([*said, Label("x", 0.5)]) == ("abbot ", [Label("x", 0.5), End()])
    assert seen([Revision("xabba", final=True)])[0] == "x"


def test_what_is_no_text_passes() -> None:
    assert seen([Data(b"abba")]) == ("", [Data(b"abba"), End()])


class Continuing:
    """Goes on with its text after what was delivered, as an upstream server does."""

    about = About("continuing", "1", Resumption.CONTINUES)

    def __init__(self, text: str) -> None:
        self.text = text
        self.asked = 0

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        self.asked += 1
        for char in self.text[len(request.delivered) :]:
            yield Text(char)

    async def close(self) -> None:
        """Hold nothing."""


async def frames(producer: Continuing, asked: Request) -> list[object]:
    made = Production(producer, asked, 1, filtering).frames()
    return [decode(raw)[1] async for _, raw in made]


async def test_a_production_goes_on_with_what_the_filter_held_when_it_was_cut() -> None:
    made = await frames(Continuing("xyabbcabba"), request("xy", 2))
    assert isinstance(made[0], Notice)
    text = "".join(each.text for each in made if isinstance(each, Token))
    assert text == "abbc"
    assert made[-1] == StreamEnd(10, FILTERED, 2 + len(made) - 1, 0, MESSAGE)


@pytest.mark.parametrize(("inserted", "texts"), [((), ["x"]), ((0,), ["x", "ab"])])
async def test_a_run_that_is_retried_leaves_what_the_filter_holds_to_the_next_one(
    inserted: tuple[int, ...], texts: list[str]
) -> None:
    """Otherwise a producer that repeats itself would skip the frame that has more text then."""

    class Failing(Continuing):
        about = About("failing", "1", Resumption.REPEATS)

        async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
            yield Text("xab")
            yield End(FinishReason.FAILED, retryable=True)

    asked = request("", len(inserted))
    production = Production(Failing(""), asked, 1, filtering, inserted)
    made = [decode(raw)[1] async for _, raw in production.frames()]
    assert [each.text for each in made if isinstance(each, Token)] == texts
    assert production.can_retry is not bool(inserted)


async def test_a_stream_that_lacks_only_the_filters_end_is_not_asked_for() -> None:
    """This happens after a worker's death if the next worker's filter is stricter."""
    producer = Continuing("xabba and more")
    assert await frames(producer, request("xabba", 5)) == [StreamEnd(5, FILTERED, 5, 0, MESSAGE)]
    assert producer.asked == 0
