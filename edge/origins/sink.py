"""The receivers of frames from a link: the interface that responses and sessions implement."""

from __future__ import annotations

from typing import Protocol

from tailrace.ledger.frame import CORR_OFFSET, PREFIX_BYTES


class Sink(Protocol):
    """The receiver of one client's frames: an HTTP response or a WebSocket session."""

    def deliver(self, raw: bytes) -> None:
        """Take one encoded frame with the client's corr. Must not block or raise."""

    def deliver_run(self, run: list[bytes], corr: bytes) -> None:
        """Take consecutive Tokens of one stream.

        The frames contain the corr of the link, and `corr` is the client's corr as encoded in a
        frame. A sink that passes frames on to its client inserts `corr` by `with_corr_bytes`.
        """


def with_corr_bytes(run: list[bytes], corr: bytes) -> list[bytes]:
    """Return copies of encoded frames with another corr; three times as fast as `with_corr`."""
    return [raw[:CORR_OFFSET] + corr + raw[PREFIX_BYTES:] for raw in run]
