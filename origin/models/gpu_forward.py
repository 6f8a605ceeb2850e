"""Runs batches of pieces through a decoder on the GPU, and draws tokens from the results.

Chunks of prompts run first, as many at a time as the decoder takes. Rows then run in steps: rows of
distinct sequences as a decode step, others as a replay, which has the bits of the decode steps that
it replaces. Steps have few sizes, each of which is captured in a CUDA graph when it is first
needed. A graph may include the LM head and the sampler, and go from ids to ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from tailrace.kernels.checks import check_tensor
from tailrace.kernels.decoder import Chunks, Decoder, Rows
from tailrace.kernels.sampler.sampler import MASK_BITS
from tailrace.kernels.sampler.sampler_batch import NO_TOKEN
from tailrace.kernels.sampler.sampler_rows import SamplerRows, SamplerWorkspace
from tailrace.kernels.sampler.sampler_triton import FAULT_EMPTY_MASK, sample_rows
from tailrace.kernels.step_graph import NO_PAGE, DrawnStep, StepGraph
from tailrace.origin.models.logprobs import scores_of
from tailrace.origin.models.model import PREFILL_CHUNK_TOKENS, Draw, Drawn, Piece, drawn_before

STEP_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows of captured steps; smaller steps are padded with rows that do nothing."""
MAX_STEP_ROWS = STEP_ROWS[-1]
MAX_PREFILL_ROWS = 8 * PREFILL_CHUNK_TOKENS
"""Maximum rows of prompts that run through the layers together."""
SHORTEST_STEP_TOKENS = 256
"""Smallest context in tokens for which a step is captured; then each doubling of it."""

EVERY_ID = -1
"""Word of a mask that allows all of its ids."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens first .. last-1 of a piece; their hidden rows go to index `place` of the result."""

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
    """Return each piece as one span; hidden rows are in the order of the pieces."""
    places = accumulate((len(piece.ids) for piece in pieces), initial=0)
    return [
        Span(piece, 0, len(piece.ids), place) for piece, place in zip(pieces, places, strict=False)
    ]


def chunk_groups(spans: Sequence[Span], most: int) -> Iterator[list[Span]]:
    """Yield chunks of prompts in groups of up to `most` rows, without dividing a chunk."""
    group: list[Span] = []
    for span in spans:
        if group and sum(map(len, group)) + len(span) > most:
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
    """Computes hidden rows of pieces; captured steps share the decoder's buffers."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._steps: dict[tuple[int, int, bool], StepGraph] = {}

    def __call__(self, pieces: Sequence[Piece], drawn: Tensor | None = None) -> Tensor:
        """Compute hidden rows fp32 [tokens of all pieces, H], in the order of the pieces.

        drawn: the tokens, on the device, that ids of rows below 0 stand for (`model.drawn_before`).
        A row with a kernel fault is NaN, as is everything computed from it.
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
        size, distinct = step_size(self._decoder, positions), len(group) == len(ids)
        if (*size, distinct) not in self._steps:
            self._steps[*size, distinct] = StepGraph(self._decoder, *size, distinct=distinct)
        step = self._steps[*size, distinct]
        step.inputs.fill(ids, positions, owners, [span.piece.pages for span in group])
        if drawn is not None and min(ids) < 0:
            step.inputs.take(drawn)
        return step()[: len(ids)]

    def _keep(self, rows: Tensor, group: list[Span], hidden: Tensor) -> None:
        """Copy rows out of the decoder's buffer, each to its index."""
        faulty = self._decoder.faults[: len(rows), None] != 0
        kept = rows.masked_fill(faulty, torch.nan)
        places = [span.place + index for span in group for index in range(len(span))]
        if places[-1] - places[0] + 1 == len(places):  # ascending, hence without a gap
            hidden[places[0] : places[-1] + 1] = kept
        else:
            hidden[torch.tensor(places, device=hidden.device)] = kept


def step_size(decoder: Decoder, positions: Sequence[int]) -> tuple[int, int]:
    """Return rows and maximum length of the captured step for rows at these positions."""
    count = next(rows for rows in STEP_ROWS if rows >= len(positions))
    longest = step_length(max(positions) + 1)
    return min(count, decoder.step_rows), min(longest, decoder.max_length)


def step_length(length: int) -> int:
    """Return the shortest captured length that holds `length` positions."""
    longest = SHORTEST_STEP_TOKENS
    while longest < length:
        longest *= 2
    return longest


def _ids(group: list[Span]) -> list[int]:
    return [token for span in group for token in span.ids]


def _positions(group: list[Span]) -> list[int]:
    return [position for span in group for position in span.positions]


def _tables(group: list[Span]) -> Tensor:
    """Return the block tables of a group, int32 [pieces, maximum pages]."""
    width = max(len(span.piece.pages) for span in group)
    padded = [[*s.piece.pages, *[NO_PAGE] * (width - len(s.piece.pages))] for s in group]
    return torch.tensor(padded, dtype=torch.int32)


class GpuStep:
    """Steps from ids to drawn ids, in the decoder's buffers."""

    def __init__(self, decoder: Decoder, workspace: SamplerWorkspace) -> None:
        self._decoder = decoder
        self._workspace = workspace
        self._most = min(STEP_ROWS[-1], decoder.step_rows)
        self._steps: dict[tuple[int, int], DrawnStep] = {}

    def takes(self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw]) -> bool:
        """Return True if these are single rows of distinct sequences, and all are drawn from."""
        return (
            0 < len(draws) == len(pieces) <= self._most
            and all(draw.by_settings for draw in draws)
            and not any(piece.prefill or len(piece.ids) > 1 for piece in pieces)
            and [*rows] == [*range(len(pieces))]
            and min(piece.ids[0] for piece in pieces) >= drawn_before(self._most - 1)
        )

    def __call__(self, pieces: Sequence[Piece], draws: Sequence[Draw], drawn: Tensor) -> Tensor:
        """Return int32 [2, pieces or more] on the device, ids and faults; other steps overwrite it.

        drawn: the tokens, on the device, that ids below 0 stand for (`model.drawn_before`).
        """
        ids, positions = [piece.ids[0] for piece in pieces], [piece.start for piece in pieces]
        size = step_size(self._decoder, positions)
        if size not in self._steps:
            self._steps[size] = DrawnStep(self._decoder, self._workspace, *size)
        step = self._steps[size]
        if min(ids) < 0:
            known = drawn[: self._most]
            step.before[: len(known)].copy_(known)
        step.inputs.fill(
            ids,
            positions,
            range(len(pieces)),
            [piece.pages for piece in pieces],
            [draw.sampling for draw in draws],
            [draw.position for draw in draws],
        )
        return step()


class GpuDraw:
    """Batched calls of the sampler for up to `rows` rows of `vocab` logits."""

    def __init__(
        self, rows: int, vocab: int, device: torch.device, *, dependent: bool = False
    ) -> None:
        self._dependent = dependent
        self._vocab = vocab
        self._device = device
        self.workspace = SamplerWorkspace(rows, vocab, device)
        self._drawn = torch.zeros(2, rows, dtype=torch.int32, device=device)
        """Drawn ids, and faults."""

    def __call__(self, logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """Draw one token for each row of fp32 [len(draws), vocab]; see `model.Model.draw`."""
        ids, faults = self.launch(logits, self.rows(draws)).tolist()
        if FAULT_EMPTY_MASK in faults:
            raise ValueError("mask: it allows no token")
        tokens = [NO_TOKEN if fault else id for id, fault in zip(ids, faults, strict=True)]
        scores = scores_of(logits, draws, tokens)
        return [Drawn(*pair) for pair in zip(tokens, scores, strict=True)]

    def rows(self, draws: Sequence[Draw]) -> SamplerRows:
        """Return the draws' settings, on the device."""
        return SamplerRows.of(
            [draw.sampling for draw in draws],
            [draw.position for draw in draws],
            self._device,
            self._masks(draws),
            self._counts(draws),
        )

    def launch(self, logits: Tensor, rows: SamplerRows) -> Tensor:
        """Return int32 [2, rows], ids and faults, in a buffer that the next call overwrites."""
        drawn = self._drawn[:, : len(logits)]
        sample_rows(logits, rows, drawn[0], drawn[1], self.workspace, dependent=self._dependent)
        return drawn

    def _masks(self, draws: Sequence[Draw]) -> Tensor | None:
        """Return masks, int32 [rows, words]; None if no row has one."""
        if all(draw.mask is None for draw in draws):
            return None
        words = -(-self._vocab // MASK_BITS)
        masks = torch.full((len(draws), words), EVERY_ID, dtype=torch.int32)
        for row, draw in enumerate(draws):
            if draw.mask is not None:
                check_tensor("mask", draw.mask, torch.int32, words)
                masks[row] = draw.mask
        return masks.to(self._device)

    def _counts(self, draws: Sequence[Draw]) -> Tensor | None:
        """Return counts, int32 [rows, vocab], moving only rows that need them.

        None if none does.
        """
        if not any(draw.sampling.penalises for draw in draws):
            return None
        size = len(draws), self._vocab
        counts = torch.zeros(size, dtype=torch.int32, device=self._device)
        for row, draw in enumerate(draws):
            if draw.sampling.penalises:
                if draw.counts is None:
                    raise ValueError("counts: missing, but the sampling penalises")
                check_tensor("counts", draw.counts, torch.int32, self._vocab)
                counts[row] = draw.counts.to(self._device)
        return counts
