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
