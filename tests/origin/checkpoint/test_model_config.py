"""Reading and checking the config of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BitNetConfig, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.utils.quantization_config import BitNetQuantConfig

from tailrace.kernels.shapes import Family
from tailrace.ledger.errors import ModelError
from tailrace.origin.checkpoint.finding import Findings
from tailrace.origin.checkpoint.model_config import examine_config, read_config
from tailrace.origin.checkpoint.model_memory import parameters
from tests.origin.tiny_checkpoint import Shape, change_json, remove_keys, set_keys, write_checkpoint

LLAMA = Shape(layers=1, family=Family.LLAMA)
QWEN3 = Shape(layers=1, family=Family.QWEN3, head_dim=24)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", Shape(layers=1))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "llama", LLAMA)


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "qwen3", QWEN3)


def test_the_shape_of_a_bitnet_checkpoint_is_read(copy: Path) -> None:
    config = read_config(copy)
    assert (config.family, config.packed) == (Family.BITNET, True)
    assert (config.vocab, config.hidden, config.ffn, config.layers) == (300, 64, 96, 1)
    assert (config.heads, config.kv_heads, config.head_dim, config.context) == (4, 2, 16, 256)
    assert (config.norm_eps, config.rope_theta, config.tied_head) == (1e-5, 500_000.0, True)
    assert config.rope_scaling is None


def test_heads_that_do_not_divide_the_hidden_size_are_read(qwen3: Path) -> None:
    config = read_config(qwen3)
    assert (config.family, config.head_dim, config.hidden) == (Family.QWEN3, 24, 64)
    assert (config.queries, config.keys) == (96, 48)


@pytest.mark.parametrize(
    ("shape", "theta", "eps", "head_dim"),
    [
        (Shape(layers=1), 500_000.0, 1e-5, 16),
        (LLAMA, 10_000.0, 1e-6, 16),
        (QWEN3, 10_000.0, 1e-6, 128),
    ],
)
def test_what_is_missing_means_what_it_means_in_transformers(
    tmp_path: Path, shape: Shape, theta: float, eps: float, head_dim: int
) -> None:
    write_checkpoint(tmp_path, shape)
    missing = ["rope_theta", "rms_norm_eps", "tie_word_embeddings", "hidden_act"]
    remove_keys(tmp_path, *missing, *(["head_dim"] if shape.head_dim else []))
    config = read_config(tmp_path)
    assert (config.rope_theta, config.norm_eps, config.head_dim) == (theta, eps, head_dim)
    assert not config.tied_head


def test_only_llama_may_leave_out_its_key_heads(llama: Path, qwen3: Path) -> None:
    assert read_config(remove_keys(llama, "num_key_value_heads")).kv_heads == 4
    assert read_config(set_keys(qwen3, num_key_value_heads=None)).kv_heads == 4
    with pytest.raises(ModelError, match="num_key_value_heads: is missing"):
        read_config(remove_keys(qwen3, "num_key_value_heads"))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 5}, {3, 4}),
        ({"eos_token_id": 3}, {"eos_token_id": 5}, {3}),
        ({}, {"eos_token_id": 5}, {5}),
        (None, {"eos_token_id": [5]}, {5}),
        (None, {"eos_token_id": None}, set()),
    ],
)
def test_the_end_of_text_is_that_of_generation_config_if_it_names_one(
    copy: Path, generation: dict[str, Any] | None, config: dict[str, Any], expected: set[int]
) -> None:
    path = copy / "generation_config.json"
    if generation is None:
        path.unlink()
    else:
        path.write_text(json.dumps(generation))
    assert read_config(set_keys(copy, **config)).eos_ids == expected


@pytest.mark.parametrize(
    ("file", "value"), [("generation_config.json", 300), ("config.json", True), ("config.json", -1)]
)
def test_an_end_of_text_outside_the_vocabulary_is_refused(
    copy: Path, file: str, value: object
) -> None:
    (copy / "generation_config.json").write_text("{}")
    change_json(copy / file, lambda raw: raw.update(eos_token_id=value))
    with pytest.raises(ModelError, match="eos_token_id") as caught:
        read_config(copy)
    assert caught.value.field == str(copy / file)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt2"),
        ("model_type", None),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("architectures", ["FooForCausalLM"]),
        ("architectures", ["Qwen3ForCausalLM"]),
        ("architectures", "LlamaForCausalLM"),
        ("auto_map", {"AutoModelForCausalLM": "modeling_foo.FooForCausalLM"}),
        ("auto_map", {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}),
        ("is_causal", False),
        ("use_qk_norm", True),
        ("no_rope_layers", [0]),
        ("num_local_experts", 8),
        ("clip_qkv", 8.0),
        ("scale_emb", 12),
        ("scale_depth", 1.4),
        ("never_heard_of", False),
        ("rope_parameters", {"full_attention": {"rope_type": "linear", "factor": 2.0}}),
        ("rope_parameters", {"rope_type": "default", "mrope_section": [1, 2]}),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("partial_rotary_factor", 0.5),
        ("sliding_window", 64),
        ("sliding_window", "64"),
        ("layer_types", ["sliding_attention"]),
        ("layer_types", []),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("logits_scaling", 8.0),
        ("rope_interleaved", True),
        ("rope_theta", 1.0),
        ("rope_theta", "10000"),
        ("hidden_size", 66),
        ("head_dim", 15),
        ("head_dim", 0),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", True),
        ("num_key_value_heads", 3),
        ("vocab_size", "300"),
        ("rms_norm_eps", -1.0),
        ("tie_word_embeddings", "no"),
        ("max_position_embeddings", None),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("quantization_config", {"quant_method": "bitnet"}),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_with_file_and_key(
    llama: Path, key: str, value: object
) -> None:
    named = "num_attention_heads" if key == "hidden_size" else key
    with pytest.raises(ModelError, match=named) as caught:
        read_config(set_keys(llama, **{key: value}))
    assert caught.value.field == str(llama / "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "silu"),
        ("head_dim", 32),
        ("intermediate_size", 98),
        ("quantization_config", None),
        ("quantization_config", {"quant_method": "bitnet"}),
    ],
)
def test_a_bitnet_config_that_cannot_be_served_is_refused_with_its_key(
    copy: Path, key: str, value: object
) -> None:
    named = "num_attention_heads" if key == "head_dim" else key
    with pytest.raises(ModelError, match=named):
        read_config(set_keys(copy, **{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("linear_class", "bitlinear"),
        ("quantization_mode", "later"),
        ("quant_method", "gptq"),
        ("use_rms_norm", True),
        ("modules_to_not_convert", ["model.layers.0.mlp.down_proj"]),
    ],
)
def test_another_way_of_quantising_is_refused(copy: Path, key: str, value: object) -> None:
    change_json(copy / "config.json", lambda raw: raw["quantization_config"].update({key: value}))
    with pytest.raises(ModelError, match=f"quantization_config.{key}"):
        read_config(copy)


def test_weights_that_become_ternary_at_load_are_told_from_packed_ones(tmp_path: Path) -> None:
    assert not read_config(write_checkpoint(tmp_path, Shape(layers=1, packed=False))).packed


@pytest.mark.parametrize(
    ("keys", "served"),
    [
        ({"use_sliding_window": False, "sliding_window": 64}, True),
        ({"use_sliding_window": True, "sliding_window": 256}, True),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, True),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, False),
        ({"use_sliding_window": True, "sliding_window": 64}, True),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": None}, True),
        ({"layer_types": ["full_attention"]}, True),
    ],
)
def test_a_sliding_window_is_refused_where_a_layer_uses_it(
    qwen3: Path, keys: dict[str, object], served: bool
) -> None:
    findings = Findings()
    examine_config(set_keys(qwen3, **keys), findings)
    assert [finding.where for finding in findings.faults] == ([] if served else ["sliding_window"])


def test_every_fault_of_a_config_is_found_at_once(llama: Path) -> None:
    set_keys(llama, vocab_size="300", hidden_act="gelu", mlp_bias=True, rope_theta=-1)
    findings = Findings()
    assert examine_config(llama, findings) is None
    named = {finding.where for finding in findings.faults}
    assert named >= {"vocab_size", "hidden_act", "mlp_bias", "rope_theta"}
    with pytest.raises(ModelError, match=r"and \d more that `tailrace model check` lists"):
        findings.refuse()


@pytest.mark.parametrize("content", ["", "[]", "{", "\udcff", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(copy: Path, content: str) -> None:
    (copy / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(copy)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_number_of_full_layers_that_is_none_is_refused(qwen3: Path) -> None:
    keys = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": "2"}
    with pytest.raises(ModelError, match='max_window_layers: "2"'):
        read_config(set_keys(qwen3, **keys))


# ---- models that are there ----


@pytest.mark.parametrize("config", [LlamaConfig(), Qwen3Config(), BitNetConfig()])
def test_every_key_that_transformers_writes_is_known(
    tmp_path: Path, config: PreTrainedConfig
) -> None:
    written = config.to_dict() | {"auto_map": None}
    if config.model_type == "bitnet":
        written["quantization_config"] = BitNetQuantConfig(linear_class="autobitlinear").to_dict()
    (tmp_path / "config.json").write_text(json.dumps(written))
    findings = Findings()
    assert examine_config(tmp_path, findings) is not None
    assert findings.faults == []


LLAMA_32_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
REAL = {
    "BitNet b1.58 2B4T": (
        {"model_type": "bitnet", "architectures": ["BitNetForCausalLM"], "hidden_act": "relu2",
         "auto_map": {"AutoConfig": "configuration_bitnet.BitNetConfig",
                      "AutoModelForCausalLM": "modeling_bitnet.BitNetForCausalLM"},
         "bos_token_id": 128_000, "eos_token_id": 128_001, "initializer_range": 0.02,
         "torch_dtype": "bfloat16", "transformers_version": "4.52.0", "hidden_size": 2560,
         "intermediate_size": 6912, "num_hidden_layers": 30, "num_attention_heads": 20,
         "num_key_value_heads": 5, "vocab_size": 128_256, "max_position_embeddings": 4096,
         "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True,
         "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear",
                                 "quantization_mode": "offline"}},
        (Family.BITNET, 128, 2_412_820_480),
    ),
    "Llama 3.2 1B": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False,
         "attention_dropout": 0.0, "eos_token_id": [128_001, 128_008, 128_009], "head_dim": 64,
         "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
         "max_position_embeddings": 131_072, "mlp_bias": False, "num_attention_heads": 32,
         "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
         "rms_norm_eps": 1e-5, "rope_scaling": LLAMA_32_ROPE, "rope_theta": 500_000.0,
         "tie_word_embeddings": True, "vocab_size": 128_256},
        (Family.LLAMA, 64, 1_235_814_400),
    ),
    "Llama 2 7B": (
        {"_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"],
         "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
         "initializer_range": 0.02, "intermediate_size": 11_008, "max_position_embeddings": 4096,
         "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
         "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
         "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32_000},
        (Family.LLAMA, 128, 6_738_415_616),
    ),
    "TinyLlama 1.1B": (
        {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1,
         "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
         "intermediate_size": 5632, "max_position_embeddings": 2048, "model_type": "llama",
         "num_attention_heads": 32, "num_hidden_layers": 22, "num_key_value_heads": 4,
         "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
         "transformers_version": "4.35.0", "vocab_size": 32_000},
        (Family.LLAMA, 64, 1_100_048_384),
    ),
    "SmolLM2 135M": (
        {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
         "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
         "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
         "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
         "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
         "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
         "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100_000,
         "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
         "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
         "transformers_version": "4.42.3", "vocab_size": 49_152},
        (Family.LLAMA, 64, 134_515_008),
    ),
    "Llama 3 8B": (
        {"model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "rope_scaling": None,
         "intermediate_size": 14_336, "max_position_embeddings": 8192, "num_attention_heads": 32,
         "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 500_000.0,
         "vocab_size": 128_256},
        (Family.LLAMA, 128, 8_030_261_248),
    ),
    "Qwen3 0.6B": (
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
         "eos_token_id": 151_645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
         "intermediate_size": 3072, "max_position_embeddings": 40_960, "max_window_layers": 28,
         "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
         "attention_dropout": 0.0, "bos_token_id": 151_643, "initializer_range": 0.02,
         "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
         "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1_000_000, "vocab_size": 151_936,
         "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False},
        (Family.QWEN3, 128, 596_049_920),
    ),
    "Qwen3 8B": (
        {"model_type": "qwen3", "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12_288,
         "max_position_embeddings": 40_960, "max_window_layers": 36, "num_attention_heads": 32,
         "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_theta": 1_000_000,
         "tie_word_embeddings": False, "vocab_size": 151_936},
        (Family.QWEN3, 128, 8_190_735_360),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "expected"), REAL.values(), ids=REAL.keys())
def test_well_known_models_are_taken_and_have_the_parameters_they_are_known_for(
    tmp_path: Path, raw: dict[str, Any], expected: tuple[Family, int, int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    findings = Findings()
    config = examine_config(tmp_path, findings)
    assert findings.faults == []
    assert config is not None
    assert (config.family, config.head_dim, parameters(config)) == expected
