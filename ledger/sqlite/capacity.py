"""What a ledger on a file has room for: within its own limits, kind by kind, and on its disk.

Sans-I/O. Generations and objects have a share of the file each, so neither pushes the other
out. What a kind has taken too much of, it can give back; what is short because other programs
fill the disk, or because a reader keeps the WAL from beginning anew, it cannot: for that
nothing is removed, and only what is new is refused.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tailrace.ledger.interface import StreamKind
from tailrace.ledger.sqlite.storage import Sizes

MIB = 1024 * 1024

DISK_SHARE = 0.8
"""What a ledger without a limit of its own may take of the whole of its disk."""
HARD_SHARE = 1.1
"""Running streams may go on up to this share of a limit; beyond, they can only end."""
LOW_SHARE = 0.9
"""Early removal goes on down to this share of the limit, so that it is not needed at once."""
DISK_RESERVE_BYTES = 64 * MIB
"""Free bytes, on the disk and in the file, below which there is no room for new streams,"""
DISK_RESERVE_SHARE = 1 / 32
"""or this share of the disk, if that is less. Below half of it running streams write only as much
as the WAL has space reserved for."""
WAL_MARGIN_BYTES = 6 * MIB
"""Bytes of that space that are kept for the ends of streams: running ones are held back before.
A commit may have 4 MiB, and between two looks at the disk 1 MiB may be written. On a small disk
it is what is kept free of the disk, if that is less."""
LONG_WAL_BYTES = 256 * MIB
"""A WAL that is longer is told of: a reader keeps it from beginning anew."""
MAX_WAL_BYTES = 1024 * MIB
"""Beyond it there is no room for new streams."""
SEGMENT_COST = 9 / 8
"""What a segment takes in the file, against its bytes."""
ROW_BYTES = 512
"""What the row of a stream or a value takes besides what is in it, with its indexes: estimated."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why there is no room for new streams of a kind.

    `own`: because of what the kind itself holds, so that removing some of that ends it. `spent`:
    running streams can only end. `held`: running streams must wait for room on the disk.
    """

    what: str
    hint: str
    own: bool = False
    spent: bool = False
    held: bool = False


class Room:
    """Judges by what was looked at last."""

    def __init__(self, max_ledger_bytes: int | None, object_share: float, place: str) -> None:
        """`place` is the ledger's file, as errors name it."""
        self._place = place
        self._max_ledger_bytes = max_ledger_bytes
        self._object_share = object_share
        self.sizes: Sizes | None = None
        self.object_bytes = 0
        """Of the streams and values of objects: counted now and then, and added to meanwhile."""

    def limit(self, kind: StreamKind) -> int:
        """What a kind may take of the file."""
        assert self.sizes is not None
        whole = self._max_ledger_bytes
        if whole is None:
            # Some file systems do not say how large they are: better no limit than one of 0.
            whole = int(self.sizes.disk_bytes * DISK_SHARE) or sys.maxsize
        objects = int(whole * self._object_share)
        return objects if kind is StreamKind.OBJECT else whole - objects

    def used(self, kind: StreamKind) -> int:
        """What it takes; all that is no object's counts as of generations."""
        assert self.sizes is not None
        whole = self.sizes.used_bytes
        objects = min(self.object_bytes, whole)
        return objects if kind is StreamKind.OBJECT else whole - objects

    def is_contested(self, sizes: Sizes) -> bool:
        """Whether the file holds so much that it matters whose that is."""
        self.sizes = sizes
        return sizes.used_bytes > min(self.limit(kind) for kind in StreamKind)

    def shortage(self, kind: StreamKind) -> Shortage | None:
        """Why there is no room for a new stream of that kind; None where there is."""
        return None if self.sizes is None else self._own(kind) or self._foreign(self.sizes)

    def goal(self, kept_bytes: int) -> int | None:
        """What generations may still have after early removal; None where that is no help.

        `kept_bytes` of segments are of running streams, which stay.
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
                "end the program that reads the ledger's file and does not go on",
            )
        return None
