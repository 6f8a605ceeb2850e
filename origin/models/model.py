"""The interface between engine and model, on any device.

**Exactness.** A sequence gets the same hidden rows and the same drawn tokens, bit for bit, in every
batch. They depend only on its own ids, and on which of its positions were prefilled and which were
decoded as rows. They do not depend on the other sequences in the batch, on page ids, or on how many
rows of the sequence are in one Piece.

Therefore prompts are divided into chunks at absolute multiples of PREFILL_CHUNK_TOKENS, so that a
chunk has the same shape each time. Several rows in one Piece (the replay of a continued run, or
drafts to verify) have the bits that decoding them one by one would give. A row with NaN does not
affect other rows.
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
"""Number of tokens in a chunk of a prompt; a chunk fills a page of the KV cache."""
MAX_KNOWN_TABLES = 8192
"""Maximum block tables that are remembered as checked; it exceeds the number of running runs."""
DEFAULT_STEP_ROWS = 64
"""Default maximum rows of a step on a GPU: the default number of concurrent runs."""
DEFAULT_KV_BYTES = 512 * 1024 * 1024
"""Default bytes of a CPU model's pages, unless one whole context needs more."""

SHARED_CODE = (
    *("checkpoint/model_config.py", "engine/grammar.py", "models/logprobs.py", "models/tensors.py"),
)
"""Files of `origin/` that can change a token or its scores on every device."""

Progress = Callable[[str, int, int], None]
"""Callback (stage, done, total): a stage lasts until the callback gets another one. The stages
`read` and `hash` are counted in bytes."""


class Device(StrEnum):
    """Device of a model; `auto` is a GPU if the kernels support it and the model, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence in a batch; positions before `start` are in its pages."""

    ids: Sequence[int]
    start: int
    """Position of the piece's first token in the sequence."""
    pages: Sequence[int]
    """The sequence's block table; it covers start + len(ids) positions.

    A later Piece may have the same list with more pages appended. The pages before them must not
    change, so that each page is checked and copied only once.
    """
    prefill: bool
    """True for a chunk of a prompt (start is a multiple of 64, at most 64 ids), False for decoding
    rows."""

    @property
    def end(self) -> int:
        """Number of positions in the pages once the piece is computed."""
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to draw from one hidden row."""

    sampling: Sampling
    position: int
    """Index of the token among those that its run generates, from 0."""
    mask: Tensor | None = None
    """int32 [ceil(V / 32)] on the CPU: the ids that a grammar allows, as llguidance writes it."""
    counts: Tensor | None = None
    """int32 [V] on the CPU: how often each id was generated; required if `sampling.penalises`."""
    logprobs: int | None = None
    """Number of alternatives to score; None for no scores."""
    generated: Sequence[int] | None = None
    """The ids in `counts`: a list that only grows, so that a device can keep its own counts."""

    @property
    def plain(self) -> bool:
        """True if row and settings alone determine the token: no mask, and no penalties."""
        return self.mask is None and not self.sampling.penalises


@dataclass(frozen=True, slots=True)
class Scores:
    """Natural logarithms of probabilities, before penalties, temperature and masks."""

    chosen: float
    best: tuple[tuple[int, float], ...]
    """Pairs (id, logprob), the best first, equal ones by id; as many as were requested."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drawn token."""

    token: int
    """Id of the token; -1 if the logits had NaN or infinity. Then `scores` is None."""
    scores: Scores | None = None


class Model(Protocol):
    """A loaded checkpoint and its KV cache, whose pages all sequences share."""

    config: ModelConfig
    fingerprint: str
    """Models with the same fingerprint give the same tokens for the same request."""
    device: str
    """Device and library, such as `cpu torch`."""
    pages: int
    """Number of pages of PAGE_TOKENS positions; the caller assigns them to sequences."""

    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Push a batch of pieces through the model; return hidden rows, in order.

        The pieces belong to different sequences, but several chunks of one prompt may follow one
        another. Returns fp32 [tokens of all pieces, H], which the next call may overwrite. Raises
        TooLarge for a piece that exceeds the context or its block table, and ValueError for an
        empty piece, a chunk that does not continue the piece before it, or an invalid page or id.
        """

    def draw(self, hidden: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """Return one token for each row of `hidden`, drawn as the entry of `draws` for it requests.

        hidden: fp32 [len(draws), H], where H is the model's hidden size. Raises ValueError for a
        mask that allows nothing or an argument that does not fit.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute hidden rows fp32 [rows, H] -> fp32 [rows, vocab]."""


def drawn_before(draw: int) -> int:
    """Return the negative id that stands for the token of draw `draw` of the previous launch.

    The function is its own inverse.
    """
    return -1 - draw


class Results(NamedTuple):
    """Results of one launch, in the host's memory."""

    fine: Sequence[bool]
    """Flag for each row, in the order of the pieces: True if it has neither NaN nor infinity."""
    drawn: Sequence[Drawn]
    first_use: bool = False
    """See `Launched.first_use`."""

    def read(self) -> Results:
        """Return the results, which have been copied to the host already."""
        return self


class Launched(Protocol):
    """A launched step, whose results were not read yet."""

    @property
    def first_use(self) -> bool:
        """True if the launch did work that no later one repeats, such as a capture.

        The duration of the step then does not predict the next one's.
        """

    def read(self) -> Results:
        """Wait for the device and return the results; called once, in the order of launches."""


@runtime_checkable
class StepDevice(Protocol):
    """A model that computes whole steps; its engine may launch a step while the last one runs.

    `launch` returns at once, and the next batch may be launched before the results of this one are
    read. An id below 0 in the next batch stands for a token that the host does not know yet:
    `drawn_before(n)` for the n-th draw of the launch before.
    """

    def launch(
        self, pieces: Sequence[Piece], rows: Sequence[int], draws: Sequence[Draw]
    ) -> Launched:
        """Push pieces and draw from some of their rows; see `Model.forward` and `Model.draw`.

        Raises what those raise.
        """


class AtOnce:
    """Runs a model step by step: `launch` returns only after the step is computed."""

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
        # If the draw has failed, the next launch gets id 0 in its place; the results for that run
        # are not used.
        return [max(self._drawn[drawn_before(token)].token, 0) for token in ids]


def context_pages(config: ModelConfig) -> int:
    """Return the number of pages that a sequence needs to fill the whole context."""
    return -(-config.context // PAGE_TOKENS)


def prefill_chunks(ids: Sequence[int]) -> list[Sequence[int]]:
    """Divide a prompt at absolute multiples of PREFILL_CHUNK_TOKENS.

    The last chunk may be shorter.
    """
    step = PREFILL_CHUNK_TOKENS
    return [ids[start : start + step] for start in range(0, len(ids), step)]


def prefill(model: Model, ids: Sequence[int], pages: Sequence[int]) -> Tensor:
    """Push a whole prompt; return the hidden rows of all its tokens, fp32 [len(ids), H]."""
    rows = []
    for index, chunk in enumerate(prefill_chunks(ids)):
        piece = Piece(chunk, index * PREFILL_CHUNK_TOKENS, pages, prefill=True)
        rows.append(model.forward([piece]).clone())
    return torch.cat(rows)


def fingerprint(
    directory: Path, code: Iterable[Path], *machine: str, digests: FileDigests | None = None
) -> str:
    """Return a hash that must be equal for workers to continue each other's streams token-exactly.

    It is the SHA-256, in hex, of the checkpoint's files, the code that determines numbers or masks,
    the versions of torch and llguidance, and `machine`: names of everything about the machine and
    its settings that the bits of results depend on. `digests` holds known digests of files, which
    are not computed again.
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


class KnownPages:
    """Checks that block tables name only pages of a cache, and remembers how far each is checked.

    A step checks only the pages that are new. Checking every page of every row would be 8,192
    numbers for 64 rows of 8,192 tokens.
    """

    def __init__(self, pages: int) -> None:
        self._pages = pages
        # Holds a reference to each list, so that no new list can get the same id().
        self._known: dict[int, tuple[Sequence[int], int]] = {}

    def check(self, table: Sequence[int], count: int) -> None:
        """Raise ValueError if one of the first `count` pages of a table is not in the cache."""
        _, known = self._known.get(id(table), (table, 0))
        if count <= known:
            return
        new = table[known:count]
        if min(new) < 0 or max(new) >= self._pages:
            raise ValueError(f"pages: a page is outside the {self._pages} of the cache")
        if len(self._known) >= MAX_KNOWN_TABLES:
            self._known.clear()
        self._known[id(table)] = table, count


def check_pieces(
    pieces: Sequence[Piece], config: ModelConfig, pages: KnownPages, drawn: int = 0
) -> None:
    """Raise the errors of `Model.forward` for invalid pieces, given a cache of these pages.

    drawn: number of ids below 0 that stand for tokens (`drawn_before`).
    """
    for piece in pieces:
        held = min(config.context, len(piece.pages) * PAGE_TOKENS)
        if piece.end > held:
            raise TooLarge(
                f"{piece.end} tokens do not fit the {held} that the context and the pages allow"
            )
        if not piece.ids or piece.start < 0 or (piece.prefill and not is_chunk(piece)):
            raise ValueError(
                f"pieces: {len(piece.ids)} tokens at {piece.start} are not a valid piece"
            )
        if min(piece.ids) < -drawn or max(piece.ids) >= config.vocab:
            raise ValueError(f"ids: an id is outside the vocabulary of {config.vocab} ids")
        pages.check(piece.pages, -(-piece.end // PAGE_TOKENS))


def is_chunk(piece: Piece) -> bool:
    """Return True if a piece begins a page and does not exceed it."""
    return piece.start % PREFILL_CHUNK_TOKENS == 0 and len(piece.ids) <= PREFILL_CHUNK_TOKENS
