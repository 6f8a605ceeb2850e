"""The encoder of responses with grouped text, in any format that shows each frame separately."""

from __future__ import annotations

from tailrace.edge.generate.encoders import Encoder, WrappedEncoder
from tailrace.edge.generate.grouping import FrameGrouper, Grouping
from tailrace.edge.generate.snapshot import as_snapshot, as_text
from tailrace.ledger.frame import FRAMES_TYPE


class GroupEncoder(WrappedEncoder):
    """Joins frames of text into pieces, and encodes the pieces and all other frames with `inner`.

    A reader of frames gets a Snapshot for each piece of several frames, because its indexes must
    have no gap. The other encoders get a Token or Reasoning with the index of the last frame.
    """

    __slots__ = ("_grouper",)

    def __init__(self, inner: Encoder, grouping: Grouping) -> None:
        super().__init__(inner)
        shows_frames = inner.media_type == FRAMES_TYPE
        self._grouper = FrameGrouper(grouping, as_snapshot if shows_frames else as_text)
        self.hold_s = grouping.ms / 1000

    def frames(self, frames: list[bytes]) -> bytes:
        """Return the encoded pieces that these frames complete, and other frames."""
        if not frames:  # the caller asks for the bytes that begin the body
            return self._inner.frames(frames)
        return self._encoded([ready for raw in frames for ready in self._grouper.add(raw)])

    @property
    def first_held(self) -> int | None:
        """The index of the oldest frame whose text is held; None if no frame is held."""
        return self._grouper.first_held

    def release(self) -> bytes:
        """Return the encoded text that is held."""
        return self._encoded(self._grouper.release())

    def _encoded(self, ready: list[bytes]) -> bytes:
        return self._inner.frames(ready) if ready else b""


def grouped(encoder: Encoder, grouping: Grouping | None) -> Encoder:
    """Return an encoder that groups text as requested, or `encoder` itself without a request."""
    return encoder if grouping is None else GroupEncoder(encoder, grouping)
