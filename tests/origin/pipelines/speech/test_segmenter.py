"""Utterances: where they begin and end, that sound is not lost, and where long ones are cut."""

from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from tailrace.origin.pipelines.speech.items import Speech
from tailrace.origin.pipelines.speech.pcm import BYTES_PER_MS
from tailrace.origin.pipelines.speech.segmenter import FRAME_BYTES, FRAME_MS, Limits, Segmenter

LIMITS = Limits(silence_ms=100, padding_ms=60, utterance_ms=1_000, overlap_ms=200)
SILENCE = [False] * 10
FLAGS = st.lists(
    st.tuples(st.booleans(), st.integers(1, 70)).map(lambda run: [run[0]] * run[1]), max_size=8
).map(lambda runs: list(chain.from_iterable(runs)))


def sound(flags: list[bool]) -> list[bytes]:
    """Return a different frame for each flag."""
    return [at.to_bytes(2, "little") * (FRAME_BYTES // 2) for at in range(len(flags))]


def segmented(flags: list[bool], limits: Limits = LIMITS, rest: bytes = b"") -> list[Speech]:
    """Return the pieces of all utterances."""
    segmenter = Segmenter(limits)
    made = [
        piece
        for frame, flag in zip(sound(flags), flags, strict=True)
        for piece in segmenter.feed(frame, flag)
    ]
    return [*made, *segmenter.finish(rest)]


def utterances(made: list[Speech]) -> list[bytes]:
    """Return the sound of each utterance."""
    count = made[-1].utterance + 1 if made else 0
    return [b"".join(one.data for one in made if one.utterance == at) for at in range(count)]


def frames(data: bytes) -> list[int]:
    """Return the numbers of the frames in a sound."""
    return [int.from_bytes(data[at : at + 2], "little") for at in range(0, len(data), FRAME_BYTES)]


def test_an_utterance_has_the_sound_around_it() -> None:
    made = segmented([*SILENCE, *[True] * 20, *SILENCE])
    # Speech is certain at 6 frames of 10, and begins before: the window and 3 frames of padding.
    assert [frames(one) for one in utterances(made)] == [list(range(3, 35))]
    assert made[0].start_ms == 3 * FRAME_MS
    assert [one.ends for one in made] == [False] * (len(made) - 1) + [True]
    assert not made[-1].is_cut


def test_a_click_is_no_utterance_and_one_in_a_silence_does_not_hold_it_up() -> None:
    assert segmented([*SILENCE, True, True, *SILENCE]) == []
    limits = Limits(200, 0, 1_000, 0)
    quiet = [False] * 5 + [True] + [False] * 20
    [utterance] = utterances(segmented([True] * 10 + quiet, limits))
    assert frames(utterance)[-1] == 19


def test_the_begin_of_a_frame_belongs_to_the_last_utterance() -> None:
    made = segmented([True] * 12, rest=b"ab")
    assert made[-1].ends
    assert made[-1].data.endswith(b"ab")
    assert segmented([False] * 12, rest=b"ab") == []


def test_a_long_utterance_is_cut_and_the_next_one_begins_before_the_cut() -> None:
    made = segmented([True] * 120)
    first, second, third = map(frames, utterances(made))
    assert len(first) * FRAME_MS == LIMITS.utterance_ms
    assert first[-10:] == second[:10]
    assert second[-10:] == third[:10]
    cuts = [one for one in made if one.is_cut]
    assert [one.overlap_ms for one in cuts] == [LIMITS.overlap_ms] * 2
    assert all(one.ends for one in cuts)


@given(FLAGS)
def test_pieces_follow_each_other_and_no_speech_is_lost(flags: list[bool]) -> None:
    made = segmented(flags)
    heard: set[int] = set()
    for at, whole in enumerate(utterances(made)):
        numbers = frames(whole)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert len(numbers) * FRAME_MS <= LIMITS.utterance_ms
        own = [one for one in made if one.utterance == at]
        assert [one.ends for one in own] == [False] * (len(own) - 1) + [True]
        place_ms = numbers[0] * FRAME_MS
        for one in own:
            assert one.start_ms == place_ms
            place_ms += len(one.data) // BYTES_PER_MS
        heard.update(numbers)
    # A run of speech that is long enough is heard from its first frame to its last one.
    run: list[int] = []
    for at, flag in enumerate([*flags, False]):
        if flag:
            run.append(at)
            continue
        if len(run) >= 10:
            assert heard.issuperset(run)
        run = []
