"""Decoders of random weights, as the kernels run them, for tests and for a bench."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailrace.kernels.attention.paged_kv import PagedKv, quantise_heads
from tailrace.kernels.attention.rope import Rope, rope_table
from tailrace.kernels.decoder import Decoder
from tailrace.kernels.layers import (
    DenseHead,
    DenseLayer,
    Head,
    Int8Head,
    Layer,
    Scratch,
    TernaryLayer,
)
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.float_triton import Weight, float_plan
from tailrace.kernels.linear.int8_linear import quantise_rows
from tailrace.kernels.linear.linear_plan import LinearWorkspace
from tailrace.kernels.linear.ternary_weights import TernaryWeights
from tailrace.kernels.linear.weight_only import quantise_int4, quantise_int8
from tailrace.kernels.shapes import PAGE_TOKENS, WEIGHTS_PER_BYTE, DecoderShape, Family


@dataclass(frozen=True, slots=True)
class Recipe:
    """Shape and number formats of a random decoder, and how many rows it can run at once."""

    shape: DecoderShape
    device: torch.device
    rows: int = 1
    """Rows of a step."""
    sequences: int = 1
    length: int = PAGE_TOKENS
    """Maximum number of positions of a sequence."""
    dtype: torch.dtype = torch.bfloat16
    """Number format of dense weights, embeddings and the cache."""
    bits: int = 0
    """8 or 4 of quantised weights instead."""
    kv_dtype: torch.dtype | None = None
    """Number format of the cache, if it is not `dtype`."""
    int8_head: bool = False
    dependent: bool = False
    """Launches begin while those ahead still run."""
    fused: bool = False
    """One row takes pairs of ternary linears in one launch."""
    seed: int = 0

    @property
    def pages(self) -> int:
        """Pages of one sequence."""
        return -(-self.length // PAGE_TOKENS)

    def tables(self) -> Tensor:
        """Block tables in which each sequence has pages of its own, last page first."""
        count = self.sequences * self.pages
        pages = torch.arange(count, dtype=torch.int32, device=self.device).flip(0)
        return pages.view(self.sequences, self.pages)


def random_decoder(recipe: Recipe) -> Decoder:
    """All weights drawn from the recipe's seed; norms around 1, linears that keep the scale."""
    return _Draw(recipe).decoder()


def random_ternary(outs: list[int], inputs: int, device: torch.device, seed: int) -> TernaryWeights:
    """Weights of -1, 0 and 1 as often as one another, with scales that keep that of the input."""
    random = torch.Generator(device).manual_seed(seed)
    size = (sum(outs) // WEIGHTS_PER_BYTE, inputs)
    packed = torch.zeros(size, dtype=torch.uint8, device=device)
    for part in range(WEIGHTS_PER_BYTE):
        codes = torch.randint(0, 3, size, dtype=torch.uint8, device=device, generator=random)
        packed |= codes << (2 * part)
    scale = torch.full((len(outs),), inputs**-0.5, device=device)
    return TernaryWeights(packed, tuple(outs), scale)


class _Draw:
    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._shape = recipe.shape
        self._random = torch.Generator(recipe.device).manual_seed(recipe.seed)
        self._scratch = Scratch(recipe.shape, recipe.rows, recipe.device)

    def decoder(self) -> Decoder:
        shape, recipe = self._shape, self._recipe
        table = self._dense(shape.vocab, shape.hidden)
        ternary = shape.family is Family.BITNET
        layers: list[Layer] = [
            self._ternary_layer() if ternary else self._dense_layer() for _ in range(shape.layers)
        ]
        cache = PagedKv.allocate(
            shape.layers, recipe.sequences * recipe.pages, shape.kv_heads, shape.head_dim,
            dtype=recipe.kv_dtype or recipe.dtype, device=recipe.device,
        )  # fmt: skip
        for layer in cache:  # as if every position were decoded already
            self._fill(layer.keys, layer.key_scales)
            self._fill(layer.values, layer.value_scales)
        return Decoder(
            shape, table, layers, [self._rope() for _ in range(shape.layers)], self._head(table),
            cache, max_rows=recipe.rows, max_length=recipe.length, dependent=recipe.dependent,
            fused=recipe.fused,
        )  # fmt: skip

    def _fill(self, cells: Tensor, scales: Tensor | None) -> None:
        if scales is None:
            cells.normal_(generator=self._random)
            return
        noise = torch.empty(cells.shape, device=cells.device).normal_(generator=self._random)
        stored, factors = quantise_heads(noise, cells.dtype)
        cells.copy_(stored)
        scales.copy_(factors)

    def _ternary_layer(self) -> TernaryLayer:
        shape = self._shape
        return TernaryLayer(
            scratch=self._scratch,
            eps=shape.norm_eps,
            input_norm=self._norm(shape.hidden),
            qkv=self._ternary([shape.queries, shape.keys, shape.keys], shape.hidden),
            attention_norm=self._norm(shape.queries),
            output=self._ternary([shape.hidden], shape.queries),
            ffn_input_norm=self._norm(shape.hidden),
            gate_up=self._ternary([shape.ffn, shape.ffn], shape.hidden),
            ffn_norm=self._norm(shape.ffn),
            down=self._ternary([shape.hidden], shape.ffn),
        )

    def _dense_layer(self) -> DenseLayer:
        shape = self._shape
        weights = {name: self._weight(*size) for name, size in shape.linears.items()}
        gates = {"gate_up": Epilogue.SWIGLU}
        plans = [float_plan(w, gates.get(n, Epilogue.STORE)) for n, w in weights.items()]
        return DenseLayer(
            scratch=self._scratch,
            workspace=LinearWorkspace(plans, self._recipe.rows, self._recipe.device),
            eps=shape.norm_eps,
            input_norm=self._norm(shape.hidden),
            qkv=weights["qkv"],
            output=weights["o"],
            ffn_input_norm=self._norm(shape.hidden),
            gate_up=weights["gate_up"],
            down=weights["down"],
        )

    def _head(self, table: Tensor) -> Head:
        shape, recipe = self._shape, self._recipe
        norm = self._norm(shape.hidden)
        if recipe.int8_head:
            weight, scale = quantise_rows(table)
            return Int8Head(self._scratch, shape.norm_eps, norm, weight, scale)
        workspace = LinearWorkspace([float_plan(table)], recipe.rows, recipe.device)
        return DenseHead(self._scratch, workspace, shape.norm_eps, norm, table)

    def _rope(self) -> Rope:
        shape, recipe = self._shape, self._recipe
        cos, sin = rope_table(recipe.length, shape.head_dim, shape.rope_theta)
        norms: tuple[Tensor | None, Tensor | None] = (None, None)
        if shape.family is Family.QWEN3:
            norms = self._norm(shape.head_dim), self._norm(shape.head_dim)
        return Rope(cos.to(recipe.device), sin.to(recipe.device), *norms, eps=shape.norm_eps)

    def _ternary(self, outs: list[int], inputs: int) -> TernaryWeights:
        seed = int(torch.randint(1 << 31, (), generator=self._random, device=self._random.device))
        return random_ternary(outs, inputs, self._recipe.device, seed)

    def _weight(self, rows: int, columns: int) -> Weight:
        dense = self._dense(rows, columns)
        if self._recipe.bits:
            return quantise_int8(dense) if self._recipe.bits == 8 else quantise_int4(dense)
        return dense

    def _dense(self, rows: int, columns: int) -> Tensor:
        weight = torch.empty(rows, columns, dtype=self._recipe.dtype, device=self._recipe.device)
        return weight.normal_(0.0, columns**-0.5, generator=self._random)

    def _norm(self, size: int) -> Tensor:
        return torch.empty(size, device=self._recipe.device).normal_(
            1.0, 0.1, generator=self._random
        )
