from typing import Any

import pytest

from ledger.frame import FinishReason, StreamEnd, Token
from origin.transcript import Transcript
from origin.worker_frame import Emission
from tests.origin.runs import continuation, end_of, frames_of, make_run, text_of
from tests.origin.tiny_checkpoint import END_ID, train_tokenizer

TOKENIZER = train_tokenizer(300)
CONTEXT = 256


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def start(context: int = CONTEXT, **fields: Any) -> Transcript:
    return Transcript(7, make_run(**fields), TOKENIZER, frozenset({END_ID}), context)


def play(transcript: Transcript, ids: list[int]) -> list[Emission]:
    """Accept ids until the run ends or they run out."""
    emissions: list[Emission] = []
    for token in ids:
        if transcript.ended:
            break
        emissions += transcript.accept(token)
    return emissions


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
    assert emissions == [Emission(7, 0, tuple(ids), emissions[0].frame)]
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
    whole = play(start(**fields), ids)
    end_of(whole)
    for logged in range(len(whole)):
        run = continuation(fields, whole[:logged])
        transcript = Transcript(7, run, TOKENIZER, frozenset({END_ID}), CONTEXT)
        rest = transcript.resume()
        rest += play(transcript, ids[len(run.generated_ids) :])
        assert rest == whole[logged:]


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
