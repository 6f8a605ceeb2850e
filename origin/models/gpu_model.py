"""A decoder on a GPU with the Triton kernels; imported only if a GPU is used."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import product
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tailrace import kernels
from tailrace.kernels.ahead import Compilation, compile_ahead, planned
from tailrace.kernels.decoder import Chunks, Decoder, Rows
from tailrace.kernels.gpu_limits import limits_of
from tailrace.kernels.one_copy import ALIGNED_BYTES
from tailrace.kernels.processes import ProcessError
from tailrace.kernels.sampler.sampler import MASK_BITS, Sampling
from tailrace.kernels.sampler.sampler_rows import SamplerRows
from tailrace.kernels.shapes import HEAD_DIMS
from tailrace.kernels.step_graph import StepInputs
from tailrace.ledger.errors import ModelError
from tailrace.origin.checkpoint.file_digests import FileDigests
from tailrace.origin.checkpoint.model_config import CONFIG_FILE, ModelConfig, read_config
from tailrace.origin.checkpoint.model_memory import refuse_formats
from tailrace.origin.formats import AS_STORED, Formats
from tailrace.origin.models.gpu_forward import (
    MAX_STEP_ROWS,
    STEP_ROWS,
    GpuDraw,
    GpuForward,
    GpuStep,
)
from tailrace.origin.models.gpu_layers import DecoderParts
from tailrace.origin.models.model import (
    PREFILL_CHUNK_TOKENS,
    Draw,
    Drawn,
    Launched,
    Piece,
    Progress,
    Results,
    check_pieces,
    fingerprint,
)
from tailrace.origin.models.tensors import checkpoint_bytes, read_tensors

FP8_CAPABILITY = (8, 9)
"""Minimum compute capability for converting fp8."""
DEPENDENT_CAPABILITY = (9, 0)
"""Minimum compute capability for launches that begin while earlier ones still run."""


class GpuModel:
    """A checkpoint loaded on `device`; see `model.Model`.

    kv_bytes: size of the KV cache; None for a share of free memory. dependent: launches begin while
    earlier ones still run. On a CPU the kernels run in Triton's interpreter, far slower than
    `cpu_model`; that is for tests.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        identity: str,
        device: torch.device,
        progress: Progress,
        formats: Formats = AS_STORED,
        *,
        kv_bytes: int | None = None,
        dependent: bool = False,
    ) -> None:
        self.config = config
        self.fingerprint = identity
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
        self.device = formats.on(f"{device.type} triton ({name})")
        parts = DecoderParts(config, tensors, device, progress, formats, dependent=dependent)
        self.pages = parts.pages_within(kv_bytes)
        self._decoder = parts.decoder(self.pages)
        self._forward = GpuForward(self._decoder)
        self._draw = GpuDraw(MAX_STEP_ROWS, config.vocab, device, dependent=dependent)
        self._step = GpuStep(self._decoder, self._draw.workspace)
        self._drawn = torch.zeros(1, dtype=torch.int32)
        """Ids drawn by the previous launch, on the device."""
        if device.type == "cuda":
            target = driver.active.get_current_target()
            have_compiled(self._decoder, self._draw, target, progress)

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece], drawn: Tensor | None = None) -> Tensor:
        """Push a batch of pieces through the model; see `model.Model.forward`.

        drawn: int32, on the device, the tokens that ids below 0 stand for (`model.drawn_before`).
        """
        check_pieces(pieces, self.config, self.pages, 0 if drawn is None else len(drawn))
        return self._forward(pieces, drawn)

    @torch.inference_mode()
    def draw(self, hidden: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """Return the tokens that follow these rows; see `model.Model.draw`."""
        drawn: list[Drawn] = []
        for logits, some in self._logits_of(hidden, draws):
            drawn += self._draw(logits, some)
        return drawn

    @torch.inference_mode()
    def launch(
        self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw]
    ) -> Launched:
        """Launch a step; see `model.StepDevice`.

        Rows with masks, penalties or logprobs are drawn before this returns, all others later. If
        all rows are of the latter kind, they go from ids to ids in one graph.
        """
        if self._step.takes(pieces, rows, draws):
            check_pieces(pieces, self.config, self.pages, len(self._drawn))
            step = self._step(pieces, draws, self._drawn)
            self._drawn = step[0]
            return GpuLaunch.of(step, 0, len(draws))
        hidden = self.forward(pieces, self._drawn)
        fine = hidden.isfinite().all(-1)
        chosen = hidden if [*rows] == [*range(len(hidden))] else hidden[[*rows]]
        if not draws or not all(draw.by_settings for draw in draws):
            return Results(fine.tolist(), self.draw(chosen, draws))
        groups = self._logits_of(chosen, draws)
        some = [self._draw.launch(logits, self._draw.rows(own)).clone() for logits, own in groups]
        drawn = torch.cat(some, 1)
        self._drawn = drawn[0]
        return GpuLaunch.of(torch.cat((fine.int(), drawn.flatten())), len(hidden), len(draws))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute hidden rows fp32 [rows, H] -> fp32 [rows, vocab]."""
        groups = torch.split(hidden.contiguous(), MAX_STEP_ROWS)
        return torch.cat([self._decoder.logits(group).clone() for group in groups])

    def _logits_of(
        self, hidden: Tensor, draws: Sequence[Draw]
    ) -> Iterator[tuple[Tensor, Sequence[Draw]]]:
        """Yield logits of as many rows as fit at a time; the next ones overwrite them."""
        for start in range(0, len(draws), MAX_STEP_ROWS):
            rows = slice(start, start + MAX_STEP_ROWS)
            yield self._decoder.logits(hidden[rows].contiguous()), draws[rows]


@dataclass(frozen=True, slots=True)
class GpuLaunch:
    """Flags, ids and faults that are being copied to the host, together.

    Without flags, each row is drawn from, and its fault tells if it is finite.
    """

    numbers: Tensor
    flags: int
    draws: int
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, numbers: Tensor, flags: int, draws: int) -> GpuLaunch:
        if numbers.device.type != "cuda":
            return cls(numbers.flatten().clone(), flags, draws, None)
        host = torch.empty(numbers.numel(), dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers.flatten(), non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return cls(host, flags, draws, arrived)

    def read(self) -> Results:
        if self.arrived is not None:
            self.arrived.synchronize()
        flags, drawn = self.numbers[: self.flags], self.numbers[self.flags :]
        ids, faults = drawn.view(2, -1)[:, : self.draws].tolist()
        fine = flags.bool().tolist() if self.flags else [not fault for fault in faults]
        # No row has a mask, so a fault means that logits are not finite.
        pairs = zip(ids, faults, strict=True)
        return Results(fine, [Drawn(-1 if fault else token) for token, fault in pairs])


def load(
    directory: Path,
    progress: Progress = lambda *_: None,
    device: torch.device | None = None,
    kv_bytes: int | None = None,
    *,
    formats: Formats = AS_STORED,
    dependent: bool = False,
    digests: FileDigests | None = None,
) -> GpuModel:
    """Read, check and move a checkpoint; see `load.load_model` and `GpuModel`."""
    progress("check", 0, 1)
    place = device or torch.device("cuda")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "no CUDA device is there", field="device", hint="set device to auto or cpu"
        )
    config = read_config(directory)
    if config.head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise ModelError(
            f"heads of {config.head_dim} elements, expected one of {sizes}",
            field=str(directory / CONFIG_FILE),
            hint="set device to cpu",
        )
    refuse_formats(formats, directory, config)
    _refuse_old_gpu(place, formats, dependent)
    size = checkpoint_bytes(directory)
    progress("read", 0, size)
    tensors = read_tensors(directory, config)
    progress("hash", 0, size)
    machine = *_machine(place), str(formats)
    identity = fingerprint(directory, _numeric_code(), *machine, digests=digests)
    progress("move", 0, config.layers)
    return GpuModel(
        config, tensors, identity, place, progress, formats, kv_bytes=kv_bytes, dependent=dependent
    )


def _refuse_old_gpu(device: torch.device, formats: Formats, dependent: bool) -> None:
    """Raise ModelError for settings that this GPU has no instructions for."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    asked = {
        "kv_cache": (formats.kv_cache == "fp8", FP8_CAPABILITY, "kv_cache = int8"),
        "dependent_launches": (dependent, DEPENDENT_CAPABILITY, "dependent_launches = false"),
    }
    for setting, (wanted, least, instead) in asked.items():
        if wanted and capability < least:
            have, need = (f"sm_{major}{minor}" for major, minor in (capability, least))
            raise ModelError(
                f"needs a GPU of {need} or more, this one is {have}",
                field=setting,
                hint=f"set {instead}",
            )


def _numeric_code() -> list[Path]:
    """Return the files that determine the bits of results."""
    return [*Path(__file__).parent.glob("gpu_*.py"), *kernels.sources()]


def _machine(device: torch.device) -> tuple[str, ...]:
    """Return the versions and names of the compiler and of the machine that it compiles for.

    Launch plans follow the GPU's limits, and bits of float sums the plans.
    """
    if device.type != "cuda":
        return triton.__version__, "interpreter", platform.machine()
    major, minor = torch.cuda.get_device_capability(device)
    name, limits = torch.cuda.get_device_name(device), limits_of(device)
    return triton.__version__, name, f"sm_{major}{minor}", str(limits)


def have_compiled(decoder: Decoder, draw: GpuDraw, target: GPUTarget, progress: Progress) -> None:
    """Compile and load every kernel that serving can launch, before the model is ready.

    Only kernels that Triton's cache lacks are compiled; `progress` is called meanwhile. Raises
    ModelError if one does not compile.
    """
    wanted = compilations(decoder, draw, target)
    try:
        compile_ahead(wanted, target, lambda done, of: progress("compile", done, of))
    except ProcessError as error:
        raise ModelError(str(error), hint="set device to cpu, or report this") from error
    for one in wanted:
        one.load()


def compilations(decoder: Decoder, draw: GpuDraw, target: GPUTarget) -> list[Compilation]:
    """Return the compilations that serving can need; nothing runs on the device but copies.

    The model's own launches are recorded, at every number of rows that a batch can have, up to
    where Triton would compile them (`kernels.ahead`).
    """
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
    """Return numbers of rows up to `most` that cover every way in which kernels are launched."""
    near = {size for power in range(most.bit_length()) for size in (2**power, 2**power + 1)}
    return sorted(size for size in near | {most} if size <= most)


def _kind(part: object) -> object:
    """Return an object that is equal for parts with the same launches."""
    if isinstance(part, Tensor):
        return part.dtype, tuple(part.shape), part.data_ptr() % ALIGNED_BYTES
    if isinstance(part, tuple):
        return tuple(map(_kind, part))
    if is_dataclass(part):
        return type(part), *(_kind(getattr(part, field.name)) for field in fields(part))
    return part
