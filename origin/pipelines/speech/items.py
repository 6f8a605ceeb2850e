"""The items between the stages of speech: pieces of speech, and transcripts with their words.

Each is a kind of item that other stages know, so these can stand between the stages of speech.
"""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.origin.producer import Data, Revision


@dataclass(frozen=True, slots=True)
class Speech(Data):
    """A piece of an utterance, as 16-bit little-endian PCM at 16 kHz.

    Attributes:
        utterance: Number of the utterance in its stream, from 0.
        start_ms: Position of the piece in the stream, in ms of sound.
        ends: True for the last piece of the utterance, which may be empty.
        is_cut: True if the utterance ends because it is too long. The next one then begins with the
            last `overlap_ms` of this one.
        overlap_ms: Length of the overlap after a cut.
    """

    utterance: int = 0
    start_ms: int = 0
    ends: bool = False
    is_cut: bool = False
    overlap_ms: int = 0


@dataclass(frozen=True, slots=True)
class Word:
    """A word, and its position in ms."""

    text: str
    start_ms: int
    end_ms: int

    @property
    def middle_ms(self) -> int:
        """The middle of the word."""
        return (self.start_ms + self.end_ms) // 2


@dataclass(frozen=True, slots=True)
class Transcript(Revision):
    """The text of an utterance so far, or in the end.

    Attributes:
        words: The words of the text, with their positions in the stream.
        at_ms: Position in the stream up to which sound was heard, in ms.
        is_cut: True if the utterance was too long, so that the next one continues its sentence.
    """

    words: tuple[Word, ...] = ()
    at_ms: int = 0
    is_cut: bool = False
