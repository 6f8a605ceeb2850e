"""Base class of stages that hold text back, and pass it on unchanged but in other pieces."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from tailrace.origin.pipelines.stage import Item, O_co, Stage, StageContext
from tailrace.origin.pipelines.text_cutter import Cutter
from tailrace.origin.producer import End, Reasoning, Text


class HoldingStage(Stage[O_co]):
    """Base class of stages that pass text and reasoning on in the pieces of a `Cutter`.

    Held text is passed on before any other item, so that the order of items is kept.
    """

    def __init__(self, options: O_co, context: StageContext) -> None:
        """Begin without text."""
        super().__init__(options, context)
        self._cutters = {Text: self.cutter(), Reasoning: self.cutter()}
        self._kind: type[Text] | type[Reasoning] = Text

    @abstractmethod
    def cutter(self) -> Cutter:
        """Return a new cutter, for the text or the reasoning of the stream."""

    def process(self, item: Item) -> Iterable[Item]:
        """Return the pieces of text that are complete once `item` is added.

        An item that is neither text nor reasoning is returned as it is, after all held text.
        """
        match item:
            case Text() | Reasoning():
                if type(item) is not self._kind:
                    yield from self._cut("", last=True)
                    self._kind = type(item)
                yield from self._cut(item.text)
            case _:
                yield from self._cut("", last=True)
                yield item

    def finish(self, end: End) -> Iterable[Item]:
        """Return the text that is still held back."""
        return self._cut("", last=True)

    def held(self) -> Iterable[Item]:
        """Return the text that is held back."""
        text = self._cutters[self._kind].held
        return [self._kind(text)] if text else []

    def _cut(self, text: str, last: bool = False) -> Iterable[Item]:
        return [self._kind(piece) for piece in self._cutters[self._kind].feed(text, last)]
