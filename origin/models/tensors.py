"""Reads the tensors of a Hugging Face checkpoint, and refuses a bad one.

Supported are `llama`, `qwen3` and `bitnet` (`origin.checkpoint.model_config`). BitNet comes in two
forms: packed, with ternary layers as uint8 [out / 4, in] and a one-element `weight_scale`
(`autobitlinear`, offline), and unpacked, with float weights that are made ternary here (online).
Every refusal is a ModelError whose field names the file and whose message names the key or the
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tailrace.kernels.linear.ternary import MIN_ABSMAX, pack_ternary
from tailrace.kernels.shapes import Family
from tailrace.ledger.errors import ModelError
from tailrace.origin.checkpoint.finding import Finding, Findings, refusal
from tailrace.origin.checkpoint.layout import (
    INDEX_FILE,
    examine_weights,
    is_ignored,
    linears,
    weight_files,
)
from tailrace.origin.checkpoint.model_config import CONFIG_FILE, GENERATION_FILE, ModelConfig
from tailrace.origin.checkpoint.tokenizer_file import TOKENIZER_FILE

EVEN_BITS = 0x55  # the lower bit of each of the four 2-bit codes in a byte


Linear = TypeVar("Linear")
Part = tuple[Tensor, Tensor | None]
"""Stored weight of one linear layer, and the scale of a ternary weight."""
CPU = torch.device("cpu")


def read_tensors(directory: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Return every tensor that the config requires, by name, free of NaN and infinity.

    Float tensors are bf16, fp16 or fp32, as stored. BitNet's linears are returned packed, uint8
    [out / 4, in], each with a float `weight_scale` [1], also if the files hold them unpacked.
    Raises ModelError.
    """
    findings = Findings()
    stored = examine_weights(directory, config, findings)
    findings.refuse()
    tensors: dict[str, Tensor] = {}
    wanted = (name for name in stored if not is_ignored(name, config))
    places = sorted((stored[name].file, name) for name in wanted)
    for file, group in groupby(places, key=lambda place: place[0]):
        tensors.update(_read(file, [name for _, name in group]))
    if config.family is Family.BITNET and not config.packed:
        _make_ternary(tensors, config)
    return tensors


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the files that determine a model's tokens, for its fingerprint; raise ModelError."""
    findings = Findings()
    weights = weight_files(directory, findings)
    findings.refuse()
    named = [directory / name for name in (CONFIG_FILE, TOKENIZER_FILE)]
    optional = [directory / name for name in (GENERATION_FILE, INDEX_FILE)]
    return [*named, *(path for path in optional if path.exists()), *weights]


def checkpoint_bytes(directory: Path) -> int:
    """Return the total size in bytes of `checkpoint_files`.

    The size is 0 if files are missing; reading the checkpoint then raises the error.
    """
    try:
        return sum(path.stat().st_size for path in checkpoint_files(directory))
    except (OSError, ModelError):
        return 0


def examine_values(directory: Path, config: ModelConfig) -> list[Finding]:
    """Read every weight of a checkpoint whose headers are right; return the first fault, if any."""
    try:
        read_tensors(directory, config)
    except ModelError as error:
        file = Path(error.field) if error.field else directory
        return [Finding(file, "", error.message, error.hint, fault=True)]
    return []


def _read(file: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one file, each checked."""
    try:
        with safe_open(file, "pt") as opened:
            for name in names:
                tensor = opened.get_tensor(name)
                _check_values(file, name, tensor)
                yield name, tensor
    except (OSError, SafetensorError) as exc:
        _refuse(file, "", f"cannot be read: {exc}", cause=exc)


def _check_values(file: Path, name: str, tensor: Tensor) -> None:
    if tensor.dtype == torch.uint8:
        # Both bits of a code are set only in the code 3.
        if bool((tensor & (tensor >> 1) & EVEN_BITS).any()):
            _refuse(file, name, "holds the code 3, which stands for no ternary value")
        return
    # aminmax needs one pass and no copy. Both results are NaN if any value is NaN.
    low, high = torch.aminmax(tensor)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        _refuse(file, name, "holds NaN or infinite values")


def _make_ternary(tensors: dict[str, Tensor], config: ModelConfig) -> None:
    """Round every linear to ternary by its mean absolute value, and pack it.

    transformers does so at every step of its `online` mode; here it is done once.
    """
    for layer in range(config.layers):
        for name in linears(config):
            stem = f"model.layers.{layer}.{name}.weight"
            real = tensors[stem].float()
            scale = absmean(real)
            ternary = (real * scale.reciprocal()).round_().clamp_(-1, 1).to(torch.int8)
            tensors[stem] = pack_ternary(ternary)
            tensors[f"{stem}_scale"] = scale


def absmean(real: Tensor) -> Tensor:
    """Return the scale of ternary weights: their mean absolute value, fp32 [1], never 0.

    The sum is made in fp64: in fp32 the scale's last bit would depend on the number of threads. But
    a worker can continue the streams of another one only if both have the same scales.
    """
    return real.abs().mean(dtype=torch.float64).float().clamp_(min=MIN_ABSMAX).reshape(1)


def _refuse(file: Path, where: str, problem: str, cause: Exception | None = None) -> NoReturn:
    raise refusal(Finding(file, where, problem, None, fault=True)) from cause


@dataclass(frozen=True, slots=True)
class LayerTensors(Generic[Linear]):
    """The tensors of one layer. Norms are fp32; norms that the model's family lacks are None."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_norm: Tensor | None
    output: Linear
    ffn_input_norm: Tensor
    gate_up: Linear
    ffn_norm: Tensor | None
    down: Linear


def layer_tensors(
    tensors: Mapping[str, Tensor],
    index: int,
    join: Callable[[Sequence[Part]], Linear],
    device: torch.device = CPU,
) -> LayerTensors[Linear]:
    """Return layer `index` on `device`, with linears of the same input joined.

    Query, key and value are joined, and gate and up. join: makes one linear of the parts that share
    an input, in the order of their outputs. A ValueError of `join` becomes a ModelError that names
    the parts.
    """
    prefix = f"model.layers.{index}"

    def norm(name: str) -> Tensor | None:
        weight = tensors.get(f"{prefix}.{name}.weight")
        return None if weight is None else weight.float().to(device)

    def required(name: str) -> Tensor:
        weight = norm(name)
        assert weight is not None, f"{prefix}.{name}: every checkpoint is read with it"
        return weight

    def linear(*names: str) -> Linear:
        stems = [f"{prefix}.{name}.weight" for name in names]
        try:
            return join([_part(tensors, stem, device) for stem in stems])
        except ValueError as exc:
            raise ModelError(str(exc), field=" or ".join(stems)) from exc

    return LayerTensors(
        input_norm=required("input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=norm("self_attn.q_norm"),
        k_norm=norm("self_attn.k_norm"),
        attention_norm=norm("self_attn.attn_sub_norm"),
        output=linear("self_attn.o_proj"),
        ffn_input_norm=required("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        ffn_norm=norm("mlp.ffn_sub_norm"),
        down=linear("mlp.down_proj"),
    )


def _part(tensors: Mapping[str, Tensor], stem: str, device: torch.device) -> Part:
    scale = tensors.get(f"{stem}_scale")
    return tensors[stem].to(device), None if scale is None else scale.to(device)
