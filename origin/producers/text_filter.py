"""What a producer says, on its way through the filter that may end its stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ledger.frame import FinishReason
from origin.filter import FilterFactory, FilterGate
from origin.producer import End, Output, Reasoning, Revision, Text

OVERRULED = (FinishReason.STOP, FinishReason.LENGTH)
"""Ends that the filter's word on the last text replaces; of the others it changes nothing."""


class TextFilter:
    """Outputs in, those that may be seen out.

    Nobody can judge text that may still change: of revisions only the final text is checked, and
    goes out. Reasoning, which nobody judges, does not; what is no text passes. `delivered` is the
    text that readers have already, in so many `pieces`; it is judged once more, as the filter's
    state follows from it.
    """

    def __init__(self, factory: FilterFactory, delivered: str = "", pieces: int = 0) -> None:
        self._gate = FilterGate(factory)
        self._known = len(delivered) - len(self._gate.feed(delivered))
        self._pieces = pieces

    @property
    def end(self) -> End | None:
        """The filter's own end of the stream, once it has come to one."""
        if self._gate.reason is None:
            return None
        return End(self._gate.reason, total_tokens=self._pieces, message=self._gate.message)

    def passed(self, output: Output) -> Iterator[Output]:
        """What comes out for one output; nothing follows an End."""
        match output:
            case Revision(final=False) | Reasoning():
                return
            case Text(text=str(text)) | Revision(text=str(text)):
                self._pieces += 1
                yield from self._text(self._gate.feed(text))
                if self.end is not None:
                    yield self.end
            case End():
                yield from self._text(self._gate.feed("", last=True))
                end = self.end
                if end is None or output.reason not in OVERRULED:
                    yield output
                else:
                    yield replace(output, reason=end.reason, message=end.message)
            case _:
                yield output

    def _text(self, text: str) -> Iterator[Text]:
        """But for the characters that were held when the stream was cut, and are known."""
        known = min(self._known, len(text))
        self._known -= known
        if text[known:]:
            yield Text(text[known:])
