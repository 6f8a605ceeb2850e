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
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from tailrace.kernels.sampler.sampler import Sampling
from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.ledger.errors import ModelError, TooLarge
from tailrace.origin.checkpoint.file_digests import FileDigests
from tailrace.origin.checkpoint.model_config import ModelConfig
from tailrace.origin.models.tensors import checkpoint_files

PREFILL_CHUNK_TOKENS = PAGE_TOKENS
"""A chunk of a prompt fills a page."""
LEAST_CAPABILITY = (8, 0)
"""Of a GPU: bf16 on tensor cores and copies beside the computation came with sm_80."""
DEFAULT_KV_BYTES = 512 * 1024 * 1024
"""What a CPU model's pages take at most, unless one whole context needs more."""

SHARED_CODE = (
    *("checkpoint/model_config.py", "engine/grammar.py", "models/logprobs.py", "models/tensors.py"),
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
        """Return the tokens that follow these rows: fp32 [len(draws), H].

        Raises ValueError for a mask that allows nothing or an argument that does not fit.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows fp32 [rows, H] -> fp32 [rows, vocab]."""


def drawn_before(draw: int) -> int:
    """Return the id that stands for the token of this draw; it is its own inverse."""
    return -1 - draw


class Results(NamedTuple):
    """Of one launch, on the host."""

    fine: Sequence[bool]
    """Of each row, in the order of the pieces: whether it is numbers."""
    drawn: Sequence[Drawn]

    def read(self) -> Results:
        """They are there already."""
        return self


class Launched(Protocol):
    def read(self) -> Results:
        """Wait for the device; once, and in the order of launches."""


@runtime_checkable
class StepDevice(Protocol):
    """A model that is asked for whole steps; an engine of one is pipelined.

    It answers at once, and the next batch may be launched before the results of this one are read.
    An id below 0 in it stands for a token that the host does not know yet: `drawn_before(n)` for
    what the n-th draw of the launch before gives.
    """

    def launch(
        self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw]
    ) -> Launched:
        """Push pieces, and draw from these of their rows; see `Model.forward` and `Model.draw`.

        Raises what those do.
        """


class AtOnce:
    """A device whose results are there when `launch` returns."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._drawn: Sequence[Drawn] = ()

    def launch(
        self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw]
    ) -> Results:
        known = [
            piece if piece.ids[0] >= 0 else replace(piece, ids=self._known(piece.ids))
            for piece in pieces
        ]
        hidden = self._model.forward(known)
        fine = hidden.isfinite().all(-1).tolist()
        self._drawn = self._model.draw(hidden[list(rows)], draws) if draws else ()
        return Results(fine, self._drawn)

    def _known(self, ids: Sequence[int]) -> list[int]:
        # What was no number is 0 to the next launch, whose results nobody looks at.
        return [max(self._drawn[drawn_before(token)].token, 0) for token in ids]


def context_pages(config: ModelConfig) -> int:
    """Pages of a sequence that fills the context."""
    return -(-config.context // PAGE_TOKENS)


def prefill_chunks(ids: Sequence[int]) -> list[Sequence[int]]:
    """Return a prompt cut at absolute multiples of PREFILL_CHUNK_TOKENS; the last may be shorter."""
    step = PREFILL_CHUNK_TOKENS
    return [ids[start : start + step] for start in range(0, len(ids), step)]


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


def check_pieces(pieces: Sequence[Piece], config: ModelConfig, pages: int, drawn: int = 0) -> None:
    """Raise what `model.Model.forward` does, for a cache of so many pages.

    drawn: how many ids below 0 stand for tokens (`drawn_before`).
    """
    for piece in pieces:
        held = min(config.context, len(piece.pages) * PAGE_TOKENS)
        if piece.end > held:
            raise TooLarge(f"{piece.end} tokens do not fit {held} of context and pages")
        if not piece.ids or piece.start < 0 or (piece.prefill and not is_chunk(piece)):
            raise ValueError(f"pieces: {len(piece.ids)} tokens at {piece.start} are no piece")
        if min(piece.ids) < -drawn or max(piece.ids) >= config.vocab:
            raise ValueError(f"ids: one is outside the vocabulary of {config.vocab}")
        used = piece.pages[: -(-piece.end // PAGE_TOKENS)]
        if min(used) < 0 or max(used) >= pages:
            raise ValueError(f"pages: one is none of the {pages} of the cache")


def is_chunk(piece: Piece) -> bool:
    """Return True if it begins a page and fills no more than that."""
    return piece.start % PREFILL_CHUNK_TOKENS == 0 and len(piece.ids) <= PREFILL_CHUNK_TOKENS
