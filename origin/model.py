"""What an engine asks of a model, whatever it runs on, and how one is loaded.

Token-exact continuation fixes shapes: a prompt goes through in chunks at absolute multiples of
PREFILL_CHUNK_TOKENS, and every generated token as a row of the decode step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.sampler import Sampling
from ledger.errors import ModelError
from origin.checkpoint import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, ModelConfig

PREFILL_CHUNK_TOKENS = 64

Progress = Callable[[str, int, int], None]


class Device(StrEnum):
    """Where a model runs; `auto` is the GPU if there is one that the kernels run on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Model(Protocol):
    """A loaded checkpoint; `cache` is what its own `new_cache` gave, of one sequence."""

    config: ModelConfig
    fingerprint: str
    """Two models of the same fingerprint give the same tokens for the same request."""
    device: str
    """What it runs on and by what, such as `cpu torch`."""

    def new_cache(self) -> Any:
        """The keys and values of a sequence that has no tokens yet."""
        ...

    def advance(self, ids: Sequence[int], cache: Any) -> Tensor:
        """Push T tokens after those in the cache; returns their final hidden rows, fp32 [T, H].

        T is that of a prefill chunk, or 1 for a generated token. Raises TooLarge when the
        context has no room for them.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden rows fp32 [T, H] -> fp32 [T, vocab]."""
        ...

    def sample(self, hidden: Tensor, sampling: Sampling, position: int) -> int:
        """The token that follows the last of these rows, the `position`th that is generated.

        Raises FloatingPointError for NaN or infinite logits.
        """
        ...


def load_model(
    directory: Path | str, progress: Progress = lambda *_: None, device: Device = Device.AUTO
) -> Model:
    """Read, check and load the checkpoint in `directory`.

    progress(stage, done, total) is called as loading goes on. Raises ModelError, also for a
    device that is not there.
    """
    if device == Device.CUDA or (device == Device.AUTO and torch.cuda.is_available()):
        from origin import gpu_model  # triton is not there without a GPU

        return gpu_model.load(Path(directory), progress)
    from origin import cpu_model

    return cpu_model.load(Path(directory), progress)


def prefill_chunks(ids: Sequence[int]) -> list[Sequence[int]]:
    """A prompt cut at absolute multiples of PREFILL_CHUNK_TOKENS; the last may be shorter."""
    step = PREFILL_CHUNK_TOKENS
    return [ids[start : start + step] for start in range(0, len(ids), step)]


def fingerprint(directory: Path, code: Iterable[Path], *machine: str) -> str:
    """What must be equal for one worker to continue another's stream token-exactly.

    SHA-256, in hex, over the checkpoint's files, the numeric code, the torch version and
    what names the machine's arithmetic.
    """
    files = [directory / name for name in (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE)]
    digest = hashlib.sha256()
    for path in (*files, *sorted(code)):
        try:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        except OSError as exc:
            raise ModelError(f"cannot be read: {exc}", field=str(path)) from exc
    digest.update(" ".join((torch.__version__, *machine)).encode())
    return digest.hexdigest()
