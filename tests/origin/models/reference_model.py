"""A checkpoint in transformers, in fp32: what ours is held against."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tailrace.kernels.linear.ternary import quantize_activations
from tailrace.origin.models.cpu_linear import TernaryLinear
from tailrace.origin.models.cpu_model import CpuModel
from tailrace.origin.models.model import context_pages, prefill
from tests.origin.models.sequences import decoded_rows, prompt_logits

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # transformers compiles parts of BitNet otherwise

Rounded = list[torch.Tensor]
"""The int8 activations that enter qkv, output, gate and up, and down of each layer in turn."""


def load_reference(directory: Path) -> Any:
    """Return the checkpoint in transformers, every weight in fp32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    # Its own .float() refuses quantised models, whose embeddings and norms stay bf16 otherwise.
    return torch.nn.Module.float(loaded)


@torch.inference_mode()
def reference_logits(reference: Any, ids: list[int]) -> torch.Tensor:
    """Logits [T, vocab] in transformers."""
    logits: torch.Tensor = reference(torch.tensor([ids])).logits[0]
    return logits


def reference_greedy(reference: Any, ids: list[int], count: int) -> list[int]:
    """Return the likeliest token `count` times over, each from a whole pass without a cache."""
    known = list(ids)
    for _ in range(count):
        known.append(int(reference_logits(reference, known)[-1].argmax()))
    return known[len(ids) :]


def reference_rounded(reference: Any, ids: list[int]) -> tuple[torch.Tensor, Rounded]:
    """Logits in transformers, and what its linear layers rounded their inputs to."""
    rounded: Rounded = []

    def look(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        rounded.append(quantize_activations(inputs[0])[0].view(len(ids), -1))

    fed_apart = re.compile(r"(q|o|gate|down)_proj$")  # k, v and up see the inputs of these
    linears = [m for name, m in reference.named_modules() if fed_apart.search(name)]
    hooks = [linear.register_forward_pre_hook(look) for linear in linears]
    logits = reference_logits(reference, ids)
    for hook in hooks:
        hook.remove()
    return logits, rounded


def our_greedy(model: CpuModel, ids: list[int], count: int) -> list[int]:
    """Return the likeliest token `count` times over, each from a row of decoding."""
    pages = range(context_pages(model.config))
    hidden, chosen = prefill(model, ids, pages), list[int]()
    while True:
        chosen.append(int(model.logits(hidden[-1:]).argmax()))
        if len(chosen) == count:
            return chosen
        start = len(ids) + len(chosen) - 1
        hidden = decoded_rows(model, chosen[-1:], start, pages)


def our_rounded(
    model: CpuModel, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, Rounded]:
    """Logits of our model, and what its linear layers rounded their inputs to."""
    rounded: Rounded = []
    sums = TernaryLinear._sums

    def look(layer: TernaryLinear, quantized: torch.Tensor) -> torch.Tensor:
        rounded.append(quantized)
        return sums(layer, quantized)

    with monkeypatch.context() as patch:
        patch.setattr(TernaryLinear, "_sums", look)
        return prompt_logits(model, ids), rounded


def first_difference(ours: Rounded, theirs: Rounded) -> int | None:
    """By how many steps the first layer input that differs does so, at most; None if none does."""
    for one, other in zip(ours, theirs, strict=True):
        steps = int((one.int() - other.int()).abs().max())
        if steps:
            return steps
    return None
