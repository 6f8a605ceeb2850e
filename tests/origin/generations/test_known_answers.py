"""Which requests have an identity, and which finished streams are given again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import (
    Branch,
    Cache,
    FinishReason,
    Frame,
    Notice,
    Open,
    Sampling,
    StreamEnd,
    Token,
    decode,
    encode,
)
from tailrace.ledger.interface import Record
from tailrace.ledger.record_extra import IdSpan, RecordExtra
from tailrace.origin.generations.known_answers import (
    identity_of,
    known_answer,
    last_records,
    may_answer,
)
from tailrace.origin.generations.recipe import Recipe, packed_ids
from tailrace.origin.generations.stream_log import History
from tests.origin.stage import RECIPE, A

GREEDY = RECIPE
SEEDED = RECIPE.model_copy(update={"sampling": replace(RECIPE.sampling, temperature=0.7)})
END = StreamEnd(2, FinishReason.LENGTH, 2, 2)


def test_a_request_has_an_identity_if_it_is_greedy_or_names_its_seed() -> None:
    assert len(identity_of(GREEDY, names_seed=False)) == 32
    assert identity_of(SEEDED, names_seed=False) == b""
    assert len(identity_of(SEEDED, names_seed=True)) == 32
    other_seed = GREEDY.model_copy(update={"sampling": replace(GREEDY.sampling, seed=9)})
    assert identity_of(other_seed, names_seed=True) == identity_of(GREEDY, names_seed=False)


@pytest.mark.parametrize("field", ["priority", "unread", "unread_after_s", "note", "trace"])
def test_what_changes_no_token_is_no_part_of_it(field: str) -> None:
    changed = {"priority": "batch", "unread": "pause", "unread_after_s": 9}.get(field, "x")
    same = SEEDED.model_copy(update={field: changed})
    assert identity_of(same, names_seed=True) == identity_of(SEEDED, names_seed=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"fingerprint": "other"},
        {"model": "other"},
        {"prompt_sha256": "other"},
        {"max_tokens": 8},
        {"sampling": Sampling(temperature=0.7, top_k=1, top_p=1.0, seed=1)},
        {"sampling": replace(SEEDED.sampling, seed=2)},
        {"stop": ("a",)},
        {"ignore_eos": False},
        {"completes": True},
        {"logprobs": 1},
        {"format": ("regex", "a")},
        {"tenant": "acme"},
        {"notices": (("truncated", "two"),)},
    ],
)
def test_what_changes_the_stream_is_a_part_of_it(changed: dict[str, Any]) -> None:
    other = SEEDED.model_copy(update=changed)
    assert identity_of(other, names_seed=True) != identity_of(SEEDED, names_seed=True)


@pytest.mark.parametrize("changed", [{"fingerprint": ""}, {"prompt_ids": packed_ids(())}])
def test_a_model_that_is_not_known_has_none(changed: dict[str, Any]) -> None:
    recipe: Recipe = GREEDY.model_copy(update=changed)
    assert identity_of(recipe, names_seed=True) == b""


def test_the_request_overrules_the_operator() -> None:
    plain = Open("demo", prompt="x")
    assert not may_answer(plain, by_default=False)
    assert may_answer(plain, by_default=True)
    assert may_answer(replace(plain, cache=Cache.EXACT), by_default=False)
    assert not may_answer(replace(plain, cache=Cache.NONE), by_default=True)
    for more in ({"n": 2}, {"branch": Branch(A, 0)}):
        assert not may_answer(replace(plain, **more), by_default=True)
        with pytest.raises(CallerError, match="not possible for a request that begins") as error:
            may_answer(replace(plain, cache=Cache.EXACT, **more), by_default=True)
        assert error.value.field == "cache"


def finished(*frames: Frame, end: StreamEnd = END, extra: bytes = b"") -> tuple[History, Record]:
    history = History()
    for index, frame in enumerate(frames):
        history.add(Record(encode(frame), (index,), extra if not index else b""))
    last = Record(encode(replace(end, index=len(frames))), (99,))
    history.add(last)
    return history, last


def test_a_stream_that_ended_by_itself_is_given_again_with_its_end() -> None:
    history, end = finished(Token("a", 0), Token("b", 1))
    answer = known_answer(A, history, end, "fingerprint")
    assert answer is not None
    assert (answer.stream, answer.shared) == (A, 2)
    told, last = last_records(answer, 1_000)
    assert RecordExtra.of(told).at_ms == 1_000
    notice = decode(told.frame)[1]
    assert isinstance(notice, Notice)
    assert (notice.code, notice.index) == ("cached", 2)
    assert decode(last.frame)[1] == replace(END, index=3)
    assert last.ids == (99,)


def test_an_answer_from_the_ledger_is_given_again_without_its_notice() -> None:
    history, end = finished(Token("a", 0), Token("b", 1), Notice("cached", "x", 2))
    answer = known_answer(A, history, end, "fingerprint")
    assert answer is not None
    assert answer.shared == 2


@pytest.mark.parametrize(
    ("frames", "end", "extra"),
    [
        ((Token("a", 0),), replace(END, finish_reason=FinishReason.CANCELLED), b""),
        ((Token("a", 0),), replace(END, finish_reason=FinishReason.FILTERED), b""),
        ((Token("a", 0),), replace(END, finish_reason=FinishReason.TOOL_CALLS), b""),
        ((Notice("loading", "x", 0), Token("a", 1)), END, b""),
        ((Token("a", 0), Notice("inexact", "x", 1)), END, b""),
        ((Token("a", 0),), END, RecordExtra(engine="other").pack()),
        ((Token("a", 0),), END, RecordExtra(steered=(IdSpan(0, 1),)).pack()),
    ],
)
def test_what_another_request_would_not_get_is_not_given(
    frames: tuple[Frame, ...], end: StreamEnd, extra: bytes
) -> None:
    history, last = finished(*frames, end=end, extra=extra)
    assert known_answer(A, history, last, "fingerprint") is None
