"""Every kernel that serving a model can launch, compiled before it is ready.

Which these are follows from the model: its own launches are gone through, at every number of rows
that a batch can have, up to where Triton would compile them (`kernels.ahead`).
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from itertools import product

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from kernels.ahead import Compilation, compile_ahead, planned
from kernels.decoder import Chunks, Decoder, Rows
from kernels.one_copy import ALIGNED_BYTES
from kernels.processes import ProcessError
from kernels.sampler.sampler import MASK_BITS, Sampling
from kernels.sampler.sampler_rows import SamplerRows
from kernels.step_graph import StepInputs
from ledger.errors import ModelError
from origin.models.gpu_draw import GpuDraw
from origin.models.gpu_forward import STEP_ROWS
from origin.models.model import PREFILL_CHUNK_TOKENS, Progress


def have_compiled(decoder: Decoder, draw: GpuDraw, target: GPUTarget, progress: Progress) -> None:
    """Compile what Triton's cache lacks, and load all of it; `progress` is told of the former.

    Raises ModelError for what does not compile.
    """
    wanted = compilations(decoder, draw, target)
    try:
        compile_ahead(wanted, target, lambda done, of: progress("compile", done, of))
    except ProcessError as error:
        raise ModelError(str(error), hint="set device to cpu, or report this") from error
    for one in wanted:
        one.load()


def compilations(decoder: Decoder, draw: GpuDraw, target: GPUTarget) -> list[Compilation]:
    """What serving can have to compile; nothing runs on the device but copies."""
    layers = decoder.parts
    decoder.parts = list({_kind(part): part for part in layers}.values())
    try:
        return planned(lambda: _launch(decoder, draw), target)
    finally:
        decoder.parts = layers


def _launch(decoder: Decoder, draw: GpuDraw) -> None:
    device = decoder.device
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    for count in sizes(decoder.max_rows):
        rows = Rows.of([0] * count, range(count), [0] * count, device)
        chunks = Chunks.of([count], [0], [0], device)
        decoder.prefill(rows, chunks, table, PREFILL_CHUNK_TOKENS)
    for count in STEP_ROWS:
        inputs = StepInputs(count, 1, device)
        for through in (decoder.decode, decoder.replay):
            hidden = through(inputs.rows, inputs.tables, PREFILL_CHUNK_TOKENS)
    most, vocab = decoder.step_rows, decoder.shape.vocab
    masks = torch.empty(most, -(-vocab // MASK_BITS), dtype=torch.int32, device=device)
    counts = torch.empty(most, vocab, dtype=torch.int32, device=device)
    for count in sizes(most):
        logits = decoder.logits(hidden[:count])
        for mask, counted in product((None, masks[:count]), (None, counts[:count])):
            settings = SamplerRows.of([Sampling()] * count, [0] * count, device, mask, counted)
            draw.launch(logits, settings)


def sizes(most: int) -> list[int]:
    """Numbers of rows up to `most` of which each other one is launched like one of these."""
    near = {size for power in range(most.bit_length()) for size in (2**power, 2**power + 1)}
    return sorted(size for size in near | {most} if size <= most)


def _kind(part: object) -> object:
    """Equal for what is launched in the same way."""
    if isinstance(part, Tensor):
        return part.dtype, tuple(part.shape), part.data_ptr() % ALIGNED_BYTES
    if isinstance(part, tuple):
        return tuple(map(_kind, part))
    if is_dataclass(part):
        return type(part), *(_kind(getattr(part, field.name)) for field in fields(part))
    return part
