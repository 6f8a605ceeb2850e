"""A decode step at fixed addresses: on a GPU one CUDA graph instead of five launches per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.decoder import Decoder, Rows
from kernels.one_copy import ALIGNED_BYTES
from kernels.shapes import PAGE_TOKENS

NO_POSITION = -1
"""Of a row that only fills a step up: it faults, and what faults is written nowhere."""
NO_PAGE = -1
"""After a sequence's last page: to read it is a fault, not another sequence's keys."""


class StepInputs:
    """Rows, and a block table for as many sequences, in one buffer: one copy to the device a step.

    rows: `kernels.decoder.Rows` of `count` rows. tables: int32 [count, pages]. On the host it is
    two buffers in turn: while a step is filled in, the copy of the one before may not have begun.
    A table that is as it was two steps ago is not written again.
    """

    def __init__(self, count: int, pages: int, device: torch.device) -> None:
        self._count, self._pages = count, pages
        self._width = count + -count % (ALIGNED_BYTES // torch.int32.itemsize)
        size = 4 * self._width + count * pages
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
        columns = self._columns(self._there)
        self.rows = Rows(*(column[:count] for column in columns))
        self.tables = self._tables(self._there)
        self.fill([], [], [], [])

    def fill(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        tables: Sequence[Sequence[int]],
    ) -> None:
        """Take up to `count` rows; those beyond have length 0, read nothing and write nothing.

        tables: the pages of each sequence, of which no more are taken than there is room for.
        """
        for pair in (self._here, self._held, self._copied):
            pair.reverse()
        if (copied := self._copied[0]) is not None:
            copied.synchronize()
        numbers, used = self._here[0], len(ids)
        columns = self._columns(numbers).zero_()
        columns[1].fill_(NO_POSITION)
        lengths = [position + 1 for position in positions]
        columns[:, :used] = torch.tensor([[*ids], [*positions], lengths, [*sequences]])
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
        return numbers[: 4 * self._width].view(4, self._width)

    def _tables(self, numbers: Tensor) -> Tensor:
        return numbers[4 * self._width :].view(self._count, self._pages)


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
