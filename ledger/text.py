"""The text of a stream, as it stands after its revisions."""

from __future__ import annotations

from ledger.frame import Frame, Revision, ScoredToken, Token


class StreamText:
    """Fed a stream's frames in order; `text` is what a reader should show now."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, str]] = []  # index of the frame, its text

    def add(self, frame: Frame) -> None:
        """A frame that is no text changes nothing."""
        if isinstance(frame, Revision):
            while self._parts and self._parts[-1][0] >= frame.replaces:
                self._parts.pop()
        if isinstance(frame, Token | ScoredToken | Revision):
            self._parts.append((frame.index, frame.text))

    @property
    def text(self) -> str:
        return "".join(text for _, text in self._parts)


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
