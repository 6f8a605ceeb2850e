"""The encoder of responses that begin with a snapshot, in the format of any API."""

from __future__ import annotations

from tailrace.edge.generate.encoders import Encoder, WrappedEncoder
from tailrace.edge.generate.snapshot import Folded, SnapshotMerge, as_snapshot
from tailrace.ledger.frame import Opened


class SnapshotEncoder(WrappedEncoder):
    """Merges the frames that existed when the stream was opened, and encodes all with `inner`."""

    __slots__ = ("_merge",)

    def __init__(self, inner: Encoder, folded: Folded = as_snapshot) -> None:
        super().__init__(inner)
        self._merge = SnapshotMerge(folded)

    def opened(self, opened: Opened) -> None:
        """Note how many frames the stream has now: these will be merged."""
        self._merge.begin(opened)
        super().opened(opened)

    def frames(self, frames: list[bytes]) -> bytes:
        """Return the encoded frames; nothing while the frames to be merged are incomplete."""
        if not frames:  # the caller asks for the bytes that begin the body
            return self._inner.frames(frames)
        ready = self._merge.add(frames)
        return self._inner.frames(ready) if ready else b""
