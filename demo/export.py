"""Write a trained network as a packed Hugging Face BitNet checkpoint.

Its format is that of transformers' `bitnet` model with `autobitlinear` in offline mode.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save

from demo.net import Net, Shape
from tailrace.kernels.linear.ternary import pack_ternary, quantize_absmean

END_ID = 0


def tensors(net: Net) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors.

    Ternary layers are packed as uint8 with bf16 scales; all others are bf16.
    """
    out: dict[str, torch.Tensor] = {}
    ternary = net.ternary_weights()
    for name, parameter in net.named_parameters():
        latent = parameter.detach()
        if name in ternary:
            weight, scale = quantize_absmean(latent)
            out[f"model.{name}"] = pack_ternary(weight)
            out[f"model.{name}_scale"] = scale.bfloat16().reshape(1)
        else:
            out[f"model.{name}"] = latent.bfloat16()
    return out


def config(shape: Shape) -> dict[str, object]:
    """Return the contents of config.json for the `bitnet` architecture."""
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
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
        },
    }


def save_checkpoint(net: Net, directory: Path) -> None:
    """Write model.safetensors, config.json and generation_config.json into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = save(tensors(net), metadata={"format": "pt"})
    (directory / "model.safetensors").write_bytes(weights)
    generation = {"eos_token_id": END_ID, "pad_token_id": END_ID, "do_sample": False}
    for name, content in (
        ("config.json", config(net.shape)),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
