"""Runs batches of pieces through a decoder on the GPU.

Chunks of prompts run first, as many at a time as the decoder takes. All other rows then run in
replay steps, which give the same bits as the decode steps that they stand for. Prefills and replay
steps are captured (`gpu_graphs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from tailrace.kernels.decoder import Decoder
from tailrace.kernels.one_copy import move_into
from tailrace.origin.models.gpu_graphs import MAX_PREFILL_CHUNKS, GpuGraphs
from tailrace.origin.models.model import Piece


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `first` to `last - 1` of a piece.

    Their hidden rows go to the result, from index `place` on.
    """

    piece: Piece
    first: int
    last: int
    place: int

    @property
    def ids(self) -> Sequence[int]:
        return self.piece.ids[self.first : self.last]

    @property
    def positions(self) -> range:
        return range(self.piece.start + self.first, self.piece.start + self.last)

    def __len__(self) -> int:
        return self.last - self.first


def spans_of(pieces: Sequence[Piece]) -> list[Span]:
    """Return a span with all tokens of each piece; `place` counts the tokens of earlier pieces."""
    places = accumulate((len(piece.ids) for piece in pieces), initial=0)
    return [
        Span(piece, 0, len(piece.ids), place) for piece, place in zip(pieces, places, strict=False)
    ]


def chunk_groups(
    spans: Sequence[Span], most: int, most_chunks: int = MAX_PREFILL_CHUNKS
) -> Iterator[list[Span]]:
    """Yield chunks of prompts in groups of up to `most` rows, without dividing a chunk."""
    group: list[Span] = []
    for span in spans:
        if group and (len(group) == most_chunks or sum(map(len, group)) + len(span) > most):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def row_groups(spans: Sequence[Span], most: int) -> Iterator[list[Span]]:
    """Yield rows in groups of up to `most`.

    A span that does not fit continues in the next group.
    """
    group: list[Span] = []
    room = most
    for span in spans:
        rest = span
        while len(rest) >= room:
            middle = rest.first + room
            yield [*group, replace(rest, last=middle)]
            rest = replace(rest, first=middle, place=rest.place + room)
            group, room = [], most
        if len(rest):
            group.append(rest)
            room -= len(rest)
    if group:
        yield group


class GpuForward:
    """Computes hidden rows of pieces with the captured steps of a decoder."""

    def __init__(self, decoder: Decoder, graphs: GpuGraphs) -> None:
        self._decoder = decoder
        self._graphs = graphs

    def __call__(self, pieces: Sequence[Piece]) -> Tensor:
        """Compute hidden rows fp32 [tokens of all pieces, H], in the order of the pieces.

        Ids below 0 stand for tokens in `GpuGraphs.before` (`model.drawn_before`). A row with a
        kernel fault is NaN, as is everything computed from it.
        """
        spans = spans_of(pieces)
        total = sum(map(len, spans))
        hidden = torch.empty(total, self._decoder.shape.hidden, device=self._decoder.device)
        chunks = [span for span in spans if span.piece.prefill]
        for group in chunk_groups(chunks, self._decoder.max_rows):
            self._keep(self._prefill(group), group, hidden)
        rows = [span for span in spans if not span.piece.prefill]
        for group in row_groups(rows, self._decoder.step_rows):
            self._keep(self._step(group), group, hidden)
        return hidden

    def _prefill(self, group: list[Span]) -> Tensor:
        count = sum(map(len, group))
        prefill = self._graphs.prefill(count, len(group))
        starts = [span.positions.start for span in group]
        prefill.inputs.fill(
            [span.ids for span in group], starts, [span.piece.pages for span in group]
        )
        return prefill()[:count]

    def _step(self, group: list[Span]) -> Tensor:
        ids = [token for span in group for token in span.ids]
        positions = [position for span in group for position in span.positions]
        owners = [index for index, span in enumerate(group) for _ in span.ids]
        step = self._graphs.replay(len(ids), max(positions) + 1)
        step.inputs.fill(ids, positions, owners, [span.piece.pages for span in group])
        return step()[: len(ids)]

    def _keep(self, rows: Tensor, group: list[Span], hidden: Tensor) -> None:
        """Copy rows from the decoder's buffer to `hidden`, each to its index."""
        faulty = self._decoder.faults[: len(rows), None] != 0
        kept = rows.masked_fill(faulty, torch.nan)
        places = [span.place + index for span in group for index in range(len(span))]
        # The places are ascending and different, so this is true if they have no gap.
        if places[-1] - places[0] + 1 == len(places):
            hidden[places[0] : places[-1] + 1] = kept
        else:
            there = torch.empty(len(places), dtype=torch.int64, device=hidden.device)
            hidden[move_into(there, torch.tensor(places))] = kept
