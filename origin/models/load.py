"""A checkpoint onto the device that it is for."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from tailrace.kernels.shapes import HEAD_DIMS
from tailrace.origin.checkpoint.file_digests import FileDigests
from tailrace.origin.checkpoint.model_config import read_config
from tailrace.origin.formats import AS_STORED, Formats
from tailrace.origin.models.model import (
    DEFAULT_KV_BYTES,
    LEAST_CAPABILITY,
    Device,
    Model,
    Progress,
)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of malloc.h."""
LARGEST_KEPT_BYTES = 32 * 1024 * 1024
"""Of one piece of memory; glibc takes no more."""
MOST_KEPT_BYTES = 64 * 1024 * 1024
"""Of all that is free where the heap ends."""


def load_model(
    directory: Path | str,
    progress: Progress = lambda *_: None,
    device: Device = Device.AUTO,
    kv_bytes: int | None = None,
    formats: Formats = AS_STORED,
    *,
    dependent: bool = False,
    digests: FileDigests | None = None,
) -> Model:
    """Read, check and load the checkpoint in `directory`.

    progress(stage, done, total) is called as loading goes on. kv_bytes: of the KV cache; None for
    DEFAULT_KV_BYTES, or on a GPU for most of what the weights leave. dependent: on a GPU, launches
    begin while those ahead still run. digests: of files that need not be hashed again. Raises
    ModelError, also for a device that is not there, and for formats that the model or device
    cannot have.
    """
    if device == Device.CUDA or (device == Device.AUTO and _runs_on_gpu(Path(directory))):
        from tailrace.origin.models import gpu_model  # triton is not there without a GPU

        return gpu_model.load(
            *(Path(directory), progress, None, kv_bytes),
            formats=formats,
            dependent=dependent,
            digests=digests,
        )
    from tailrace.origin.models import cpu_model

    kv_bytes = kv_bytes or DEFAULT_KV_BYTES
    model = cpu_model.load(Path(directory), progress, kv_bytes, formats, digests)
    _keep_freed_memory()
    return model


def _keep_freed_memory() -> None:
    """Leave what a step frees to the next step, which asks for the same sizes.

    glibc does so by itself only once something large has been freed, which is chance. Before, the
    kernel clears up to 200 pages for each step of the demo model.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not in musl, nor on macOS
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, MOST_KEPT_BYTES)


def _runs_on_gpu(directory: Path) -> bool:
    """Return True if there is a GPU that the kernels are for, and they take the model's heads."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        return False
    return read_config(directory).head_dim in HEAD_DIMS
