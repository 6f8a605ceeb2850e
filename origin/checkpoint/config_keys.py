"""The keys of a config.json, as data: those that change nothing here, and those that would.

What is in neither table, and not read by `model_config`, is refused: a key that nobody knows may
say that the weights were trained in another computation.
"""

from __future__ import annotations

from kernels.shapes import Family

# What `model_config` and `rope_config` read.
READ = frozenset(
    """
    architectures attention_bias auto_map eos_token_id head_dim hidden_act hidden_size
    intermediate_size layer_types max_position_embeddings max_window_layers mlp_bias model_type
    num_attention_heads num_hidden_layers num_key_value_heads original_max_position_embeddings
    partial_rotary_factor quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta
    sliding_window tie_word_embeddings use_sliding_window vocab_size
    """.split()
)

# Each changes what is computed; the value with which it does not.
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

# Where it came from, how it was trained, how it is run elsewhere, and what it is asked for.
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

# Of rope_scaling and rope_parameters. transformers reads neither alpha, attn_factor nor finetuned.
ROPE = frozenset(
    """
    alpha attention_factor attn_factor beta_fast beta_slow factor finetuned high_freq_factor
    low_freq_factor mscale mscale_all_dim original_max_position_embeddings partial_rotary_factor
    rope_theta rope_type truncate type
    """.split()
)

CLASS_NAMES = {Family.BITNET: "BitNet", Family.LLAMA: "Llama", Family.QWEN3: "Qwen3"}
# BitNet was published with code of its own, before transformers had the same.
AUTO_CLASSES = {Family.BITNET: frozenset(("BitNetConfig", "BitNetModel", "BitNetForCausalLM"))}
