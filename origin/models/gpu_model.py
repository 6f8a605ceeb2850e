"""A decoder on a GPU with the Triton kernels; imported only if a GPU is used."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from tailrace.kernels.block_tables import BlockTables
from tailrace.kernels.decoder import Chunks, Decoder, Rows
from tailrace.kernels.gpu_limits import limits_of
from tailrace.kernels.one_copy import ALIGNED_BYTES, move_into
from tailrace.kernels.processes import ProcessError
from tailrace.kernels.sampler.sampler import MASK_BITS, Sampling
from tailrace.kernels.sampler.sampler_rows import SamplerRows
from tailrace.kernels.shapes import HEAD_DIMS
from tailrace.kernels.step_graph import Capture
from tailrace.kernels.step_inputs import StepInputs
from tailrace.ledger.errors import ModelError
from tailrace.origin.checkpoint.file_digests import FileDigests
from tailrace.origin.checkpoint.model_config import CONFIG_FILE, ModelConfig, read_config
from tailrace.origin.checkpoint.model_memory import refuse_formats
from tailrace.origin.formats import AS_STORED, Formats
from tailrace.origin.models.gpu_draw import GpuDraw, read_drawn
from tailrace.origin.models.gpu_forward import GpuForward
from tailrace.origin.models.gpu_graphs import MAX_DRAWS, STEP_ROWS, GpuGraphs, captured_rows
from tailrace.origin.models.gpu_layers import DecoderParts
from tailrace.origin.models.logprobs import most_scores
from tailrace.origin.models.model import (
    DEFAULT_STEP_ROWS,
    PREFILL_CHUNK_TOKENS,
    Draw,
    Drawn,
    KnownPages,
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
    earlier ones still run. step_rows: maximum rows that one pass over the weights computes; a
    larger batch reads the weights again. capture: replaces the device's way of capturing steps, for
    tests. On a CPU the kernels run in Triton's interpreter, far slower than `cpu_model`; that is
    for tests.
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
        step_rows: int = DEFAULT_STEP_ROWS,
        capture: Capture | None = None,
    ) -> None:
        self.config = config
        self.fingerprint = identity
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
        self.device = formats.on(f"{device.type} triton ({name})")
        rows = captured_rows(step_rows)
        parts = DecoderParts(config, tensors, device, progress, formats, dependent=dependent)
        self.pages = parts.pages_within(kv_bytes)
        self._known_pages = KnownPages(self.pages)
        self._decoder = parts.decoder(self.pages, rows)
        self._draw = GpuDraw(rows, config.vocab, device, dependent=dependent)
        self._graphs = GpuGraphs(self._decoder, self._draw.workspace, capture)
        self._forward = GpuForward(self._decoder, self._graphs)
        self._before = 0
        """Number of tokens drawn by the previous launch."""
        if device.type == "cuda":
            target = driver.active.get_current_target()
            have_compiled(self._decoder, self._draw, target, progress)
        if device.type == "cuda" or capture is not None:
            self._capture_all(progress)

    @property
    def captured(self) -> int:
        """Number of steps that were captured so far."""
        return self._graphs.captured

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Push a batch of pieces through the model; see `model.Model.forward`."""
        check_pieces(pieces, self.config, self._known_pages)
        return self._forward(pieces)

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

        If all pieces are single rows of distinct sequences, one captured graph computes and draws
        the tokens.
        """
        captured = self.captured
        check_pieces(pieces, self.config, self._known_pages, self._before)
        if self._is_decoding(pieces, rows, draws):
            drawn, flags, scores = self._decode(pieces, draws)
        else:
            drawn, flags, scores = self._run(pieces, rows, draws)
        if (count := min(len(draws), MAX_DRAWS)) > 0:
            self._graphs.before[:count].copy_(drawn[0, :count])
        self._before = count
        numbers = [drawn.flatten(), *(() if flags is None else (flags,))]
        return GpuLaunch.of(
            numbers, len(drawn[0]), scores, draws, first_use=self.captured > captured
        )

    @torch.inference_mode()
    def _capture_all(self, progress: Progress) -> None:
        """Capture every step, so that none is captured while serving."""
        self._graphs.capture_all(lambda done, of: progress("capture", done, of))

    def _is_decoding(
        self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw]
    ) -> bool:
        """Return True if the pieces are single rows of distinct sequences, each with a draw."""
        return (
            0 < len(draws) == len(pieces) <= self._decoder.step_rows
            and not any(piece.prefill or len(piece.ids) > 1 for piece in pieces)
            and [*rows] == [*range(len(pieces))]
        )

    def _decode(
        self, pieces: Sequence[Piece], draws: Sequence[Draw]
    ) -> tuple[Tensor, None, Tensor | None]:
        """Run one captured step; return ids and faults, int32 [2, rows or more], and scores."""
        count, positions = len(pieces), [piece.start for piece in pieces]
        step = self._graphs.drawn(count, max(positions) + 1)
        step.inputs.fill(
            [piece.ids[0] for piece in pieces],
            positions,
            range(count),
            [piece.pages for piece in pieces],
            [draw.sampling for draw in draws],
            [draw.position for draw in draws],
        )
        drawn, logits = step(), step.logits[:count]
        self._draw.redraw(logits, draws, drawn, self._decoder.faults[:count])
        return drawn, None, self._draw.scores(logits, draws, drawn[0])

    def _run(
        self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run any pieces; return ids and faults, flags of finite rows, int32 [rows], and scores."""
        hidden = self._forward(pieces)
        flags = hidden.isfinite().all(-1).int()
        if [*rows] != [*range(len(hidden))]:
            there = torch.empty(len(rows), dtype=torch.int64, device=hidden.device)
            hidden = hidden.index_select(0, move_into(there, torch.tensor([*rows])))
        most = most_scores(draws)
        drawn = [torch.empty(2, 0, dtype=torch.int32, device=hidden.device)]
        scores: list[Tensor] = []
        for logits, own in self._logits_of(hidden, draws):
            drawn.append(self._draw.draw(logits, own).clone())
            if (some := self._draw.scores(logits, own, drawn[-1][0], most)) is not None:
                scores.append(some)
        return torch.cat(drawn, 1), flags, torch.cat(scores) if scores else None

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute hidden rows fp32 [rows, H] -> fp32 [rows, vocab]."""
        groups = torch.split(hidden.contiguous(), self._decoder.step_rows)
        return torch.cat([self._decoder.logits(group).clone() for group in groups])

    def _logits_of(
        self, hidden: Tensor, draws: Sequence[Draw]
    ) -> Iterator[tuple[Tensor, Sequence[Draw]]]:
        """Yield the logits of up to `step_rows` rows at a time; the next ones overwrite them."""
        most = self._decoder.step_rows
        for start in range(0, len(draws), most):
            rows = slice(start, start + most)
            yield self._decoder.logits(hidden[rows].contiguous()), draws[rows]


@dataclass(frozen=True, slots=True)
class GpuLaunch:
    """Ids, faults, flags and scores that are being copied to the host, together.

    numbers: int32; ids and faults of `width` rows each, then the flags of finite rows, then scores,
    `scored` numbers for each row that requests them. Without flags, a token is drawn for each row,
    and the row's fault tells whether the row is finite.
    """

    numbers: Tensor
    width: int
    scored: int
    flags: int
    draws: Sequence[Draw]
    first_use: bool
    arrived: torch.cuda.Event | None

    @classmethod
    def of(
        cls,
        numbers: Sequence[Tensor],
        width: int,
        scores: Tensor | None,
        draws: Sequence[Draw],
        *,
        first_use: bool,
    ) -> GpuLaunch:
        """Begin the copy. numbers: ids and faults, and perhaps flags, int32 on the device."""
        scored = 0 if scores is None else scores.shape[1]
        flags = sum(map(len, numbers[1:]))
        parts = [*numbers, *(() if scores is None else (scores.flatten(),))]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if whole.device.type != "cuda":
            return cls(whole.clone(), width, scored, flags, draws, first_use, None)
        host = torch.empty(whole.numel(), dtype=whole.dtype, pin_memory=True)
        host.copy_(whole, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return cls(host, width, scored, flags, draws, first_use, arrived)

    def read(self) -> Results:
        if self.arrived is not None:
            self.arrived.synchronize()
        sizes = [2 * self.width, self.flags]
        drawn, flags, scores = torch.split(self.numbers, [*sizes, len(self.numbers) - sum(sizes)])
        rows = drawn.view(2, self.width)[:, : len(self.draws)]
        packed = scores.view(-1, self.scored) if self.scored else None
        fine = flags.bool().tolist() if self.flags else (rows[1] == 0).tolist()
        return Results(fine, read_drawn(rows, packed, self.draws), self.first_use)


def load(
    directory: Path,
    progress: Progress = lambda *_: None,
    device: torch.device | None = None,
    kv_bytes: int | None = None,
    *,
    formats: Formats = AS_STORED,
    dependent: bool = False,
    step_rows: int = DEFAULT_STEP_ROWS,
    digests: FileDigests | None = None,
    capture: Capture | None = None,
) -> GpuModel:
    """Read, check and move a checkpoint; see `load.load_model` and `GpuModel`."""
    progress("check", 0, 1)
    place = device or torch.device("cuda")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "there is no CUDA device", field="device", hint="set device to auto or cpu"
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
        config, tensors, identity, place, progress, formats, kv_bytes=kv_bytes, dependent=dependent,
        step_rows=step_rows, capture=capture,
    )  # fmt: skip


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
    """Return the source files that determine the bits of results on a GPU, for the fingerprint."""
    return [*Path(__file__).parent.glob("gpu_*.py"), *kernels.sources()]


def _machine(device: torch.device) -> tuple[str, ...]:
    """Return the versions and names of the compiler and of the machine that it compiles for.

    The GPU's limits determine the launch plans, and these the last bits of float sums.
    """
    if device.type != "cuda":
        return triton.__version__, "interpreter", platform.machine()
    major, minor = torch.cuda.get_device_capability(device)
    name, limits = torch.cuda.get_device_name(device), limits_of(device)
    return triton.__version__, name, f"sm_{major}{minor}", str(limits)


def have_compiled(decoder: Decoder, draw: GpuDraw, target: GPUTarget, progress: Progress) -> None:
    """Compile and load every kernel that serving can launch, before the model is ready.

    Only kernels that Triton's cache lacks are compiled; `progress` is called meanwhile. Each kernel
    is launched once, so that none has to be loaded while serving, and a kernel that the device
    cannot run fails here. Raises ModelError if a kernel does not compile.
    """
    wanted = compilations(decoder, draw, target)
    try:
        compile_ahead(wanted, target, lambda done, of: progress("compile", done, of))
    except ProcessError as error:
        raise ModelError(str(error), hint="set device to cpu, or report this") from error
    for one in wanted:
        one.load()
    with _distinct_layers(decoder), torch.inference_mode():
        _launch(decoder, draw)


def compilations(decoder: Decoder, draw: GpuDraw, target: GPUTarget) -> list[Compilation]:
    """Return the compilations that serving can need, without running any kernel.

    The decoder's code is executed for every number of rows that needs kernels of its own. Instead
    of compiling and launching the kernels, `kernels.ahead` records each launch.
    """
    with _distinct_layers(decoder):
        return planned(lambda: _launch(decoder, draw), target)


@contextmanager
def _distinct_layers(decoder: Decoder) -> Iterator[None]:
    """Leave only one layer of each kind in the decoder, until the `with` block ends.

    The layers of one kind launch the same kernels in the same way, so one of them stands for all.
    """
    layers = decoder.parts
    decoder.parts = list({_kind(part): part for part in layers}.values())
    try:
        yield
    finally:
        decoder.parts = layers


def _launch(decoder: Decoder, draw: GpuDraw) -> None:
    device = decoder.device
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    for count in sizes(decoder.max_rows):
        rows = Rows.of([0] * count, range(count), [0] * count, device)
        chunks = Chunks.of([count], [0], [0], device)
        decoder.prefill(rows, chunks, table, PREFILL_CHUNK_TOKENS)
    tables = BlockTables(decoder.step_rows, 1, device)
    before = torch.zeros(1, dtype=torch.int32, device=device)
    for count in (rows for rows in STEP_ROWS if rows <= decoder.step_rows):
        inputs = StepInputs(count, tables, before)
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
    """Return numbers of rows up to `most` that together cause every possible kind of launch."""
    near = {size for power in range(most.bit_length()) for size in (2**power, 2**power + 1)}
    return sorted(size for size in near | {most} if size <= most)


def _kind(part: object) -> object:
    """Return an object that is equal for two parts if their kernels are launched alike."""
    if isinstance(part, Tensor):
        return part.dtype, tuple(part.shape), part.data_ptr() % ALIGNED_BYTES
    if isinstance(part, tuple):
        return tuple(map(_kind, part))
    if is_dataclass(part):
        return type(part), *(_kind(getattr(part, field.name)) for field in fields(part))
    return part
