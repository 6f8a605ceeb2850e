"""Check on this device that kernels agree with their oracles, and that batches change no row.

Each check returns a largest difference (0 where bits must be equal), and is named by what it
compares. They run at real shapes on a GPU; the tests of `tests/kernels` go into the corners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from tailrace.kernels.block_tables import BlockTables
from tailrace.kernels.decoder import Decoder, Rows
from tailrace.kernels.linear.float_triton import float_linear, float_plan
from tailrace.kernels.linear.int8_linear import int8_linear, quantise_rows
from tailrace.kernels.linear.int8_triton import int8_gemm, int8_gemv
from tailrace.kernels.linear.linear_plan import LinearWorkspace
from tailrace.kernels.linear.ternary import quantize_activations, ternary_linear
from tailrace.kernels.linear.ternary_gemm_triton import ternary_gemm
from tailrace.kernels.linear.ternary_triton import GEMV_MAX_ROWS, ternary_gemv
from tailrace.kernels.sampler.sampler import Sampling, sample
from tailrace.kernels.sampler.sampler_rows import SamplerRows, SamplerWorkspace
from tailrace.kernels.sampler.sampler_triton import sample_rows
from tailrace.kernels.shapes import PAGE_TOKENS, DecoderShape
from tailrace.kernels.step_graph import ReplayGraph, capture_for
from tests.kernels.random_decoder import Recipe, random_decoder, random_ternary

BATCHES = (1, 2, 3, 8, 9, 16, 17, 40, 64)
STEPS = 12
POSITION = 300
"""Position of the sequence under test in a batch; its last page is not full."""
SAMPLED_ROWS = 5

Check = tuple[str, Callable[[], float], float]
"""Name, what finds the difference, and the most that it may be."""


def size_checks(shape: DecoderShape, device: torch.device) -> Iterator[Check]:
    """Yield the checks of linears and of the sampler, which depend on sizes only."""
    for rows in (1, 8, 16, 300):
        yield f"ternary rows={rows} = oracle", partial(_ternary, shape, device, rows), 0.0
    yield "int8 head = oracle", lambda: _int8_head(shape, device), 0.0
    yield "dense bf16 ~ float64", lambda: _dense(shape, device), 1e-4
    yield "sampler = oracle", lambda: _sampler(shape, device), 0.0


def decoder_checks(
    shape: DecoderShape, device: torch.device, batches: tuple[int, ...], steps: int, length: int
) -> Iterator[Check]:
    """Yield the checks of whole steps of a decoder.

    steps: how many steps follow one another. length: maximum positions of a sequence.
    """
    yield "a row alone = in a batch", lambda: _batches(shape, device, batches, length), 0.0
    yield "rows of one sequence = steps", lambda: _replay(shape, device, steps, length), 0.0
    yield "dependent launches = ordinary", lambda: _dependent(shape, device, steps, length), 0.0


def difference(left: Tensor, right: Tensor) -> float:
    """Return the largest difference of two tensors; infinite where only one is NaN."""
    apart = (left.double() - right.double()).abs()
    alike = (left == right) | (left.isnan() & right.isnan())
    return float(apart.nan_to_num(torch.inf).masked_fill(alike, 0.0).max())


def _ternary(shape: DecoderShape, device: torch.device, rows: int) -> float:
    weights = random_ternary([shape.hidden], shape.ffn, device, seed=1)
    x = _normal((rows, shape.ffn), device, seed=2)
    out = torch.zeros(rows, shape.hidden, device=device)
    if rows <= GEMV_MAX_ROWS:
        ternary_gemv(x, weights, out)
    else:
        q, factor = quantize_activations(x)
        ternary_gemm(q.to(torch.int8), factor[:, 0].contiguous(), weights, out)
    return difference(out, ternary_linear(x, weights.packed, weights.scale))


def _int8_head(shape: DecoderShape, device: torch.device) -> float:
    weight, scale = quantise_rows(_normal((shape.vocab, shape.hidden), device, seed=3))
    x = _normal((3, shape.hidden), device, seed=4)
    out = torch.zeros(3, shape.vocab, device=device)
    int8_gemv(x[:1], weight, scale, out[:1])
    q, factor = quantize_activations(x[1:])
    int8_gemm(q.to(torch.int8), factor[:, 0].contiguous(), weight, scale, out[1:])
    # In float64 whole numbers are exact on any device, which fp32 products of a GPU are not.
    return difference(out, int8_linear(x.cpu(), weight.cpu(), scale.cpu()).to(device))


def _dense(shape: DecoderShape, device: torch.device) -> float:
    weight = _normal((shape.hidden, shape.ffn), device, seed=5).mul_(shape.ffn**-0.5).bfloat16()
    x = _normal((3, shape.ffn), device, seed=6)
    out = torch.zeros(3, shape.hidden, device=device)
    float_linear(x, weight, out, workspace=LinearWorkspace([float_plan(weight)], 3, device))
    return difference(out, x.bfloat16().double() @ weight.double().T)


def _sampler(shape: DecoderShape, device: torch.device) -> float:
    logits = _normal((SAMPLED_ROWS, shape.vocab), device, seed=7) * 3
    samplings = [
        Sampling(),
        Sampling(temperature=0.7, seed=3),
        Sampling(temperature=1.0, top_k=50, seed=4),
        Sampling(temperature=1.2, top_p=0.9, seed=5),
        Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=6),
    ]
    ids, faults = (torch.zeros(SAMPLED_ROWS, dtype=torch.int32, device=device) for _ in range(2))
    workspace = SamplerWorkspace(SAMPLED_ROWS, shape.vocab, device)
    rows = SamplerRows.of(samplings, range(SAMPLED_ROWS), device)
    sample_rows(logits, rows, ids, faults, workspace)
    expected = [sample(logits[row].cpu(), s, row) for row, s in enumerate(samplings)]
    return float(sum(a != b for a, b in zip(ids.tolist(), expected, strict=True)))


def _batches(
    shape: DecoderShape, device: torch.device, batches: tuple[int, ...], length: int
) -> float:
    """Hidden rows and logits of one sequence's token, alone and beside others."""
    most = max(batches)
    recipe = Recipe(shape, device, rows=most, sequences=most, length=length)
    decoder, tables = random_decoder(recipe), recipe.tables()
    last = min(POSITION, length - 1)
    worst = 0.0
    alone: tuple[Tensor, Tensor] | None = None
    for rows in batches:
        first = most - rows  # the sequence under test is the last row of every batch
        ids = [7 * sequence % shape.vocab for sequence in range(first, most)]
        positions = [last - 3 * (most - 1 - sequence) for sequence in range(first, most)]
        batch = Rows.of(ids, positions, range(first, most), device)
        hidden = decoder.decode(batch, tables, length)
        found = hidden[-1].clone(), decoder.logits(hidden)[-1].clone()
        alone = alone or found
        worst = max(worst, *(difference(a, b) for a, b in zip(alone, found, strict=True)))
    return worst


def _replay(shape: DecoderShape, device: torch.device, steps: int, length: int) -> float:
    """Return the hidden rows of some tokens pushed one by one, and as rows of one launch."""
    recipe = Recipe(shape, device, rows=steps, sequences=2, length=length, seed=9)
    start = _start(recipe, steps)
    ids = [(31 * step + 5) % shape.vocab for step in range(steps)]
    tables = recipe.tables()
    decoder = random_decoder(recipe)
    one_by_one = [_step(decoder, tables, each, start + at, length) for at, each in enumerate(ids)]
    again = random_decoder(recipe)
    rows = Rows.of(ids, range(start, start + steps), [1] * steps, device)
    return difference(torch.cat(one_by_one), again.replay(rows, tables, length))


def _dependent(shape: DecoderShape, device: torch.device, steps: int, length: int) -> float:
    """Hidden rows and logits of two sequences' steps from a graph, where launches can overlap."""
    found = []
    for dependent in (False, True):
        recipe = Recipe(shape, device, 2, 2, length=length, dependent=dependent, seed=11)
        decoder, tables = random_decoder(recipe), recipe.tables().tolist()
        kept = BlockTables(2, recipe.pages, device)
        before = torch.zeros(1, dtype=torch.int32, device=device)
        graph, parts = ReplayGraph(decoder, kept, before, 2, length, capture_for(device)), []
        start = _start(recipe, steps)
        for step in range(steps):
            ids = [(17 * step + row) % shape.vocab for row in range(2)]
            graph.inputs.fill(ids, [start + step, 60 + step], [0, 1], tables)
            hidden = graph()
            parts += [hidden.flatten().clone(), decoder.logits(hidden).flatten().clone()]
        found.append(torch.cat(parts))
    return difference(*found)


def _start(recipe: Recipe, steps: int) -> int:
    """Return the position of the first of some steps that cross the end of a page (a split)."""
    return recipe.pages // 2 * PAGE_TOKENS - steps // 2


def _step(decoder: Decoder, tables: Tensor, token: int, position: int, length: int) -> Tensor:
    rows = Rows.of([token], [position], [1], decoder.device)
    return decoder.decode(rows, tables, length).clone()


def _normal(size: tuple[int, ...], device: torch.device, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(device)
