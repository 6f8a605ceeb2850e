"""The stage `transcribe`: turns the utterances of `voice-activity` into text.

While somebody speaks it gives interim results, and at the end of each utterance a final one. They
are `Transcript` items, a kind of `Revision`. The text of a later utterance begins with a space.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from tailrace.ledger.errors import CallerError
from tailrace.origin.pipelines.speech.items import Speech, Transcript, Word
from tailrace.origin.pipelines.speech.pcm import BYTES_PER_MS
from tailrace.origin.pipelines.speech.recogniser import Recogniser, Stability
from tailrace.origin.pipelines.speech.sphinx import SphinxRecogniser
from tailrace.origin.pipelines.speech.vocabulary import VocabularyOptions
from tailrace.origin.pipelines.stage import Item, Prompt, Stage, StageContext, StageKind
from tailrace.origin.producer import Data


class Transcribe(Stage[VocabularyOptions]):
    """Replaces the prompt and `Speech` items by `Transcript` items."""

    kind = StageKind.CPU
    Options: ClassVar[type[VocabularyOptions]] = VocabularyOptions
    answers_prompts: ClassVar[bool] = True
    takes_input: ClassVar[bool] = True

    def __init__(self, options: VocabularyOptions, context: StageContext) -> None:
        """Begin without an utterance."""
        super().__init__(options, context)
        self._recogniser: Recogniser = SphinxRecogniser(options)
        self._is_open = False
        self._start_ms = 0  # of the utterance
        self._from_ms = 0  # words before this position belong to the utterance before
        self._stability = Stability()
        self._shown = Transcript("")  # the last interim result of the utterance
        self._has_text = False  # a final result had text

    def process(self, item: Item) -> Iterable[Item]:
        """Recognise a piece of an utterance; other items are passed on, except the prompt."""
        match item:
            case Speech():
                return self._heard(item)
            case Prompt():
                return ()
            case Data():
                raise CallerError(
                    "the sound has not passed the stage voice-activity",
                    hint='put a stage "voice-activity" in front of it, without `optional`',
                )
        return (item,)

    def close(self, has_ended: bool) -> None:
        """Release the recogniser."""
        self._recogniser.close()

    def _heard(self, speech: Speech) -> Iterable[Item]:
        if not self._is_open:
            self._recogniser.begin()
            self._is_open = True
            self._start_ms = speech.start_ms
            self._stability = Stability()
            self._shown = Transcript("")
        words = self._placed(self._recogniser.feed(speech.data))
        at_ms = speech.start_ms + len(speech.data) // BYTES_PER_MS
        if speech.ends:
            self._is_open = False
            yield from self._final(speech, self._placed(self._recogniser.end()), at_ms)
            return
        stability = self._stability.of(tuple(word.text for word in words))
        interim = Transcript(self._text(words), False, stability, words, at_ms)
        if (interim.text, stability) != (self._shown.text, self._shown.stability):
            self._shown = interim
            yield interim

    def _final(self, speech: Speech, words: tuple[Word, ...], at_ms: int) -> Iterable[Item]:
        """Yield the final result, unless there is no text and none was shown.

        After a cut the utterances share some sound. Words of its first half belong to the first
        utterance, and all words behind the last of these to the second one.
        """
        self._from_ms = 0
        if speech.is_cut:
            middle_ms = at_ms - speech.overlap_ms // 2
            words = tuple(word for word in words if word.middle_ms < middle_ms)
            self._from_ms = words[-1].end_ms if words else 0
        final = Transcript(self._text(words), True, 1.0, words, at_ms, speech.is_cut)
        if final.text or self._shown.text:
            self._has_text |= bool(final.text)
            yield final

    def _placed(self, words: tuple[Word, ...]) -> tuple[Word, ...]:
        """Return the words with their positions in the stream, without those before a cut."""
        start_ms = self._start_ms
        placed = (
            replace(word, start_ms=word.start_ms + start_ms, end_ms=word.end_ms + start_ms)
            for word in words
        )
        return tuple(word for word in placed if word.middle_ms >= self._from_ms)

    def _text(self, words: tuple[Word, ...]) -> str:
        text = " ".join(word.text for word in words)
        return f" {text}" if text and self._has_text else text
