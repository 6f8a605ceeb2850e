"""Which tensors a model of a given shape has, and whether a checkpoint has exactly those; no torch.

The names are Llama's, in all three families.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kernels.shapes import WEIGHTS_PER_BYTE, Family
from origin.checkpoint.finding import Findings
from origin.checkpoint.model_config import ModelConfig
from origin.checkpoint.weights_file import StoredTensor, main_file, same_bytes, stored_tensors

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FLOATING = ("BF16", "F16", "F32")
PACKED = ("U8",)
# Computed from the config; older files hold it all the same.
IGNORED_SUFFIX = "rotary_emb.inv_freq"

Expected = tuple[tuple[str, ...], tuple[int, ...]]


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor that many checkpoints carry is needed by nobody."""
    return name.endswith(IGNORED_SUFFIX) or (name == HEAD and config.tied_head)


def linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out, in) of the linears of a layer, by name within it."""
    return {
        "self_attn.q_proj": (config.queries, config.hidden),
        "self_attn.k_proj": (config.keys, config.hidden),
        "self_attn.v_proj": (config.keys, config.hidden),
        "self_attn.o_proj": (config.hidden, config.queries),
        "mlp.gate_proj": (config.ffn, config.hidden),
        "mlp.up_proj": (config.ffn, config.hidden),
        "mlp.down_proj": (config.hidden, config.ffn),
    }


def norms(config: ModelConfig) -> dict[str, int]:
    """The size of the norms of a layer, by name within it."""
    sizes = {"input_layernorm": config.hidden, "post_attention_layernorm": config.hidden}
    match config.family:
        case Family.BITNET:
            sizes |= {"self_attn.attn_sub_norm": config.hidden, "mlp.ffn_sub_norm": config.ffn}
        case Family.QWEN3:
            sizes |= {
                "self_attn.q_norm": config.head_dim,
                "self_attn.k_norm": config.head_dim,
            }
    return sizes


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, Expected]]:
    """(name, (dtypes allowed, shape)) of every tensor of the checkpoint."""
    yield EMBEDDING, (FLOATING, (config.vocab, config.hidden))
    yield "model.norm.weight", (FLOATING, (config.hidden,))
    if not config.tied_head:
        yield HEAD, (FLOATING, (config.vocab, config.hidden))
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in linears(config).items():
            if config.packed:
                yield f"{prefix}.{name}.weight", (PACKED, (rows // WEIGHTS_PER_BYTE, columns))
                yield f"{prefix}.{name}.weight_scale", (FLOATING, (1,))
            else:
                yield f"{prefix}.{name}.weight", (FLOATING, (rows, columns))
        for name, size in norms(config).items():
            yield f"{prefix}.{name}.weight", (FLOATING, (size,))


def examine_weights(
    directory: Path, config: ModelConfig, findings: Findings
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name.

    A fault for each that is missing, misshapen, of another dtype, or too many. None is called
    missing where a file cannot be read.
    """
    before = len(findings.faults)
    stored = stored_tensors(directory, findings)
    whole = len(findings.faults) == before
    expected = dict(expected_tensors(config))
    for name, (dtypes, shape) in expected.items():
        if name in stored:
            _check_tensor(name, stored[name], dtypes, shape, findings)
        elif whole:
            findings.fault(main_file(directory), name, "is missing", f"{dtypes[0]} {shape}")
    _check_others(stored, expected, config, findings)
    return stored


def _check_others(
    stored: dict[str, StoredTensor],
    expected: dict[str, Expected],
    config: ModelConfig,
    findings: Findings,
) -> None:
    for name in sorted(stored.keys() - expected.keys()):
        if name == HEAD and config.tied_head:
            _check_tied(stored, expected[EMBEDDING][1], findings)
        elif not is_ignored(name, config):
            findings.fault(stored[name].file, name, "belongs to no part of the model")


def _check_tied(
    stored: dict[str, StoredTensor], shape: tuple[int, ...], findings: Findings
) -> None:
    """A head that is there all the same is the embedding, byte for byte."""
    head, embedding = stored[HEAD], stored.get(EMBEDDING)
    if embedding is None or embedding.shape != shape:
        return  # which is a fault already
    _check_tensor(HEAD, head, (embedding.dtype,), shape, findings)
    if (head.dtype, head.shape) != (embedding.dtype, shape):
        return
    try:
        is_same = same_bytes(head, embedding)
    except OSError as exc:
        findings.fault(head.file, HEAD, f"cannot be read: {exc}")
        return
    if not is_same:
        right = "tie_word_embeddings false, or no head"
        findings.fault(head.file, HEAD, f"differs from {EMBEDDING}", right)


def _check_tensor(
    name: str,
    tensor: StoredTensor,
    dtypes: tuple[str, ...],
    shape: tuple[int, ...],
    findings: Findings,
) -> None:
    if tensor.dtype not in dtypes:
        findings.fault(tensor.file, name, f"dtype {tensor.dtype}", " or ".join(dtypes))
    if tensor.shape != shape:
        findings.fault(tensor.file, name, f"shape {tensor.shape}", f"{shape}")
