"""Producers: what their outputs become, and what becomes of those that misbehave."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.ledger.errors import CallerError, ConfigError, Unavailable
from tailrace.ledger.frame import (
    MAX_FRAME_BYTES,
    Chunk,
    Classification,
    Embedding,
    FinishReason,
    Notice,
    Revision,
    StreamEnd,
    Token,
    decode,
)
from tailrace.origin import producer as outputs
from tailrace.origin.producer import (
    About,
    Data,
    End,
    Label,
    Output,
    Remark,
    Request,
    Resumption,
    Text,
    Vector,
    load_producer,
)
from tailrace.origin.producers.production import (
    MAX_CHUNK_BYTES,
    MAX_TEXT_CHARS,
    MAX_VECTOR_VALUES,
    Framing,
    Production,
)
from tailrace.origin.tool_calls import CallPiece
from tests.origin.producers.asked import frames, request

pytestmark = pytest.mark.anyio


class Says:
    """Gives the same outputs each time; raises those that are errors."""

    def __init__(
        self, *said: Any, resumption: Resumption = Resumption.REPEATS, makes: str = "says"
    ) -> None:
        self.about = About(makes, "1", resumption)
        self.requests: list[Request] = []
        self.closed = 0
        self._said = said

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        self.requests.append(request)
        try:
            for each in self._said:
                if isinstance(each, Exception):
                    raise each
                yield each
        finally:
            self.closed += 1

    async def close(self) -> None:
        """Hold nothing."""


def make() -> Says:
    return Says(Text("made"))


async def make_later() -> Says:
    return make()


def needs_arguments(what: str) -> str:
    return what


class Unannounced:
    """A producer without `about`."""

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        yield Text("x")


class Synchronous(Says):
    """A producer whose `produce` cannot be called."""

    produce = None  # type: ignore[assignment]


async def made_of(*said: Any) -> Sequence[Any]:
    return await frames(Says(*said), request())


async def test_each_output_is_a_frame_and_the_end_is_the_last() -> None:
    assert await made_of(
        Text("a"), Data(b"\x00\xff"), Vector((0.5, -1.0)), Label("good", 0.25), Remark("r", "why")
    ) == [
        Token("a", 0),
        Chunk(b"\x00\xff", True, 1),
        Embedding((0.5, -1.0), 2),
        Classification("good", 0.25, 3),
        Notice("r", "why", 4),
        StreamEnd(0, FinishReason.STOP, 5, 0),
    ]


async def test_an_end_says_all_that_it_can() -> None:
    end = End(FinishReason.LENGTH, 7, 3, "enough", retryable=True)
    assert await made_of(end, Text("after the end")) == [
        StreamEnd(7, FinishReason.LENGTH, 0, 3, "enough", retryable=True)
    ]


async def test_empty_text_makes_no_frame_and_empty_data_makes_one() -> None:
    made = await made_of(Text(""), Data(b""))
    assert made[0] == Chunk(b"", True, 0)
    assert len(made) == 2


@pytest.mark.parametrize("size", [MAX_CHUNK_BYTES - 1, MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1])
async def test_data_of_any_size_goes_out_in_pieces_of_which_one_is_the_last(size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    chunks = (await made_of(Data(data[:size])))[:-1]
    assert b"".join(chunk.data for chunk in chunks) == data[:size]
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(chunks) == (2 if size > MAX_CHUNK_BYTES else 1)


async def test_long_text_goes_out_as_several_tokens_even_of_the_widest_characters() -> None:
    text = "🌊" * (2 * MAX_TEXT_CHARS + 5)
    tokens = (await made_of(Text(text)))[:-1]
    assert [len(token.text) for token in tokens] == [MAX_TEXT_CHARS, MAX_TEXT_CHARS, 5]
    assert "".join(token.text for token in tokens) == text


async def test_no_frame_is_larger_than_a_frame_may_be() -> None:
    values = (0.5,) * (MAX_VECTOR_VALUES + 1)
    said = Text("🌊" * MAX_TEXT_CHARS), Data(b"x" * (3 << 20)), Vector(values[1:]), Vector(values)
    async with aclosing(Production(Says(*said), request(), 1).frames()) as made:
        assert all([len(raw) <= MAX_FRAME_BYTES async for _, raw in made])


async def test_a_vector_that_no_frame_holds_goes_out_as_little_endian_floats() -> None:
    values = tuple(n / 8 for n in range(MAX_VECTOR_VALUES + 3))
    chunks = (await made_of(Vector(values)))[:-1]
    assert struct.unpack(f"<{len(values)}f", b"".join(c.data for c in chunks)) == values


# ---- revisions ----


async def test_interim_text_is_replaced_until_it_is_final() -> None:
    said = [
        outputs.Revision("wreck"),
        outputs.Revision("wreck a nice", stability=0.5),
        outputs.Revision("recognise", final=True),
        outputs.Revision("peach"),
        outputs.Revision("speech", final=True),
    ]
    assert (await made_of(*said))[:-1] == [
        Revision(0, "wreck", False, 0),
        Revision(0, "wreck a nice", False, 1, 0.5),
        Revision(0, "recognise", True, 2, 1.0),
        Revision(3, "peach", False, 3),
        Revision(3, "speech", True, 4, 1.0),
    ]


async def test_a_long_revision_is_replaced_as_a_whole() -> None:
    long = "x" * (MAX_TEXT_CHARS + 1)
    said = [outputs.Revision(long), outputs.Revision(long), outputs.Revision("", final=True)]
    made = (await made_of(Text("a"), *said, Text("b")))[:-1]
    assert [each.replaces for each in made if isinstance(each, Revision)] == [1, 2, 1, 4, 1]
    assert shown(made) == "ab"
    assert shown(made[:5]) == "a" + long


def shown(made: Sequence[Any]) -> str:
    """Return what a reader shows after these frames."""
    texts: dict[int, str] = {}
    for each in made:
        if isinstance(each, Revision):
            texts = {index: text for index, text in texts.items() if index < each.replaces}
        texts[each.index] = each.text
    return "".join(texts.values())


# ---- what goes wrong ----


@pytest.mark.parametrize(
    "rubbish",
    [
        None,
        "text",
        Text(b"bytes"),  # type: ignore[arg-type]
        Text("\ud800"),
        Data("text"),  # type: ignore[arg-type]
        Vector((float("nan"),)),
        Vector(("1",)),  # type: ignore[arg-type]
        Vector((1e300,)),
        Label("good", None),  # type: ignore[arg-type]
        outputs.Revision("a", stability=1.5),
        outputs.Revision("a", stability=float("nan")),
        outputs.Revision("a", stability="high"),  # type: ignore[arg-type]
        Remark("x" * MAX_FRAME_BYTES, ""),
        End(FinishReason.STOP, total_tokens=-1),
        End("stop"),  # type: ignore[arg-type]
    ],
)
async def test_rubbish_ends_the_stream_as_failed(rubbish: Any) -> None:
    made = await made_of(Text("a"), rubbish, Text("never"))
    assert made[0] == Token("a", 0)
    assert len(made) == 2
    assert made[1].finish_reason is FinishReason.FAILED
    assert made[1].message.startswith("the producer gave an invalid output")


async def test_an_exception_ends_the_stream_and_tells_nothing_of_the_inside() -> None:
    made = await made_of(Text("a"), KeyError("/secret/path"))
    assert made[-1] == StreamEnd(
        0, FinishReason.FAILED, 1, 0, "the producer failed; see the origin's log"
    )


async def test_an_error_of_ours_is_told_as_it_is() -> None:
    made = await made_of(CallerError("the text is too long", field="prompt"))
    assert made == [StreamEnd(0, FinishReason.FAILED, 0, 0, "the text is too long")]


async def test_an_error_while_it_is_closed_after_its_end_changes_nothing() -> None:
    class Clumsy(Says):
        async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
            try:
                yield End(total_tokens=1)
            finally:
                raise RuntimeError("too late")

    assert await frames(Clumsy(), request()) == [StreamEnd(1, FinishReason.STOP, 0, 0)]


async def test_the_producer_is_closed_when_its_frames_are_not_wanted_any_more() -> None:
    producer = Says(Text("a"), Text("b"))
    async with aclosing(Production(producer, request(), 1).frames()) as made:
        assert (await anext(made))[0] == 0
        assert producer.closed == 0
    assert producer.closed == 1


# ---- resumption ----


SAID = (Text("a"), Data(b"x" * (MAX_CHUNK_BYTES + 1)), outputs.Revision("i"), outputs.Revision("f"))


@pytest.mark.parametrize("cut", range(6))
async def test_a_producer_that_repeats_itself_goes_on_after_any_frame(cut: int) -> None:
    whole = await made_of(*SAID)
    assert len(whole) == 6
    assert await frames(Says(*SAID), request("a", cut)) == whole[cut:]


OUTPUTS = st.one_of(
    st.builds(Text, st.text(max_size=3)),
    st.builds(Text, st.just("🌊" * (MAX_TEXT_CHARS + 1))),
    st.builds(Data, st.sampled_from([b"", b"x", b"x" * (2 * MAX_CHUNK_BYTES)])),
    st.builds(Label, st.text(max_size=3), st.floats(0, 1, width=32)),
    st.builds(outputs.Revision, st.text(max_size=3), st.booleans()),
)


@given(st.lists(OUTPUTS, max_size=8), st.integers(0, 2), st.data())
@settings(max_examples=50)
def test_any_outputs_go_on_after_any_frame(
    said: list[Output], notices: int, data: st.DataObject
) -> None:
    more: dict[str, Any] = {"notices": (("code", "message"),) * notices}
    whole = asyncio.run(frames(Says(*said), request(**more)))
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert asyncio.run(frames(Says(*said), request("", cut, **more))) == whole[cut:]


@pytest.mark.parametrize("said", [(), (Text("a"),), (KeyError("x"),)])
async def test_a_producer_that_repeats_less_than_it_said_fails(said: tuple[Any, ...]) -> None:
    made: Any = await frames(Says(*said), request("abc", 3))
    assert [each.finish_reason for each in made] == [FinishReason.FAILED]


async def test_one_that_has_changed_since_does_not_pretend_to_repeat_itself() -> None:
    made: Any = await frames(Says(Text("a"), Text("b")), request("a", 1, fingerprint="0"))
    assert [each.finish_reason for each in made] == [FinishReason.ORIGIN_LOST]
    assert "changed" in made[0].message
    whole = await frames(Says(Text("a")), request(fingerprint="0"))
    assert [type(each) for each in whole] == [Token, StreamEnd]


async def test_one_that_continues_is_given_what_was_delivered_and_says_that_it_is_inexact() -> None:
    producer = Says(Text("d"), resumption=Resumption.CONTINUES)
    made: Any = await frames(producer, request("abc", 3))
    assert [type(each) for each in made] == [Notice, Token, StreamEnd]
    assert made[0].code == "inexact"
    assert producer.requests[0].delivered == "abc"


async def test_one_that_can_do_neither_ends_as_lost_and_is_not_asked() -> None:
    producer = Says(Text("d"), resumption=Resumption.ENDS)
    made: Any = await frames(producer, request("abc", 3))
    assert [each.finish_reason for each in made] == [FinishReason.ORIGIN_LOST]
    assert made[0].retryable
    assert producer.requests == []


# ---- retries ----

BUSY = Unavailable("the device is busy")


async def ends_retryable(
    producer: Says, asked: Request, inserted: Sequence[int] = ()
) -> tuple[list[Any], bool]:
    """Return the frames of a stream, and whether the origin may retry it."""
    production = Production(producer, asked, 1, None, inserted)
    made = [decode(raw)[1] async for _, raw in production.frames()]
    return made, production.can_retry


@pytest.mark.parametrize(
    ("resumption", "said", "asked", "may"),
    [
        (Resumption.REPEATS, (Text("a"), BUSY), request(), True),
        (Resumption.REPEATS, (Text("a"), BUSY), request("abc", 3), True),
        (Resumption.REPEATS, (End(FinishReason.FAILED, retryable=True),), request("abc", 3), True),
        (Resumption.REPEATS, (CallerError("too long"),), request(), False),
        (Resumption.REPEATS, (BUSY,), request(fingerprint="0"), True),
        (Resumption.REPEATS, (Text("a"), BUSY), request(fingerprint="0"), False),
        (Resumption.CONTINUES, (Text("a"), BUSY), request(), True),
        (Resumption.CONTINUES, (CallPiece(0, "i", "f", "{"), BUSY), request(), False),
        (Resumption.CONTINUES, (BUSY,), replace(request("abc", 3), calls=1), False),
        (Resumption.ENDS, (BUSY,), request(), True),
        (Resumption.ENDS, (Text("a"), BUSY), request(), False),
        (Resumption.ENDS, (Text("d"),), request("abc", 3), False),
    ],
    ids=[
        "repeats",
        "repeats after a takeover",
        "repeats an end that is retryable",
        "refuses the request",
        "repeats on another engine",
        "had output from another engine",
        "continues",
        "has begun a call",
        "began a call before a takeover",
        "ends without output",
        "ends after output",
        "ends after a takeover",
    ],
)
async def test_a_failure_is_retried_where_the_stream_can_continue(
    resumption: Resumption, said: tuple[Any, ...], asked: Request, may: bool
) -> None:
    made, can_retry = await ends_retryable(Says(*said, resumption=resumption), asked)
    assert isinstance(made[-1], StreamEnd)
    assert made[-1].index == asked.next_index + len(made) - 1
    assert can_retry is may


async def test_a_failure_is_not_retried_twice_nor_where_the_producer_retries_itself() -> None:
    made, can_retry = await ends_retryable(Says(BUSY), request("", 1), [0])
    assert (made[-1].retryable, made[-1].index, can_retry) == (True, 1, False)
    itself = Says(BUSY)
    itself.about = replace(itself.about, retries=True)
    assert not (await ends_retryable(itself, request()))[1]


@pytest.mark.parametrize("cut", range(6))
async def test_a_producer_that_repeats_itself_goes_on_around_the_notice_of_a_retry(
    cut: int,
) -> None:
    """Every frame of an uninterrupted stream comes once, and revisions replace the same text."""
    whole = await made_of(*SAID)
    before: list[Any] = [*whole[:cut], Notice("retried", "", cut)]
    rest, _ = await ends_retryable(Says(*SAID), request("", cut + 1), [cut])
    assert [each.index for each in rest] == [*range(cut + 1, len(whole) + 1)]
    texts = [each for each in before + rest if isinstance(each, Token | Revision)]
    assert shown(texts) == shown([each for each in whole if isinstance(each, Token | Revision)])
    assert [type(each) for each in whole[cut:]] == [type(each) for each in rest]


async def test_a_stream_that_was_retried_before_any_output_is_no_continuation() -> None:
    for resumption in (Resumption.CONTINUES, Resumption.ENDS):
        producer = Says(Text("a"), resumption=resumption)
        made, _ = await ends_retryable(producer, request("", 1), [0])
        assert [type(each) for each in made] == [Token, StreamEnd]


async def test_the_code_of_the_origins_notice_is_refused() -> None:
    made = await made_of(Remark("retried", "by me"))
    assert "only the origin uses" in made[-1].message


def test_a_frame_that_was_not_handed_over_leaves_no_gap() -> None:
    framing = Framing()
    pieces = framing.encoded(Data(b"x" * (MAX_CHUNK_BYTES * 2)))
    next(pieces)
    next(pieces)
    del pieces
    assert framing.next_index == 1


# ---- the factory ----


@pytest.mark.parametrize("factory", ["make", "make_later"])
async def test_a_factory_is_called_or_awaited(factory: str) -> None:
    made = await load_producer(f"{__name__}:{factory}")
    assert made.about.name == "says"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("no_such_module:make", "No module named 'no_such_module'.*start the origin in its folder"),
        (f"{__name__}:absent", "is not a function or class"),
        (f"{__name__}:SAID", "is not a function or class"),
        (f"{__name__}:needs_arguments", "a function without arguments"),
        (f"{__name__}:Unannounced", "gave a Unannounced without `about`"),
        (f"{__name__}:Synchronous", "has no `async def produce` that yields"),
    ],
)
async def test_a_factory_that_gives_no_producer_is_named(place: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await load_producer(place)
