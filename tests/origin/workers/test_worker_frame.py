"""The frames between supervisor and worker: their schema, round trips and refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger import frame as client
from tailrace.ledger.errors import FrameError
from tailrace.ledger.frame import PREFIX_BYTES, Hello, OutputFormat, Sampling, corr_of
from tailrace.ledger.record_extra import IdSpan
from tailrace.ledger.wire.bare import field_types
from tailrace.ledger.wire.codec import FrameSplitter
from tailrace.origin.workers.worker_frame import (
    FRAMES,
    MAX_WORKER_FRAME_BYTES,
    SCHEMA_HASH,
    SUPERVISOR,
    WORKER,
    CancelRun,
    Emission,
    Emissions,
    Frame,
    LoadProgress,
    StartRun,
    Step,
    TokenCounts,
    decode,
    encode,
    together,
)
from tests.frame_strategies import CORRS, any_frame
from tests.origin.emissions import rows
from tests.pybare_oracle import Oracle
from tests.schema_text import WORKER_SCHEMA, read_schema, schema_hash

SCHEMA = read_schema(WORKER_SCHEMA)
ORACLE = Oracle(SCHEMA)
ANY_FRAME = any_frame(FRAMES)


def test_the_schema_hash_is_that_of_the_schema_file() -> None:
    assert schema_hash(WORKER_SCHEMA.read_text(encoding="utf-8")) == SCHEMA_HASH
    assert SCHEMA_HASH != client.SCHEMA_HASH


@pytest.mark.parametrize("cls", [*FRAMES.values(), OutputFormat, Sampling])
def test_a_class_has_the_fields_of_its_struct_in_order(cls: type) -> None:
    types = {name: of.name for name, of in field_types(cls).items()}
    assert list(types.items()) == list(SCHEMA.structs[cls.__name__].items())


def test_the_table_of_tags_is_the_union_of_the_schema() -> None:
    assert {cls.__name__: tag for tag, cls in FRAMES.items()} == SCHEMA.unions["Frame"]
    sent = WORKER | SUPERVISOR
    assert sent == set(FRAMES)


def test_hello_alone_is_shared_with_the_client_schema() -> None:
    assert set(FRAMES) & set(client.FRAMES) == {Hello.tag}
    assert FRAMES[Hello.tag] is client.FRAMES[Hello.tag]
    assert all(32 <= tag < 64 for tag in set(FRAMES) - {Hello.tag})


@given(ANY_FRAME, CORRS)
def test_a_frame_comes_back_as_it_went(frame: Frame, corr: int) -> None:
    raw = encode(frame, corr)
    assert decode(raw) == (corr, frame)
    assert FrameSplitter(FRAMES, MAX_WORKER_FRAME_BYTES).feed(raw) == [raw]


@given(ANY_FRAME)
def test_pybare_packs_the_same_payload(frame: Frame) -> None:
    assert ORACLE.pack(frame) == encode(frame)[PREFIX_BYTES:]


@given(ANY_FRAME, st.data())
def test_a_changed_byte_raises_nothing_but_a_frame_error(frame: Any, data: st.DataObject) -> None:
    raw = bytearray(encode(frame))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        _, changed = decode(raw)
    except FrameError:
        return
    assert "nan" in repr(changed) or encode(changed, corr_of(raw)) == raw


def test_an_emission_carries_a_client_frame_whole() -> None:
    token = client.encode(client.Token(" the", 42))
    step = Step.of((Emission(run=7, index=42, ids=(262,), steered=(), frame=token),))
    _, got = decode(encode(step))
    assert isinstance(got, Step)
    assert client.decode(rows(got)[0].frame) == (0, client.Token(" the", 42))


@st.composite
def emissions(draw: st.DrawFn) -> Emission:
    ids = draw(st.lists(st.integers(0, 2**32 - 1), max_size=5))
    places = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=4)))
    spans = tuple(IdSpan(begin, end - begin) for begin, end in pairwise(places))
    frame = draw(st.binary(min_size=9, max_size=20))
    numbers = draw(st.integers(1, 9)), draw(st.integers(0, 1 << 20))
    counted = TokenCounts(*draw(st.tuples(st.integers(0, 9), st.integers(0, 9))))
    return Emission(*numbers, tuple(ids), spans, frame, counted=counted)


def counts(some: list[Emission]) -> list[TokenCounts]:
    """Return what `Emission` does not compare."""
    return [each.counted for each in some]


EMISSIONS = emissions()


@given(st.lists(EMISSIONS, max_size=5))
def test_a_step_in_columns_gives_the_emissions_that_it_was_made_of(some: list[Emission]) -> None:
    _, step = decode(encode(Step.of(some)))
    assert isinstance(step, Step)
    assert rows(step) == some
    assert counts(rows(step)) == counts(some)


@given(st.lists(st.lists(EMISSIONS, max_size=3), min_size=1, max_size=3))
def test_steps_in_a_row_are_one_step(some: list[list[Emission]]) -> None:
    (joined,) = together(map(Step.of, some))
    assert isinstance(joined, Emissions)
    together_again = list(chain.from_iterable(some))
    assert rows(joined) == together_again
    assert counts(rows(joined)) == counts(together_again)


def test_the_runs_that_failed_are_kept_when_steps_are_joined_or_cut() -> None:
    step, other = (
        Step.of((Emission(run, 0, (), (), bytes(9)), Emission(run + 1, 1, (), (), bytes(9), True)))
        for run in (1, 5)
    )
    _, got = decode(encode(step))
    assert isinstance(got, Step)
    assert list(got.cut().failed) == [2]
    (joined,) = together([step, other])
    assert isinstance(joined, Emissions)
    assert list(joined.failed) == [2, 6]
    assert list(joined.those([False, True, True, False]).failed) == [2, 6]


@given(st.lists(EMISSIONS, min_size=1, max_size=3), st.data())
def test_columns_that_do_not_fit_together_are_refused(
    some: list[Emission], data: st.DataObject
) -> None:
    step = Step.of(some)
    name = data.draw(st.sampled_from(["runs", "indexes", "counts", "sizes", "ids"]))
    longer = replace(step, **cast(Any, {name: (*getattr(step, name), 1)}))
    with pytest.raises(FrameError, match="contradict each other"):
        longer.cut()
    with pytest.raises(FrameError, match="contradict each other"):
        list(together([step, longer, step]))


def test_a_bad_id_is_refused_by_its_column() -> None:
    emissions = (Emission(1, 0, (5,), (), b"x"), Emission(2, 0, (5, -1), (), b"x"))
    with pytest.raises(FrameError) as caught:
        encode(Step.of(emissions))
    assert caught.value.field == "Step.ids"


def test_a_long_prompt_fits_a_worker_frame() -> None:
    run = StartRun(
        prompt_ids=tuple(range(100_000, 500_000)),
        generated_ids=(),
        sent_bytes=0,
        next_index=0,
        max_tokens=16,
    )
    raw = encode(run, 9)
    assert len(raw) > client.MAX_FRAME_BYTES
    assert decode(raw) == (9, run)


@pytest.mark.parametrize("frame", [CancelRun(), LoadProgress("weights", 1, 2)])
def test_a_client_connection_refuses_worker_frames(frame: Frame) -> None:
    raw = encode(frame)
    with pytest.raises(FrameError, match="unknown tag"):
        client.decode(raw)
    with pytest.raises(FrameError, match="unknown tag"):
        client.Splitter().feed(raw)


def test_a_worker_connection_refuses_client_frames_but_hello() -> None:
    splitter = FrameSplitter(FRAMES, MAX_WORKER_FRAME_BYTES)
    assert splitter.feed(client.encode(Hello(SCHEMA_HASH, "tailrace-worker/0.1.0")))
    with pytest.raises(FrameError, match="unknown tag 0"):
        splitter.feed(client.encode(client.Token("x", 0)))
