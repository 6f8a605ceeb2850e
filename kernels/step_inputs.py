"""Inputs of captured steps: all values that change from step to step, sent in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tailrace.kernels.block_tables import BlockTables
from tailrace.kernels.decoder import Chunks, Rows
from tailrace.kernels.one_copy import ALIGNED_BYTES
from tailrace.kernels.sampler.sampler import Sampling
from tailrace.kernels.sampler.sampler_rows import SamplerRows, settings_of
from tailrace.kernels.upload_buffer import UploadBuffer

NO_POSITION = -1
"""Position of a padding row. It is invalid, so the row gets a fault and stores nothing."""

_SETTINGS = (
    (torch.float32, 1), (torch.int32, 1), (torch.float32, 1), (torch.float32, 1), (torch.int64, 2),
    (torch.int32, 1),
)  # fmt: skip
"""Type of each column of `settings_of`, and its size in int32 numbers per row."""
_ROWS = 4
"""Number of columns of `Rows`."""
_CELLS = 3
"""Number of int32 columns for changed cells of block tables: two for an int64 index, one for a
page."""
_MIN_CELLS = 16
"""Minimum number of changed cells for which a step's inputs have space: the 16 pages of a prompt of
1,024 tokens, or one new page for each of 16 sequences."""


class StepInputs:
    """Inputs of a step of up to `count` rows, sent to the device in one copy.

    rows: `kernels.decoder.Rows` of `count` rows. settings: the sampler's settings per row, without
    masks and penalties; rows without settings are greedy. tables: the block tables of all
    sequences, indexed by `rows.sequences`; `update` writes the cells that have changed. before:
    int32 [draws] on the device, the tokens that ids below 0 stand for.
    """

    def __init__(self, count: int, tables: BlockTables, before: Tensor | None = None) -> None:
        device = tables.tables.device
        self._count, self._tables = count, tables
        self._width = aligned(count)
        self._room = aligned(max(count, _MIN_CELLS))
        columns = _ROWS + sum(columns for _, columns in _SETTINGS)
        self._rows_end = columns * self._width
        self._buffer = UploadBuffer(self._rows_end + _CELLS * self._room, device)
        there = self._buffer.there
        ids, positions, lengths, sequences = self._rows_of(there)[:, :count]
        self.rows = Rows(ids, positions, lengths, sequences, before)
        self.settings = SamplerRows(*(column[:count] for column in self._settings_of(there)))
        self.tables = tables.tables
        self._indices, self._pages = self._cells_of(there)
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
        """Fill in up to `count` rows, and send them; the rest become padding rows of length 0.

        Padding rows touch neither the cache nor the tables. `update` must run before the next call,
        or changed cells are lost. tables: the pages of each sequence, see `BlockTables`. sequences:
        each row's index into `tables`. samplings: the sampler's settings of each row that draws a
        token. drawn: the number of tokens that each of these rows has drawn so far.
        """
        slots, cells = self._tables.place(tables, self._room)
        numbers, used = self._buffer.next(), len(ids)
        numbers[: self._rows_end] = 0
        rows = self._rows_of(numbers)
        rows[1] = NO_POSITION
        lengths = [position + 1 for position in positions]
        places = [slots[sequence] for sequence in sequences]
        rows[:, :used] = torch.tensor([[*ids], [*positions], lengths, places])
        given = settings_of(samplings, drawn)
        for column, values in zip(self._settings_of(numbers), given, strict=True):
            column[: len(values)] = values
        write_cells(*self._cells_of(numbers), cells, self._tables.padding)
        self._buffer.send()

    def update(self) -> None:
        """Write the changed cells of the block tables; must be the first launch of a step."""
        self._tables.put(self._indices, self._pages)

    def _rows_of(self, numbers: Tensor) -> Tensor:
        return numbers[: _ROWS * self._width].view(_ROWS, self._width)

    def _settings_of(self, numbers: Tensor) -> list[Tensor]:
        widths = [columns * self._width for _, columns in _SETTINGS]
        parts = torch.split(numbers[_ROWS * self._width : self._rows_end], widths)
        return [part.view(dtype) for part, (dtype, _) in zip(parts, _SETTINGS, strict=True)]

    def _cells_of(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return cells_of(numbers[self._rows_end :], self._room)


class PrefillInputs:
    """Inputs of a prefill of up to `count` rows in up to `chunks` chunks, sent in one copy.

    rows, chunks: arguments of `Decoder.prefill`, at addresses that never change. Padding rows
    belong to no chunk, have no position and store nothing; padding chunks have no rows.
    """

    def __init__(self, count: int, chunks: int, tables: BlockTables) -> None:
        self._tables = tables
        # Columns per row: id, position, length, sequence. Columns per chunk: first row, start,
        # sequence.
        sizes = [*[aligned(count)] * _ROWS, aligned(chunks + 1), aligned(chunks), aligned(chunks)]
        self._sizes = sizes
        self._room = aligned(_MIN_CELLS)
        self._buffer = UploadBuffer(sum(sizes) + _CELLS * self._room, tables.tables.device)
        self._count, self._chunks = count, chunks
        *rows, first_rows, starts, sequences = self._columns_of(self._buffer.there)
        self.rows = Rows(*(column[:count] for column in rows))
        self.chunks = Chunks(first_rows[: chunks + 1], starts[:chunks], sequences[:chunks])
        self.tables = tables.tables
        self._indices, self._pages = self._cells_of(self._buffer.there)
        self.fill([], [], [])

    def fill(
        self,
        chunks: Sequence[Sequence[int]],
        starts: Sequence[int],
        tables: Sequence[Sequence[int]],
    ) -> None:
        """Fill in each chunk's token ids, the position of the first one, and its sequence's pages.

        `update` must run before the next call, or changed cells are lost.
        """
        slots, cells = self._tables.place(tables, self._room)
        sizes = [len(ids) for ids in chunks]
        ends = [*accumulate(sizes, initial=0)]
        numbers, used = self._buffer.next(), ends[-1]
        numbers[: sum(self._sizes)] = 0
        ids, positions, lengths, sequences, first_rows, begins, places = self._columns_of(numbers)
        positions.fill_(NO_POSITION)
        first_rows.fill_(used)
        if chunks:
            spans = zip(starts, sizes, strict=True)
            where = [position for start, size in spans for position in range(start, start + size)]
            owners = [slot for slot, size in zip(slots, sizes, strict=True) for _ in range(size)]
            ids[:used] = torch.tensor([token for some in chunks for token in some])
            positions[:used] = torch.tensor(where)
            lengths[:used] = positions[:used] + 1
            sequences[:used] = torch.tensor(owners)
            first_rows[: len(ends)] = torch.tensor(ends)
            begins[: len(starts)] = torch.tensor(starts)
            places[: len(slots)] = torch.tensor(slots)
        write_cells(*self._cells_of(numbers), cells, self._tables.padding)
        self._buffer.send()

    def update(self) -> None:
        """Write the changed cells of the block tables; must be the first launch of a prefill."""
        self._tables.put(self._indices, self._pages)

    def _columns_of(self, numbers: Tensor) -> Sequence[Tensor]:
        return torch.split(numbers[: sum(self._sizes)], self._sizes)

    def _cells_of(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return cells_of(numbers[sum(self._sizes) :], self._room)


def aligned(count: int) -> int:
    """Return `count` rounded up, so that a column that follows `count` int32 numbers is aligned."""
    return count + -count % (ALIGNED_BYTES // torch.int32.itemsize)


def cells_of(numbers: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Return views of `numbers` as the columns of up to `room` changed cells."""
    return numbers[: 2 * room].view(torch.int64), numbers[2 * room :]


def write_cells(
    indices: Tensor, pages: Tensor, cells: Sequence[tuple[int, int]], padding: int
) -> None:
    """Write changed cells into the columns of `cells_of`; unused entries get index `padding`."""
    indices.fill_(padding)
    if cells:
        indices[: len(cells)] = torch.tensor([index for index, _ in cells])
        pages[: len(cells)] = torch.tensor([page for _, page in cells], dtype=torch.int32)
