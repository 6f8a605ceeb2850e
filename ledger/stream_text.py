"""The text of a stream after its revisions."""

from __future__ import annotations

from array import array
from bisect import bisect_left

from tailrace.ledger.frame import Frame, Revision, ScoredToken, Token


class StreamText:
    """The current text of a stream whose frames are added in order.

    A process may have one for each reader of a stream. So it stores only 16 bytes per frame and the
    text.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._indexes = array("Q")  # the indexes of the frames with text
        self._ends = array("Q")  # the offsets in `_text` at which the texts of these frames end

    def add(self, frame: Frame) -> None:
        """Apply the next frame. Frames without text change nothing."""
        if isinstance(frame, Revision):
            kept = bisect_left(self._indexes, frame.replaces)
            del self._indexes[kept:], self._ends[kept:]
            del self._text[self._ends[-1] if kept else 0 :]
        if isinstance(frame, Token | ScoredToken | Revision):
            self._text += frame.text.encode()
            self._indexes.append(frame.index)
            self._ends.append(len(self._text))

    @property
    def text(self) -> str:
        return self._text.decode()


class AppendedText(StreamText):
    """The text of a stream for a reader that shows text as it comes, and cannot replace any of it.

    If a Revision changes text that the reader has shown, nothing more is appended until the
    stream's text begins with the shown text again. `text` is always the current text of the stream.
    """

    def __init__(self) -> None:
        super().__init__()
        # The text that the reader has shown. It is None while the stream's text begins with it.
        self._shown: str | None = None

    @property
    def departed(self) -> bool:
        """True while the stream's text does not begin with the text that the reader has shown."""
        return self._shown is not None

    def added(self, frame: Frame) -> str:
        """Apply the next frame; return the text for the reader to append to the shown text."""
        if self._shown is None and not isinstance(frame, Revision):
            self.add(frame)
            return frame.text if isinstance(frame, Token | ScoredToken) else ""
        shown = self.text if self._shown is None else self._shown
        self.add(frame)
        text = self.text
        if text.startswith(shown):
            self._shown = None
            return text[len(shown) :]
        self._shown = shown
        return ""
