"""A decode step at fixed addresses: on a GPU one CUDA graph instead of five launches per layer.

`StepGraph` ends with hidden rows, `DrawnStep` with tokens: head and sampler are in its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tailrace.kernels.decoder import Decoder, Rows
from tailrace.kernels.one_copy import ALIGNED_BYTES
from tailrace.kernels.sampler.sampler import Sampling
from tailrace.kernels.sampler.sampler_rows import SamplerRows, SamplerWorkspace, settings_of
from tailrace.kernels.sampler.sampler_triton import sample_rows
from tailrace.kernels.shapes import PAGE_TOKENS

NO_POSITION = -1
"""Of a row that only fills a step up: it faults, and what faults is written nowhere."""
NO_PAGE = -1
"""After a sequence's last page: to read it is a fault, not another sequence's keys."""


_SETTINGS = (
    (torch.float32, 1), (torch.int32, 1), (torch.float32, 1), (torch.float32, 1), (torch.int64, 2),
    (torch.int32, 1),
)  # fmt: skip
"""Of each column of `settings_of`: its type, and how many of int32 it takes."""
_ROWS = 4
"""Columns of `Rows`."""
_COLUMNS = _ROWS + sum(columns for _, columns in _SETTINGS)


class StepInputs:
    """Rows, what to draw from them, and a block table for as many sequences: one copy a step.

    rows: `kernels.decoder.Rows` of `count` rows. settings: without masks and penalties; greedy
    where none were given. tables: int32 [count, pages]. All in one buffer, on the host two in turn:
    while a step is filled in, the copy of the one before may not have begun. A table that is as it
    was two steps ago is not written again.
    """

    def __init__(self, count: int, pages: int, device: torch.device) -> None:
        self._count, self._pages = count, pages
        self._width = _aligned(count)
        size = _COLUMNS * self._width + count * pages
        pinned = device.type == "cuda"
        self._here = [
            torch.full((size,), NO_PAGE, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        self._copied = [
            torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        self._held: list[list[Sequence[int]]] = [[()] * count for _ in range(2)]
        self._there = torch.empty(size, dtype=torch.int32, device=device)
        self.rows = Rows(*(column[:count] for column in self._columns(self._there)[:_ROWS]))
        self.settings = SamplerRows(*(column[:count] for column in self._settings(self._there)))
        self.tables = self._tables(self._there)
        self.fill([], [], [], [])

    def fill(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        tables: Sequence[Sequence[int]],
        samplings: Sequence[Sampling] = (),
        drawn: Sequence[int] = (),
    ) -> None:
        """Take up to `count` rows; those beyond have length 0, read nothing and write nothing.

        tables: the pages of each sequence, of which no more are taken than there is room for.
        samplings, drawn: of each row, if any are drawn from, and how many tokens it has drawn.
        """
        for pair in (self._here, self._held, self._copied):
            pair.reverse()
        if (copied := self._copied[0]) is not None:
            copied.synchronize()
        numbers, used = self._here[0], len(ids)
        columns = self._columns(numbers).zero_()
        columns[1].fill_(NO_POSITION)
        lengths = [position + 1 for position in positions]
        columns[:_ROWS, :used] = torch.tensor([[*ids], [*positions], lengths, [*sequences]])
        for column, given in zip(
            self._settings(numbers), settings_of(samplings, drawn), strict=True
        ):
            column[: len(given)] = given
        cells = self._tables(numbers)
        for place, held in enumerate(self._held[0]):
            table = tables[place][: self._pages] if place < len(tables) else ()
            if table != held:
                self._held[0][place] = _changed(cells[place], held, table)
        self._there.copy_(numbers, non_blocking=True)
        if copied is not None:
            copied.record()

    def take(self, drawn: Tensor) -> None:
        """Of each id below 0, -1 - n, the n-th of these, int32 on the device."""
        ids = self.rows.ids
        ids.copy_(torch.where(ids < 0, drawn[(-1 - ids).clamp(min=0)], ids))

    def _columns(self, numbers: Tensor) -> Tensor:
        return numbers[: _COLUMNS * self._width].view(_COLUMNS, self._width)

    def _settings(self, numbers: Tensor) -> list[Tensor]:
        widths = [columns * self._width for _, columns in _SETTINGS]
        parts = torch.split(self._columns(numbers)[_ROWS:].flatten(), widths)
        return [part.view(dtype) for part, (dtype, _) in zip(parts, _SETTINGS, strict=True)]

    def _tables(self, numbers: Tensor) -> Tensor:
        return numbers[_COLUMNS * self._width :].view(self._count, self._pages)


def _aligned(count: int) -> int:
    """So many int32, or a few more: what lies behind them begins where kernels expect it."""
    return count + -count % (ALIGNED_BYTES // torch.int32.itemsize)


def _changed(cell: Tensor, held: Sequence[int], table: Sequence[int]) -> Sequence[int]:
    """Write a table over the one that is held; mostly it has a page more. Gives what is held."""
    grown = len(table) > len(held) and table[: len(held)] == held
    start = len(held) if grown else 0
    cell[start : len(table)] = torch.tensor(table[start:], dtype=torch.int32)
    cell[len(table) : len(held)] = NO_PAGE
    return table


class StepGraph:
    """Up to `count` rows, none longer than `max_length`, through a decoder's layers.

    distinct: the rows are of distinct sequences (`Decoder.decode`), else of any
    (`Decoder.replay`); both give a row the same bits. It works in the decoder's buffers: steps of
    one decoder run one after another. Without a CUDA device the launches are made one by one.
    """

    def __init__(self, decoder: Decoder, count: int, max_length: int, *, distinct: bool) -> None:
        self.inputs = StepInputs(count, -(-max_length // PAGE_TOKENS), decoder.device)
        through = decoder.decode if distinct else decoder.replay
        launch = partial(through, self.inputs.rows, self.inputs.tables, max_length)
        self._run = _captured(launch) if decoder.device.type == "cuda" else launch

    def __call__(self) -> Tensor:
        """Run the step that `inputs` was filled with; hidden rows fp32 [count, hidden].

        They are a view of a buffer that the decoder's next call overwrites.
        """
        return self._run()


class DrawnStep:
    """Up to `count` rows of distinct sequences, none longer than `max_length`, from ids to ids.

    before: int32 [rows of a step], what ids below 0 of the inputs stand for (`Rows`).
    workspace: of the sampler; for the rest see `StepGraph`.
    """

    def __init__(
        self, decoder: Decoder, workspace: SamplerWorkspace, count: int, max_length: int
    ) -> None:
        device = decoder.device
        self.inputs = StepInputs(count, -(-max_length // PAGE_TOKENS), device)
        self.before = torch.zeros(decoder.step_rows, dtype=torch.int32, device=device)
        self._drawn = torch.zeros(2, _aligned(count), dtype=torch.int32, device=device)
        launch = partial(self._launch, decoder, workspace, max_length)
        self._run = _captured(launch) if device.type == "cuda" else launch

    def __call__(self) -> Tensor:
        """Run the step; int32 [2, count or more], ids and faults, which its next run overwrites.

        A fault is what the decoder or the sampler found wrong with a row; its id means nothing.
        """
        return self._run()

    def _launch(self, decoder: Decoder, workspace: SamplerWorkspace, max_length: int) -> Tensor:
        inputs, (ids, faults) = self.inputs, self._drawn[:, : len(self.inputs.rows)]
        rows = replace(inputs.rows, before=self.before)
        hidden = decoder.decode(rows, inputs.tables, max_length)
        logits = decoder.logits(hidden)
        sample_rows(logits, inputs.settings, ids, faults, workspace, dependent=decoder.dependent)
        faults |= decoder.faults[: len(faults)]
        return self._drawn


def _captured(launch: Callable[[], Tensor]) -> Callable[[], Tensor]:
    # Rows of length 0 write nothing and read nothing: the rehearsal leaves no trace.
    rehearsal = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    rehearsal.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(rehearsal):  # compiles what is not yet compiled
        launch()
    torch.cuda.current_stream().wait_stream(rehearsal)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = launch()

    def run() -> Tensor:
        graph.replay()
        return hidden

    return run
