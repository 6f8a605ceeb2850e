"""The BitNet decoder on a GPU, by the Triton kernels; imported only where one is asked for.

The residual stream, the norms and the sums are fp32, keys and values of the cache and the LM head
are as the checkpoint's size allows (`FP32_HEAD_BYTES`). A small model therefore computes what
the CPU path computes, and gives the same tokens but for the last bits of the float sums.
"""

from __future__ import annotations

import platform
import weakref
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import triton
from torch import Tensor

import kernels
from kernels.decoder import Chunks, Decoder, Rows
from kernels.dense_triton import dense_plan
from kernels.epilogue import Epilogue
from kernels.layers import DenseHead, Head, Scratch, TernaryLayer
from kernels.linear_plan import LinearWorkspace
from kernels.paged_kv import HEAD_DIMS, PAGE_TOKENS, PagedKv
from kernels.rope import Rope, rope_table
from kernels.sampler import Sampling
from kernels.sampler_rows import SamplerRows, SamplerWorkspace
from kernels.sampler_triton import sample_rows
from kernels.shapes import DecoderShape, Family
from kernels.step_graph import StepGraph
from kernels.ternary_triton import GEMV_MAX_ROWS
from kernels.ternary_weights import TernaryWeights
from ledger.errors import ModelError, TooLarge
from origin.checkpoint import CONFIG_FILE, ModelConfig, read_config, read_tensors
from origin.model import PREFILL_CHUNK_TOKENS, Progress, fingerprint

MAX_SEQUENCES = 32
"""Sequences that hold a cache at once: what an engine runs at most."""
SHORTEST_GRAPH_TOKENS = 256
"""A decode step is captured for contexts up to this and each doubling of it."""
FP32_HEAD_BYTES = 64 * 1024 * 1024
"""An LM head that fits in so much is fp32; a larger one stays as it is stored."""


class GpuCache:
    """One sequence's row of the block tables, given back when nobody holds it any more.

    `length` is the number of tokens whose keys and values every layer holds.
    """

    def __init__(self, free: list[int], context: int) -> None:
        if not free:
            raise TooLarge("every sequence of the KV cache is taken")
        self.sequence = free.pop()
        self.context = context
        self.length = 0
        weakref.finalize(self, free.append, self.sequence)


class GpuModel:
    """A loaded checkpoint on `device`; see `origin.model.Model`.

    On a CPU the kernels run in Triton's interpreter, far slower than `BitNetModel`: that is for
    tests.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        identity: str,
        device: torch.device,
        progress: Progress,
        sequences: int = MAX_SEQUENCES,
    ) -> None:
        self.config = config
        self.fingerprint = identity
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
        self.device = f"{device.type} triton ({name})"
        self._place = device
        self._decoder = _decoder(config, tensors, device, sequences, progress)
        pages = -(-config.context // PAGE_TOKENS)
        table = torch.arange(sequences * pages, dtype=torch.int32, device=device)
        self._tables = table.view(sequences, pages)
        self._free = list(range(sequences))
        self._graphs: dict[int, StepGraph] = {}
        self._sampler = SamplerWorkspace(1, config.vocab, device)
        self._chosen = torch.zeros(1, dtype=torch.int32, device=device)
        self._faults = torch.zeros(1, dtype=torch.int32, device=device)

    def new_cache(self) -> GpuCache:
        """An empty cache for one sequence; TooLarge when all are taken."""
        return GpuCache(self._free, self.config.context)

    @torch.inference_mode()
    def advance(self, ids: Sequence[int], cache: GpuCache) -> Tensor:
        """Push T tokens after those in the cache; see `origin.model.Model.advance`.

        The rows returned are a view of a buffer that the next call overwrites.
        """
        start, end = cache.length, cache.length + len(ids)
        if end > cache.context:
            raise TooLarge(f"{end} tokens do not fit a context of {cache.context}")
        sequences = [cache.sequence] * len(ids)
        rows = Rows.of(ids, range(start, end), sequences, self._place)
        cache.length = end
        if len(ids) == 1:
            return self._decode(rows, end)
        chunk = Chunks.of([len(ids)], [start], [cache.sequence], self._place)
        return self._decoder.prefill(rows, chunk, self._tables, PREFILL_CHUNK_TOKENS)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden rows fp32 [T, H] -> fp32 [T, vocab], a view of a buffer."""
        return self._decoder.logits(hidden)

    @torch.inference_mode()
    def sample(self, hidden: Tensor, sampling: Sampling, position: int) -> int:
        """The token that follows the last of these rows; see `origin.model.Model.sample`."""
        rows = SamplerRows.of([sampling], [position], self._place)
        logits = self._decoder.logits(hidden[-1:])
        sample_rows(logits, rows, self._chosen, self._faults, self._sampler)
        if int(self._faults) or int(self._decoder.faults.any()):
            raise FloatingPointError("the logits hold NaN or infinite values")
        return int(self._chosen)

    def forward(self, ids: Sequence[int]) -> Tensor:
        """Logits fp32 [T, vocab] of a whole sequence, computed as a prompt would be."""
        cache, step = self.new_cache(), PREFILL_CHUNK_TOKENS
        bounds = [*range(0, len(ids), step), len(ids)]
        # One chunk at a time: the next one takes the buffers of the last.
        spans = pairwise(bounds)
        return torch.cat([self.logits(self.advance(ids[a:b], cache)).clone() for a, b in spans])

    def _decode(self, rows: Rows, length: int) -> Tensor:
        longest = _graph_length(length)
        if self._place.type != "cuda":
            return self._decoder.decode(rows, self._tables, min(longest, self._longest))
        graph = self._graphs.get(longest)
        if graph is None:
            graph = StepGraph(self._decoder, self._tables, 1, min(longest, self._longest))
            self._graphs[longest] = graph
        graph(rows)
        return graph.hidden

    @property
    def _longest(self) -> int:
        return self._tables.shape[1] * PAGE_TOKENS


def load(
    directory: Path, progress: Progress = lambda *_: None, device: torch.device | None = None
) -> GpuModel:
    """Read, check and move a checkpoint; see `origin.model.load_model`."""
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
    progress("read", 0, 1)
    tensors = read_tensors(directory, config)
    code = [Path(__file__), *Path(kernels.__path__[0]).glob("*.py")]
    identity = fingerprint(directory, code, *_machine(place))
    progress("read", 1, 1)
    return GpuModel(config, tensors, identity, place, progress)


def _machine(device: torch.device) -> tuple[str, ...]:
    """What compiles the kernels, and what for."""
    if device.type != "cuda":
        return triton.__version__, "interpreter", platform.machine()
    major, minor = torch.cuda.get_device_capability(device)
    return triton.__version__, torch.cuda.get_device_name(device), f"sm_{major}{minor}"


def _graph_length(length: int) -> int:
    """The shortest captured length that holds `length` positions."""
    longest = SHORTEST_GRAPH_TOKENS
    while longest < length:
        longest *= 2
    return longest


def _decoder(
    config: ModelConfig,
    tensors: dict[str, Tensor],
    device: torch.device,
    sequences: int,
    progress: Progress,
) -> Decoder:
    shape = _shape(config)
    pages = -(-config.context // PAGE_TOKENS)
    cos, sin = rope_table(config.context, config.head_dim, config.rope_theta)
    rope = Rope(cos.to(device), sin.to(device))
    scratch = Scratch(shape, PREFILL_CHUNK_TOKENS, device)
    layers = []
    for index in range(config.layers):
        layers.append(_layer(tensors, f"model.layers.{index}", scratch, config.norm_eps, device))
        progress("move", index + 1, config.layers)
    return Decoder(
        shape,
        tensors["model.embed_tokens.weight"].to(device),
        layers,
        [rope] * config.layers,
        _head(config, tensors, scratch, device),
        PagedKv.allocate(
            config.layers, sequences * pages, config.kv_heads, config.head_dim,
            dtype=torch.float32 if _is_small(shape) else torch.bfloat16, device=device,
        ),
        max_rows=PREFILL_CHUNK_TOKENS,
        max_length=pages * PAGE_TOKENS,
    )  # fmt: skip


def _shape(config: ModelConfig) -> DecoderShape:
    return DecoderShape(
        name="checkpoint",
        family=Family.BITNET,
        hidden=config.hidden,
        ffn=config.ffn,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab=config.vocab,
        context=config.context,
        rope_theta=config.rope_theta,
        norm_eps=config.norm_eps,
    )


def _is_small(shape: DecoderShape) -> bool:
    return shape.vocab * shape.hidden * 4 <= FP32_HEAD_BYTES


def _head(
    config: ModelConfig, tensors: dict[str, Tensor], scratch: Scratch, device: torch.device
) -> Head:
    name = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
    weight = tensors[name].to(device)
    if _is_small(_shape(config)):
        weight = weight.float()
    plan = dense_plan(weight, Epilogue.STORE)
    workspace = LinearWorkspace([plan], PREFILL_CHUNK_TOKENS, device)
    norm = tensors["model.norm.weight"].float().to(device)
    return DenseHead(scratch, workspace, config.norm_eps, norm, weight)


def _layer(
    tensors: dict[str, Tensor], prefix: str, scratch: Scratch, eps: float, device: torch.device
) -> TernaryLayer:
    def norm(name: str) -> Tensor:
        return tensors[f"{prefix}.{name}.weight"].float().to(device)

    def linear(*names: str) -> TernaryWeights:
        stems = [f"{prefix}.{name}.weight" for name in names]
        parts = [(tensors[stem].to(device), tensors[f"{stem}_scale"].to(device)) for stem in stems]
        try:
            return TernaryWeights.from_parts(parts)
        except ValueError as exc:
            raise ModelError(str(exc), field=" or ".join(stems)) from exc

    return TernaryLayer(
        scratch=scratch,
        eps=eps,
        input_norm=norm("input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attention_norm=norm("self_attn.attn_sub_norm"),
        output=linear("self_attn.o_proj"),
        ffn_input_norm=norm("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        ffn_norm=norm("mlp.ffn_sub_norm"),
        down=linear("mlp.down_proj"),
        # The interpreter takes seconds for the many programs of one; the bits are the same.
        gemv_rows=GEMV_MAX_ROWS if device.type == "cuda" else 0,
    )
