"""Every kernel, cache type and weight type on this device beside torch on the CPU.

Each check returns the largest difference relative to the largest number of the oracle, and is named
by what it compares. A kernel whose sums have no order must be equal; others may differ by what fp32
sums in another order do, or by what bf16 operands lose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from tailrace.kernels.attention.attention_triton import decode_attention
from tailrace.kernels.attention.paged_attention import paged_attention
from tailrace.kernels.attention.paged_kv import KV_DTYPES, PagedKv, quantise_heads
from tailrace.kernels.attention.prefill_triton import prefill_attention
from tailrace.kernels.attention.rope import Rope, apply_rope, rope_table
from tailrace.kernels.attention.rope_triton import rope_write
from tailrace.kernels.attention.splits_triton import DecodeWorkspace
from tailrace.kernels.linear.dense import dense_linear
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.float_triton import Weight, float_linear, float_plan
from tailrace.kernels.linear.linear_plan import LinearWorkspace
from tailrace.kernels.linear.ternary import ternary_linear
from tailrace.kernels.linear.ternary_triton import ternary_gemv
from tailrace.kernels.linear.weight_only import (
    quantise_int4,
    quantise_int8,
    weight_only_linear,
)
from tailrace.kernels.rows.norm import order_free_rms_norm
from tailrace.kernels.rows.norm_triton import rms_norm
from tailrace.kernels.shapes import PAGE_TOKENS, DecoderShape, Family
from tests.bench.gpu.place import Place
from tests.kernels.random_decoder import random_ternary

BF16_SUMS = 1e-2
"""Tolerance where operands or weights of a softmax are bf16 on one side only."""
FP32_SUMS = 2e-5
"""Tolerance where only the order of fp32 sums differs."""
MAX_FFN = 2048
LENGTH = 300
"""Positions of a sequence: more than four pages, the last one not full. A fake run has fewer."""
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Check:
    """A comparison: `difference` computes it, and `most` is what it may be."""

    name: str
    difference: Callable[[], float]
    most: float


def oracle_checks(place: Place) -> Iterator[Check]:
    """Yield a check for each kernel, and for each type of cache and of weight."""
    device = place.device
    bitnet, llama, qwen = (_narrow(each) for each in (place.bitnet, place.llama, place.qwen))
    yield Check("norm = oracle", partial(_norm, device, llama.hidden), 0.0)
    yield Check("ReLU squared of a ternary gate = oracle", partial(_relu2, device, bitnet), 1e-6)
    kinds: dict[str, torch.dtype | int] = {
        "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": 8, "int4": 4
    }  # fmt: skip
    for name, kind in kinds.items():
        swiglu = partial(_swiglu, device, llama, kind)
        yield Check(f"SwiGLU of {name} weights ~ oracle", swiglu, 1e-4)
    for shape in (llama, qwen):
        yield Check(f"RoPE of {shape.name} ~ oracle", partial(_rope, device, shape), 1e-5)
    # The tiny shapes of a fake run have the same heads, so one of them is enough.
    by_heads = {(each.heads, each.kv_heads, each.head_dim): each for each in (llama, bitnet)}
    length = min(LENGTH, place.length)
    for dtype, shape in product(KV_DTYPES, by_heads.values()):
        cells = str(dtype).removeprefix("torch.")
        most = FP32_SUMS if dtype == torch.float32 else BF16_SUMS
        title = f"of {shape.name}, {cells} cache ~ oracle"
        attention = partial(_attention, device, shape, dtype, length)
        yield Check(f"attention {title}", attention, most)
        yield Check(f"prefill {title}", partial(_prefill, device, shape, dtype), most)


def _narrow(shape: DecoderShape) -> DecoderShape:
    """Return the shape with a small feed-forward layer, since a CPU computes the oracle."""
    fields = {name: getattr(shape, name) for name in DecoderShape.__slots__}
    return DecoderShape(**{**fields, "ffn": min(shape.ffn, MAX_FFN)})


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the oracle's largest number; inf for a NaN."""
    found, expected = found.cpu().double(), expected.cpu().double()
    apart = (found - expected).abs().nan_to_num(torch.inf)
    return float(apart.max() / expected.abs().max().clamp(min=1e-30))


def normal(size: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def _norm(device: torch.device, size: int) -> float:
    x, weight = normal((5, size), 1), normal((size,), 2)
    out = torch.empty(5, size, device=device)
    rms_norm(x.to(device), weight.to(device), EPS, out)
    return relative(out, order_free_rms_norm(x, weight, EPS))


def _relu2(device: torch.device, shape: DecoderShape) -> float:
    weights = random_ternary([shape.ffn, shape.ffn], shape.hidden, torch.device("cpu"), seed=3)
    x, norm = normal((1, shape.hidden), 4), normal((shape.hidden,), 5)
    out = torch.empty(1, shape.ffn, device=device)
    moved = type(weights)(weights.packed.to(device), weights.outs, weights.scale.to(device))
    ternary_gemv(
        x.to(device), moved, out, norm=norm.to(device), eps=EPS, epilogue=Epilogue.RELU2_GATE
    )
    normed = order_free_rms_norm(x, norm, EPS)
    packed = zip(weights.packed.chunk(2), weights.scale.chunk(2), strict=True)
    gate, up = (ternary_linear(normed, part, scale) for part, scale in packed)
    return relative(out, gate.relu().square() * up)


def _swiglu(device: torch.device, shape: DecoderShape, kind: torch.dtype | int) -> float:
    inputs = -(-shape.hidden // 128) * 128
    real = normal((2 * shape.ffn, inputs), 6) * inputs**-0.5
    x, norm = normal((3, inputs), 7), normal((inputs,), 8)
    expected = torch.empty(3, shape.ffn)
    weight: Weight
    if isinstance(kind, int):
        quantise = quantise_int8 if kind == 8 else quantise_int4
        weight_only_linear(
            x, quantise(real.bfloat16()), expected, norm=norm, eps=EPS, epilogue=Epilogue.SWIGLU
        )
        weight = quantise(real.bfloat16().to(device))
    else:
        dense_linear(x, real.to(kind), expected, norm=norm, eps=EPS, epilogue=Epilogue.SWIGLU)
        weight = real.to(device, kind)
    plan = float_plan(weight, Epilogue.SWIGLU)
    out = torch.empty(3, shape.ffn, device=device)
    float_linear(
        x.to(device), weight, out, workspace=LinearWorkspace([plan], 3, device),
        norm=norm.to(device), eps=EPS, epilogue=Epilogue.SWIGLU,
    )  # fmt: skip
    return relative(out, expected)


def _cache(shape: DecoderShape, dtype: torch.dtype, pages: int) -> PagedKv:
    """Return a full cache on the CPU."""
    (cache,) = PagedKv.allocate(
        1, pages, shape.kv_heads, shape.head_dim, dtype=dtype, device=torch.device("cpu")
    )
    for seed, cells, scales in (
        (9, cache.keys, cache.key_scales), (10, cache.values, cache.value_scales)
    ):  # fmt: skip
        noise = normal(tuple(cells.shape), seed)
        if scales is None:
            cells.copy_(noise)
        else:
            stored, factors = quantise_heads(noise, dtype)
            cells.copy_(stored)
            scales.copy_(factors)
    return cache


def _moved(cache: PagedKv, device: torch.device) -> PagedKv:
    scales = [
        None if each is None else each.to(device) for each in (cache.key_scales, cache.value_scales)
    ]
    return PagedKv(cache.keys.to(device), cache.values.to(device), scales[0], scales[1])


def _attention(device: torch.device, shape: DecoderShape, dtype: torch.dtype, length: int) -> float:
    """Attend from rows of two sequences, without a write; the cache is full."""
    pages = -(-length // PAGE_TOKENS)
    cache, tables = _cache(shape, dtype, 2 * pages), torch.randperm(2 * pages).int().view(2, pages)
    lengths = torch.tensor([length, 64, 1, length - 1], dtype=torch.int32)
    sequences = torch.tensor([0, 1, 1, 0], dtype=torch.int32)
    q = normal((4, shape.queries), 11)
    expected = paged_attention(q, lengths, sequences, cache, tables)
    out = torch.empty(4, shape.queries, device=device)
    faults = torch.zeros(4, dtype=torch.int32, device=device)
    workspace = DecodeWorkspace(4, shape.heads, shape.kv_heads, shape.head_dim, length, device)
    decode_attention(
        q.to(device), lengths.to(device), sequences.to(device), _moved(cache, device),
        tables.to(device), out, faults, workspace, max_length=length,
    )  # fmt: skip
    return relative(out, expected)


def _prefill(device: torch.device, shape: DecoderShape, dtype: torch.dtype) -> float:
    """Attend from a chunk, the start of another sequence, and a chunk after the first."""
    cache, tables = _cache(shape, dtype, 4), torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    sizes, starts, owners = [PAGE_TOKENS, 3, 9], [0, 0, PAGE_TOKENS], [0, 1, 0]
    rows = sum(sizes)
    lengths = torch.tensor(
        [start + at + 1 for start, size in zip(starts, sizes, strict=True) for at in range(size)],
        dtype=torch.int32,
    )
    sequences = torch.tensor(owners).repeat_interleave(torch.tensor(sizes)).int()
    q = normal((rows, shape.queries), 12)
    expected = paged_attention(q, lengths, sequences, cache, tables)
    out = torch.empty(rows, shape.queries, device=device)
    first = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32)
    begins, whose = (
        torch.tensor(each, dtype=torch.int32, device=device) for each in (starts, owners)
    )
    prefill_attention(
        q.to(device), first.to(device), begins, whose, _moved(cache, device), tables.to(device),
        out, torch.zeros(rows, dtype=torch.int32, device=device), max_tokens=PAGE_TOKENS,
    )  # fmt: skip
    return relative(out, expected)


def _rope(device: torch.device, shape: DecoderShape) -> float:
    """Compare queries that are turned, and keys and values that are stored, in fp32."""
    cos, sin = rope_table(PAGE_TOKENS, shape.head_dim, shape.rope_theta)
    norms: list[Tensor] = []
    if shape.family is Family.QWEN3:
        norms = [normal((shape.head_dim,), seed) for seed in (13, 14)]
    positions = torch.tensor([0, 5, 63], dtype=torch.int32)
    qkv = normal((3, shape.queries + 2 * shape.keys), 15)
    (cache,) = PagedKv.allocate(
        1, 3, shape.kv_heads, shape.head_dim, dtype=torch.float32, device=device
    )
    q_norm, k_norm = [norm.to(device) for norm in norms] or (None, None)
    rope = Rope(cos.to(device), sin.to(device), q_norm, k_norm, eps=shape.norm_eps)
    out = torch.empty(3, shape.queries, device=device)
    rope_write(
        qkv.to(device), positions.to(device), torch.arange(3, dtype=torch.int32, device=device),
        rope, cache, torch.tensor([[2], [0], [1]], dtype=torch.int32, device=device), out,
        torch.zeros(3, dtype=torch.int32, device=device),
    )  # fmt: skip
    parts = torch.split(qkv, [shape.queries, shape.keys, shape.keys], -1)
    queries, keys, values = (part.view(3, -1, shape.head_dim) for part in parts)
    if norms:
        queries = order_free_rms_norm(queries, norms[0], shape.norm_eps)
        keys = order_free_rms_norm(keys, norms[1], shape.norm_eps)
    turned = [apply_rope(each, cos[positions], sin[positions]) for each in (queries, keys)]
    places = torch.tensor([2, 0, 1]), positions.long()
    stored = cache.keys.cpu()[places[0], :, places[1]], cache.values.cpu()[places[0], :, places[1]]
    return max(
        relative(out.view(3, -1, shape.head_dim), turned[0]),
        relative(stored[0], turned[1]),
        relative(stored[1], values),
    )
