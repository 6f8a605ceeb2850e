"""The stage `voice-activity`: finds the utterances in sound, and drops what is not speech.

It works on frames of 20 ms, whatever the sizes of the pieces of its input. The detector takes a few
microseconds for a frame, less than a message to another process takes. So the stage runs on the
event loop of its worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Self

from pydantic import Field, model_validator

from tailrace.origin.pipelines.speech import library
from tailrace.origin.pipelines.speech.pcm import SAMPLE_RATE, PcmReader
from tailrace.origin.pipelines.speech.segmenter import (
    FRAME_BYTES,
    FRAME_MS,
    START_WINDOW_MS,
    Limits,
    Segmenter,
)
from tailrace.origin.pipelines.stage import Item, Stage, StageContext, StageOptions
from tailrace.origin.producer import Data, End, Remark

INPUT_CUT = "input_cut"
"""Code of the Notice for an input that ends inside a sample or inside a header."""
DEFAULT_SENSITIVITY = 1
DEFAULT_SILENCE_MS = 500
MAX_SILENCE_MS = 5_000
DEFAULT_PADDING_MS = 200
MAX_PADDING_MS = 1_000
DEFAULT_UTTERANCE_S = 15.0
MAX_UTTERANCE_S = 60.0
DEFAULT_OVERLAP_MS = 600
MAX_OVERLAP_MS = 2_000


class VoiceActivityOptions(StageOptions):
    """The options of the stage `voice-activity`."""

    sensitivity: int = Field(
        DEFAULT_SENSITIVITY,
        ge=0,
        le=3,
        description="How easily sound is taken for speech: 0 is strict, 3 is generous.",
    )
    silence_ms: int = Field(
        DEFAULT_SILENCE_MS,
        ge=100,
        le=MAX_SILENCE_MS,
        multiple_of=FRAME_MS,
        description="Length of the silence that ends an utterance, in ms.",
    )
    padding_ms: int = Field(
        DEFAULT_PADDING_MS,
        ge=0,
        le=MAX_PADDING_MS,
        multiple_of=FRAME_MS,
        description="Length of the sound before an utterance that belongs to it, in ms.",
    )
    max_utterance_s: float = Field(
        DEFAULT_UTTERANCE_S,
        ge=2,
        le=MAX_UTTERANCE_S,
        description="Maximum length of an utterance in seconds. A longer one is cut.",
    )
    overlap_ms: int = Field(
        DEFAULT_OVERLAP_MS,
        ge=0,
        le=MAX_OVERLAP_MS,
        multiple_of=FRAME_MS,
        description="Length of the sound that is heard twice after a cut, so that no word is lost"
        " there, in ms.",
    )

    @model_validator(mode="after")
    def _can_run(self) -> Self:
        library.check_installed()
        longest_ms = max(self.overlap_ms, self.padding_ms + START_WINDOW_MS)
        if self.max_utterance_s * 1000 < 2 * longest_ms:
            raise ValueError("max_utterance_s must be at least twice overlap_ms and padding_ms")
        return self


class VoiceActivity(Stage[VoiceActivityOptions]):
    """Replaces PCM by `Speech` items, which are pieces of utterances."""

    Options: ClassVar[type[VoiceActivityOptions]] = VoiceActivityOptions
    takes_input: ClassVar[bool] = True

    def __init__(self, options: VoiceActivityOptions, context: StageContext) -> None:
        """Begin before the first sample."""
        super().__init__(options, context)
        # The library's numbers say how much the detector rejects.
        mode = 3 - options.sensitivity
        self._detector = library.load().Vad(mode, SAMPLE_RATE, FRAME_MS / 1000)
        utterance_ms = int(options.max_utterance_s * 1000)
        self._segmenter = Segmenter(
            Limits(options.silence_ms, options.padding_ms, utterance_ms, options.overlap_ms)
        )
        self._pcm = PcmReader()
        self._samples = b""  # the begin of a frame

    def process(self, item: Item) -> Iterable[Item]:
        """Look for speech in the samples of an item; other items are passed on."""
        if isinstance(item, Data):
            return self._pieces(self._pcm.feed(item.data))
        return (item,)

    def finish(self, end: End) -> Iterable[Item]:
        """End an open utterance."""
        yield from self._pieces(self._pcm.finish())
        yield from self._segmenter.finish(self._samples)
        if self._pcm.is_cut:
            yield Remark(INPUT_CUT, "the input ends inside a sample or inside its header")

    def _pieces(self, samples: bytes) -> Iterable[Item]:
        self._samples += samples
        whole = len(self._samples) - len(self._samples) % FRAME_BYTES
        for at in range(0, whole, FRAME_BYTES):
            frame = self._samples[at : at + FRAME_BYTES]
            yield from self._segmenter.feed(frame, self._detector.is_speech(frame))
        self._samples = self._samples[whole:]
