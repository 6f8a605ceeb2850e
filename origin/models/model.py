"""What an engine asks of a model, whatever it runs on, and how one is loaded.

**Exactness.** The hidden row and the drawn token of a Piece depend on the sequence's own ids, and
on which of its positions were prefilled and which were rows; never on what else is in the batch, on
page ids, or on how many rows of the sequence are in one Piece. So prompts are cut at absolute
multiples of PREFILL_CHUNK_TOKENS, which gives a chunk the same shape each time, and rows of a Piece
(the replay of a continued run, or drafts to verify) equal decoding one by one, bit for bit. A row
with NaN disturbs no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kernels.sampler.sampler import Sampling
from kernels.shapes import PAGE_TOKENS
from ledger.errors import ModelError
from origin.checkpoint.file_digests import FileDigests
from origin.models.tensors import ModelConfig, checkpoint_files

PREFILL_CHUNK_TOKENS = PAGE_TOKENS
"""A chunk of a prompt fills a page."""
LEAST_CAPABILITY = (8, 0)
"""Of a GPU: bf16 on tensor cores and copies beside the computation came with sm_80."""
DEFAULT_KV_BYTES = 512 * 1024 * 1024
"""What a CPU model's pages take at most, unless one whole context needs more."""

SHARED_CODE = (
    *("checkpoint/model_config.py", "checkpoint/rope_config.py", "engine/grammar.py"),
    *("models/layer_tensors.py", "models/logprobs.py", "models/tensors.py"),
)
"""Files of `origin/` that decide a token or its scores on every device."""

Progress = Callable[[str, int, int], None]
"""(stage, done, total): a stage lasts until the next one is named; those of `read` and `hash` are
counted in bytes."""


class Device(StrEnum):
    """Where a model runs; `auto` is the GPU where the kernels run on it and take the model."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence in a batch; what lies before `start` is in its pages."""

    ids: Sequence[int]
    start: int
    """Position of the first."""
    pages: Sequence[int]
    """The sequence's block table; it covers start + len(ids) positions."""
    prefill: bool
    """A chunk of a prompt (start is a multiple of 64, at most 64 ids), or rows of decoding."""

    @property
    def end(self) -> int:
        """Positions that are in the pages once the piece is."""
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class Draw:
    """What to draw from one hidden row."""

    sampling: Sampling
    position: int
    """Index among the generated tokens."""
    mask: Tensor | None = None
    """int32 [ceil(V / 32)] on the CPU: the ids that a grammar allows, as llguidance writes it."""
    counts: Tensor | None = None
    """int32 [V] on the CPU: how often each id was generated; where `sampling.penalises`."""
    logprobs: int | None = None
    """How many alternatives to score; None for no scores at all."""

    @property
    def by_settings(self) -> bool:
        """The row and the settings decide the token, and nothing but its id is asked for."""
        return self.mask is None and self.logprobs is None and not self.sampling.penalises


@dataclass(frozen=True, slots=True)
class Scores:
    """Natural logarithms of chances, before penalties, temperature and masks."""

    chosen: float
    best: tuple[tuple[int, float], ...]
    """(id, logprob), the best first, equal ones by id; as many as were asked for."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drawn token."""

    token: int
    """-1: the logits were NaN or infinite, and there are no scores."""
    scores: Scores | None = None


class Model(Protocol):
    """A loaded checkpoint and its KV cache, which is pages that all sequences share."""

    config: ModelConfig
    fingerprint: str
    """Two models of the same fingerprint give the same tokens for the same request."""
    device: str
    """What it runs on and by what, such as `cpu torch`."""
    pages: int
    """Pages of PAGE_TOKENS positions, 0 .. pages-1; who holds which is the caller's business."""

    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Push a batch of pieces; returns hidden rows, in order.

        Each piece is of another sequence, but for chunks of one prompt, which may follow one
        another. fp32 [tokens of all pieces, H]; the next call may overwrite them. Raises
        TooLarge for a piece that the context or its block table has no room for, and ValueError
        for one that is empty, for a chunk that is no chunk, and for a page or an id that is not
        there.
        """

    def draw(self, hidden: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """The tokens that follow these rows: fp32 [len(draws), H].

        Raises ValueError for a mask that allows nothing or an argument that does not fit.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows fp32 [rows, H] -> fp32 [rows, vocab]."""


def prefill_chunks(ids: Sequence[int]) -> list[Sequence[int]]:
    """A prompt cut at absolute multiples of PREFILL_CHUNK_TOKENS; the last may be shorter."""
    step = PREFILL_CHUNK_TOKENS
    return [ids[start : start + step] for start in range(0, len(ids), step)]


def context_pages(config: ModelConfig) -> int:
    """Pages of a sequence that fills the context."""
    return -(-config.context // PAGE_TOKENS)


def prefill(model: Model, ids: Sequence[int], pages: Sequence[int]) -> Tensor:
    """Push a whole prompt; returns the hidden rows of all its tokens, fp32 [len(ids), H]."""
    rows = []
    for index, chunk in enumerate(prefill_chunks(ids)):
        piece = Piece(chunk, index * PREFILL_CHUNK_TOKENS, pages, prefill=True)
        rows.append(model.forward([piece]).clone())
    return torch.cat(rows)


def fingerprint(
    directory: Path, code: Iterable[Path], *machine: str, digests: FileDigests | None = None
) -> str:
    """What must be equal for one worker to continue another's stream token-exactly.

    SHA-256, in hex, over the checkpoint's files, the code that decides numbers or masks, the
    versions of torch and llguidance, and what names the machine's arithmetic. `digests` of files
    that are known already are not computed again.
    """
    digests = digests or FileDigests()
    digest = hashlib.sha256()
    files = {*code, *(Path(__file__).parents[1] / name for name in SHARED_CODE)}
    for path in (*checkpoint_files(directory), *sorted(files)):
        try:
            digest.update(digests.of(path))
        except OSError as exc:
            raise ModelError(f"cannot be read: {exc}", field=str(path)) from exc
    digests.keep()
    digest.update(" ".join((torch.__version__, version("llguidance"), *machine)).encode())
    return digest.hexdigest()
