"""Finds the utterances in a stream of frames, each of which is speech or not.

An utterance begins when most frames of a short window are speech, and ends after a time of silence.
An utterance that is too long is cut. The next one then begins with the last part of it, so that a
word at the cut is whole in one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tailrace.origin.pipelines.speech.items import Speech
from tailrace.origin.pipelines.speech.pcm import BYTES_PER_MS

FRAME_MS = 20
"""Length of a frame, in ms of sound."""
FRAME_BYTES = FRAME_MS * BYTES_PER_MS
"""Size of a frame, in bytes."""
PIECE_MS = 80
"""Length of the pieces of an utterance, in ms of sound. Each is a message to another process."""
START_WINDOW_MS = 200
"""Length of the window in which an utterance begins, in ms of sound."""
START_SHARE = 0.6
"""Share of the frames of this window that must be speech."""
NOISE_SHARE = 0.1
"""Share of the frames of a silence that may be taken for speech."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of utterances, in ms of sound.

    Attributes:
        silence_ms: Length of the silence that ends an utterance.
        padding_ms: Length of the sound before an utterance that belongs to it.
        utterance_ms: Maximum length of an utterance.
        overlap_ms: Length of the sound that belongs to both utterances after a cut.
    """

    silence_ms: int
    padding_ms: int
    utterance_ms: int
    overlap_ms: int


class Segmenter:
    """Cuts a stream of frames into utterances; what is not speech is dropped."""

    def __init__(self, limits: Limits) -> None:
        """Begin before the first frame, in silence."""
        self._limits = limits
        kept = (limits.padding_ms + START_WINDOW_MS) // FRAME_MS
        self._before: deque[bytes] = deque(maxlen=kept)  # the last frames of a silence
        self._window: deque[bool] = deque(maxlen=START_WINDOW_MS // FRAME_MS)
        self._silence: deque[bool] = deque(maxlen=limits.silence_ms // FRAME_MS)
        overlap = limits.overlap_ms // FRAME_MS
        self._tail: deque[bytes] = deque(maxlen=overlap)  # the last frames of an utterance
        self._piece: list[bytes] = []
        self._is_open = False
        self._utterance = -1
        self._length_ms = 0  # of the utterance
        self._now_ms = 0

    def feed(self, frame: bytes, is_speech: bool) -> Iterator[Speech]:
        """Take the next frame, and yield the pieces that are complete with it."""
        self._now_ms += FRAME_MS
        if self._is_open:
            yield from self._continue(frame, is_speech)
            return
        self._before.append(frame)
        self._window.append(is_speech)
        if sum(self._window) >= START_SHARE * START_WINDOW_MS / FRAME_MS:
            yield self._open(list(self._before))
            self._before.clear()
            self._window.clear()

    def finish(self, rest: bytes) -> Iterator[Speech]:
        """Yield the last piece of an open utterance; `rest` is the begin of one more frame."""
        if self._is_open:
            yield self._end(rest)

    def _open(self, frames: list[bytes]) -> Speech:
        """Begin an utterance with these frames, which become its first piece."""
        self._is_open = True
        self._utterance += 1
        self._length_ms = len(frames) * FRAME_MS
        self._silence.clear()
        self._tail.clear()
        self._tail.extend(frames)
        return self._speech(b"".join(frames))

    def _continue(self, frame: bytes, is_speech: bool) -> Iterator[Speech]:
        self._piece.append(frame)
        self._tail.append(frame)
        self._silence.append(is_speech)
        self._length_ms += FRAME_MS
        is_full = len(self._silence) == self._silence.maxlen
        if is_full and sum(self._silence) <= NOISE_SHARE * len(self._silence):
            yield self._end(b"")
        elif self._length_ms >= self._limits.utterance_ms:
            overlap = list(self._tail)
            yield self._end(b"", is_cut=True)
            yield self._open(overlap)
        elif len(self._piece) * FRAME_MS >= PIECE_MS:
            yield self._speech(self._taken())

    def _end(self, rest: bytes, is_cut: bool = False) -> Speech:
        self._is_open = False
        return self._speech(self._taken() + rest, ends=True, is_cut=is_cut)

    def _taken(self) -> bytes:
        data = b"".join(self._piece)
        self._piece.clear()
        return data

    def _speech(self, data: bytes, ends: bool = False, is_cut: bool = False) -> Speech:
        whole = len(data) - len(data) % FRAME_BYTES
        start_ms = self._now_ms - whole // BYTES_PER_MS
        overlap_ms = self._limits.overlap_ms if is_cut else 0
        return Speech(data, self._utterance, start_ms, ends, is_cut, overlap_ms)
