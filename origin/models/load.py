"""Loads a checkpoint onto a CPU or a GPU, and chooses which of the two."""

from __future__ import annotations

import ctypes
from pathlib import Path

import structlog

from tailrace.kernels.shapes import HEAD_DIMS
from tailrace.origin.checkpoint.file_digests import FileDigests
from tailrace.origin.checkpoint.model_config import read_config
from tailrace.origin.formats import AS_STORED, Formats
from tailrace.origin.gpu.probe import gpu_is_usable, require_gpu
from tailrace.origin.models.model import (
    DEFAULT_KV_BYTES,
    DEFAULT_STEP_ROWS,
    Device,
    Model,
    Progress,
)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of two parameters of glibc's `mallopt`, from malloc.h."""
LARGEST_KEPT_BYTES = 32 * 1024 * 1024
"""Maximum bytes of a freed block that the process keeps for reuse; glibc accepts no more."""
MOST_KEPT_BYTES = 64 * 1024 * 1024
"""Maximum free bytes that the process keeps at the end of its heap."""

log = structlog.get_logger("model")


def load_model(
    directory: Path | str,
    progress: Progress = lambda *_: None,
    device: Device = Device.AUTO,
    kv_bytes: int | None = None,
    formats: Formats = AS_STORED,
    *,
    dependent: bool = False,
    step_rows: int = DEFAULT_STEP_ROWS,
    digests: FileDigests | None = None,
) -> Model:
    """Read, check and load the checkpoint in `directory`.

    progress(stage, done, total) is called during loading. kv_bytes: size of the KV cache; None for
    DEFAULT_KV_BYTES, or on a GPU for most of the memory that the weights leave. dependent: on a
    GPU, launches begin while earlier ones still run. step_rows: on a GPU, maximum rows that one
    pass over the weights computes. digests: known digests of files, which are not hashed again.
    Raises ModelError, also for an absent device, and for formats that the model or device does not
    support. Whether a GPU can be used is checked before the checkpoint is read.
    """
    progress("check", 0, 1)
    if device == Device.CUDA:
        require_gpu()
    if device == Device.CUDA or (device == Device.AUTO and _runs_on_gpu(Path(directory))):
        # Imported here, because it needs triton, which only the extra `gpu` and CUDA builds of
        # torch install.
        from tailrace.origin.models import gpu_model

        return gpu_model.load(
            *(Path(directory), progress, None, kv_bytes),
            formats=formats,
            dependent=dependent,
            step_rows=step_rows,
            digests=digests,
        )
    from tailrace.origin.models import cpu_model

    kv_bytes = kv_bytes or DEFAULT_KV_BYTES
    model = cpu_model.load(Path(directory), progress, kv_bytes, formats, digests)
    _keep_freed_memory()
    return model


def _keep_freed_memory() -> None:
    """Keep memory that a step frees for the next step, which needs the same sizes.

    By default glibc keeps such memory only after a large block has been freed, which happens by
    chance. Until then the operating system clears up to 200 pages for each step of the demo model.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # musl and macOS have no mallopt
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, MOST_KEPT_BYTES)


def _runs_on_gpu(directory: Path) -> bool:
    """Return True if a GPU can be used, and the kernels support the model's heads.

    If the heads prevent it, the reason is logged, because a large model is slow on a CPU.
    """
    if not gpu_is_usable():
        return False
    head_dim = read_config(directory).head_dim
    if head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        reason = f"heads of {head_dim} elements; on a GPU they may have {sizes}"
        log.warning("device.cpu", reasons=[reason], model=directory.name)
    return head_dim in HEAD_DIMS
