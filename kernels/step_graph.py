"""A decode step at fixed addresses: one CUDA graph on a GPU instead of five launches per layer.

`StepGraph` ends with hidden rows. `DrawnStep` also contains the LM head and the sampler, and ends
with tokens.
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
"""Position of a padding row. The row faults, and rows that fault store nothing."""
NO_PAGE = -1
"""Page id after a sequence's last page. Reading it is a fault, not another sequence's keys."""


_SETTINGS = (
    (torch.float32, 1), (torch.int32, 1), (torch.float32, 1), (torch.float32, 1), (torch.int64, 2),
    (torch.int32, 1),
)  # fmt: skip
"""Type of each column of `settings_of`, and its width in int32."""
_ROWS = 4
"""Number of columns of `Rows`."""
_COLUMNS = _ROWS + sum(columns for _, columns in _SETTINGS)


class StepInputs:
    """Inputs of a step: rows, sampler settings and block tables, sent to the device in one copy.

    rows: `kernels.decoder.Rows` of `count` rows. settings: the sampler's, without masks and
    penalties; greedy where none were given. tables: int32 [count, pages]. Everything lies in one
    buffer on the device and in two on the host, used in turn: the copy of the step before may not
    have begun when the next step is filled in. A block table that has not changed since its host
    buffer was last used is not written again.
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
        """Fill in up to `count` rows; padding rows beyond have length 0 and touch no memory.

        tables: the pages of each sequence; pages beyond the width of the buffer are dropped.
        samplings, drawn: the settings of each row to draw from, and how many tokens it has drawn so
        far.
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
        """Replace each id -1 - n with the n-th of `drawn`, int32 on the device."""
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
    """Return `count`, rounded up so that the int32 column after it is aligned for the kernels."""
    return count + -count % (ALIGNED_BYTES // torch.int32.itemsize)


def _changed(cell: Tensor, held: Sequence[int], table: Sequence[int]) -> Sequence[int]:
    """Write a block table over the one in `cell`, and return it.

    Usually it has grown by one page.
    """
    grown = len(table) > len(held) and table[: len(held)] == held
    start = len(held) if grown else 0
    cell[start : len(table)] = torch.tensor(table[start:], dtype=torch.int32)
    cell[len(table) : len(held)] = NO_PAGE
    return table


class StepGraph:
    """A step of up to `count` rows of at most `max_length` positions through a decoder's layers.

    distinct: the rows are of distinct sequences (`Decoder.decode`), else of any (`Decoder.replay`);
    both give a row the same bits. The step uses the decoder's buffers, so steps of one decoder must
    run one after another. Without a CUDA device the kernels are launched one by one.
    """

    def __init__(self, decoder: Decoder, count: int, max_length: int, *, distinct: bool) -> None:
        self.inputs = StepInputs(count, -(-max_length // PAGE_TOKENS), decoder.device)
        through = decoder.decode if distinct else decoder.replay
        launch = partial(through, self.inputs.rows, self.inputs.tables, max_length)
        self._run = _captured(launch) if decoder.device.type == "cuda" else launch

    def __call__(self) -> Tensor:
        """Run the step that `inputs` was filled with and return hidden rows, fp32 [count, hidden].

        They are a view of a buffer that the decoder's next call overwrites.
        """
        return self._run()


class DrawnStep:
    """A step of up to `count` rows of distinct sequences, from token ids to drawn token ids.

    before: int32 [step_rows], the tokens that ids below 0 stand for (see `Rows`). workspace: the
    sampler's. No row is longer than `max_length`. Otherwise like `StepGraph`.
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
        """Run the step and return int32 [2, count or more]: drawn ids and faults.

        The next run overwrites the result. A fault is what the decoder or the sampler found wrong
        with a row; its id is then meaningless.
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
    # The rehearsal has rows of length 0 only, which read and write nothing.
    rehearsal = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    rehearsal.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(rehearsal):  # compiles kernels before the capture, which cannot
        launch()
    torch.cuda.current_stream().wait_stream(rehearsal)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = launch()

    def run() -> Tensor:
        graph.replay()
        return hidden

    return run
