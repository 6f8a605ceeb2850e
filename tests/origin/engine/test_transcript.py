"""Transcripts: the frames that are made of a run's tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.ledger.frame import (
    MAX_FRAME_BYTES,
    FinishReason,
    Score,
    ScoredToken,
    StreamEnd,
    Token,
    TokenScores,
)
from tailrace.ledger.record_extra import IdSpan
from tailrace.origin.engine.transcript import (
    MAX_FRAME_SCORE_BYTES,
    MAX_FRAME_TEXT_CHARS,
    SCORE_BYTES,
    Transcript,
    Vocabulary,
)
from tailrace.origin.filter import Filter, FilterFactory
from tailrace.origin.workers.worker_frame import Emission, StartRun
from tests.origin import blocked_phrase
from tests.origin.engine.runs import (
    continuation,
    end_of,
    fallback_tokenizer,
    frame_of,
    frames_of,
    make_run,
    text_of,
)
from tests.origin.tiny_checkpoint import END_ID, train_tokenizer

TOKENIZER = train_tokenizer(300)
VOCABULARY = Vocabulary(TOKENIZER)
CONTEXT = 256


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def start(
    context: int = CONTEXT, filter_factory: FilterFactory | None = None, **fields: Any
) -> Transcript:
    run = make_run(**fields)
    return Transcript(7, run, VOCABULARY, frozenset({END_ID}), context, filter_factory)


def scores_of(token: int, position: int) -> TokenScores:
    """Return what a model might have said."""
    chosen = Score(token, VOCABULARY.bytes_of(token), -float(position))
    return TokenScores(chosen, (chosen, Score(5, b"%", -99.0)))


def play(transcript: Transcript, ids: Sequence[int]) -> list[Emission]:
    """Accept ids, as if drawn, until the run ends or they run out."""
    emissions: list[Emission] = []
    for token in ids:
        if transcript.ended:
            break
        emissions += transcript.accept(token, scores_of(token, transcript.total_tokens))
    return emissions


def generate(
    transcript: Transcript, run: StartRun, ids: Sequence[int], orders: Mapping[int, list[int]]
) -> list[Emission]:
    """Start, or go on: at each position its id is drawn, until the run ends or they run out.

    An order comes before the draw at its position, or at the next one if another is in the way.
    """
    emissions = transcript.resume()
    known = len(run.steered)
    due = sorted(orders)[known:]
    while not transcript.ended and (position := transcript.total_tokens) < len(ids):
        if due and due[0] <= position:
            emissions += transcript.steer(orders[due.pop(0)])
        else:
            emissions += play(transcript, ids[position : position + 1])
    return emissions


FALLBACK = fallback_tokenizer()
SPACED = [FALLBACK.get_vocab()[word] for word in ("\u2581", "a", "\u2581a", "\u2581\u2581", "é")]


@settings(max_examples=200)
@given(st.text("ab é", max_size=3), st.lists(st.sampled_from(SPACED), min_size=1), st.data())
def test_a_completion_is_what_prompt_and_tokens_decode_to_beyond_the_prompt(
    prompt: str, ids: list[int], data: st.DataObject
) -> None:
    prompt_ids = [END_ID, *FALLBACK.encode(prompt).ids]
    fields: dict[str, Any] = {"prompt_ids": tuple(prompt_ids), "completes": True}
    vocabulary = Vocabulary(FALLBACK)
    whole = Transcript(7, make_run(**fields), vocabulary, frozenset(), CONTEXT)
    emissions = play(whole, ids)
    decoded, before = FALLBACK.decode(prompt_ids + ids), FALLBACK.decode(prompt_ids)
    assert text_of(emissions) == decoded.removeprefix(before)
    cut = data.draw(st.integers(0, len(emissions)))
    rest = continuation(fields, emissions[:cut])
    again = Transcript(7, rest, vocabulary, frozenset(), CONTEXT)
    assert again.resume() == []
    assert play(again, ids[again.total_tokens :]) == emissions[cut:]


def test_an_answer_in_a_conversation_begins_without_the_space_of_its_first_word() -> None:
    ids = FALLBACK.encode("a b").ids
    run = make_run(prompt_ids=tuple(FALLBACK.encode("b").ids))
    transcript = Transcript(7, run, Vocabulary(FALLBACK), frozenset(), CONTEXT)
    assert text_of(play(transcript, ids)) == "a b"


def test_a_frame_is_emitted_with_the_text_of_each_token() -> None:
    ids = ids_of("The fox")
    emissions = play(start(), ids)
    assert [emission.ids for emission in emissions] == [(token,) for token in ids]
    assert [emission.run for emission in emissions] == [7] * len(ids)
    assert frames_of(emissions)[0] == Token(TOKENIZER.decode(ids[:1]), 0)
    assert text_of(emissions) == "The fox"


def test_ids_whose_text_is_held_back_ride_with_the_emission_that_completes_it() -> None:
    ids = ids_of("狐")
    assert len(ids) > 1
    emissions = play(start(), ids)
    assert emissions == [Emission(7, 0, tuple(ids), (), emissions[0].frame)]
    assert frames_of(emissions) == [Token("狐", 0)]


def test_the_end_of_text_stops_the_run_without_text_but_counts_as_a_token() -> None:
    ids = ids_of("fox")
    emissions = play(start(), [*ids, END_ID, *ids])
    assert text_of(emissions) == "fox"
    assert end_of(emissions) == StreamEnd(len(ids) + 1, FinishReason.STOP, len(emissions) - 1, 3)
    assert emissions[-1].ids == (END_ID,)


def test_an_ignored_end_of_text_is_counted_and_generation_goes_on() -> None:
    ids = [*ids_of("fox"), END_ID, *ids_of(" ran")]
    emissions = play(start(ignore_eos=True, max_tokens=len(ids)), ids)
    assert text_of(emissions) == "fox ran"
    assert end_of(emissions).total_tokens == len(ids)
    assert end_of(emissions).finish_reason is FinishReason.LENGTH
    assert [token for emission in emissions for token in emission.ids] == ids


def test_a_stop_sequence_across_tokens_is_not_emitted() -> None:
    emissions = play(start(stop=("x ran",)), ids_of("The fox ran over"))
    assert text_of(emissions) == "The fo"
    assert end_of(emissions).finish_reason is FinishReason.STOP
    assert end_of(emissions).message == "x ran"


def test_an_end_by_the_model_itself_names_no_stop_sequence() -> None:
    emissions = play(start(stop=("y",)), [*ids_of("fox"), END_ID])
    assert end_of(emissions).finish_reason is FinishReason.STOP
    assert end_of(emissions).message is None


def test_text_held_for_a_stop_sequence_comes_out_when_the_run_ends() -> None:
    ids = ids_of("The fox ran")
    emissions = play(start(stop=("ran away",), max_tokens=len(ids)), ids)
    assert text_of(emissions) == "The fox ran"
    assert end_of(emissions).finish_reason is FinishReason.LENGTH


def test_a_truncated_last_character_comes_out_as_a_replacement() -> None:
    ids = [*ids_of("fox"), *ids_of("狐")[:-1]]
    emissions = play(start(max_tokens=len(ids)), ids)
    assert text_of(emissions) == "fox\ufffd"
    assert end_of(emissions).total_tokens == len(ids)


def test_a_replacement_can_complete_a_stop_sequence() -> None:
    ids = [*ids_of("fox"), *ids_of("狐")[:-1]]
    emissions = play(start(stop=("x\ufffd",), max_tokens=len(ids)), ids)
    assert text_of(emissions) == "fo"
    assert end_of(emissions).finish_reason is FinishReason.STOP


@pytest.mark.parametrize("prompt_tokens", [250, 255])
def test_the_end_of_the_context_ends_the_run(prompt_tokens: int) -> None:
    transcript = start(prompt_ids=(1,) * prompt_tokens)
    emissions = play(transcript, ids_of("The fox ran over the hill"))
    expected = StreamEnd(
        CONTEXT - prompt_tokens, FinishReason.LENGTH, len(emissions) - 1, prompt_tokens
    )
    assert end_of(emissions) == expected


def test_no_tokens_asked_for_gives_the_end_at_once() -> None:
    emissions = start(max_tokens=0).resume()
    assert frames_of(emissions) == [StreamEnd(0, FinishReason.LENGTH, 0, 3)]


def test_a_cancelled_run_gives_its_held_text_and_its_end() -> None:
    transcript = start(stop=("ran away",))
    play(transcript, ids_of("The fox ran"))
    emissions = transcript.end(FinishReason.CANCELLED)
    assert text_of(emissions) == " ran"[-len(text_of(emissions)) :] != ""
    assert end_of(emissions).finish_reason is FinishReason.CANCELLED


# ---- steering ----


def test_an_order_is_one_emission_which_says_which_ids_are_its() -> None:
    transcript = start()
    ids = ids_of(" ran over")
    play(transcript, ids_of("The fox"))
    (emission,) = transcript.steer(ids)
    assert frames_of([emission]) == [Token(" ran over", emission.index)]
    assert emission.ids == tuple(ids)
    assert emission.steered == (IdSpan(0, len(ids)),)
    assert transcript.total_tokens == len(ids_of("The fox")) + len(ids)


def test_what_is_held_back_goes_out_before_an_order() -> None:
    transcript = start(stop=("fox END",))
    assert text_of(play(transcript, [*ids_of("a fox E"), *ids_of("狐")[:-1]])) == "a "
    (emission,) = transcript.steer(ids_of("ND狐"))
    assert text_of([emission]) == "fox E\ufffdND狐"
    assert not transcript.ended


def test_a_stop_sequence_or_an_end_in_an_order_ends_nothing() -> None:
    transcript = start(stop=("END",))
    emissions = transcript.steer([*ids_of("the END"), END_ID, *ids_of(" E")])
    assert text_of(emissions) == "the END E"
    assert text_of(play(transcript, ids_of("ND"))) == "ND"
    emissions = play(transcript, ids_of(" END"))
    assert text_of(emissions) == " "
    assert end_of(emissions).finish_reason is FinishReason.STOP


def test_an_order_goes_out_whole_even_if_it_ends_inside_a_character() -> None:
    assert text_of(start().steer([*ids_of("fox"), *ids_of("狐")[:1]])) == "fox\ufffd"


def test_an_order_of_no_text_counts_with_the_next_emission() -> None:
    transcript = start()
    assert transcript.steer([END_ID]) == []
    (emission,) = transcript.accept(ids_of("f")[0])
    assert emission.ids == (END_ID, *ids_of("f"))
    assert emission.steered == (IdSpan(0, 1),)


def test_an_order_that_is_longer_than_the_room_is_cut() -> None:
    ids = ids_of("The fox ran")
    emissions = start(max_tokens=len(ids) - 1).steer(ids)
    assert emissions[0].ids == tuple(ids[:-1])
    assert emissions[0].steered == (IdSpan(0, len(ids) - 1),)
    assert end_of(emissions).finish_reason is FinishReason.LENGTH


def test_an_order_that_just_fits_is_whole() -> None:
    ids = ids_of("The fox ran")
    emissions = start(max_tokens=len(ids)).steer(ids)
    assert emissions[0].steered == (IdSpan(0, len(ids)),)
    assert end_of(emissions).total_tokens == len(ids)


def test_no_character_is_made_of_bytes_on_both_sides_of_the_edge_of_an_order() -> None:
    first, *rest = ids_of("狐")
    orders = {1: [*rest, first], 4: rest}
    emissions = generate(start(), make_run(), [first, *ids_of("abcdefox")], orders)
    assert text_of(emissions).startswith("\ufffd" * (2 + len(rest)))
    assert "狐" not in text_of(emissions)


def test_going_on_knows_where_one_order_ends_and_the_next_begins() -> None:
    first, *rest = ids_of("狐")
    ids, orders = ids_of("abcfox"), {1: [first], 2: rest}
    whole = generate(start(), make_run(), ids, orders)
    assert "狐" not in text_of(whole)
    check_all_cuts({}, ids, orders, whole)


# ---- filters ----


def test_a_filtered_run_ends_before_the_phrase_and_says_why() -> None:
    transcript = start(filter_factory=blocked_phrase.make)
    emissions = play(transcript, ids_of("The secret hill is here"))
    assert text_of(emissions) == "The "
    assert end_of(emissions).finish_reason is FinishReason.FILTERED
    assert end_of(emissions).message == blocked_phrase.MESSAGE


def test_a_phrase_in_an_order_is_filtered_too() -> None:
    transcript = start(filter_factory=blocked_phrase.make)
    emissions = play(transcript, ids_of("a secret")) + transcript.steer(ids_of(" hill"))
    assert text_of(emissions) == "a "
    assert end_of(emissions).finish_reason is FinishReason.FILTERED


def test_what_a_filter_holds_comes_out_when_the_run_ends_without_the_phrase() -> None:
    ids = ids_of("a secret")
    emissions = play(start(max_tokens=len(ids), filter_factory=blocked_phrase.make), ids)
    assert text_of(emissions) == "a secret"
    assert end_of(emissions).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("asked", "given_reason"),
    [
        (FinishReason.STOP, FinishReason.FILTERED),
        (FinishReason.LENGTH, FinishReason.FILTERED),
        (FinishReason.CANCELLED, FinishReason.CANCELLED),
        (FinishReason.FAILED, FinishReason.FAILED),
    ],
)
def test_a_verdict_on_the_last_text_is_the_reason_where_there_is_no_worse(
    asked: FinishReason, given_reason: FinishReason
) -> None:
    transcript = start(filter_factory=blocked_phrase.make, stop=(" hill top",))
    emissions = play(transcript, ids_of("a secret hill"))
    emissions += transcript.end(asked, "because")
    assert text_of(emissions) == "a "
    end = end_of(emissions)
    assert end.finish_reason is given_reason
    filtered = given_reason is FinishReason.FILTERED
    assert end.message == (blocked_phrase.MESSAGE if filtered else "because")


def test_a_filter_that_fails_ends_the_run_as_failed() -> None:
    def broken() -> Filter:
        raise OSError("gone")

    emissions = start(filter_factory=broken).accept(ids_of("f")[0])
    assert frames_of(emissions) == [
        StreamEnd(1, FinishReason.FAILED, 0, 3, "the filter failed: OSError: gone")
    ]


# ---- scores ----


def test_a_frame_has_the_scores_of_the_tokens_whose_ids_it_has() -> None:
    ids = ids_of("a狐")
    emissions = play(start(logprobs=1), ids)
    assert [frame_of(emission) for emission in emissions] == [
        ScoredToken("a", (scores_of(ids[0], 0),), 0),
        ScoredToken("狐", tuple(scores_of(token, at) for at, token in enumerate(ids) if at), 1),
    ]


def test_steered_tokens_have_no_scores() -> None:
    transcript = start(logprobs=0)
    assert frames_of(transcript.steer(ids_of("fox"))) == [ScoredToken("fox", (), 0)]


def test_of_too_many_scores_a_frame_has_the_last() -> None:
    many = MAX_FRAME_SCORE_BYTES // SCORE_BYTES + 10
    transcript = start(logprobs=0, max_tokens=many + 1, context=many + 10, ignore_eos=True)
    for at in range(many):
        assert transcript.accept(END_ID, TokenScores(Score(END_ID, b"", -float(at)))) == []
    (emission,) = transcript.accept(ids_of("f")[0], TokenScores(Score(1, b"f", -float(many))))[:1]
    assert len(emission.frame) <= MAX_FRAME_BYTES
    frame = frame_of(emission)
    assert isinstance(frame, ScoredToken)
    assert len(frame.scores) < many
    last = [-float(at) for at in range(many + 1)][-len(frame.scores) :]
    assert [scores.chosen.logprob for scores in frame.scores] == last


# ---- long texts ----


def test_a_text_that_is_longer_than_a_frame_is_several() -> None:
    text = "狐f" * MAX_FRAME_TEXT_CHARS
    ids = ids_of(text)
    size = len(ids) + 10
    emissions = start(context=size + 3, max_tokens=size).steer(ids)
    assert [len(frame.text) for frame in frames_of(emissions) if isinstance(frame, Token)] == [
        MAX_FRAME_TEXT_CHARS
    ] * 2
    assert text_of(emissions) == text
    assert [len(emission.ids) for emission in emissions] == [len(ids), 0]
    run = continuation({"max_tokens": size}, emissions[:1])
    rest = Transcript(7, run, VOCABULARY, frozenset(), size + 3).resume()
    assert [emission.frame for emission in rest] == [emissions[1].frame]


# ---- going on ----

SCRIPTS = [
    ({}, [*ids_of("The 🦊 and 狐"), END_ID]),
    ({"stop": ("hill", "over")}, ids_of("The fox ran ov er, o ver, over the hill")),
    ({"max_tokens": 9}, ids_of("🐻🐻 狐狐狐狐狐狐")),
    ({"max_tokens": 8, "stop": ("\ufffd\ufffd\ufffd",)}, ids_of("🦊")[:1] * 9),
    ({"ignore_eos": True, "max_tokens": 12}, [END_ID, *ids_of("狐"), END_ID] * 4),
]


@pytest.mark.parametrize(("fields", "ids"), SCRIPTS)
def test_going_on_from_any_frame_gives_the_frames_that_were_missing(
    fields: dict[str, Any], ids: list[int]
) -> None:
    whole = generate(start(**fields), make_run(**fields), ids, {})
    end_of(whole)
    check_all_cuts(fields, ids, {}, whole)


WORDS = ["The ", "fox", " ran", " o", "ver", "E", "N", "D", "secret", " hill", "狐", "🐻", "é", "a"]
PIECES = [*(ids_of(word) for word in WORDS), [END_ID], ids_of("🦊")[:2], ids_of("狐")[-1:]]
IDS = st.lists(st.sampled_from(PIECES), max_size=14).map(
    lambda parts: list(chain.from_iterable(parts))
)
STOPS = st.lists(st.sampled_from(["END", "ND", "over", "xE", "\ufffd\ufffd", "狐🐻"]), max_size=3)


@settings(max_examples=150)
@given(
    ids=IDS,
    orders=st.dictionaries(st.integers(0, 12), IDS.filter(bool), max_size=3),
    stops=STOPS,
    is_filtered=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
    ignore_eos=st.booleans(),
    max_tokens=st.integers(1, 40),
)
def test_going_on_is_exact_whatever_a_run_has_and_wherever_it_is_cut(
    ids: list[int],
    orders: dict[int, list[int]],
    stops: list[str],
    is_filtered: bool,
    logprobs: int | None,
    ignore_eos: bool,
    max_tokens: int,
) -> None:
    fields: dict[str, Any] = {
        "stop": tuple(stops),
        "logprobs": logprobs,
        "ignore_eos": ignore_eos,
        "max_tokens": max_tokens,
    }
    factory = blocked_phrase.make if is_filtered else None
    transcript = start(filter_factory=factory, **fields)
    whole = generate(transcript, make_run(**fields), ids, orders)
    assert transcript.ended == (bool(whole) and isinstance(frame_of(whole[-1]), StreamEnd))
    check_all_cuts(fields, ids, orders, whole, factory)


def check_all_cuts(
    fields: dict[str, Any],
    ids: list[int],
    orders: dict[int, list[int]],
    whole: list[Emission],
    factory: FilterFactory | None = None,
) -> None:
    """Check that a run continued after any frame gives exactly the frames that were missing."""
    ended = bool(whole) and isinstance(frame_of(whole[-1]), StreamEnd)
    for logged in range(len(whole) + (not ended)):
        run = continuation(fields, whole[:logged])
        transcript = Transcript(7, run, VOCABULARY, frozenset({END_ID}), CONTEXT, factory)
        rest = generate(transcript, run, ids, orders)
        assert [replace(e, run=0) for e in rest] == [replace(e, run=0) for e in whole[logged:]]


@pytest.mark.parametrize(
    ("text", "sent_bytes"),
    [("fox", 4), ("é", 1)],
    ids=["more text than the ids give", "half a character"],
)
def test_a_stream_whose_text_is_not_that_of_its_tokens_fails(text: str, sent_bytes: int) -> None:
    transcript = start(generated_ids=tuple(ids_of(text)), sent_bytes=sent_bytes, next_index=2)
    end = end_of(transcript.resume())
    assert end.finish_reason is FinishReason.FAILED
    assert end.message == "the stream's text is not that of its tokens"
    assert end.total_tokens == len(ids_of(text))
    assert transcript.ended


def test_ids_beyond_the_end_of_a_text_are_not_taken() -> None:
    transcript = start(generated_ids=(*ids_of("fox"), END_ID, *ids_of("ran")), sent_bytes=3)
    emissions = transcript.resume()
    assert frames_of(emissions) == [StreamEnd(len(ids_of("fox")) + 1, FinishReason.STOP, 0, 3)]


def test_nothing_comes_after_the_end() -> None:
    transcript = start(max_tokens=1)
    end_of(transcript.accept(ids_of("f")[0]))
    assert transcript.end(FinishReason.CANCELLED) == []
    assert transcript.steer(ids_of("ox")) == []
    assert transcript.total_tokens == 1


def test_a_failure_says_whether_the_request_may_succeed_when_it_is_sent_again() -> None:
    end = end_of(start().end(FinishReason.FAILED, "the logits were NaN", retryable=True))
    assert end == StreamEnd(0, FinishReason.FAILED, 0, 3, "the logits were NaN", retryable=True)
