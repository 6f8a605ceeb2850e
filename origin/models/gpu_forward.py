"""A batch of pieces through a decoder on the GPU: which rows go together, and by which launches.

Chunks of prompts go first, as many at a time as the decoder has room for. Rows then go in steps:
of distinct sequences as a decode step, else as a replay, whose bits are those of the steps that
it stands for. Steps have few sizes, each of which is captured in a CUDA graph once it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from kernels.decoder import Chunks, Decoder, Rows
from kernels.step_graph import NO_PAGE, StepGraph
from origin.models.model import PREFILL_CHUNK_TOKENS, Piece

STEP_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a captured step; fewer rows are filled up with such that do nothing."""
MAX_STEP_ROWS = STEP_ROWS[-1]
MAX_PREFILL_ROWS = 8 * PREFILL_CHUNK_TOKENS
"""Rows of prompts that go through the layers together."""
SHORTEST_STEP_TOKENS = 256
"""A step is captured for contexts up to this, and for each doubling of it."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens first .. last-1 of a piece, whose hidden rows belong at `place` of the result."""

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
    """Each piece as one span, with its hidden rows after those of the pieces before it."""
    places = accumulate((len(piece.ids) for piece in pieces), initial=0)
    return [
        Span(piece, 0, len(piece.ids), place) for piece, place in zip(pieces, places, strict=False)
    ]


def chunk_groups(spans: Sequence[Span], most: int) -> Iterator[list[Span]]:
    """Chunks of prompts in groups of up to `most` rows; none is divided, as its tiles are not."""
    group: list[Span] = []
    for span in spans:
        if group and sum(map(len, group)) + len(span) > most:
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def row_groups(spans: Sequence[Span], most: int) -> Iterator[list[Span]]:
    """Rows in groups of up to `most`; a span that does not fit goes on in the next group."""
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
    """Pieces in, hidden rows out; the steps that it captures work in the decoder's buffers."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._steps: dict[tuple[int, int, bool], StepGraph] = {}

    def __call__(self, pieces: Sequence[Piece], drawn: Tensor | None = None) -> Tensor:
        """Hidden rows fp32 [tokens of all pieces, H], in the order of the pieces.

        drawn: what ids of rows below 0 stand for, on the device (`device.drawn_before`).
        A row that a kernel finds fault with is NaN, as is all that is computed from it.
        """
        spans = spans_of(pieces)
        total = sum(map(len, spans))
        hidden = torch.empty(total, self._decoder.shape.hidden, device=self._decoder.device)
        chunks = [span for span in spans if span.piece.prefill]
        for group in chunk_groups(chunks, self._decoder.max_rows):
            self._keep(self._prefill(group), group, hidden)
        rows = [span for span in spans if not span.piece.prefill]
        for group in row_groups(rows, min(MAX_STEP_ROWS, self._decoder.step_rows)):
            self._keep(self._step(group, drawn), group, hidden)
        return hidden

    def _prefill(self, group: list[Span]) -> Tensor:
        device = self._decoder.device
        owners = [index for index, span in enumerate(group) for _ in span.ids]
        rows = Rows.of(_ids(group), _positions(group), owners, device)
        starts = [span.positions.start for span in group]
        chunks = Chunks.of([*map(len, group)], starts, range(len(group)), device)
        tables = _tables(group).to(device)
        return self._decoder.prefill(rows, chunks, tables, PREFILL_CHUNK_TOKENS)

    def _step(self, group: list[Span], drawn: Tensor | None) -> Tensor:
        ids, positions = _ids(group), _positions(group)
        owners = [index for index, span in enumerate(group) for _ in span.ids]
        step = self._captured(len(ids), max(positions) + 1, distinct=len(group) == len(ids))
        step.inputs.fill(ids, positions, owners, [span.piece.pages for span in group])
        if drawn is not None and min(ids) < 0:
            step.inputs.take(drawn)
        return step()[: len(ids)]

    def _captured(self, rows: int, length: int, *, distinct: bool) -> StepGraph:
        count = min(next(c for c in STEP_ROWS if c >= rows), self._decoder.step_rows)
        longest = min(step_length(length), self._decoder.max_length)
        key = count, longest, distinct
        if key not in self._steps:
            self._steps[key] = StepGraph(self._decoder, count, longest, distinct=distinct)
        return self._steps[key]

    def _keep(self, rows: Tensor, group: list[Span], hidden: Tensor) -> None:
        """Copy rows out of the decoder's buffer, each to its place."""
        faulty = self._decoder.faults[: len(rows), None] != 0
        kept = rows.masked_fill(faulty, torch.nan)
        places = [span.place + index for span in group for index in range(len(span))]
        if places[-1] - places[0] + 1 == len(places):  # ascending, hence without a gap
            hidden[places[0] : places[-1] + 1] = kept
        else:
            hidden[torch.tensor(places, device=hidden.device)] = kept


def step_length(length: int) -> int:
    """The shortest length that steps are captured for and that holds `length` positions."""
    longest = SHORTEST_STEP_TOKENS
    while longest < length:
        longest *= 2
    return longest


def _ids(group: list[Span]) -> list[int]:
    return [token for span in group for token in span.ids]


def _positions(group: list[Span]) -> list[int]:
    return [position for span in group for position in span.positions]


def _tables(group: list[Span]) -> Tensor:
    """int32 [pieces, most pages of one]: the block tables of a group."""
    width = max(len(span.piece.pages) for span in group)
    padded = [[*s.piece.pages, *[NO_PAGE] * (width - len(s.piece.pages))] for s in group]
    return torch.tensor(padded, dtype=torch.int32)
