"""Real speech, made by espeak-ng, in several voices: what is heard of it, and how exactly."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tailrace.ledger.errors import CallerError, ConfigError, Overloaded
from tailrace.origin.pipelines.speech import sphinx
from tailrace.origin.pipelines.speech.items import Speech, Transcript, Word
from tailrace.origin.pipelines.speech.transcribe import Transcribe
from tailrace.origin.pipelines.speech.vocabulary import VocabularyOptions
from tailrace.origin.pipelines.stage import Item, Prompt
from tailrace.origin.producer import Data, Remark
from tests.origin.pipelines.speech.heard import (
    debounce,
    final_text,
    in_pieces,
    pieces,
    punctuate,
    through,
    transcribe,
    transcripts,
    voice_activity,
)
from tests.spoken import digits, louder, needs_espeak, noisy, say, wrong_words

pytestmark = needs_espeak

VOICES = ("en-us", "en-gb", "en-us+f2", "en-us+m3", "en-gb+f3", "en-us+f4")
SPEEDS = (120, 150, 180)
UTTERANCES = 3
WORDS = 5
LEAST_ACCURACY = 0.88
"""Share of the words that must be right; 0.944 was measured (tests/bench/SPEECH.md)."""


def heard(pcm: bytes, size: int = 3_200, **options: object) -> list[Item]:
    """Return what the detector and the recogniser make of live sound."""
    return through([voice_activity(), transcribe(**options)], in_pieces(pcm, size))


def held_out(voice: str, speed: int) -> list[str]:
    """Return utterances that were not used to choose any setting."""
    first = 10 * SPEEDS.index(speed) + 100 * len(voice) + 5_000
    return [digits(first + at, WORDS) for at in range(UTTERANCES)]


def test_digits_in_several_voices_and_speeds_are_heard() -> None:
    wrong = total = 0
    for voice in VOICES:
        for speed in SPEEDS:
            said = held_out(voice, speed)
            made = heard(b"".join(say(one, voice, speed) for one in said))
            wrong += wrong_words(" ".join(said), final_text(made))
            total += WORDS * UTTERANCES
    assert 1 - wrong / total >= LEAST_ACCURACY


@given(st.lists(st.integers(0, 220_000), max_size=20))
@settings(max_examples=10, deadline=None)
def test_any_cut_of_the_same_bytes_gives_the_same_items(cuts: list[int]) -> None:
    pcm = say("one two three") + say("four five")
    stages = [voice_activity(), transcribe(), punctuate(), debounce()]
    made = through(stages, [Data(one) for one in pieces(pcm, cuts)])
    again = [voice_activity(), transcribe(), punctuate(), debounce()]
    assert made == through(again, in_pieces(pcm))
    assert len(transcripts(made, final=True)) == 2


def test_streams_that_share_decoders_do_not_change_each_other() -> None:
    one, other = say("one two three", "en-gb"), say("nine eight", "en-us+f2", 120)
    alone = heard(one + one)
    sound = [through([voice_activity()], in_pieces(pcm)) for pcm in (one + one, other)]
    stages = [transcribe(), transcribe()]
    made: list[list[Item]] = [[], []]
    for at in range(max(map(len, sound))):
        for stage, items, into in zip(stages, sound, made, strict=True):
            into.extend(stage.process(items[at]) if at < len(items) else [])
    assert made[0] == alone
    assert made[1] == heard(other)


def test_interim_results_become_stable_before_the_final_one() -> None:
    made = heard(say("one two three four", "en-us+f2"))
    interim = transcripts(made, final=False)
    [final] = transcripts(made, final=True)
    assert all(0 <= one.stability < 1.0 or one.text == interim[-1].text for one in interim[-8:])
    assert interim[-1].stability == 1.0
    assert final.stability == 1.0
    assert [one.at_ms for one in interim] == sorted({one.at_ms for one in interim})
    assert interim[-1].at_ms < final.at_ms
    # Stable results are right more often than others.
    right = {True: [0, 0], False: [0, 0]}
    for one in interim:
        counts = right[one.stability >= 0.75]
        counts[0] += final.text.startswith(one.text)
        counts[1] += 1
    assert right[True][0] / right[True][1] > right[False][0] / right[False][1]


def test_words_have_their_places() -> None:
    [final] = transcripts(heard(say("one two three", "en-us+f2")), final=True)
    assert [one.text for one in final.words] == ["one", "two", "three"]
    assert 400 <= final.words[0].start_ms <= 700
    for one, following in pairwise(final.words):
        assert one.start_ms < one.end_ms <= following.start_ms


def test_later_utterances_are_separated_by_a_space() -> None:
    made = heard(say("one two", "en-us+f2") + say("three", "en-us+f2"))
    assert [one.text for one in transcripts(made, final=True)] == ["one two", " three"]


@pytest.mark.parametrize("overlap_ms", [400, 600, 1_000])
def test_no_word_is_lost_or_heard_twice_where_an_utterance_is_cut(overlap_ms: int) -> None:
    said = digits(12, 14)
    pcm = say(said, "en-us+f2", 150)
    whole = heard(pcm)
    detector = voice_activity(max_utterance_s=2.4, overlap_ms=overlap_ms)
    made = through([detector, transcribe()], in_pieces(pcm))
    finals = transcripts(made, final=True)
    assert len(finals) >= 3
    assert [one.is_cut for one in finals] == [True] * (len(finals) - 1) + [False]
    assert len(transcripts(whole, final=True)) == 1
    words = [word for one in finals for word in one.words]
    assert all(a.end_ms <= b.middle_ms for a, b in pairwise(words))
    # A cut costs no more than the recogniser's own mistakes.
    assert wrong_words(said, final_text(made)) <= wrong_words(said, final_text(whole)) + 1


def test_words_at_a_cut_belong_to_one_of_the_utterances() -> None:
    """Place words by hand: the second utterance hears the last words of the first one again."""
    stage = transcribe()
    stage._recogniser = Script(
        [
            (Word("a", 0, 500), Word("b", 500, 900), Word("c", 900, 1_000)),
            (Word("be", 0, 100), Word("c", 110, 400), Word("d", 400, 700)),
        ]
    )
    first = Speech(bytes(32_000), 0, 0, ends=True, is_cut=True, overlap_ms=200)
    second = Speech(bytes(25_600), 1, 800, ends=True)
    finals = transcripts(through([stage], [first, second]), final=True)
    assert [one.text for one in finals] == ["a b", " c d"]
    assert [word.start_ms for one in finals for word in one.words] == [0, 500, 910, 1_200]


class Script:
    """A recogniser that hears given words."""

    def __init__(self, utterances: list[tuple[Word, ...]]) -> None:
        """Prepare the words of each utterance."""
        self._utterances = utterances

    def begin(self) -> None:
        """Do nothing."""

    def feed(self, pcm: bytes) -> tuple[Word, ...]:
        """Return no word yet."""
        return ()

    def end(self) -> tuple[Word, ...]:
        """Return the words of the next utterance."""
        return self._utterances.pop(0)

    def close(self) -> None:
        """Do nothing."""


def test_a_grammar_allows_its_sentences_only(tmp_path: Path) -> None:
    grammar = tmp_path / "lights.jsgf"
    grammar.write_text(
        "#JSGF V1.0;\ngrammar lights;\n"
        "public <command> = turn (on | off) the <thing>;\n<thing> = light | radio;\n"
    )
    made = heard(say("turn off the radio", "en-us+f2"), grammar=grammar)
    assert final_text(made) == "turn off the radio"


def test_a_language_model_hears_any_words() -> None:
    made = heard(say("good morning", "en-us+f2", 130), language_model=None)
    assert final_text(made)


@pytest.mark.parametrize("sigma", [0, 8, 1_000])
def test_silence_gives_no_text(sigma: float) -> None:
    assert heard(noisy([0] * 48_000, sigma)) == []


def test_loud_noise_and_clipped_speech_end_like_any_other_sound() -> None:
    for pcm in (noisy([0] * 80_000, 12_000), louder(say("one two three"), 60)):
        made = through([voice_activity(sensitivity=3), transcribe()], in_pieces(pcm))
        for one in made:
            assert isinstance(one, Transcript)
        interim = transcripts(made, final=False)
        assert not interim or transcripts(made, final=True)


def test_a_stage_that_is_closed_within_an_utterance_hands_back_its_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sphinx, "MAX_DECODERS", 2)
    [first, *_] = through([voice_activity()], in_pieces(say("one two")))
    for _ in range(4):  # more than there are decoders in a process
        stage = transcribe()
        list(stage.process(first))
        stage.close(False)


def test_a_process_has_a_limited_number_of_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sphinx, "MAX_DECODERS", 2)
    decoders, options = sphinx.Decoders(), VocabularyOptions(words=("one",))
    first, _ = decoders.take(options), decoders.take(options)
    with pytest.raises(Overloaded, match="more than 2 streams of a process have speech"):
        decoders.take(options)
    assert decoders.take(VocabularyOptions(words=("two",))) is not first
    decoders.hand_back(options, first)
    assert decoders.take(options) is first


def test_sound_without_the_detector_is_refused() -> None:
    with pytest.raises(CallerError, match="has not passed the stage voice-activity"):
        transcribe().process(Data(bytes(3_200)))


def test_the_prompt_is_dropped_and_other_items_are_passed_on() -> None:
    assert through([transcribe()], [Prompt(""), Remark("a", "b")]) == [Remark("a", "b")]
    assert Transcribe.answers_prompts
    assert Transcribe.takes_input


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"words": ["one", "xyzzy"]}, "the dictionary has no xyzzy"),
        ({"words": ["One"]}, "not a word of lower-case letters"),
        ({"words": ["one"], "grammar": "a.jsgf"}, "give one of words and grammar"),
        ({"grammar": "none.jsgf"}, "there is no file none.jsgf"),
        ({"dictionary": "none.dict"}, "there is no file none.dict"),
        ({"model": "none"}, "there is no folder none"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        VocabularyOptions.model_validate(options)


@pytest.mark.parametrize("text", ["no grammar", "#JSGF V1.0; grammar g; public <g> = xyzzy;"])
def test_a_grammar_that_cannot_be_used_is_named(tmp_path: Path, text: str) -> None:
    grammar = tmp_path / "bad.jsgf"
    grammar.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.jsgf"):
        heard(say("one two"), grammar=grammar)
