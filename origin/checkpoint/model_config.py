"""The shape of a decoder, from the config.json of a Hugging Face checkpoint.

The families `bitnet`, `llama` and `qwen3` are served. Missing keys have the defaults of
transformers. A value with which the model would load but compute something else is refused. An
unknown key is refused, too, because it may stand for a computation with which the weights were
trained. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tailrace.kernels.attention.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)
from tailrace.kernels.shapes import DecoderShape, Family
from tailrace.origin.checkpoint.finding import (
    Findings,
    JsonObject,
    read_object,
    read_object_if_there,
    shown,
)
from tailrace.origin.checkpoint.tokenizer_file import check_tokenizer

# Keys of config.json whose values this module reads.
READ = frozenset(
    """
    architectures attention_bias auto_map eos_token_id head_dim hidden_act hidden_size
    intermediate_size layer_types max_position_embeddings max_window_layers mlp_bias model_type
    num_attention_heads num_hidden_layers num_key_value_heads original_max_position_embeddings
    partial_rotary_factor quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta
    sliding_window tie_word_embeddings use_sliding_window vocab_size
    """.split()
)

# Keys that would change the computation, each with the only accepted value, which changes nothing.
NEUTRAL: dict[str, object] = {
    "add_cross_attention": False,
    "attention_multiplier": None,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "is_causal": True,
    "is_encoder_decoder": False,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "pruned_heads": {},
    "query_pre_attn_scalar": None,
    "residual_multiplier": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "use_qk_norm": False,
}

# Keys that do not change the computation. They are about the checkpoint's history, training, other
# software, and defaults of requests.
IRRELEVANT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled
    _name_or_path _pre_quantization_dtype attn_implementation dtype finetuning_task
    is_llama_config model_name prefix task_specific_params tokenizer_class torch_dtype
    transformers.js_config transformers_version unsloth_fixed unsloth_version

    attention_dropout gradient_checkpointing initializer_range neftune_noise_alpha pretraining_tp

    chunk_size_feed_forward cross_attention_hidden_size id2label is_decoder label2id
    max_sequence_length model_max_length num_labels output_attentions output_hidden_states
    problem_type return_dict tf_legacy_loss tie_encoder_decoder torchscript use_bfloat16 use_cache

    bos_token_id cls_token_id decoder_start_token_id mask_token_id pad_token_id sep_token_id
    unk_token_id

    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
    """.split()
)

# Known keys of rope_scaling and rope_parameters. Like transformers, we ignore alpha, attn_factor
# and finetuned.
ROPE = frozenset(
    """
    alpha attention_factor attn_factor beta_fast beta_slow factor finetuned high_freq_factor
    low_freq_factor mscale mscale_all_dim original_max_position_embeddings partial_rotary_factor
    rope_theta rope_type truncate type
    """.split()
)

CLASS_NAMES = {Family.BITNET: "BitNet", Family.LLAMA: "Llama", Family.QWEN3: "Qwen3"}
# Early BitNet checkpoints name classes in code of their own, because transformers did not have
# BitNet yet.
AUTO_CLASSES = {Family.BITNET: frozenset(("BitNetConfig", "BitNetModel", "BitNetForCausalLM"))}


CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
MAX_LAYERS = 1024
MAX_CONTEXT = 1 << 24
"""Maximum context in tokens. It limits the rotary tables, which have a row for each position."""
FULL_ATTENTION = "full_attention"
QWEN3_FULL_LAYERS = 28
"""Default of `max_window_layers`: the number of first layers that have no sliding window."""


def read_rope(
    config: JsonObject, context: int, default_theta: float
) -> tuple[float, RopeScaling | None]:
    """Return (theta, scaling) of the rotary embedding in a config.json.

    Older files have `rope_theta` at the top level and a `rope_scaling` with `type` or `rope_type`;
    newer ones have everything in `rope_parameters`. If both exist, `rope_scaling` is used, as in
    transformers.
    """
    old, new = config.child("rope_scaling"), config.child("rope_parameters")
    rope = old if old is not None and old.raw else new
    if rope is None:
        rope = JsonObject(config.file, {}, config.findings)
    rope.nothing_but(ROPE)
    theta = config.number("rope_theta", default_theta, above=1.0)
    theta = rope.number("rope_theta", theta, above=1.0)
    for part in (config, rope):
        part.only("partial_rotary_factor", 1.0, default=1.0)
    try:
        return theta, _scaling(config, rope, context)
    except ValueError as exc:  # each number is valid, but not their combination
        rope.fault("", str(exc))
        return theta, None


def _scaling(config: JsonObject, rope: JsonObject, context: int) -> RopeScaling | None:
    kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    match kind:
        case "default":
            return None
        case "dynamic":
            # Dynamic scaling only affects positions beyond the context, which are never served.
            rope.number("factor")
            return None
        case "linear":
            return LinearScaling(rope.number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=rope.number("factor"),
                low_turns=rope.number("low_freq_factor"),
                high_turns=rope.number("high_freq_factor"),
                original_context=_original_context(config, rope, context),
            )
        case "yarn":
            return _yarn(config, rope, context)
    key = "rope_type" if rope.raw.get("rope_type") else "type"
    rope.fault(key, shown(kind), "default, linear, dynamic, llama3 or yarn")
    return None


def _yarn(config: JsonObject, rope: JsonObject, context: int) -> YarnScaling:
    original = _original_context(config, rope, context)
    factor = rope.number("factor", context / original)
    factors = (rope.optional_number("mscale"), rope.optional_number("mscale_all_dim"))
    scaling = YarnScaling(
        factor=factor,
        original_context=original,
        attention_factor=rope.number("attention_factor", yarn_attention_factor(factor, *factors)),
        fast_turns=rope.number("beta_fast", 32.0),
        slow_turns=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", default=True),
    )
    if original * factor > context:
        config.note(
            "max_position_embeddings",
            f"{context}: the scaling allows {original * factor:.0f} tokens",
            "a larger number would allow longer contexts",
        )
    return scaling


def _original_context(config: JsonObject, rope: JsonObject, context: int) -> int:
    """Return the context in tokens with which the model was trained before its RoPE was scaled.

    The key may be at the top level of `config.json` or in its RoPE settings; the value at the top
    level takes precedence. Without the key, return `context`.
    """
    key = "original_max_position_embeddings"
    return config.count(key, rope.count(key, context))


@dataclass(frozen=True, slots=True)
class FamilyDefaults:
    """Defaults of missing keys, from transformers' configuration classes."""

    activation: str
    rope_theta: float
    norm_eps: float
    head_dim: int | None
    """Elements of a head; None means the hidden size divided by the number of query heads."""


DEFAULTS = {
    Family.BITNET: FamilyDefaults("relu2", 500_000.0, 1e-5, None),
    Family.LLAMA: FamilyDefaults("silu", 10_000.0, 1e-6, None),
    Family.QWEN3: FamilyDefaults("silu", 10_000.0, 1e-6, 128),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderShape):
    """The shape of a decoder, and everything else in config.json that its computation needs."""

    rope_scaling: RopeScaling | None
    tied_head: bool
    eos_ids: frozenset[int]
    packed: bool
    """BitNet: True for packed ternary weights; False for float weights, made ternary at load."""


def read_config(directory: Path) -> ModelConfig:
    """Return the model's shape, after checking that tokenizer.json fits it.

    eos_token_id of generation_config.json takes precedence over that of config.json.

    Raises:
        ModelError: The checkpoint cannot be served; the error names the file and the key.
    """
    findings = Findings()
    config = examine_config(directory, findings)
    if config is not None:
        check_tokenizer(directory, config.vocab, config.eos_ids, findings)
    findings.refuse()
    assert config is not None  # otherwise `refuse` has raised the fault
    return config


def examine_config(directory: Path, findings: Findings) -> ModelConfig | None:
    """Return the model's shape; None if its family is not served or config.json has a fault."""
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
        name="checkpoint",
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
    """Return (number of query heads, number of key heads, number of elements of a head)."""
    heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
    # A missing key means "as many key heads as query heads" for Llama only; other families must
    # have the key.
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
        keys.fault(
            "head_dim", f"{head_dim}", "an even number, because rotary embedding rotates pairs"
        )
    return heads, kv_heads, head_dim


def _check_same_computation(keys: JsonObject, config: ModelConfig) -> None:
    """Add a fault for each key with which the model would load but compute something else."""
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
                keys.fault(
                    key,
                    f"{size} rows",
                    "a multiple of 4, because four weights are packed into a byte",
                )


def _check_classes(keys: JsonObject, family: Family) -> None:
    """Add a fault if the checkpoint names a class that is not its family's, or code of its own."""
    right = f"{CLASS_NAMES[family]}ForCausalLM"
    kinds = keys.raw.get("architectures")
    if kinds and not (isinstance(kinds, list) and right in kinds):
        keys.fault("architectures", shown(kinds), shown([right]))
    own = keys.child("auto_map")
    for kind, name in ({} if own is None else own.raw).items():
        # `name` is `module.Class`, or `REPOSITORY--module.Class` for code of another repository.
        if str(name).rpartition(".")[2] not in AUTO_CLASSES.get(family, ()):
            keys.fault(
                f"auto_map.{kind}",
                shown(name),
                "no auto_map, because a checkpoint's own code is not run",
            )


def _check_attention(keys: JsonObject, config: ModelConfig) -> None:
    """Add a fault unless every layer attends to all earlier tokens."""
    kinds = keys.raw.get("layer_types")
    if kinds is not None and kinds != [FULL_ATTENTION] * config.layers:
        keys.fault("layer_types", shown(kinds), f"{config.layers} × {FULL_ATTENTION}")
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
    """Return True if the weights are packed; other kinds of quantization are faults."""
    found = keys.child("quantization_config")
    if family is not Family.BITNET:
        if found is not None:
            method = shown(found.raw.get("quant_method"))
            found.fault("quant_method", method, "no quantization: weights in bf16, fp16 or fp32")
        return False
    if found is None:
        keys.fault("quantization_config", "is missing", "that of a BitNet checkpoint")
        return True
    found.only("quant_method", "bitnet")
    found.only("linear_class", "autobitlinear")
    found.only("use_rms_norm", False, default=False)
    spared = found.raw.get("modules_to_not_convert") or ["lm_head"]
    if spared != ["lm_head"]:
        found.fault("modules_to_not_convert", shown(spared), "null, because every layer is ternary")
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
        place.note(
            "eos_token_id",
            "is missing",
            "without it texts end only at max_tokens or a stop sequence",
        )
    return frozenset(item for item in ids if type(item) is int)
