"""A decoder on a GPU, by the Triton kernels; imported only where one is asked for."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.runtime import driver

import kernels
from kernels.shapes import HEAD_DIMS
from ledger.errors import ModelError
from origin.checkpoint.file_digests import FileDigests
from origin.checkpoint.formats_check import refuse_formats
from origin.checkpoint.model_config import CONFIG_FILE, ModelConfig, read_config
from origin.formats import AS_STORED, Formats
from origin.models.gpu_ahead import have_compiled
from origin.models.gpu_draw import GpuDraw
from origin.models.gpu_forward import MAX_STEP_ROWS, GpuForward
from origin.models.gpu_layers import DecoderParts
from origin.models.gpu_step import GpuStep
from origin.models.model import Draw, Drawn, Piece, Progress, fingerprint
from origin.models.piece_check import check_pieces
from origin.models.tensors import checkpoint_bytes, read_tensors

FP8_CAPABILITY = (8, 9)
"""Of a GPU that converts fp8."""
DEPENDENT_CAPABILITY = (9, 0)
"""Of one whose launches can begin while those ahead still run."""


class GpuModel:
    """A loaded checkpoint on `device`; see `model.Model`.

    kv_bytes: of the KV cache; None for a share of what is free. dependent: launches begin while
    those ahead still run. On a CPU the kernels run in Triton's interpreter, far slower than
    `cpu_model`: that is for tests.
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
        if device.type == "cuda":
            target = driver.active.get_current_target()
            have_compiled(self._decoder, self._draw, target, progress)

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece], drawn: Tensor | None = None) -> Tensor:
        """Push a batch of pieces; see `model.Model.forward`.

        drawn: int32, on the device: what ids below 0 stand for (`device.drawn_before`).
        """
        check_pieces(pieces, self.config, self.pages, 0 if drawn is None else len(drawn))
        return self._forward(pieces, drawn)

    @torch.inference_mode()
    def draw(self, hidden: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """The tokens that follow these rows; see `model.Model.draw`."""
        drawn: list[Drawn] = []
        for logits, some in self._logits_of(hidden, draws):
            drawn += self._draw(logits, some)
        return drawn

    @torch.inference_mode()
    def launch_step(
        self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw], drawn: Tensor
    ) -> Tensor | None:
        """`forward` and `launch_draws` in one graph, where there can be one; see `GpuStep`."""
        if not self._step.takes(pieces, rows, draws):
            return None
        check_pieces(pieces, self.config, self.pages, len(drawn))
        return self._step(pieces, draws, drawn)

    @torch.inference_mode()
    def launch_draws(self, hidden: Tensor, draws: Sequence[Draw]) -> Tensor:
        """int32 [2, len(draws)] on the device: ids and faults of draws that are `by_settings`."""
        groups = self._logits_of(hidden, draws)
        drawn = [
            self._draw.launch(logits, self._draw.rows(some)).clone() for logits, some in groups
        ]
        return torch.cat(drawn, 1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows fp32 [rows, H] -> fp32 [rows, vocab]."""
        groups = torch.split(hidden.contiguous(), MAX_STEP_ROWS)
        return torch.cat([self._decoder.logits(group).clone() for group in groups])

    def _logits_of(
        self, hidden: Tensor, draws: Sequence[Draw]
    ) -> Iterator[tuple[Tensor, Sequence[Draw]]]:
        """As many rows at a time as there is room for; the next ones overwrite the logits."""
        for start in range(0, len(draws), MAX_STEP_ROWS):
            rows = slice(start, start + MAX_STEP_ROWS)
            yield self._decoder.logits(hidden[rows].contiguous()), draws[rows]


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
    """Raise ModelError for what this GPU has no instructions for."""
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
    """The files that decide the bits of a result."""
    return [*Path(__file__).parent.glob("gpu_*.py"), *kernels.sources()]


def _machine(device: torch.device) -> tuple[str, ...]:
    """What compiles the kernels, and what for."""
    if device.type != "cuda":
        return triton.__version__, "interpreter", platform.machine()
    major, minor = torch.cuda.get_device_capability(device)
    return triton.__version__, torch.cuda.get_device_name(device), f"sm_{major}{minor}"
