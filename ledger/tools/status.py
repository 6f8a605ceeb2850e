"""A ledger in numbers, of one moment. What only one kind of storage has, it adds itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What every ledger can count. `ledger` says where it is, without secrets."""

    ledger: str
    streams: int
    unfinished: int
    ended: int
    object_streams: int
    objects: int
    alarms: int
    next_alarm_ms: int | None
    next_expiry_ms: int | None
    frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What one stream takes where it is stored, in bytes of frames and ids."""

    stored_bytes: int


def per_frame(size: int, frames: int) -> float | None:
    """Bytes for each frame; None where there is no frame."""
    return round(size / frames, 2) if frames else None
