"""A decoder's forward pass as a sequence of kernel launches: five per layer for a few rows.

A BitNet decoder can compute a single row with three launches per layer (`kernels.fused_layers`).

A row is one token of one sequence. `decode` takes rows of distinct sequences. `replay` takes any
rows, also several of one sequence, and gives each the same bits as `decode`. `prefill` takes chunks
of prompts. All three store the keys and values of their rows and return the hidden rows. They
neither allocate memory nor wait for the device, so that a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tailrace.kernels.attention.attention_triton import decode_attention
from tailrace.kernels.attention.paged_kv import PagedKv
from tailrace.kernels.attention.prefill_triton import prefill_attention
from tailrace.kernels.attention.rope import Rope
from tailrace.kernels.attention.rope_triton import rope_write
from tailrace.kernels.attention.splits_triton import DecodeWorkspace
from tailrace.kernels.fused_layers import FUSED_LINEARS, FusedTernaryLayers
from tailrace.kernels.layers import Head, Layer
from tailrace.kernels.one_copy import one_copy
from tailrace.kernels.rows.embedding_triton import embed
from tailrace.kernels.shapes import DecoderShape


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward pass, as int32 [rows] on the decoder's device.

    ids: token ids. positions: the tokens' positions in their sequences. lengths: positions + 1, or
    0 for a padding row. sequences: the rows' indices into the block tables. before: int32 [draws],
    optional: the tokens that the previous step has drawn, so that a step can be launched before the
    host knows them. An id of -1 - n means the n-th of these tokens.
    """

    ids: Tensor
    positions: Tensor
    lengths: Tensor
    sequences: Tensor
    before: Tensor | None = None

    @classmethod
    def of(
        cls,
        ids: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        device: torch.device,
    ) -> Rows:
        """Make the rows from Python integers, with one copy to the device."""
        lengths = [position + 1 for position in positions]
        return cls(*_columns([ids, positions, lengths, sequences], device))

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The division of rows into chunks of prompts, as int32 on the decoder's device.

    first_rows: [chunks + 1], ascending from 0 to the number of rows. starts: [chunks], the position
    of each chunk's first row. sequences: [chunks], indices into the block tables.
    """

    first_rows: Tensor
    starts: Tensor
    sequences: Tensor

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        starts: Sequence[int],
        sequences: Sequence[int],
        device: torch.device,
    ) -> Chunks:
        """Make the division from the number of rows of each chunk, with one copy to the device."""
        return cls(*_columns([[0, *accumulate(sizes)], starts, sequences], device))


def _columns(columns: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    return one_copy([torch.tensor(column, dtype=torch.int32) for column in columns], device)


Attend = Callable[[Tensor, PagedKv, Tensor], None]


class Decoder:
    """One model's weights, with buffers for up to `max_rows` rows at a time.

    table: the embedding, bf16, fp16 or fp32 [vocab, hidden]. layers, ropes and cache: one of each
    per layer. max_length: maximum positions of a sequence. step_rows: maximum rows that are
    decoded, or whose logits are computed, at a time; default max_rows. Buffers for long contexts
    and large vocabularies take memory in proportion to step_rows. dependent: launches of a step may
    begin while earlier ones still run (`kernels.dependent_triton`), with the same bits; `embed` is
    the ordinary launch at the head of each chain. fused: steps of one row compute two linears in
    each launch (`kernels.fused_layers`), with the same bits, if the layers are ternary and all
    programs of such a launch are resident on the GPU at once. Raises ValueError for parts that do
    not fit each other.
    """

    def __init__(
        self,
        shape: DecoderShape,
        table: Tensor,
        layers: Sequence[Layer],
        ropes: Sequence[Rope],
        head: Head,
        cache: Sequence[PagedKv],
        *,
        max_rows: int,
        max_length: int,
        step_rows: int | None = None,
        dependent: bool = False,
        fused: bool = FUSED_LINEARS,
    ) -> None:
        if not len(layers) == len(ropes) == len(cache) == shape.layers:
            raise ValueError(
                f"layers: {len(layers)} with {len(ropes)} ropes and {len(cache)} caches, "
                f"expected {shape.layers} of each"
            )
        self.shape = shape
        self.device = table.device
        self.max_rows = max_rows
        self.max_length = max_length
        self.step_rows = max_rows if step_rows is None else step_rows
        self.dependent = dependent
        self.table = table
        self.parts = list(zip(layers, ropes, cache, strict=True))
        self.head = head
        self.fused = FusedTernaryLayers.of(layers, self.device) if fused else None
        """The layers with fused pairs of linears, used for steps of one row; None if not fused."""
        self._x = self._buffer(max_rows, shape.hidden)
        self._qkv = self._buffer(max_rows, shape.queries + 2 * shape.keys)
        self._queries = self._buffer(max_rows, shape.queries)
        self._mixed = self._buffer(max_rows, shape.queries)
        self._logits = self._buffer(self.step_rows, shape.vocab)
        self.faults = torch.zeros(max_rows, dtype=torch.int32, device=self.device)
        """Faults of each row in the last call: FAULT_* bits, or 0."""
        self._workspace = DecodeWorkspace(
            self.step_rows, shape.heads, shape.kv_heads, shape.head_dim, max_length, self.device
        )

    def decode(self, rows: Rows, tables: Tensor, max_length: int) -> Tensor:
        """Run the forward pass for one token of each of several distinct sequences.

        tables: int32 [sequences, max_pages]. max_length: maximum length of the rows. Returns hidden
        rows, fp32 [rows, hidden], a view of a buffer that the next call overwrites. Raises
        ValueError for more than step_rows rows.
        """
        x, qkv, mixed, _ = self._begin(rows)
        fused = self.fused if len(rows) <= FusedTernaryLayers.MAX_ROWS else None
        for place, (layer, rope, cache) in enumerate(self.parts):
            if place == 0 or fused is None:
                layer.project_in(x, qkv, dependent=self.dependent)
            decode_attention(
                qkv, rows.lengths, rows.sequences, cache, tables, mixed, self.faults[: len(rows)],
                self._workspace, max_length=max_length, write=rope, dependent=self.dependent,
            )  # fmt: skip
            if fused is not None:
                fused.behind_attention(place, mixed, x, qkv, dependent=self.dependent)
                continue
            layer.project_out(mixed, x, dependent=self.dependent)
            layer.feed_forward(x, dependent=self.dependent)
        return x

    def replay(self, rows: Rows, tables: Tensor, max_length: int) -> Tensor:
        """Run the forward pass for rows of any sequences; each has the bits of `decode`.

        Several rows may belong to one sequence. Arguments and result are otherwise those of
        `decode`.
        """

        def attend(queries: Tensor, cache: PagedKv, mixed: Tensor) -> None:
            decode_attention(
                queries, rows.lengths, rows.sequences, cache, tables, mixed,
                self.faults[: len(rows)], self._workspace, max_length=max_length,
                dependent=self.dependent,
            )  # fmt: skip

        return self._written_first(rows, tables, attend)

    def prefill(self, rows: Rows, chunks: Chunks, tables: Tensor, max_tokens: int) -> Tensor:
        """Run the forward pass for chunks of prompts, of up to `max_tokens` rows each."""

        def attend(queries: Tensor, cache: PagedKv, mixed: Tensor) -> None:
            prefill_attention(
                queries, chunks.first_rows, chunks.starts, chunks.sequences, cache, tables, mixed,
                self.faults[: len(rows)], max_tokens=max_tokens,
            )  # fmt: skip

        return self._written_first(rows, tables, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits of up to step_rows hidden rows: fp32 [rows, hidden] -> fp32 [rows, vocab].

        The result is a view of a buffer that the next call overwrites.
        """
        logits = self.logits_buffer(len(hidden))
        self.head(hidden, logits, dependent=self.dependent)
        return logits

    def logits_buffer(self, count: int) -> Tensor:
        """Return the buffer that `logits` fills for `count` hidden rows, fp32 [count, vocab]."""
        return self._logits[:count]

    def _written_first(self, rows: Rows, tables: Tensor, attend: Attend) -> Tensor:
        """Run the layers, storing the keys and values of all rows before any row attends."""
        x, qkv, mixed, queries = self._begin(rows)
        for layer, rope, cache in self.parts:
            layer.project_in(x, qkv, dependent=self.dependent)
            rope_write(
                qkv, rows.positions, rows.sequences, rope, cache, tables, queries,
                self.faults[: len(rows)], dependent=self.dependent,
            )  # fmt: skip
            attend(queries, cache, mixed)
            layer.project_out(mixed, x, dependent=self.dependent)
            layer.feed_forward(x, dependent=self.dependent)
        return x

    def _begin(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embed the rows; return the buffers x, qkv, mixed and queries, cut to `len(rows)`."""
        count = len(rows)
        if count > self.max_rows:
            raise ValueError(f"rows: {count}, expected at most {self.max_rows}")
        self.faults.zero_()
        buffers = (self._x, self._qkv, self._mixed, self._queries)
        x, qkv, mixed, queries = (buffer[:count] for buffer in buffers)
        faults, before = self.faults[:count], rows.before
        embed(rows.ids, self.table, x, faults, before=before, chain=self.dependent)
        return x, qkv, mixed, queries

    def _buffer(self, rows: int, columns: int) -> Tensor:
        """Allocate a buffer of zeros: padding rows are computed from what no row has written."""
        return torch.zeros(rows, columns, device=self.device)
