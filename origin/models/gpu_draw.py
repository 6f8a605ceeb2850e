"""Draws of a batch on the GPU, with masks, penalties and scores; nothing here waits for the device.

A captured step draws every row with its sampling settings, but without mask and penalties. Rows
that have a mask or penalties are drawn a second time from the same logits, so that all other rows
of the batch can stay in the captured step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.kernels.checks import check_tensor
from tailrace.kernels.one_copy import move_into, one_copy
from tailrace.kernels.sampler.sampler import MASK_BITS
from tailrace.kernels.sampler.sampler_batch import NO_TOKEN
from tailrace.kernels.sampler.sampler_rows import SamplerRows, SamplerWorkspace
from tailrace.kernels.sampler.sampler_triton import FAULT_EMPTY_MASK, sample_rows
from tailrace.origin.models.logprobs import most_scores, pack_scores, scored_rows, unpack_scores
from tailrace.origin.models.model import Draw, Drawn

EVERY_ID = -1
"""Word of a mask (int32) that allows all 32 ids of the word."""
NOTHING_ALLOWED = 1 << 16
"""Fault bit of a draw whose mask allows no id; it is combined with the decoder's fault bits."""


class GpuDraw:
    """Batched calls of the sampler for up to `rows` rows of `vocab` logits."""

    def __init__(
        self, rows: int, vocab: int, device: torch.device, *, dependent: bool = False
    ) -> None:
        self._dependent = dependent
        self._vocab = vocab
        self._device = device
        self._counts = DeviceCounts(rows, vocab, device)
        self.workspace = SamplerWorkspace(rows, vocab, device)
        self._drawn = torch.zeros(2, rows, dtype=torch.int32, device=device)
        """Drawn ids in the first row, faults in the second one."""

    def __call__(self, logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """Draw one token for each row of fp32 [len(draws), vocab]; see `model.Model.draw`."""
        drawn = self.draw(logits, draws)
        scores = self.scores(logits, draws, drawn[0])
        return read_drawn(drawn.cpu(), None if scores is None else scores.cpu(), draws)

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        """Return int32 [2, rows], ids and faults, in a buffer that the next call overwrites."""
        drawn = self.launch(logits, self._rows(draws))
        if any(draw.mask is not None for draw in draws):
            drawn[1] |= (drawn[1] == FAULT_EMPTY_MASK).int() * NOTHING_ALLOWED
        return drawn

    def launch(self, logits: Tensor, rows: SamplerRows) -> Tensor:
        """Launch the sampler; the result is that of `draw`, but never has NOTHING_ALLOWED."""
        drawn = self._drawn[:, : len(logits)]
        sample_rows(logits, rows, drawn[0], drawn[1], self.workspace, dependent=self._dependent)
        return drawn

    def redraw(self, logits: Tensor, draws: Sequence[Draw], drawn: Tensor, faults: Tensor) -> None:
        """Draw rows with masks or penalties again, into `drawn`, int32 [2, rows or more].

        logits: fp32 [rows, vocab], from which `drawn` was drawn without masks and penalties.
        faults: int32 [rows], the decoder's.
        """
        special = [row for row, draw in enumerate(draws) if not draw.plain]
        if not special:
            return
        places = self._moved(special)
        again = self.draw(logits.index_select(0, places), [draws[row] for row in special])
        again[1] |= faults.index_select(0, places)
        drawn.index_copy_(1, places, again)

    def scores(
        self, logits: Tensor, draws: Sequence[Draw], tokens: Tensor, most: int | None = None
    ) -> Tensor | None:
        """Return `logprobs.pack_scores` of the rows that request scores, or None if no row does.

        tokens: int32 [rows or more], the drawn ids. most: number of alternatives, by default as
        many as these draws request.
        """
        rows = scored_rows(draws)
        if not rows:
            return None
        places = self._moved(rows)
        some = logits if len(rows) == len(logits) else logits.index_select(0, places)
        most = most_scores(draws) if most is None else most
        return pack_scores(some, tokens.index_select(0, places), most)

    def _rows(self, draws: Sequence[Draw]) -> SamplerRows:
        """Return the sampler's settings of these draws, as tensors on the device."""
        return SamplerRows.of(
            [draw.sampling for draw in draws],
            [draw.position for draw in draws],
            self._device,
            self._masks(draws),
            self._counts_of(draws),
        )

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
        return move_into(torch.empty_like(masks, device=self._device), masks)

    def _counts_of(self, draws: Sequence[Draw]) -> Tensor | None:
        """Return counts, int32 [rows, vocab]; None if no row needs them."""
        for draw in draws:
            if draw.sampling.penalises:
                if draw.counts is None:
                    raise ValueError("counts: missing, but the penalties need them")
                check_tensor("counts", draw.counts, torch.int32, self._vocab)
        if not any(draw.sampling.penalises for draw in draws):
            return None
        return self._counts.rows(draws)

    def _moved(self, rows: Sequence[int]) -> Tensor:
        there = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        return move_into(there, torch.tensor(rows))


@dataclass(slots=True)
class _Counted:
    ids: Sequence[int]
    """The run's list of ids, held so that no new list can get the same id()."""
    slot: int
    count: int
    """Number of ids that are counted on the device."""


class DeviceCounts:
    """How often each id was generated, for runs with penalties, kept on the device.

    A run's list of ids grows by a token in each step, and only that token is sent; counting anew
    would move `vocab` numbers for each row. The memory, int32 [slots, vocab], is taken at first
    use. If no slot is free, a new run gets the least recently used one; the former run of that slot
    is counted anew when it is drawn for again.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._device = device
        self._slots = slots
        self._held: dict[int, _Counted] = {}
        # The last slot stays 0, for rows without penalties.
        self._cells: Tensor | None = None

    def rows(self, draws: Sequence[Draw]) -> Tensor:
        """Return counts, int32 [rows, vocab]; 0 where a row does not penalise."""
        if self._cells is None:
            size = self._slots + 1, self._vocab
            self._cells = torch.zeros(size, dtype=torch.int32, device=self._device)
        used = {id(draw.generated) for draw in draws if draw.generated is not None}
        slots: list[int] = []
        added: list[int] = []
        whole: list[tuple[int, Tensor]] = []
        for row, draw in enumerate(draws):
            if not draw.sampling.penalises or draw.counts is None:
                slots.append(self._slots)
            elif draw.generated is None:
                slots.append(self._slots)
                whole.append((row, draw.counts))
            else:
                held = self._find(draw.generated, used)
                slots.append(held.slot)
                new = draw.generated[held.count :]
                held.count = len(draw.generated)
                added += [held.slot * self._vocab + token for token in new]
        where, cells = one_copy(
            [torch.tensor(slots), torch.tensor(added, dtype=torch.int64)], self._device
        )
        if added:
            ones = torch.ones(len(added), dtype=torch.int32, device=self._device)
            self._cells.view(-1).index_add_(0, cells, ones)
        counts = self._cells.index_select(0, where)
        for row, counted in whole:
            move_into(counts[row], counted)
        return counts

    def _find(self, ids: Sequence[int], used: set[int]) -> _Counted:
        held = self._held.pop(id(ids), None)
        if held is not None and held.count > len(ids):
            raise ValueError(
                f"generated: the list has {len(ids)} ids, fewer than {held.count} before"
            )
        if held is None:
            slot = len(self._held)
            if slot == self._slots:
                oldest = next(key for key in self._held if key not in used)
                slot = self._held.pop(oldest).slot
            assert self._cells is not None
            self._cells[slot].zero_()
            held = _Counted(ids, slot, 0)
        self._held[id(ids)] = held  # at the end, as the most recently used entry
        return held


def read_drawn(drawn: Tensor, scores: Tensor | None, draws: Sequence[Draw]) -> list[Drawn]:
    """Return the drawn tokens, with their scores if these are given.

    drawn: int32 [2, rows], the drawn ids and the faults. Both tensors must be in the memory of the
    host. Raises ValueError for a mask that allows nothing.
    """
    ids, faults = drawn.tolist()
    if any(fault & NOTHING_ALLOWED for fault in faults):
        raise ValueError("mask: it allows no token")
    tokens = [NO_TOKEN if fault else id for id, fault in zip(ids, faults, strict=True)]
    if scores is None:
        return [Drawn(token) for token in tokens]
    found = unpack_scores(scores, draws, tokens)
    return [Drawn(*pair) for pair in zip(tokens, found, strict=True)]
