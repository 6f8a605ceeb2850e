"""The shape of a decoder, from the config.json of a Hugging Face checkpoint.

Served are `bitnet`, `llama` and `qwen3`. What is missing means what it means in transformers;
what would load but compute something else is refused by key and value. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernels.attention.rope_scaling import RopeScaling
from kernels.shapes import Family
from origin.checkpoint.config_keys import AUTO_CLASSES, CLASS_NAMES, IRRELEVANT, NEUTRAL, READ
from origin.checkpoint.finding import Findings
from origin.checkpoint.model_json import JsonObject, read_object, read_object_if_there, shown
from origin.checkpoint.rope_config import read_rope
from origin.checkpoint.tokenizer_file import check_tokenizer

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

MAX_LAYERS = 1024
MAX_CONTEXT = 1 << 24
"""Tokens; the rotary tables have a row for each."""

FULL_ATTENTION = "full_attention"
QWEN3_FULL_LAYERS = 28
"""Layers before the first with a sliding window, where the file does not say."""


@dataclass(frozen=True, slots=True)
class FamilyDefaults:
    """What a key means that is not in the file (transformers' configuration classes)."""

    activation: str
    rope_theta: float
    norm_eps: float
    head_dim: int | None
    """None: hidden size / heads."""


DEFAULTS = {
    Family.BITNET: FamilyDefaults("relu2", 500_000.0, 1e-5, None),
    Family.LLAMA: FamilyDefaults("silu", 10_000.0, 1e-6, None),
    Family.QWEN3: FamilyDefaults("silu", 10_000.0, 1e-6, 128),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder; counts are in elements, `context` in tokens."""

    family: Family
    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_head: bool
    eos_ids: frozenset[int]
    packed: bool
    """BitNet: the files hold packed ternary weights, not real ones that become so at load."""

    @property
    def queries(self) -> int:
        """Elements of all query heads of a token; not always `hidden`."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Elements of all key heads of a token, and of all value heads."""
        return self.kv_heads * self.head_dim


def read_config(directory: Path) -> ModelConfig:
    """The model's shape; eos_token_id of generation_config.json goes before config.json's.

    tokenizer.json is held against it. Raises ModelError that names the file and the key.
    """
    findings = Findings()
    config = examine_config(directory, findings)
    if config is not None:
        check_tokenizer(directory, config.vocab, config.eos_ids, findings)
    findings.refuse()
    assert config is not None  # otherwise there was a fault
    return config


def examine_config(directory: Path, findings: Findings) -> ModelConfig | None:
    """As far as it can be read: None if its family is not served or there is a fault in it."""
    path = directory / CONFIG_FILE
    raw = read_object(path, findings)
    if raw is None:
        return None
    keys = JsonObject(path, raw, findings)
    family = _family(keys)
    if family is None:
        return None
    before = len(findings.faults)
    config = _config(directory, keys, family)
    return config if len(findings.faults) == before else None


def _config(directory: Path, keys: JsonObject, family: Family) -> ModelConfig:
    defaults = DEFAULTS[family]
    heads, kv_heads, head_dim = _heads(keys, family)
    vocab, context = (
        keys.count("vocab_size"),
        keys.count("max_position_embeddings", most=MAX_CONTEXT),
    )
    theta, scaling = read_rope(keys, context, defaults.rope_theta)
    config = ModelConfig(
        family=family,
        vocab=vocab,
        hidden=keys.count("hidden_size"),
        ffn=keys.count("intermediate_size"),
        layers=keys.count("num_hidden_layers", most=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=context,
        norm_eps=keys.number("rms_norm_eps", defaults.norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_head=keys.flag("tie_word_embeddings"),
        eos_ids=_eos_ids(directory, keys, vocab),
        packed=_quantization(keys, family),
    )
    _check_same_computation(keys, config)
    return config


def _family(keys: JsonObject) -> Family | None:
    kind = keys.raw.get("model_type")
    names = [family.value for family in Family]
    if kind not in names:
        keys.fault("model_type", shown(kind), "one of " + ", ".join(names))
        return None
    return Family(kind)


def _heads(keys: JsonObject, family: Family) -> tuple[int, int, int]:
    """(query heads, key heads, elements of one)."""
    heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
    # Only Llama gives every query head its own key head where the file does not say.
    said = "num_key_value_heads" in keys.raw or family is not Family.LLAMA
    given = keys.raw.get("num_key_value_heads", 0)
    kv_heads = heads if given is None or not said else keys.count("num_key_value_heads")
    head_dim = keys.count("head_dim", DEFAULTS[family].head_dim or max(hidden // heads, 1))
    free = keys.raw.get("head_dim") is not None or family is Family.QWEN3
    if (family is Family.BITNET or not free) and heads * head_dim != hidden:
        keys.fault("num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}")
    if heads % kv_heads:
        keys.fault("num_key_value_heads", f"{kv_heads}", f"a divisor of the {heads} heads")
    if head_dim % 2:
        keys.fault("head_dim", f"{head_dim}", "an even number, as rotary embedding turns pairs")
    return heads, kv_heads, head_dim


def _check_same_computation(keys: JsonObject, config: ModelConfig) -> None:
    """Refuse what would load but compute something else."""
    activation = DEFAULTS[config.family].activation
    keys.only("hidden_act", activation, default=activation)
    for key in ("attention_bias", "mlp_bias"):
        keys.only(key, False, default=False)
    for key, neutral in NEUTRAL.items():
        keys.only(key, neutral, default=neutral)
    keys.nothing_but(READ | NEUTRAL.keys() | IRRELEVANT)
    _check_classes(keys, config.family)
    _check_attention(keys, config)
    if config.family is Family.BITNET:
        sizes = {"hidden_size": config.hidden, "intermediate_size": config.ffn}
        sizes["num_key_value_heads"] = config.keys
        for key, size in sizes.items():
            if size % 4:
                keys.fault(key, f"{size} rows", "a multiple of 4, as four weights are one byte")


def _check_classes(keys: JsonObject, family: Family) -> None:
    """The code that computes it is that of its family, not one of its own."""
    right = f"{CLASS_NAMES[family]}ForCausalLM"
    kinds = keys.raw.get("architectures")
    if kinds and not (isinstance(kinds, list) and right in kinds):
        keys.fault("architectures", shown(kinds), shown([right]))
    own = keys.child("auto_map")
    for kind, name in ({} if own is None else own.raw).items():
        # `module.Class`, after the repository and two dashes where it is another one.
        if str(name).rpartition(".")[2] not in AUTO_CLASSES.get(family, ()):
            keys.fault(f"auto_map.{kind}", shown(name), "none: code of its own is not run")


def _check_attention(keys: JsonObject, config: ModelConfig) -> None:
    """Every layer attends to everything before it."""
    kinds = keys.raw.get("layer_types")
    if kinds is not None and kinds != [FULL_ATTENTION] * config.layers:
        keys.fault("layer_types", shown(kinds), f"{config.layers} times {FULL_ATTENTION}")
    if kinds is not None or keys.raw.get("sliding_window") is None:
        return
    window = keys.count("sliding_window")
    used = keys.flag("use_sliding_window", default=config.family is not Family.QWEN3)
    full_layers = 0
    if config.family is Family.QWEN3:
        full_layers = keys.count("max_window_layers", QWEN3_FULL_LAYERS, least=0)
    if used and window < config.context and config.layers > full_layers:
        keys.fault("sliding_window", f"{window}", f"null, or the context of {config.context}")


def _quantization(keys: JsonObject, family: Family) -> bool:
    """Whether the weights are packed; faults for every other way to quantise them."""
    found = keys.child("quantization_config")
    if family is not Family.BITNET:
        if found is not None:
            method = shown(found.raw.get("quant_method"))
            found.fault("quant_method", method, "none: weights as bf16, fp16 or fp32")
        return False
    if found is None:
        keys.fault("quantization_config", "is missing", "that of a BitNet checkpoint")
        return True
    found.only("quant_method", "bitnet")
    found.only("linear_class", "autobitlinear")
    found.only("use_rms_norm", False, default=False)
    spared = found.raw.get("modules_to_not_convert") or ["lm_head"]
    if spared != ["lm_head"]:
        found.fault("modules_to_not_convert", shown(spared), "null: every layer is ternary")
    mode = found.raw.get("quantization_mode", "offline")
    if mode not in ("offline", "online"):
        found.fault("quantization_mode", shown(mode), "offline (packed) or online (not packed)")
    return bool(mode != "online")


def _eos_ids(directory: Path, keys: JsonObject, vocab: int) -> frozenset[int]:
    path = directory / GENERATION_FILE
    place = JsonObject(path, read_object_if_there(path, keys.findings), keys.findings)
    if place.raw.get("eos_token_id") is None:
        place = keys
    value = place.raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for item in ids:
        if type(item) is not int or not 0 <= item < vocab:
            place.fault("eos_token_id", shown(item), f"an id of the vocabulary of {vocab}")
    if not ids:
        place.note("eos_token_id", "is missing", "without it only max_tokens and stops end a text")
    return frozenset(item for item in ids if type(item) is int)
