"""Whole sequences through a model, without an engine: what tests compare."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailrace.origin.models.model import Model, Piece, context_pages, prefill


def prompt_logits(model: Model, ids: Sequence[int]) -> Tensor:
    """Logits fp32 [len(ids), vocab] of all tokens of a prompt, in the first pages."""
    return model.logits(prefill(model, ids, range(context_pages(model.config))))


def decoded_rows(
    model: Model, ids: Sequence[int], start: int, pages: Sequence[int], at_once: int = 1
) -> Tensor:
    """Hidden rows fp32 [len(ids), H] of tokens that are decoded from `start` on."""
    pieces = [
        Piece(ids[index : index + at_once], start + index, pages, prefill=False)
        for index in range(0, len(ids), at_once)
    ]
    return torch.cat([model.forward([piece]) for piece in pieces])
