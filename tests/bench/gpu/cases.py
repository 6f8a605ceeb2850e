"""The bench's launches: every kernel at its real shapes, whole steps, and checks of exactness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tailrace.kernels.attention.attention_triton import decode_attention
from tailrace.kernels.attention.paged_kv import PagedKv
from tailrace.kernels.attention.splits_triton import DecodeWorkspace
from tailrace.kernels.decoder import Chunks, Decoder, Rows
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.float_triton import float_linear, float_plan
from tailrace.kernels.linear.int8_linear import quantise_rows
from tailrace.kernels.linear.int8_triton import GEMV_MAX_ROWS as INT8_GEMV_MAX_ROWS
from tailrace.kernels.linear.int8_triton import int8_gemm, int8_gemv
from tailrace.kernels.linear.linear_plan import LinearPlan, LinearWorkspace, Tile, plan_linear
from tailrace.kernels.linear.ternary_gemm_triton import ternary_gemm
from tailrace.kernels.linear.ternary_triton import GEMV_MAX_ROWS, ternary_gemv
from tailrace.kernels.linear.ternary_weights import TernaryWeights
from tailrace.kernels.linear.weight_only import GROUP, quantise_int4, quantise_int8
from tailrace.kernels.rows.embedding_triton import embed
from tailrace.kernels.rows.norm_triton import rms_norm, rms_norm_int8
from tailrace.kernels.sampler.sampler import Sampling
from tailrace.kernels.sampler.sampler_rows import SamplerRows, SamplerWorkspace
from tailrace.kernels.sampler.sampler_triton import sample_rows
from tailrace.kernels.shapes import PAGE_TOKENS, DecoderShape
from tests.bench.gpu.place import Place
from tests.bench.gpu.timing import GRAPH_LAUNCHES, GRAPH_STEPS, Launch

SAMPLING = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=1)
GATED = {"gate_up"}
RESIDUAL = {"o", "down"}
OTHER_TILES = (
    Tile(64, 64, 4, 6),
    Tile(64, 128, 4, 4),
    Tile(128, 64, 4, 3),
    Tile(128, 64, 4, 5),
    Tile(128, 64, 8, 4),
    Tile(128, 128, 8, 3),
    Tile(256, 64, 8, 3),
)
"""Tiles of bf16 and fp16 weights to try beside the committed one."""


@dataclass(frozen=True, slots=True)
class Case:
    """An operation: launches that take turns, and the minimum bytes that each must move."""

    name: str
    launches: list[Launch]
    bytes_moved: int
    graph_launches: int = GRAPH_LAUNCHES
    """Number of launches in one graph; few where each is a whole step."""


def ternary_linears(place: Place, shape: DecoderShape, rows: int) -> Iterator[Case]:
    """Yield the four linears of a BitNet layer, with norm and activation where they have them."""
    parts = {"qkv": (shape.queries, shape.keys, shape.keys), "gate_up": (shape.ffn, shape.ffn)}
    for name, (outputs, inputs) in shape.linears.items():
        outs = parts.get(name, (outputs,))
        weight_bytes = outputs * inputs // 4
        make = partial(_ternary_launch, place, name, outs, inputs, rows)
        moved = weight_bytes + rows * 4 * (inputs + outputs)
        title = f"{shape.name}.{name} ternary rows={rows}"
        yield Case(title, place.sets(weight_bytes, make), moved)


def _ternary_launch(
    place: Place, name: str, outs: tuple[int, ...], inputs: int, rows: int
) -> Launch:
    # 0b00, 0b01 and 0b10 in any mixture: the codes of -1, 0 and 1.
    codes = torch.randint(0, 256, (sum(outs) // 4, inputs), dtype=torch.uint8, device=place.device)
    packed = codes & ~((codes >> 1) & 0x55)
    weights = TernaryWeights(packed, outs, torch.full((len(outs),), 0.02, device=place.device))
    if rows > GEMV_MAX_ROWS:
        q = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8, device=place.device)
        epilogue = Epilogue.ADD if name in RESIDUAL else Epilogue.STORE
        factor, out = place.normal(rows).abs_(), place.normal(rows, sum(outs))
        return partial(ternary_gemm, q, factor, weights, out, epilogue=epilogue)
    epilogue = _epilogue(name, Epilogue.RELU2_GATE)
    out = place.normal(rows, sum(outs) // (2 if epilogue.gated else 1))
    x, norm = place.normal(rows, inputs), place.normal(inputs)
    return partial(ternary_gemv, x, weights, out, norm=norm, eps=1e-5, epilogue=epilogue)


def dense_linears(place: Place, shape: DecoderShape, rows: int) -> Iterator[Case]:
    """Yield the four linears of a bf16 layer, and its head."""
    sizes = {**shape.linears, "head": (shape.vocab, shape.hidden)}
    for name, (outputs, inputs) in sizes.items():
        weight_bytes = outputs * inputs * 2
        make = partial(_dense_launch, place, name, outputs, inputs, rows)
        moved = weight_bytes + rows * 4 * (inputs + outputs)
        yield Case(f"{shape.name}.{name} bf16 rows={rows}", place.sets(weight_bytes, make), moved)


def quantised_linears(place: Place, shape: DecoderShape, rows: int, bits: int) -> Iterator[Case]:
    """Yield the four linears of a layer with weights of 8 or 4 bits."""
    for name, (outputs, width) in shape.linears.items():
        inputs = max(width, GROUP)  # a tiny shape has less than a group
        weight_bytes = outputs * inputs * bits // 8
        make = partial(_quantised_launch, place, name, outputs, inputs, rows, bits)
        moved = weight_bytes + rows * 4 * (inputs + outputs)
        title = f"{shape.name}.{name} int{bits} rows={rows}"
        yield Case(title, place.sets(weight_bytes, make), moved)


def _quantised_launch(
    place: Place, name: str, outputs: int, inputs: int, rows: int, bits: int
) -> Launch:
    real = place.normal(outputs, inputs, dtype=torch.bfloat16)
    weight = quantise_int8(real) if bits == 8 else quantise_int4(real)
    epilogue = _epilogue(name, Epilogue.SWIGLU)
    out = place.normal(rows, outputs // (2 if epilogue.gated else 1))
    workspace = LinearWorkspace([float_plan(weight, epilogue)], rows, place.device)
    x = place.normal(rows, inputs)
    return partial(float_linear, x, weight, out, workspace=workspace, epilogue=epilogue)


def _dense_launch(
    place: Place, name: str, outputs: int, inputs: int, rows: int, plan: LinearPlan | None = None
) -> Launch:
    weight = place.normal(outputs, inputs, dtype=torch.bfloat16)
    epilogue = _epilogue(name, Epilogue.SWIGLU)
    out = place.normal(rows, outputs // (2 if epilogue.gated else 1))
    plan = plan or float_plan(weight, epilogue)
    workspace = LinearWorkspace([plan], rows, place.device)
    x = place.normal(rows, inputs)
    return partial(float_linear, x, weight, out, workspace=workspace, epilogue=epilogue, plan=plan)


def tiles(place: Place, shape: DecoderShape, rows: int) -> Iterator[tuple[str, Case, list[Case]]]:
    """Yield each bf16 linear with its committed tile, and with all others: (name, case, cases)."""
    for name, (outputs, inputs) in shape.linears.items():
        weight_bytes = outputs * inputs * 2
        gated = _epilogue(name, Epilogue.SWIGLU).gated
        cases = []
        for tile in (None, *OTHER_TILES):
            plan = plan_linear(outputs, inputs, 2, gated=gated, tile=tile)
            make = partial(_dense_launch, place, name, outputs, inputs, rows, plan)
            title = f"{shape.name}.{name} bf16 rows={rows} {tile or 'committed'}"
            cases.append(Case(title, place.sets(weight_bytes, make), weight_bytes))
        yield f"{shape.name}.{name}", cases[0], cases[1:]


def int8_heads(place: Place, shape: DecoderShape, rows: int) -> Case:
    """Return the int8 LM head, with the norm where it has it."""
    weight_bytes = shape.vocab * shape.hidden
    make = partial(_head_launch, place, shape, rows)
    moved = weight_bytes + 4 * shape.vocab * (1 + rows)
    return Case(f"{shape.name}.head int8 rows={rows}", place.sets(weight_bytes, make), moved)


def _head_launch(place: Place, shape: DecoderShape, rows: int) -> Launch:
    weight, scale = quantise_rows(place.normal(shape.vocab, shape.hidden, dtype=torch.bfloat16))
    logits = place.empty(rows, shape.vocab)
    if rows > INT8_GEMV_MAX_ROWS:
        q = torch.randint(-127, 128, (rows, shape.hidden), dtype=torch.int8, device=place.device)
        return partial(int8_gemm, q, place.normal(rows).abs_(), weight, scale, logits)
    x, norm = place.normal(rows, shape.hidden), place.normal(shape.hidden)
    return partial(int8_gemv, x, weight, scale, logits, norm=norm, eps=1e-5)


def attention(
    place: Place, shape: DecoderShape, rows: int, length: int, dtype: torch.dtype
) -> Case:
    """Decode attention of rows of distinct sequences, each `length` tokens long."""
    pages = -(-length // PAGE_TOKENS)
    moved = rows * length * _token_bytes(shape, dtype)
    make = partial(_attention_launch, place, shape, rows, length, pages, dtype)
    kind = str(dtype).removeprefix("torch.")
    title = f"{shape.name}.attend {kind} rows={rows} length={length}"
    return Case(title, place.sets(moved, make), moved)


def _token_bytes(shape: DecoderShape, dtype: torch.dtype) -> int:
    scales = 8 * shape.kv_heads if dtype.itemsize == 1 else 0
    return 2 * shape.keys * dtype.itemsize + scales


def _attention_launch(
    place: Place, shape: DecoderShape, rows: int, length: int, pages: int, dtype: torch.dtype
) -> Launch:
    (cache,) = PagedKv.allocate(
        1, rows * pages, shape.kv_heads, shape.head_dim, dtype=dtype, device=place.device
    )
    ids = torch.randperm(rows * pages, device=place.device).int()
    lengths = torch.full((rows,), length, dtype=torch.int32, device=place.device)
    sequences = torch.arange(rows, dtype=torch.int32, device=place.device)
    faults = torch.zeros(rows, dtype=torch.int32, device=place.device)
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    workspace = DecodeWorkspace(rows, *heads, length, place.device)
    return partial(
        decode_attention, place.normal(rows, shape.queries), lengths, sequences, cache,
        ids.view(rows, pages), place.empty(rows, shape.queries), faults, workspace,
        max_length=length,
    )  # fmt: skip


def sampler(place: Place, shape: DecoderShape, rows: int) -> Case:
    """Return a draw of every row with temperature, top-k and top-p."""
    logits = place.normal(rows, shape.vocab).mul_(3)
    settings = SamplerRows.of([SAMPLING] * rows, range(rows), place.device)
    ids, faults = (place.empty(rows, dtype=torch.int32) for _ in range(2))
    workspace = SamplerWorkspace(rows, shape.vocab, place.device)
    launch = partial(sample_rows, logits, settings, ids, faults, workspace)
    return Case(f"{shape.name}.sample rows={rows}", [launch], 4 * logits.numel())


def step(decoder: Decoder, tables: Tensor, rows: int, length: int, bytes_moved: int) -> Case:
    """Return a whole decode step at the end of a context of `length`: ids in, ids out."""
    device = decoder.device
    batch = Rows.of([0] * rows, [length - 1] * rows, range(rows), device)
    settings = SamplerRows.of([Sampling()] * rows, [0] * rows, device)
    workspace = SamplerWorkspace(rows, decoder.shape.vocab, device)
    faults = torch.zeros(rows, dtype=torch.int32, device=device)

    def launch() -> None:
        logits = decoder.logits(decoder.decode(batch, tables, length))
        sample_rows(logits, settings, batch.ids, faults, workspace, dependent=decoder.dependent)

    name = f"{decoder.shape.name}.step rows={rows} length={length}"
    return Case(name, [launch], bytes_moved, GRAPH_STEPS)


def norms(place: Place, shape: DecoderShape, rows: int) -> Iterator[Case]:
    """Yield the norms that are launches of their own, and the embedding."""
    x, weight = place.normal(rows, shape.hidden), place.normal(shape.hidden)
    size = rows * shape.hidden
    out = place.empty(rows, shape.hidden, dtype=torch.bfloat16)
    launch: Launch = partial(rms_norm, x, weight, 1e-5, out)
    yield Case(f"{shape.name}.norm bf16 rows={rows}", [launch], 6 * size)
    q, factor = place.empty(rows, shape.hidden, dtype=torch.int8), place.empty(rows)
    launch = partial(rms_norm_int8, x, weight, 1e-5, q, factor)
    yield Case(f"{shape.name}.norm int8 rows={rows}", [launch], 5 * size)
    ids = torch.zeros(rows, dtype=torch.int32, device=place.device)
    table = place.normal(shape.vocab, shape.hidden, dtype=torch.bfloat16)
    launch = partial(embed, ids, table, x, torch.zeros_like(ids))
    yield Case(f"{shape.name}.embed rows={rows}", [launch], 6 * size)


def prefill(decoder: Decoder, tables: Tensor, rows: int, start: int, bytes_moved: int) -> Case:
    """Return a prefill of `rows` tokens of one prompt, from position `start` on."""
    device, shape = decoder.device, decoder.shape
    sizes = [min(PAGE_TOKENS, rows - at) for at in range(0, rows, PAGE_TOKENS)]
    starts = [start + at for at in range(0, rows, PAGE_TOKENS)]
    batch = Rows.of([0] * rows, range(start, start + rows), [0] * rows, device)
    chunks = Chunks.of(sizes, starts, [0] * len(sizes), device)
    own = tables[:1].expand(len(sizes), -1).contiguous()

    def launch() -> None:
        decoder.prefill(batch, chunks, own, PAGE_TOKENS)

    name = f"{shape.name}.prefill rows={rows} start={start}"
    return Case(name, [launch], bytes_moved, GRAPH_STEPS)


def _epilogue(name: str, gate: Epilogue) -> Epilogue:
    if name in GATED:
        return gate
    return Epilogue.ADD if name in RESIDUAL else Epilogue.STORE
