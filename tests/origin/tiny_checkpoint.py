"""Random checkpoints of every family that is served: quick to write, quick to run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tailrace.kernels.linear.ternary import pack_ternary
from tailrace.kernels.shapes import Family

END = "<|end|>"
END_ID = 0
SENTENCES = (
    "The fox ran over the hill and the bear ran after the fox.",
    "Märchen über Füchse – so schön wie das Café.",
    "🦊 and 🐻 are friends, 狐 is a fox.",
)


@dataclass(frozen=True)
class Shape:
    """The numbers of config.json; the tokenizer's byte alphabet needs a vocab of 257 or more."""

    vocab: int = 300
    hidden: int = 64
    ffn: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    context: int = 256
    tied_head: bool = True
    family: Family = Family.BITNET
    head_dim: int | None = None
    """None: hidden / heads, and but for Qwen3 no key in config.json."""
    packed: bool = True
    """BitNet: ternary weights as bytes; otherwise bf16 weights that become ternary at load."""
    rope: dict[str, Any] = field(default_factory=dict)
    """More keys of config.json: rope_theta, rope_scaling, rope_parameters."""
    shards: int = 1

    @property
    def size_of_head(self) -> int:
        return self.head_dim or self.hidden // self.heads


KERNEL_SHAPES = {
    Family.BITNET: Shape(heads=2, kv_heads=1),
    Family.LLAMA: Shape(heads=2, kv_heads=1, family=Family.LLAMA, tied_head=False),
    Family.QWEN3: Shape(heads=2, kv_heads=1, family=Family.QWEN3, head_dim=64),
}
"""The least that the kernels take: heads of 32 elements; Qwen3's are wider than hidden / heads."""


def write_checkpoint(directory: Path, shape: Shape = Shape(), seed: int = 1) -> Path:
    """Write a whole checkpoint and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_weights(directory, dict(random_tensors(shape, seed)), shape.shards)
    (directory / "config.json").write_text(json.dumps(config(shape)))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_ID]}))
    train_tokenizer(shape.vocab).save(str(directory / "tokenizer.json"))
    return directory


def write_weights(directory: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    """Write one model.safetensors, or several shards and their index."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for at in range(shards):
        shard = f"model-{at + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[at::shards]}
        save_file(part, directory / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite one JSON file of a checkpoint."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def set_keys(directory: Path, **keys: object) -> Path:
    """Set keys of config.json."""
    change_json(directory / "config.json", lambda raw: raw.update(keys))
    return directory


def remove_keys(directory: Path, *keys: str) -> Path:
    """Remove keys of config.json."""

    def remove(raw: dict[str, Any]) -> None:
        for key in keys:
            del raw[key]

    change_json(directory / "config.json", remove)
    return directory


def config(shape: Shape) -> dict[str, object]:
    bitnet = shape.family is Family.BITNET
    class_name = {Family.BITNET: "BitNet", Family.LLAMA: "Llama", Family.QWEN3: "Qwen3"}
    content: dict[str, object] = {
        "architectures": [f"{class_name[shape.family]}ForCausalLM"],
        "model_type": shape.family.value,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_act": "relu2" if bitnet else "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": shape.tied_head,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "dtype": "float32",
    }
    if shape.head_dim is not None or shape.family is Family.QWEN3:
        content["head_dim"] = shape.size_of_head
    if bitnet:
        content["quantization_config"] = {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline" if shape.packed else "online",
        }
    return content | shape.rope


def random_tensors(shape: Shape, seed: int) -> Iterator[tuple[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    hidden, ffn, head_dim = shape.hidden, shape.ffn, shape.size_of_head
    queries, keys = shape.heads * head_dim, shape.kv_heads * head_dim

    def noise(*size: int, around: float = 0.0, spread: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=random) * spread + around).bfloat16()

    # Small enough that the layers, not the last token alone, decide what comes next.
    yield "model.embed_tokens.weight", noise(shape.vocab, hidden, spread=0.3)
    yield "model.norm.weight", noise(hidden, around=1.0, spread=0.1)
    if not shape.tied_head:
        yield "lm_head.weight", noise(shape.vocab, hidden, spread=0.3)
    linears = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if shape.family is Family.BITNET:
        norms |= {"self_attn.attn_sub_norm": hidden, "mlp.ffn_sub_norm": ffn}
    if shape.family is Family.QWEN3:
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in linears.items():
            if shape.family is Family.BITNET and shape.packed:
                ternary = torch.randint(-1, 2, (rows, columns), generator=random, dtype=torch.int8)
                yield f"{prefix}.{name}.weight", pack_ternary(ternary)
                yield f"{prefix}.{name}.weight_scale", noise(1, around=0.1, spread=0.01)
            else:
                yield f"{prefix}.{name}.weight", noise(rows, columns, spread=1.5 * columns**-0.5)
        for name, size in norms.items():
            yield f"{prefix}.{name}.weight", noise(size, around=1.0, spread=0.1)


def train_tokenizer(vocab: int) -> Tokenizer:
    """Byte-level BPE whose multi-byte characters are mostly several tokens; END has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer
