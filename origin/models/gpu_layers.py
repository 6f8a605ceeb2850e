"""Builds a decoder of the kernels from a checkpoint's tensors, and sizes its KV cache.

The residual stream, the norms and the sums are fp32. Dense weights stay as they are stored, and
their inputs are rounded to their type. Keys, values and the LM head of a small model are fp32
(`origin.checkpoint.model_memory`), so that a small model computes what the CPU path computes: the
results differ only in the last bits of float sums. `Formats` may override this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tailrace.kernels.attention.paged_kv import FP8, PagedKv, page_bytes
from tailrace.kernels.attention.rope import Rope, rope_table
from tailrace.kernels.decoder import Decoder
from tailrace.kernels.launch import INTERPRETED
from tailrace.kernels.layers import (
    DenseHead,
    DenseLayer,
    Head,
    Int8Head,
    Layer,
    Scratch,
    TernaryLayer,
)
from tailrace.kernels.linear.epilogue import Epilogue
from tailrace.kernels.linear.float_triton import Weight, float_plan
from tailrace.kernels.linear.int8_linear import quantise_rows
from tailrace.kernels.linear.linear_plan import LinearWorkspace
from tailrace.kernels.linear.ternary_triton import gemv_rows
from tailrace.kernels.linear.ternary_weights import TernaryWeights
from tailrace.kernels.linear.weight_only import quantise_int4, quantise_int8
from tailrace.kernels.shapes import PAGE_TOKENS, Family, has_fp32_head
from tailrace.ledger.errors import ModelError
from tailrace.origin.checkpoint.layout import EMBEDDING, HEAD
from tailrace.origin.checkpoint.model_config import ModelConfig
from tailrace.origin.checkpoint.model_memory import GPU_KV_SHARE
from tailrace.origin.formats import Formats
from tailrace.origin.models.gpu_graphs import MAX_PREFILL_ROWS
from tailrace.origin.models.model import Progress, context_pages
from tailrace.origin.models.tensors import LayerTensors, Linear, Part, layer_tensors

MAX_FULL_SEQUENCES = 256
"""Maximum size of the KV cache, in sequences of a whole context."""
INTERPRETED_SEQUENCES = 4
"""Like MAX_FULL_SEQUENCES, but in Triton's interpreter, which is used for tests."""


class DecoderParts:
    """The parts of a decoder, moved to `device` layer by layer."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        device: torch.device,
        progress: Progress,
        formats: Formats,
        *,
        dependent: bool,
    ) -> None:
        self._formats = formats
        self._dependent = dependent
        self._config = config
        self._device = device
        self._scratch = Scratch(config, MAX_PREFILL_ROWS, device)
        self.table = tensors[EMBEDDING].to(device)
        self.layers: list[Layer] = []
        self.ropes: list[Rope] = []
        if config.family is Family.BITNET:
            self.layers += map(self._ternary_layer, self._moved(tensors, _ternary, progress))
        else:
            self.layers += self._dense_layers(self._moved(tensors, self._join, progress))
        self.head = self._head(tensors)

    def decoder(self, pages: int, step_rows: int) -> Decoder:
        """Return the decoder, with a KV cache of this many pages, for steps of this many rows."""
        config = self._config
        cache = PagedKv.allocate(
            config.layers, pages, config.kv_heads, config.head_dim,
            dtype=self._kv_dtype, device=self._device,
        )  # fmt: skip
        return Decoder(
            self._config, self.table, self.layers, self.ropes, self.head, cache,
            max_rows=MAX_PREFILL_ROWS, step_rows=step_rows,
            max_length=context_pages(config) * PAGE_TOKENS, dependent=self._dependent,
        )  # fmt: skip

    def pages_within(self, kv_bytes: int | None) -> int:
        """Return how many pages fit in `kv_bytes`; if that is None, in a share of the free memory.

        The result is at least the number of pages of one whole context. Raises ModelError if the
        GPU has not enough free memory.
        """
        config, context = self._config, context_pages(self._config)
        page = page_bytes(config.layers, config.kv_heads, config.head_dim, self._kv_dtype)
        asked = None if kv_bytes is None else max(kv_bytes // page, context)
        if self._device.type != "cuda":
            return context * INTERPRETED_SEQUENCES if asked is None else asked
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        fit = int(free * GPU_KV_SHARE) // page
        pages = min(fit, context * MAX_FULL_SEQUENCES) if asked is None else asked
        if not 1 <= pages <= fit:
            raise ModelError(
                f"the KV cache needs {max(pages, 1)} pages of {page} bytes, but may take only"
                f" {GPU_KV_SHARE:.0%} of the {free} bytes of GPU memory that are free",
                field="kv_mib",
                hint="set device to cpu, free memory of the GPU, or set a smaller kv_mib",
            )
        return pages

    @property
    def _kv_dtype(self) -> torch.dtype:
        small = has_fp32_head(self._config.vocab, self._config.hidden)
        plain = torch.float32 if small else torch.bfloat16
        return {"int8": torch.int8, "fp8": FP8}.get(self._formats.kv_cache, plain)

    def _moved(
        self,
        tensors: dict[str, Tensor],
        join: Callable[[Sequence[Part]], Linear],
        progress: Progress,
    ) -> list[LayerTensors[Linear]]:
        """Return the layers' tensors on the device; add their rotary embeddings to `ropes`."""
        config, moved = self._config, list[LayerTensors[Linear]]()
        tables = rope_table(config.context, config.head_dim, config.rope_theta, config.rope_scaling)
        cos, sin = (table.to(self._device) for table in tables)
        for index in range(config.layers):
            moved.append(layer := layer_tensors(tensors, index, join, self._device))
            self.ropes.append(Rope(cos, sin, layer.q_norm, layer.k_norm, eps=config.norm_eps))
            progress("move", index + 1, config.layers)
        return moved

    def _dense_layers(self, parts: Sequence[LayerTensors[Weight]]) -> list[DenseLayer]:
        plans = [
            float_plan(weight, Epilogue.SWIGLU if weight is layer.gate_up else Epilogue.STORE)
            for layer in parts
            for weight in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        workspace = LinearWorkspace(plans, MAX_PREFILL_ROWS, self._device)
        return [self._dense_layer(layer, workspace) for layer in parts]

    def _ternary_layer(self, layer: LayerTensors[TernaryWeights]) -> TernaryLayer:
        assert layer.attention_norm is not None and layer.ffn_norm is not None, "BitNet's norms"
        return TernaryLayer(
            scratch=self._scratch,
            eps=self._config.norm_eps,
            input_norm=layer.input_norm,
            qkv=layer.qkv,
            attention_norm=layer.attention_norm,
            output=layer.output,
            ffn_input_norm=layer.ffn_input_norm,
            gate_up=layer.gate_up,
            ffn_norm=layer.ffn_norm,
            down=layer.down,
            # Triton's interpreter takes seconds for the many programs of a GEMV. In the interpreter
            # the matrix kernels compute single rows, too, with results of the same bits.
            gemv_rows=0 if INTERPRETED else gemv_rows(self._config),
        )

    def _dense_layer(self, layer: LayerTensors[Weight], workspace: LinearWorkspace) -> DenseLayer:
        return DenseLayer(
            scratch=self._scratch,
            workspace=workspace,
            eps=self._config.norm_eps,
            input_norm=layer.input_norm,
            qkv=layer.qkv,
            output=layer.output,
            ffn_input_norm=layer.ffn_input_norm,
            gate_up=layer.gate_up,
            down=layer.down,
        )

    def _join(self, parts: Sequence[Part]) -> Weight:
        weight = torch.cat([weight for weight, _ in parts])
        match self._formats.weights:
            case "int8":
                return quantise_int8(weight)
            case "int4":
                return quantise_int4(weight)
            case "auto":
                return weight

    def _head(self, tensors: dict[str, Tensor]) -> Head:
        eps = self._config.norm_eps
        norm = tensors["model.norm.weight"].float().to(self._device)
        tied = self._config.tied_head
        weight = self.table if tied else tensors[HEAD].to(self._device)
        if self._formats.head == "int8":
            return Int8Head(self._scratch, eps, norm, *quantise_rows(weight))
        if has_fp32_head(self._config.vocab, self._config.hidden):
            weight = weight.float()
        workspace = LinearWorkspace([float_plan(weight)], MAX_PREFILL_ROWS, self._device)
        return DenseHead(self._scratch, workspace, eps, norm, weight)


def _ternary(parts: Sequence[Part]) -> TernaryWeights:
    scaled = [(packed, scale) for packed, scale in parts if scale is not None]
    return TernaryWeights.from_parts(scaled)
