"""Runs the stages of speech on sound that is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from tailrace.origin.pipelines.speech.debounce import Debounce, DebounceOptions
from tailrace.origin.pipelines.speech.items import Transcript
from tailrace.origin.pipelines.speech.punctuate import Punctuate, PunctuateOptions
from tailrace.origin.pipelines.speech.transcribe import Transcribe
from tailrace.origin.pipelines.speech.vocabulary import VocabularyOptions
from tailrace.origin.pipelines.speech.voice_activity import VoiceActivity, VoiceActivityOptions
from tailrace.origin.pipelines.stage import AnyStage, Item
from tailrace.origin.producer import Data
from tests.origin.pipelines.staged import stage_of, synchronous
from tests.spoken import DIGITS

PIECE_BYTES = 3_200
"""Size of the pieces of live sound: 100 ms."""


def pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """Return the pieces of bytes that are cut at some places; none is empty."""
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(places) if begin < end]


def in_pieces(data: bytes, size: int = PIECE_BYTES) -> list[Item]:
    """Return bytes as items of a size."""
    return [Data(data[at : at + size]) for at in range(0, len(data), size)]


def voice_activity(**options: object) -> VoiceActivity:
    """Return the stage for one stream."""
    checked = VoiceActivityOptions.model_validate(options)
    stage = stage_of(VoiceActivity, options=checked)
    assert isinstance(stage, VoiceActivity)
    return stage


def transcribe(**options: object) -> Transcribe:
    """Return the stage for one stream, for digits unless there are options."""
    checked = VocabularyOptions.model_validate(options or {"words": DIGITS})
    stage = stage_of(Transcribe, options=checked)
    assert isinstance(stage, Transcribe)
    return stage


def debounce(ms: int = 80) -> AnyStage:
    """Return the stage for one stream."""
    return stage_of(Debounce, options=DebounceOptions(ms=ms))


def punctuate() -> AnyStage:
    """Return the stage for one stream."""
    return stage_of(Punctuate, options=PunctuateOptions())


def through(stages: Sequence[AnyStage], items: Iterable[Item]) -> list[Item]:
    """Return what stages make of items, one stage after the other."""
    made = list(items)
    for stage in stages:
        made = synchronous(stage, made)
    return made


def transcripts(items: Iterable[Item], *, final: bool) -> list[Transcript]:
    """Return the final results, or the interim ones."""
    return [one for one in items if isinstance(one, Transcript) and one.final is final]


def final_text(items: Iterable[Item]) -> str:
    """Return the text of all final results."""
    return "".join(one.text for one in transcripts(items, final=True))
