"""Stores how many tokens of ended generations were delivered after their end.

The usage that is stored when a generation ends counts the tokens that readers have got by then, and
those that are sent to them together with the end. But readers may also come later, or be behind.
This module adds the tokens that they get after the end.
"""

from __future__ import annotations

from collections.abc import Container

from pydantic import ValidationError

from tailrace.ledger.errors import Damaged, FrameError, NotFound
from tailrace.ledger.frame import StreamEnd, decode
from tailrace.ledger.interface import Ledger, StreamKind
from tailrace.origin.core.frame_tokens import FrameTokens, delivered_tokens
from tailrace.origin.generations.presence import Readers
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.generations.stream_log import SLICE_RECORDS

ALL_TOKENS = 2**62
"""Stands for all tokens of a stream; the ledger stores the number that the stream has."""


async def store_deliveries(ledger: Ledger, readers: Readers, running: Container[bytes]) -> None:
    """Store how many tokens were sent to readers that have left since the last call.

    Streams that have not ended are kept for a later call. They are either in `running`, and then
    their usage is computed from `Readers.reach` when they end, or run at another origin.
    """
    kept = readers.take_reached()
    if not kept:
        return
    tokens: dict[bytes, int] = {}
    try:
        for stream in [one for one in kept if one not in running]:
            try:
                found = await _delivered(ledger, stream, kept[stream])
            except (NotFound, Damaged, FrameError, ValidationError):
                del kept[stream]  # the stream was deleted, or cannot be read
                continue
            if found is not None:
                tokens[stream] = found
        if tokens:
            await ledger.deliver(tokens)
        kept = {stream: index for stream, index in kept.items() if stream not in tokens}
    finally:
        readers.keep_reached(kept)


async def _delivered(ledger: Ledger, stream: bytes, reach: int) -> int | None:
    """Return how many tokens of a stream are before index `reach`; None if it has not ended."""
    info = await ledger.info(stream)
    if info.kind is not StreamKind.GENERATION:
        raise NotFound("the stream of an object has no usage")
    if not info.ended:
        return None
    end = info.next_index - 1
    if reach >= end:
        return ALL_TOKENS
    tokens, at = FrameTokens(), 0
    while at < reach and (records := await ledger.read(stream, at, SLICE_RECORDS)):
        for record in records:
            tokens.add(at, len(record.ids))
            at += 1
    [last] = await ledger.frames(stream, end, 1)
    _, frame = decode(last)
    assert isinstance(frame, StreamEnd), frame
    has_ids = bool(Recipe.model_validate_json(info.recipe).prompt_ids)
    return delivered_tokens(reach, end, frame.total_tokens, tokens if has_ids else None)
