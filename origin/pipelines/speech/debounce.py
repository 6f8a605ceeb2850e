"""The stage `debounce`: fewer interim results, so that a reader's display does not flicker.

The time is that of the sound, never that of a clock: a stage that runs again gives the same items.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from pydantic import Field

from tailrace.origin.pipelines.speech.items import Transcript
from tailrace.origin.pipelines.speech.recogniser import STABILITY_WINDOW
from tailrace.origin.pipelines.speech.segmenter import PIECE_MS
from tailrace.origin.pipelines.stage import Item, Stage, StageContext, StageOptions
from tailrace.origin.producer import End

DEFAULT_DEBOUNCE_MS = 80
MIN_DEBOUNCE_MS = 50
MAX_DEBOUNCE_MS = PIECE_MS * STABILITY_WINDOW
"""Maximum of `ms`. The stability of a new text changes with each of the next pieces, so within this
time another interim result follows, with which a held one is passed on."""


class DebounceOptions(StageOptions):
    """The options of the stage `debounce`."""

    ms: int = Field(
        DEFAULT_DEBOUNCE_MS,
        ge=MIN_DEBOUNCE_MS,
        le=MAX_DEBOUNCE_MS,
        description="Minimum time between two interim results, in ms of sound.",
    )


class Debounce(Stage[DebounceOptions]):
    """Passes on at most one interim result in a time, always the newest, and every final one."""

    Options: ClassVar[type[DebounceOptions]] = DebounceOptions

    def __init__(self, options: DebounceOptions, context: StageContext) -> None:
        """Begin without a result."""
        super().__init__(options, context)
        self._due_ms = 0  # position from which on an interim result is passed on
        self._held: Transcript | None = None

    def process(self, item: Item) -> Iterable[Item]:
        """Pass on an item, or hold back an interim result that comes too early."""
        held, self._held = self.held(), None
        if not isinstance(item, Transcript):
            return (*held, item)
        if not item.final:
            if item.at_ms < self._due_ms:
                self._held = item
                return ()
            self._due_ms = item.at_ms + self.options.ms
        return (item,)

    def finish(self, end: End) -> Iterable[Item]:
        """Pass on a result that is held back."""
        return self.held()

    def held(self) -> Iterable[Item]:
        """Return the result that is held back."""
        return [] if self._held is None else [self._held]
