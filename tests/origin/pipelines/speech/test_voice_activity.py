"""The detector on real sound: speech, silence, noise, and what it is sent by mistake."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tailrace.ledger.errors import CallerError
from tailrace.origin.pipelines.speech import library
from tailrace.origin.pipelines.speech.items import Speech
from tailrace.origin.pipelines.speech.pcm import BYTES_PER_MS
from tailrace.origin.pipelines.speech.segmenter import PIECE_MS
from tailrace.origin.pipelines.speech.voice_activity import (
    INPUT_CUT,
    VoiceActivity,
    VoiceActivityOptions,
)
from tailrace.origin.pipelines.stage import Item, Prompt
from tailrace.origin.pipelines.stages.model import ModelStage
from tailrace.origin.producer import Data, Remark, Text
from tests.origin.pipelines.speech.heard import in_pieces, pieces, through, voice_activity
from tests.spoken import louder, needs_espeak, noisy, say

CUTS = st.lists(st.integers(0, 130_000), max_size=20)


def heard(pcm: bytes, **options: object) -> list[Item]:
    """Return what the stage makes of live sound."""
    return through([voice_activity(**options)], in_pieces(pcm))


@needs_espeak
def test_an_utterance_is_found_between_silences() -> None:
    made = heard(say("one two three") + say("four five six"))
    speech = [one for one in made if isinstance(one, Speech)]
    assert speech == made
    assert [one.utterance for one in speech if one.ends] == [0, 1]
    # The first piece is what was needed to be sure; each of the others comes as soon as it is full.
    lengths = {len(one.data) for one in speech if one.utterance == 0} - {len(speech[0].data)}
    assert max(lengths) == PIECE_MS * BYTES_PER_MS
    assert 200 <= speech[0].start_ms <= 500  # the speech begins at 500 ms, with padding before it


@needs_espeak
@given(CUTS)
@settings(max_examples=25, deadline=None)
def test_any_cut_of_the_same_bytes_gives_the_same_items(cuts: list[int]) -> None:
    pcm = say("seven eight") + b"odd"
    items = [Data(one) for one in pieces(pcm, cuts)]
    assert through([voice_activity()], items) == heard(pcm)


@pytest.mark.parametrize("sigma", [0, 8, 100, 1_000])
def test_silence_and_the_noise_of_a_room_are_no_speech(sigma: float) -> None:
    assert heard(noisy([0] * 48_000, sigma)) == []


def test_loud_noise_ends_in_utterances_of_limited_length() -> None:
    made = heard(noisy([0] * 160_000, 12_000), sensitivity=3, max_utterance_s=2, overlap_ms=200)
    lengths: dict[int, int] = {}
    for one in made:
        assert isinstance(one, Speech)
        lengths[one.utterance] = lengths.get(one.utterance, 0) + len(one.data) // BYTES_PER_MS
    assert all(length <= 2_000 for length in lengths.values())


@needs_espeak
def test_speech_is_found_however_loud_it_is() -> None:
    pcm = say("one two three")
    for factor in (0.1, 60):  # quiet, and clipped almost everywhere
        assert any(isinstance(one, Speech) for one in heard(louder(pcm, factor)))


@needs_espeak
def test_speech_up_to_the_last_byte_is_one_utterance() -> None:
    pcm = say("one two three")[:40_000]  # in the middle of the speech
    *_, last = heard(pcm)
    assert isinstance(last, Speech)
    assert last.ends


@pytest.mark.parametrize("data", [b"\0", bytes(1_281), b"RIFF\0\0\0\0WAVE"])
def test_an_input_that_ends_inside_a_sample_says_so(data: bytes) -> None:
    [notice] = heard(data)
    assert isinstance(notice, Remark)
    assert notice.code == INPUT_CUT


def test_another_format_fails_the_stage() -> None:
    with pytest.raises(CallerError, match="the input is Ogg"):
        heard(b"OggS" + bytes(100))


def test_other_items_are_passed_on() -> None:
    items: list[Item] = [Prompt("a"), Text("b")]
    assert through([voice_activity()], items) == items


@pytest.mark.parametrize(
    "options",
    [
        {"sensitivity": 4},
        {"silence_ms": 90},
        {"silence_ms": 110},
        {"max_utterance_s": 61},
        {"max_utterance_s": 2, "overlap_ms": 1_200},
        {"overlap_ms": 2_020},
    ],
)
def test_settings_have_bounds(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        VoiceActivityOptions.model_validate(options)


def test_the_stage_needs_an_input() -> None:
    assert VoiceActivity.takes_input
    assert not ModelStage.takes_input


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "NAME", "a_package_that_nobody_has")
    with pytest.raises(ValidationError, match=r"install tailrace\[speech\]"):
        VoiceActivityOptions()
