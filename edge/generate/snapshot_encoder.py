"""The encoder of responses that begin with a snapshot, in the format of any API."""

from __future__ import annotations

from starlette.responses import Response

from tailrace.edge.generate.encoders import Encoder
from tailrace.edge.generate.snapshot import Folded, SnapshotMerge, as_snapshot
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import Opened


class SnapshotEncoder(Encoder):
    """Merges the frames that existed when the stream was opened, and encodes all with `inner`."""

    __slots__ = ("_inner", "_merge", "ends_by_204", "hold_s", "media_type", "shows_corr")

    def __init__(self, inner: Encoder, folded: Folded = as_snapshot) -> None:
        self._inner = inner
        self._merge = SnapshotMerge(folded)
        self.media_type = inner.media_type
        self.ends_by_204 = inner.ends_by_204
        self.shows_corr = inner.shows_corr
        self.hold_s = inner.hold_s

    def opened(self, opened: Opened) -> None:
        """Note how many frames the stream has now: these will be merged."""
        self._merge.begin(opened)
        self._inner.opened(opened)

    def refusal(self, error: TailraceError) -> Response:
        """Return the response to send if the origin refuses the request."""
        return self._inner.refusal(error)

    def frames(self, frames: list[bytes]) -> bytes:
        """Return the encoded frames; nothing while the frames to be merged are incomplete."""
        if not frames:  # the caller asks for the bytes that begin the body
            return self._inner.frames(frames)
        ready = self._merge.add(frames)
        return self._inner.frames(ready) if ready else b""

    @property
    def first_held(self) -> int | None:
        """The index of the oldest frame that the inner encoder holds back."""
        return self._inner.first_held

    def release(self) -> bytes:
        """Return the encoded text that the inner encoder holds back."""
        return self._inner.release()

    def keepalive(self) -> bytes:
        """Return the keepalive of the inner encoder."""
        return self._inner.keepalive()
