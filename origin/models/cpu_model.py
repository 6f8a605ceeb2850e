"""A decoder on the CPU in fp32: it computes the hidden rows of a batch of pieces, and draws tokens.

It is exact as `origin.models.model` defines it: the bits of a row do not depend on its batch.
Ternary products are integer sums, and where fp32 holds them they stay below 2**24. fp32 products
use only shapes that were found to give a row the same bits (`cpu_linear`). In attention each
decoding row and each prefill chunk is computed alone, so that every shape follows from the
sequence's own length. All other operations work on each row separately.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tailrace import kernels
from tailrace.kernels.attention.attention import causal_attention, row_attention
from tailrace.kernels.attention.kv_cache import KvCache, Place
from tailrace.kernels.attention.paged_kv import FP8, page_bytes
from tailrace.kernels.attention.rope import rope_table
from tailrace.kernels.linear.int8_linear import quantise_rows
from tailrace.kernels.rows.norm import rms_norm
from tailrace.kernels.sampler.sampler_batch import sample_batch
from tailrace.kernels.shapes import PAGE_TOKENS, Family
from tailrace.ledger.errors import ModelError
from tailrace.origin.checkpoint.file_digests import FileDigests
from tailrace.origin.checkpoint.layout import EMBEDDING, HEAD
from tailrace.origin.checkpoint.model_config import ModelConfig, read_config
from tailrace.origin.checkpoint.model_memory import refuse_formats
from tailrace.origin.formats import AS_STORED, Formats
from tailrace.origin.models.cpu_linear import (
    DenseLinear,
    FloatLinear,
    Int4WeightLinear,
    Int8Linear,
    Int8WeightLinear,
    Products,
    TernaryLinear,
)
from tailrace.origin.models.logprobs import scores_of
from tailrace.origin.models.model import (
    DEFAULT_KV_BYTES,
    Draw,
    Drawn,
    KnownPages,
    Piece,
    Progress,
    check_pieces,
    context_pages,
    fingerprint,
)
from tailrace.origin.models.tensors import (
    LayerTensors,
    Part,
    checkpoint_bytes,
    layer_tensors,
    read_tensors,
)

Linear = TernaryLinear | FloatLinear

NORM = "model.norm.weight"
KV_DTYPES = {"auto": torch.float32, "int8": torch.int8, "fp8": FP8}


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one piece in a batch."""

    rows: range
    place: Place
    lengths: range
    """Number of positions that each row attends to, including its own."""
    prefill: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of a batch, besides its hidden rows, that every layer needs."""

    cos: Tensor
    """Cosines for rotary embedding, fp32 [T, 1, head_dim]; `sin` has the same shape."""
    sin: Tensor
    slots: Tensor
    """Slots of the KV cache that each row's keys and values are written to, int64 [T]."""
    spans: Sequence[Span]


def attends_in_place(config: ModelConfig) -> bool:
    """Return True if attention over consecutive pages in place has the same bits as over a copy.

    Results must not depend on page ids, and no BLAS promises equal bits, so they are tested.
    """
    random = torch.Generator().manual_seed(1)
    cache = KvCache(1, 4, config.kv_heads, config.head_dim)
    size = 2 * config.kv_heads, config.head_dim
    slots = torch.arange(cache.pages * PAGE_TOKENS)
    cache.write(0, slots, torch.randn(len(slots), *size, generator=random))
    q = torch.randn(5, config.heads, config.head_dim, generator=random)
    row = q[0].view(config.kv_heads, -1, config.head_dim)
    pages, scale = torch.tensor([1, 2, 3]), torch.tensor(config.head_dim**-0.5)
    for length in (5, 63, 64, 65, 100, 192):
        lying, copied = cache.read(0, 1, length), cache.read(0, pages, length)
        alike = torch.equal(
            row_attention(row, *lying, scale), row_attention(row, *copied, scale)
        ) and torch.equal(causal_attention(q, *lying), causal_attention(q, *copied))
        if not alike:
            return False
    return True


class CpuLayer:
    """One decoder layer of any family; transforms hidden rows and stores their keys and values."""

    def __init__(self, index: int, config: ModelConfig, parts: LayerTensors[Linear]) -> None:
        self._index = index
        self._parts = parts
        self._eps = config.norm_eps
        self._ffn = config.ffn
        self._squared_relu = config.family is Family.BITNET
        self._heads, self._kv_heads = config.heads, config.kv_heads
        self._head_dim = config.head_dim
        self._turned = config.heads + config.kv_heads
        self._scale = torch.tensor(config.head_dim**-0.5)

    def __call__(self, x: Tensor, cache: KvCache, batch: Batch) -> Tensor:
        """Compute the layer for a batch of hidden rows: fp32 [T, hidden] -> fp32 [T, hidden]."""
        parts, eps = self._parts, self._eps
        qkv = parts.qkv(rms_norm(x, parts.input_norm, eps)).view(len(x), -1, self._head_dim)
        mixed = self._attend(self._turn(qkv, batch), cache, batch)
        if parts.attention_norm is not None:
            mixed = rms_norm(mixed, parts.attention_norm, eps)
        x = x + parts.output(mixed)
        inner = self._activate(parts.gate_up(rms_norm(x, parts.ffn_input_norm, eps)))
        if parts.ffn_norm is not None:
            inner = rms_norm(inner, parts.ffn_norm, eps)
        return parts.down(inner).add_(x)

    def _turn(self, qkv: Tensor, batch: Batch) -> Tensor:
        """Rotate the query and key heads of fp32 [T, heads + 2 kv_heads, D] to their positions.

        The two products and the sum are separate operations, each rounded. Fused ones would round a
        row's last elements differently depending on the size of the batch, because torch fuses them
        for whole vectors only.
        """
        parts, heads = self._parts, self._heads
        turned = qkv[:, : self._turned]
        if parts.q_norm is not None and parts.k_norm is not None:
            query = rms_norm(turned[:, :heads], parts.q_norm, self._eps)
            turned = torch.cat((query, rms_norm(turned[:, heads:], parts.k_norm, self._eps)), 1)
        swapped = turned.roll(self._head_dim // 2, -1).mul_(batch.sin)
        torch.add(turned * batch.cos, swapped, out=qkv[:, : self._turned])
        return qkv

    def _attend(self, qkv: Tensor, cache: KvCache, batch: Batch) -> Tensor:
        """Attend: fp32 [T, heads + 2 kv_heads, D] -> fp32 [T, heads * D]."""
        cache.write(self._index, batch.slots, qkv[:, self._heads :])
        # The query heads of a KV head are contiguous: [T, kv_heads, heads / kv_heads, D].
        queries = qkv[:, : self._heads].view(len(qkv), self._kv_heads, -1, self._head_dim)
        mixed: list[Tensor] = []
        for span in batch.spans:
            keys, values = cache.read(self._index, span.place, span.lengths[-1])
            if span.prefill:
                own = qkv[span.rows.start : span.rows.stop, : self._heads]
                chunk = causal_attention(own, keys, values)
                mixed.append(chunk.view(-1, *queries.shape[2:]))
            elif len(span.rows) == 1:
                mixed.append(row_attention(queries[span.rows[0]], keys, values, self._scale))
            else:
                mixed += [
                    row_attention(queries[row], keys[..., :length], values[:, :length], self._scale)
                    for row, length in zip(span.rows, span.lengths, strict=True)
                ]
        return (torch.cat(mixed) if len(mixed) > 1 else mixed[0]).view(len(qkv), -1)

    def _activate(self, gate_up: Tensor) -> Tensor:
        """Apply the activation: fp32 [T, 2 ffn], gate before up -> fp32 [T, ffn]."""
        gate, up = gate_up[:, : self._ffn], gate_up[:, self._ffn :]
        if self._squared_relu:
            return gate.relu().square_().mul_(up)
        return F.silu(gate).mul_(up)


class CpuModel:
    """A checkpoint loaded on a CPU; see `model.Model`.

    All calls are deterministic for the same fingerprint and number of threads.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        fingerprint: str,
        progress: Progress = lambda *_: None,
        kv_bytes: int = DEFAULT_KV_BYTES,
        formats: Formats = AS_STORED,
    ) -> None:
        """Build the model, emptying `tensors` so that no weight is held twice."""
        self.config = config
        self.fingerprint = fingerprint
        self.device = formats.on("cpu torch")
        kv_dtype = KV_DTYPES[formats.kv_cache]
        self.pages = pages_within(config, kv_bytes, kv_dtype)
        self._known_pages = KnownPages(self.pages)
        self._cache = _cache(config, self.pages, kv_dtype)
        self._formats = formats
        self._products = Products()
        self._embedding, self._head = self._tables(tensors)
        self._final_norm = tensors.pop(NORM).float()
        cos, sin = rope_table(
            config.context, config.head_dim, config.rope_theta, config.rope_scaling
        )
        self._cos, self._sin = cos[:, None], sin[:, None]
        self._layers = []
        for index in range(config.layers):
            self._layers.append(self._layer(tensors, index))
            progress("unpack", index + 1, config.layers)

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> Tensor:
        """Push a batch of pieces through the model; see `model.Model.forward`."""
        check_pieces(pieces, self.config, self._known_pages)
        batch = self._batch(pieces)
        x = self._embedding[torch.tensor([i for piece in pieces for i in piece.ids])].float()
        for layer in self._layers:
            x = layer(x, self._cache, batch)
        return x

    @torch.inference_mode()
    def draw(self, hidden: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """Return the tokens that follow these rows; see `model.Model.draw`."""
        if not draws:
            return []
        logits = self.logits(hidden)
        tokens = sample_batch(
            logits,
            [draw.sampling for draw in draws],
            [draw.position for draw in draws],
            [draw.mask for draw in draws],
            [draw.counts for draw in draws],
        )
        scores = scores_of(logits, draws, tokens)
        return [Drawn(*pair) for pair in zip(tokens, scores, strict=True)]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute hidden rows fp32 [rows, H] -> fp32 [rows, vocab]."""
        return self._head(rms_norm(hidden, self._final_norm, self.config.norm_eps))

    def _tables(self, tensors: dict[str, Tensor]) -> tuple[Tensor, DenseLinear | Int8Linear]:
        """Return embeddings and LM head, removing their tensors from the dictionary."""
        tied = self.config.tied_head
        embedding = tensors.pop(EMBEDDING)
        stored = embedding if tied else tensors.pop(HEAD)
        if self._formats.head == "int8":
            return embedding, Int8Linear(*quantise_rows(stored))
        head = DenseLinear([(stored, None)], self._products)
        return (head.weight if tied else embedding), head

    def _layer(self, tensors: dict[str, Tensor], index: int) -> CpuLayer:
        """Return layer `index`, removing its tensors from the dictionary."""
        parts: LayerTensors[Linear] = layer_tensors(tensors, index, self._linear)
        for name in [name for name in tensors if name.startswith(f"model.layers.{index}.")]:
            del tensors[name]
        return CpuLayer(index, self.config, parts)

    def _linear(self, parts: Sequence[Part]) -> Linear:
        if self.config.family is Family.BITNET:
            return TernaryLinear(parts)
        match self._formats.weights:
            case "int8":
                return Int8WeightLinear(parts, self._products)
            case "int4":
                return Int4WeightLinear(parts, self._products)
            case "auto":
                return DenseLinear(parts, self._products)

    def _batch(self, pieces: Sequence[Piece]) -> Batch:
        spans: list[Span] = []
        positions: list[int] = []
        slots: list[int] = []
        for piece in pieces:
            own = range(piece.start, piece.end)
            rows = range(len(positions), len(positions) + len(own))
            positions += own
            slots += self._cache.slots(piece.pages, own)
            used = piece.pages[: -(-piece.end // PAGE_TOKENS)]
            place = self._cache.place(used)
            spans.append(Span(rows, place, range(piece.start + 1, piece.end + 1), piece.prefill))
        at = torch.tensor(positions)
        return Batch(self._cos[at], self._sin[at], torch.tensor(slots), spans)


def pages_within(config: ModelConfig, kv_bytes: int, kv_dtype: torch.dtype = torch.float32) -> int:
    """Return the pages that fit into this many bytes, at least those of a whole context."""
    page = page_bytes(config.layers, config.kv_heads, config.head_dim, kv_dtype)
    return max(kv_bytes // page, context_pages(config))


def _cache(config: ModelConfig, pages: int, dtype: torch.dtype) -> KvCache:
    try:
        return KvCache(
            config.layers,
            pages,
            config.kv_heads,
            config.head_dim,
            in_place=attends_in_place(config),
            dtype=dtype,
        )
    except RuntimeError as exc:  # raised by torch if it cannot allocate the memory
        size = pages * page_bytes(config.layers, config.kv_heads, config.head_dim, dtype)
        raise ModelError(
            f"not enough memory: {pages} pages of keys and values take {size} bytes",
            field="max_position_embeddings",
            hint="set a smaller context in config.json, or use a machine with more memory",
        ) from exc


def load(
    directory: Path,
    progress: Progress = lambda *_: None,
    kv_bytes: int = DEFAULT_KV_BYTES,
    formats: Formats = AS_STORED,
    digests: FileDigests | None = None,
) -> CpuModel:
    """Read, check and unpack a checkpoint; see `load.load_model`."""
    progress("check", 0, 1)
    config = read_config(directory)
    refuse_formats(formats, directory, config)
    size = checkpoint_bytes(directory)
    progress("read", 0, size)
    tensors = read_tensors(directory, config)
    progress("hash", 0, size)
    # These change the bits of results: torch chooses CPU kernels by the instruction set, and splits
    # sums by the number of threads.
    arithmetic = torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads"
    machine = platform.machine(), *arithmetic, str(formats)
    identity = fingerprint(directory, _numeric_code(), *machine, digests=digests)
    progress("unpack", 0, config.layers)
    return CpuModel(config, tensors, identity, progress, kv_bytes, formats)


def _numeric_code() -> list[Path]:
    """Return the source files that determine the bits of results on a CPU, for the fingerprint."""
    return [
        *Path(__file__).parent.glob("cpu_*.py"),
        *(path for path in kernels.sources() if not path.stem.endswith("_triton")),
    ]
