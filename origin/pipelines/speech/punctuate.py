"""The stage `punctuate`: capital letters, commas where a speaker pauses, and full stops.

It uses simple rules and no model. Sentences are utterances, so it never guesses a question mark.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from tailrace.origin.pipelines.speech.items import Transcript
from tailrace.origin.pipelines.stage import Item, Stage, StageContext, StageOptions
from tailrace.origin.producer import Revision

DEFAULT_COMMA_MS = 250
MAX_COMMA_MS = 5_000
_I = {"i": "I", "i'm": "I'm", "i'd": "I'd", "i'll": "I'll", "i've": "I've"}
_ENDS = (".", "!", "?", "…")


class PunctuateOptions(StageOptions):
    """The options of the stage `punctuate`."""

    comma_ms: int = Field(
        DEFAULT_COMMA_MS,
        ge=50,
        le=MAX_COMMA_MS,
        description="Minimum length of a pause between two words that becomes a comma, in ms.",
    )


class Punctuate(Stage[PunctuateOptions]):
    """Makes sentences of the results of a recogniser."""

    Options: ClassVar[type[PunctuateOptions]] = PunctuateOptions

    def __init__(self, options: PunctuateOptions, context: StageContext) -> None:
        """Begin before the first sentence."""
        super().__init__(options, context)
        self._continues = False  # the utterance before was cut, within a sentence

    def process(self, item: Item) -> Iterable[Item]:
        """Punctuate a result; other items are passed on."""
        if not isinstance(item, Revision):
            return (item,)
        text = self._punctuated(item)
        if item.final and item.text:
            self._continues = isinstance(item, Transcript) and item.is_cut
        return (replace(item, text=text),)

    def _punctuated(self, item: Revision) -> str:
        words = [_I.get(word, word) for word in item.text.split()]
        if not words:
            return item.text
        if isinstance(item, Transcript) and len(item.words) == len(words):
            for at, (one, following) in enumerate(zip(item.words, item.words[1:], strict=False)):
                if following.start_ms - one.end_ms >= self.options.comma_ms:
                    words[at] += ","
        if not self._continues:
            words[0] = words[0][0].upper() + words[0][1:]
        is_cut = isinstance(item, Transcript) and item.is_cut
        if item.final and not is_cut and not words[-1].endswith(_ENDS):
            words[-1] += "."
        before = item.text[: len(item.text) - len(item.text.lstrip())]
        return before + " ".join(words)
