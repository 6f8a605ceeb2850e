"""The stage `blocklist`: moderation by words and patterns, of prompts or of text.

Text is held back as long as it may be the beginning of a blocked phrase, so no part of a phrase
reaches the ledger before the whole phrase is checked. The decisions depend on the text alone, not
on its pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Self

from pydantic import Field, field_validator, model_validator

from tailrace.origin.pipelines.moderation import Moderation, ModerationOptions
from tailrace.origin.pipelines.patterns import Pattern
from tailrace.origin.pipelines.phrase_matcher import PhraseMatcher, Phrases, Piece
from tailrace.origin.pipelines.stage import Item, Prompt, Stage, StageContext
from tailrace.origin.producer import End, Reasoning, Revision, Text

MAX_PHRASES = 10_000
"""Maximum number of words and phrases of a blocklist."""
MAX_PHRASE_CHARS = 200
"""Maximum number of characters of a word or phrase."""
DEFAULT_HOLD_CHARS = 100
MAX_HOLD_CHARS = 4096


class BlocklistOptions(ModerationOptions):
    """The options of the stage `blocklist`."""

    words: tuple[str, ...] = Field(
        (),
        max_length=MAX_PHRASES,
        description="Words and phrases to block, in lower or upper case. They match whole words.",
    )
    patterns: tuple[Pattern, ...] = Field(
        (), description="Regular expressions to block, in the syntax of Python's re module."
    )
    hold_chars: int = Field(
        DEFAULT_HOLD_CHARS,
        ge=1,
        le=MAX_HOLD_CHARS,
        description="Maximum length of a match of `patterns`, in characters. With patterns, text"
        " is held back until this many characters follow it.",
    )

    @field_validator("words")
    @classmethod
    def _check_words(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in words:
            if not word.strip() or len(word) > MAX_PHRASE_CHARS:
                raise ValueError(f"{word!r:.40} must have 1 to {MAX_PHRASE_CHARS} characters")
        return words

    @model_validator(mode="after")
    def _blocks_something(self) -> Self:
        if not (self.words or self.patterns):
            raise ValueError("give words or patterns to block")
        return self

    @cached_property
    def phrases(self) -> Phrases:
        """The compiled list, which all streams share."""
        return Phrases(self.words, self.patterns, self.hold_chars)


class Blocklist(Stage[BlocklistOptions]):
    """Ends a stream, or changes its text, where a word or pattern of the list is found."""

    Options = BlocklistOptions

    def __init__(self, options: BlocklistOptions, context: StageContext) -> None:
        """Begin without text."""
        super().__init__(options, context)
        self._phrases = options.phrases
        self._matcher = PhraseMatcher(self._phrases)
        self._kind: type[Text] | type[Reasoning] = Text
        self._moderation = Moderation(options, context.name)

    def process(self, item: Item) -> Iterable[Item]:
        """Check one item; text that is not decided yet is held back."""
        match item:
            case Text() | Reasoning():
                yield from self._pieces(type(item), item.text)
            case Prompt():
                yield from self._prompt(item)
            case Revision():
                yield from self._revision(item)
            case _:
                yield item

    def finish(self, end: End) -> Iterable[Item]:
        """Check the text that is still held back."""
        yield from self._checked(self._matcher.feed("", last=True))

    def held(self) -> Iterable[Item]:
        """Return the text that is held back."""
        return [self._kind(self._matcher.held)] if self._matcher.held else []

    def _pieces(self, kind: type[Text] | type[Reasoning], text: str) -> Iterable[Item]:
        """Check a piece of text or reasoning.

        A phrase that begins in reasoning and ends in text, or the reverse, is not blocked.
        """
        if kind is not self._kind:
            yield from self._checked(self._matcher.feed("", last=True))
            self._kind, self._matcher = kind, PhraseMatcher(self._phrases)
        yield from self._checked(self._matcher.feed(text))

    def _checked(self, pieces: Iterable[Piece]) -> Iterable[Item]:
        for piece in pieces:
            if not piece.blocked:
                yield self._kind(piece.text)
                continue
            if self._moderation.ends:
                yield self._moderation.end()
                return
            yield from self._moderation.notice()
            if changed := self._moderation.changed(piece.text):
                yield self._kind(changed)

    def _prompt(self, prompt: Prompt) -> Iterable[Item]:
        checked = [PhraseMatcher(self._phrases).feed(text, last=True) for text in prompt.texts]
        is_blocked = any(piece.blocked for pieces in checked for piece in pieces)
        if is_blocked and self._moderation.ends:
            yield self._moderation.end()
            return
        if is_blocked:
            yield from self._moderation.notice()
        yield prompt.with_texts(map(self._joined, checked))

    def _revision(self, revision: Revision) -> Iterable[Item]:
        """Check a revision, whose text replaces the text before it.

        A blocked interim revision is left out; only a final one ends the stream.
        """
        pieces = PhraseMatcher(self._phrases).feed(revision.text, last=True)
        is_blocked = any(piece.blocked for piece in pieces)
        if is_blocked and self._moderation.ends:
            if revision.final:
                yield self._moderation.end()
            return
        if is_blocked:
            yield from self._moderation.notice()
        yield replace(revision, text=self._joined(pieces))

    def _joined(self, pieces: Iterable[Piece]) -> str:
        changed = self._moderation.changed
        return "".join(changed(one.text) if one.blocked else one.text for one in pieces)
