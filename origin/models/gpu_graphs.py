"""The captured steps of a model: few sizes, each captured before the model is ready.

A capture launches a few hundred kernels from Python. While serving, that would delay every stream.
So all steps that decoding can need are captured at the start: each number of rows of `STEP_ROWS`,
at each number of programs that attention launches per row. From 2,048 positions on that number is
the same, so all longer steps share a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tailrace.kernels.attention.splits_triton import splits_of
from tailrace.kernels.block_tables import BlockTables
from tailrace.kernels.decoder import Decoder
from tailrace.kernels.sampler.sampler_rows import SamplerWorkspace
from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.kernels.step_graph import (
    Capture,
    DrawnStep,
    PrefillGraph,
    ReplayGraph,
    capture_for,
    launched,
)

STEP_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of rows of captured steps; smaller steps are padded with rows that do nothing."""
MAX_STEP_ROWS = STEP_ROWS[-1]
SHORTEST_STEP_TOKENS = 256
"""Smallest maximum length in tokens for which steps are captured; the next ones are its
doublings."""
PREFILL_ROWS = (64, 128, 256, 512)
"""Numbers of rows of captured prefills; smaller prefills are padded in the same way."""
MAX_PREFILL_ROWS = PREFILL_ROWS[-1]
"""Maximum rows of prompts that run through the layers together."""
MAX_PREFILL_CHUNKS = 16
"""Maximum number of chunks of prompts that run together. MAX_PREFILL_ROWS has room for eight full
chunks of 64 tokens, or for more chunks if some are shorter because a prompt ends in them."""
MAX_DRAWS = 8192
"""Maximum tokens of one launch that the next launch can refer to."""


class GpuGraphs:
    """The captured steps of one decoder, and what they share: block tables and drawn tokens.

    capture: how a step is captured; by default in a CUDA graph on a GPU, and not at all elsewhere.
    Steps that are not captured have as many prefill rows as they are given, since padding saves
    nothing there. `captured` counts the captures, so that a capture while serving can be noticed.
    """

    def __init__(
        self, decoder: Decoder, workspace: SamplerWorkspace, capture: Capture | None = None
    ) -> None:
        self._decoder = decoder
        self._workspace = workspace
        self._capture = capture or capture_for(decoder.device)
        self._captures = self._capture is not launched
        most, device = decoder.step_rows, decoder.device
        pages = -(-decoder.max_length // PAGE_TOKENS)
        self.tables = BlockTables(most + MAX_PREFILL_CHUNKS, pages, device)
        self.before = torch.zeros(MAX_DRAWS, dtype=torch.int32, device=device)
        """Tokens drawn by the previous launch, int32 [MAX_DRAWS]; ids below 0 refer to them."""
        self.captured = 0
        self._drawn: dict[tuple[int, int], DrawnStep] = {}
        self._replays: dict[tuple[int, int], ReplayGraph] = {}
        self._prefills: dict[tuple[int, int], PrefillGraph] = {}

    @property
    def step_rows(self) -> Sequence[int]:
        """Numbers of rows of the captured steps, ascending."""
        return _up_to(STEP_ROWS, self._decoder.step_rows)

    @property
    def prefill_rows(self) -> Sequence[int]:
        """Numbers of rows of the captured prefills, ascending; none if nothing is captured."""
        return _up_to(PREFILL_ROWS, self._decoder.max_rows) if self._captures else ()

    @property
    def lengths(self) -> Sequence[int]:
        """Maximum lengths of the captured steps, ascending: one for each grid of attention."""
        longest, lengths = self._decoder.max_length, []
        length = SHORTEST_STEP_TOKENS
        while length < longest and splits_of(length) < splits_of(longest):
            lengths.append(length)
            length *= 2
        return [*lengths, longest]

    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """Capture every step that serving can need, the largest first.

        progress: called with the number of captures that are done, and the number of all captures.
        """
        sizes = [(rows, length) for rows in self.step_rows for length in self.lengths]
        total = 2 * len(sizes) + len(self.prefill_rows)
        for rows, length in reversed(sizes):
            progress(self.captured, total)
            self.drawn(rows, length)
            self.replay(rows, length)
        for rows in reversed(self.prefill_rows):
            progress(self.captured, total)
            self.prefill(rows, 1)
        progress(self.captured, total)

    def drawn(self, rows: int, length: int) -> DrawnStep:
        """Return the step that draws tokens, for rows of distinct sequences up to `length`."""
        size = self._step_size(rows, length)
        if size not in self._drawn:
            self.captured += self._captures
            self._drawn[size] = DrawnStep(
                self._decoder, self._workspace, self.tables, self.before, *size, self._capture
            )
        return self._drawn[size]

    def replay(self, rows: int, length: int) -> ReplayGraph:
        """Return the step that computes hidden rows, of any sequences up to `length`."""
        size = self._step_size(rows, length)
        if size not in self._replays:
            self.captured += self._captures
            self._replays[size] = ReplayGraph(
                self._decoder, self.tables, self.before, *size, self._capture
            )
        return self._replays[size]

    def prefill(self, rows: int, chunks: int) -> PrefillGraph:
        """Return a prefill that takes this many rows and chunks."""
        size = rows, chunks
        if self.prefill_rows:
            size = next(count for count in self.prefill_rows if count >= rows), MAX_PREFILL_CHUNKS
        if size not in self._prefills:
            self.captured += self._captures
            self._prefills[size] = PrefillGraph(self._decoder, self.tables, *size, self._capture)
        return self._prefills[size]

    def _step_size(self, rows: int, length: int) -> tuple[int, int]:
        """Return rows and maximum length of the smallest captured step that takes these rows."""
        return (
            next(size for size in self.step_rows if size >= rows),
            next((longest for longest in self.lengths if longest >= length), self.lengths[-1]),
        )


def _up_to(sizes: Sequence[int], most: int) -> Sequence[int]:
    return [*(size for size in sizes if size < most), most]


def captured_rows(rows: int) -> int:
    """Return the number of rows of the smallest captured step that has room for `rows` rows.

    Return MAX_STEP_ROWS if no captured step has room for them.
    """
    return next((size for size in STEP_ROWS if size >= rows), MAX_STEP_ROWS)
