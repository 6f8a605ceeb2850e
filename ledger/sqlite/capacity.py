"""Decide if a ledger file has space for new data: within its limits and on its disk. Sans-I/O.

Streams are of two kinds, generations and those of objects. Each kind has a share of the file, so
that neither displaces the other. If a kind exceeds its share, removing some of its streams helps.
If other programs fill the disk, or an open read transaction prevents the WAL from restarting,
removing streams does not help: then nothing is removed, and only new data is refused.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tailrace.ledger.interface import StreamKind
from tailrace.ledger.sqlite.storage import Sizes

MIB = 1024 * 1024

DISK_SHARE = 0.8
"""Maximum share of the disk that a ledger without a configured limit may use."""
HARD_SHARE = 1.1
"""Multiple of a limit up to which running streams may grow; beyond it they can only end."""
LOW_SHARE = 0.9
"""Share of the limit down to which streams are removed early, so that this is needed rarely."""
DISK_RESERVE_BYTES = 64 * MIB
"""Reserve: free bytes on the disk and in the file below which new streams are refused."""
DISK_RESERVE_SHARE = 1 / 32
"""Share of the disk that is the reserve if this share is smaller than DISK_RESERVE_BYTES.

Below half of the reserve, running streams may only use the space that the WAL has reserved.
"""
WAL_MARGIN_BYTES = 6 * MIB
"""Bytes of the WAL's reserved space that are kept for the ends of streams.

Running streams are paused before they use this space. A commit may have 4 MiB, and 1 MiB may be
written between two checks of the disk. If a small disk has a smaller reserve than this, the margin
is as large as the reserve.
"""
LONG_WAL_BYTES = 256 * MIB
"""Size of the WAL in bytes beyond which a warning says that an open read transaction keeps it."""
MAX_WAL_BYTES = 1024 * MIB
"""Size of the WAL in bytes beyond which new streams are refused."""
SEGMENT_COST = 9 / 8
"""Space that a segment takes in the file, as a multiple of the segment's bytes."""
ROW_BYTES = 512
"""Estimated overhead in bytes of the row of a stream or value, with its indexes."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The reason why new streams of a kind are refused.

    `own`: the kind exceeds its own share, so removing some of its streams helps. `spent`: running
    streams can only end. `held`: running streams must wait for space on the disk.
    """

    what: str
    hint: str
    own: bool = False
    spent: bool = False
    held: bool = False


class Room:
    """Decides if new data has space, by the sizes that were measured last."""

    def __init__(self, max_ledger_bytes: int | None, object_share: float, place: str) -> None:
        """Create the rules for the ledger file `place`."""
        self._place = place
        self._max_ledger_bytes = max_ledger_bytes
        self._object_share = object_share
        self.sizes: Sizes | None = None
        self.object_bytes = 0
        """Bytes of the streams and values of objects.

        They are counted rarely; in between, the bytes that objects store are added.
        """

    def limit(self, kind: StreamKind) -> int:
        """Return the maximum bytes of a kind in the file."""
        assert self.sizes is not None
        whole = self._max_ledger_bytes
        if whole is None:
            # Some file systems do not report their size; then there is no limit.
            whole = int(self.sizes.disk_bytes * DISK_SHARE) or sys.maxsize
        objects = int(whole * self._object_share)
        return objects if kind is StreamKind.OBJECT else whole - objects

    def used(self, kind: StreamKind) -> int:
        """Return the used bytes of a kind. Everything but objects counts as generations."""
        assert self.sizes is not None
        whole = self.sizes.used_bytes
        objects = min(self.object_bytes, whole)
        return objects if kind is StreamKind.OBJECT else whole - objects

    def is_contested(self, sizes: Sizes) -> bool:
        """Set the measured sizes, and return True if a kind may use more bytes than its limit.

        No kind can while all kinds together use no more bytes than the smaller limit. Then the
        bytes of objects need not be counted.
        """
        self.sizes = sizes
        return sizes.used_bytes > min(self.limit(kind) for kind in StreamKind)

    def shortage(self, kind: StreamKind) -> Shortage | None:
        """Return why a new stream of a kind is refused; None if there is space."""
        return None if self.sizes is None else self._own(kind) or self._foreign(self.sizes)

    def goal(self, kept_bytes: int) -> int | None:
        """Return the size in bytes to which early removal should shrink generations, or None.

        None means that removal cannot help, because `kept_bytes` of segments belong to running
        streams, which are not removed.
        """
        limit = self.limit(StreamKind.GENERATION)
        low = int(limit * LOW_SHARE)
        kept = int(kept_bytes * SEGMENT_COST)
        return low if kept < low else limit if kept < limit else None

    def _own(self, kind: StreamKind) -> Shortage | None:
        used, limit = self.used(kind), self.limit(kind)
        if used <= limit:
            return None
        whose = "objects" if kind is StreamKind.OBJECT else "generations"
        return Shortage(
            f"{whose} hold {used} bytes of the ledger, the limit is {limit}",
            "delete some of them, or raise ledger.max_ledger_bytes or ledger.object_share"
            if kind is StreamKind.OBJECT
            else "wait until streams expire, or raise ledger.max_ledger_bytes",
            own=True,
            spent=used > limit * HARD_SHARE,
        )

    def _foreign(self, sizes: Sizes) -> Shortage | None:
        left = sizes.disk_free_bytes + sizes.free_bytes - sizes.unmoved_bytes
        reserve = min(DISK_RESERVE_BYTES, int(sizes.disk_bytes * DISK_RESERVE_SHARE))
        margin = min(WAL_MARGIN_BYTES, reserve)
        wal_room = sizes.wal_room_bytes
        wal_ends = sizes.disk_free_bytes + wal_room < margin
        if sizes.disk_bytes and (left < reserve or wal_ends):
            return Shortage(
                f"the ledger's disk has {max(0, left)} bytes left, {reserve} are kept free",
                f"free space on the disk of {self._place}",
                held=wal_ends or (left < reserve // 2 and wal_room < margin),
            )
        if sizes.wal_bytes > MAX_WAL_BYTES:
            return Shortage(
                f"the ledger's WAL has {sizes.wal_bytes} bytes, the limit is {MAX_WAL_BYTES}",
                "end the program that has an open read transaction on the ledger's file",
            )
        return None
