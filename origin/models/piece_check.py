"""Refuse a batch that no model could compute, before any page is written."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.shapes import PAGE_TOKENS
from ledger.errors import TooLarge
from origin.checkpoint.model_config import ModelConfig
from origin.models.model import PREFILL_CHUNK_TOKENS, Piece


def check_pieces(pieces: Sequence[Piece], config: ModelConfig, pages: int, drawn: int = 0) -> None:
    """Raise what `model.Model.forward` does, for a cache of so many pages.

    drawn: how many ids below 0 stand for tokens (`device.drawn_before`).
    """
    for piece in pieces:
        held = min(config.context, len(piece.pages) * PAGE_TOKENS)
        if piece.end > held:
            raise TooLarge(f"{piece.end} tokens do not fit {held} of context and pages")
        if not piece.ids or piece.start < 0 or (piece.prefill and not is_chunk(piece)):
            raise ValueError(f"pieces: {len(piece.ids)} tokens at {piece.start} are no piece")
        if min(piece.ids) < -drawn or max(piece.ids) >= config.vocab:
            raise ValueError(f"ids: one is outside the vocabulary of {config.vocab}")
        used = piece.pages[: -(-piece.end // PAGE_TOKENS)]
        if min(used) < 0 or max(used) >= pages:
            raise ValueError(f"pages: one is none of the {pages} of the cache")


def is_chunk(piece: Piece) -> bool:
    """Whether it begins a page and fills no more than that."""
    return piece.start % PREFILL_CHUNK_TOKENS == 0 and len(piece.ids) <= PREFILL_CHUNK_TOKENS
