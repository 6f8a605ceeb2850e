"""Round trips, refusals of broken bytes, and agreement with another BARE implementation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.ledger.errors import FrameError
from tailrace.ledger.frame import (
    CODEC,
    FRAMES,
    LOGGED,
    PREFIX_BYTES,
    Frame,
    Open,
    Sampling,
    Splitter,
    Token,
    corr_of,
    decode,
    encode,
    index_of,
    patch_corrs,
    split,
    tag_of,
    with_corr,
)
from tailrace.ledger.wire.bare import F32, F64, STR, U16, U32, U64, UINT, Type
from tests.frame_strategies import CORRS, TEXTS, UINTS, any_frame
from tests.pybare_oracle import Oracle
from tests.schema_text import CLIENT_SCHEMA, read_schema

ANY_FRAME = any_frame(FRAMES)
ORACLE = Oracle(read_schema(CLIENT_SCHEMA))


def payload(tag: int, data: bytes, corr: int = 0) -> bytes:
    """Bytes under a header that is right, so that they reach the payload's decoder."""
    length = PREFIX_BYTES - 4 + len(data)
    return (
        (length | 1 << 24).to_bytes(4, "little") + bytes((tag,)) + corr.to_bytes(4, "little") + data
    )


def outcome_of(raw: bytes) -> Frame | FrameError:
    """Return the frame, or the one error that there may be; any other fails the test."""
    try:
        return decode(raw)[1]
    except FrameError as error:
        return error


def check(raw: bytes) -> None:
    """Check that a decoded frame encodes to the same bytes; an error must name a place in them."""
    outcome = outcome_of(raw)
    if isinstance(outcome, FrameError):
        assert outcome.field
        assert 0 <= outcome.offset <= len(raw)
    elif "nan" not in repr(outcome):  # the bits of a NaN are not kept
        assert encode(outcome, corr_of(raw)) == raw


# ---- round trips ----


@given(ANY_FRAME, CORRS)
def test_a_frame_comes_back_as_it_went(frame: Frame, corr: int) -> None:
    raw = encode(frame, corr)
    assert decode(raw) == (corr, frame)
    assert decode(memoryview(raw)) == (corr, frame)
    assert (tag_of(raw), corr_of(raw)) == (raw[4], corr)
    assert type(frame) is FRAMES[tag_of(raw)]


@given(st.builds(Token, TEXTS | st.text(min_size=120, max_size=140), UINTS), CORRS)
@example(Token("a" * 127, 2**14 - 1), 2**32 - 1)
@example(Token("a" * 128, 2**14), 2**32 - 1)
def test_the_short_way_of_tokens_equals_the_table_driven_codec(token: Token, corr: int) -> None:
    raw = encode(token, corr)
    assert raw == CODEC.encode(token, corr)
    assert decode(raw) == CODEC.decode(raw) == (corr, token)


@given(any_frame({tag: FRAMES[tag] for tag in LOGGED}))
def test_the_index_of_a_raw_frame_is_that_of_the_frame(frame: Any) -> None:
    assert index_of(encode(frame)) == frame.index


@given(ANY_FRAME, CORRS, CORRS, st.binary(max_size=8))
def test_patching_corr_changes_corr_alone(
    frame: Frame, before: int, after: int, lead: bytes
) -> None:
    raw = encode(frame, before)
    buf = bytearray(lead + raw + lead)
    patch_corrs(buf, [(len(lead), after)])
    assert buf == lead + encode(frame, after) + lead
    assert with_corr(raw, after) == encode(frame, after)


# ---- broken bytes ----


@given(ANY_FRAME, st.data())
def test_no_part_of_a_payload_passes_for_the_whole(frame: Frame, data: st.DataObject) -> None:
    raw = encode(frame)
    end = data.draw(st.integers(PREFIX_BYTES, len(raw)))
    outcome = outcome_of(payload(raw[4], raw[PREFIX_BYTES:end]))
    assert outcome == frame if end == len(raw) else isinstance(outcome, FrameError)


@given(ANY_FRAME, st.binary(min_size=1, max_size=4))
def test_bytes_after_the_payload_are_refused(frame: Frame, more: bytes) -> None:
    raw = encode(frame)
    assert isinstance(outcome_of(raw + more), FrameError)
    assert isinstance(outcome_of(payload(raw[4], raw[PREFIX_BYTES:] + more)), FrameError)


@given(st.binary(max_size=64))
def test_random_bytes_raise_nothing_but_a_frame_error(raw: bytes) -> None:
    check(raw)


@given(st.sampled_from(sorted(FRAMES)), st.binary(max_size=64))
def test_a_random_payload_raises_nothing_but_a_frame_error(tag: int, data: bytes) -> None:
    check(payload(tag, data))


@given(ANY_FRAME, st.data())
def test_a_changed_byte_raises_nothing_but_a_frame_error(frame: Frame, data: st.DataObject) -> None:
    raw = bytearray(encode(frame))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    check(bytes(raw))


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_a_splitter_raises_nothing_but_a_frame_error(chunks: list[bytes]) -> None:
    splitter, whole = Splitter(), Splitter()
    frames: list[bytes] = []
    failed = False
    for chunk in chunks:
        try:
            frames += splitter.feed(chunk)
        except FrameError:
            failed = True
    assert all(tag_of(raw) in FRAMES for raw in frames)
    if failed:
        with pytest.raises(FrameError):
            whole.feed(b"".join(chunks))
    else:
        assert whole.feed(b"".join(chunks)) == frames


@given(st.lists(ANY_FRAME, max_size=4), st.lists(st.integers(1, 30), max_size=20))
def test_a_splitter_gives_the_same_frames_however_they_arrive(
    frames: list[Frame], sizes: list[int]
) -> None:
    parts = [encode(frame, corr) for corr, frame in enumerate(frames)]
    whole = b"".join(parts)
    splitter = Splitter()
    got = []
    for size in [*sizes, len(whole)]:
        got += splitter.feed(whole[:size])
        whole = whole[size:]
    assert got == parts == split(b"".join(parts))
    assert splitter.pending == 0


# ---- values outside their type ----


@given(st.text(st.characters(categories=["Cs"]), min_size=1), UINTS)
def test_a_lone_surrogate_is_refused_by_name(text: str, index: int) -> None:
    with pytest.raises(FrameError) as caught:
        encode(Token(text, index))
    assert (caught.value.field, caught.value.offset) == ("Token.text", PREFIX_BYTES)


@given(st.integers(max_value=-1) | st.integers(min_value=2**64))
def test_an_integer_outside_64_bits_is_refused_by_name(number: int) -> None:
    for frame, field in (
        (Token("x", number), "Token.index"),
        (Open("m", sampling=Sampling(seed=number)), "Open.sampling.seed"),
    ):
        with pytest.raises(FrameError) as caught:
            encode(frame)
        assert caught.value.field == field


# ---- another implementation ----


@given(ANY_FRAME)
def test_pybare_packs_the_same_payload(frame: Frame) -> None:
    assert ORACLE.pack(frame) == encode(frame)[PREFIX_BYTES:]


PRIMITIVES: list[tuple[Type, st.SearchStrategy[Any]]] = [
    (UINT, UINTS),
    (U16, st.integers(0, 2**16 - 1)),
    (U32, st.integers(0, 2**32 - 1)),
    (U64, st.integers(0, 2**64 - 1)),
    (F32, st.floats(width=32, allow_nan=False)),
    (F64, st.floats(allow_nan=False)),
    (STR, st.text()),
]


@pytest.mark.parametrize(("of", "values"), PRIMITIVES, ids=lambda p: getattr(p, "name", ""))
@given(data=st.data())
def test_pybare_reads_what_a_primitive_writes(
    of: Type, values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    value = data.draw(values)
    out = bytearray()
    of.encode(out, value)
    assert ORACLE.unpack(of.name, bytes(out)).value == value
    assert of.decode(bytes(out), 0) == (value, len(out))
