"""Random BitNet checkpoints in the packed format: quick to write, quick to run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from kernels.ternary import pack_ternary

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


def write_checkpoint(directory: Path, shape: Shape = Shape(), seed: int = 1) -> Path:
    """Write a whole checkpoint and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(random_tensors(shape, seed)), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config(shape)))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_ID]}))
    train_tokenizer(shape.vocab).save(str(directory / "tokenizer.json"))
    return directory


def config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_act": "relu2",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": shape.tied_head,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "dtype": "float32",
        "quantization_config": {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
        },
    }


def random_tensors(shape: Shape, seed: int) -> Iterator[tuple[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    kv = shape.kv_heads * (shape.hidden // shape.heads)
    hidden, ffn = shape.hidden, shape.ffn

    def noise(*size: int, around: float = 0.0, spread: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=random) * spread + around).bfloat16()

    # Small enough that the layers, not the last token alone, decide what comes next.
    yield "model.embed_tokens.weight", noise(shape.vocab, hidden, spread=0.3)
    yield "model.norm.weight", noise(hidden, around=1.0, spread=0.1)
    if not shape.tied_head:
        yield "lm_head.weight", noise(shape.vocab, hidden, spread=0.3)
    linears = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    norms = {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "self_attn.attn_sub_norm": hidden,
        "mlp.ffn_sub_norm": ffn,
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in linears.items():
            ternary = torch.randint(-1, 2, (rows, columns), generator=random, dtype=torch.int8)
            yield f"{prefix}.{name}.weight", pack_ternary(ternary)
            yield f"{prefix}.{name}.weight_scale", noise(1, around=0.1, spread=0.01)
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
