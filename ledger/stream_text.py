"""The text of a stream, as it stands after its revisions."""

from __future__ import annotations

from array import array
from bisect import bisect_left

from tailrace.ledger.frame import Frame, Revision, ScoredToken, Token


class StreamText:
    """Fed a stream's frames in order; `text` is what a reader should show now.

    There may be one for each reader of a stream, so it lies packed: 16 bytes a frame and its text.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self._indexes = array("Q")  # of the frames whose text it is,
        self._ends = array("Q")  # and where the text of each one ends

    def add(self, frame: Frame) -> None:
        """A frame that is no text changes nothing."""
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
    """The text of a stream for readers who cannot take back what they have shown.

    A revision that keeps what was shown only adds to it. After one that does not, nothing is
    added until the text begins again with what was shown; `text` is right all the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: str | None = None  # while the text is another than what was shown

    @property
    def departed(self) -> bool:
        """Whether what was shown is no longer how the text begins."""
        return self._shown is not None

    def added(self, frame: Frame) -> str:
        """Take the next frame; what is to be appended to all that was given before."""
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
