"""`model check`: what it reports about a checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tailrace.kernels.shapes import Family
from tailrace.ledger.errors import ModelError
from tailrace.origin.checkpoint.model_check import ModelReport, check_model
from tailrace.origin.checkpoint.model_config import read_config
from tailrace.origin.checkpoint.model_memory import Footprint
from tailrace.origin.formats import AS_STORED, Formats
from tailrace.origin.models import cpu_linear, cpu_model
from tailrace.origin.models.cpu_model import CpuModel
from tailrace.origin.models.tensors import examine_values, read_tensors
from tests.origin.held_bytes import held_bytes
from tests.origin.tiny_checkpoint import Shape, write_checkpoint

BITNET = Shape(layers=1, hidden=128)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write(directory: Path, shape: Shape = BITNET) -> Path:
    write_checkpoint(directory, shape)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


def set_keys(path: Path, **keys: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def places(report: ModelReport) -> list[tuple[str, str]]:
    return [(finding.file.name, finding.where) for finding in report.findings]


@pytest.mark.parametrize(
    "shape",
    [
        BITNET,
        Shape(layers=2, hidden=128, packed=False),
        Shape(family=Family.LLAMA, hidden=128, tied_head=False),
        Shape(family=Family.QWEN3, head_dim=32, shards=3),
    ],
)
def test_a_good_checkpoint_is_supported_and_nothing_is_found(tmp_path: Path, shape: Shape) -> None:
    report = check_model(write(tmp_path, shape))
    assert report.findings == []
    assert report.supported and report.has_template
    assert report.files == shape.shards
    assert report.disk_bytes == sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))
    assert report.footprints.keys() == {"cpu", "gpu"}


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(tied_head=False),
        Shape(family=Family.LLAMA, tied_head=False),
        Shape(family=Family.QWEN3, head_dim=24),
    ],
)
def test_parameters_are_counted_as_the_tensors_hold_them(tmp_path: Path, shape: Shape) -> None:
    write(tmp_path, shape)
    tensors = read_tensors(tmp_path, read_config(tmp_path))
    weights = {name: t for name, t in tensors.items() if not name.endswith("_scale")}
    packed = sum(t.numel() * (4 if t.dtype == torch.uint8 else 1) for t in weights.values())
    assert check_model(tmp_path).parameters == packed


@pytest.mark.parametrize(
    ("family", "formats"),
    [
        *((family, AS_STORED) for family in Family),
        (Family.BITNET, Formats(kv_cache="fp8", head="int8")),
        (Family.LLAMA, Formats("int8", "int8", "int8")),
        (Family.LLAMA, Formats("int4")),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_bytes_on_a_cpu_are_those_of_the_loaded_model(
    tmp_path: Path, family: Family, formats: Formats, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "is_fp32_quicker", lambda *_: False)
    write(tmp_path, Shape(family=family, tied_head=tied, hidden=128, ffn=256, vocab=512))
    config = read_config(tmp_path)
    model = CpuModel(config, read_tensors(tmp_path, config), "", formats=formats)
    kv_bytes = held_bytes(model._cache)
    weights_bytes = held_bytes(model) - kv_bytes
    footprint = check_model(tmp_path, formats).footprints["cpu"]
    assert kv_bytes == model.pages * footprint.kv_page_bytes
    # Beside the weights a model holds a few single numbers.
    assert 0 <= weights_bytes - footprint.weights_bytes < 0.01 * weights_bytes


def test_sequences_take_whole_pages_of_what_the_weights_leave() -> None:
    footprint = Footprint(weights_bytes=1000, kv_token_bytes=10, kv_share=1.0)
    assert footprint.kv_page_bytes == 640
    assert footprint.sequences(1000 + 640 * 4, context=65) == 2
    assert footprint.sequences(1000 + 640 * 4 - 1, context=65) == 1
    assert footprint.sequences(999, context=65) == 0
    assert Footprint(0, 10, 0.5).sequences(640 * 4, context=64) == 2


@pytest.mark.parametrize(
    ("formats", "shape", "place"),
    [
        (Formats("int8"), BITNET, "model_type"),
        (Formats("int4"), Shape(family=Family.LLAMA, hidden=128), "mlp.down_proj"),
        (
            Formats(head="int8"),
            Shape(family=Family.QWEN3, hidden=98, heads=2, kv_heads=1, head_dim=32),
            "hidden_size",
        ),
    ],
)
def test_formats_that_a_model_cannot_have_are_refused_by_the_place(
    tmp_path: Path, formats: Formats, shape: Shape, place: str
) -> None:
    report = check_model(write(tmp_path, shape), formats)
    assert places(report) == [("config.json", place)]
    assert not report.supported and report.footprints == {}
    with pytest.raises(ModelError, match=place) as caught:
        cpu_model.load(tmp_path, formats=formats)
    assert caught.value.hint is not None and "auto" in caught.value.hint


def test_heads_that_the_gpu_kernels_do_not_take_are_said_and_served(tmp_path: Path) -> None:
    report = check_model(write(tmp_path, Shape(family=Family.QWEN3, head_dim=24)))
    assert report.supported
    assert places(report) == [("config.json", "head_dim")]
    assert report.footprints.keys() == {"cpu"}


def test_faults_of_all_files_are_found_at_once(tmp_path: Path) -> None:
    write(tmp_path)
    set_keys(tmp_path / "config.json", hidden_act="gelu", rope_theta=0)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    report = check_model(tmp_path)
    assert not report.supported
    assert set(places(report)) == {
        ("config.json", "hidden_act"),
        ("config.json", "rope_theta"),
        ("tokenizer.json", ""),
        ("tokenizer_config.json", "chat_template:1"),
        ("model.safetensors", ""),
    }


def test_every_tensor_at_fault_is_found_with_what_would_be_right(tmp_path: Path) -> None:
    write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    tensors[q_proj] = torch.zeros(3, 3)
    del tensors["model.norm.weight"]
    tensors["more"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors")
    report = check_model(tmp_path)
    found = [(finding.where, finding.problem, finding.right) for finding in report.findings]
    assert sorted(found) == [
        ("model.layers.0.self_attn.q_proj.weight", "dtype F32", "U8"),
        ("model.layers.0.self_attn.q_proj.weight", "shape (3, 3)", "(32, 128)"),
        ("model.norm.weight", "is missing", "BF16 (128,)"),
        ("more", "is not part of the model", None),
    ]


def test_a_check_says_of_a_head_beside_a_tied_embedding_what_loading_says(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    tensors = {n: t.clone() for n, t in load_file(tmp_path / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert check_model(tmp_path).findings == []
    assert "lm_head.weight" not in read_tensors(tmp_path, config)
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    (finding,) = check_model(tmp_path).findings
    assert (finding.where, finding.fault) == ("lm_head.weight", True)
    with pytest.raises(ModelError, match=finding.problem):
        read_tensors(tmp_path, config)


def test_a_broken_file_that_is_read_twice_is_told_once(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert places(check_model(tmp_path)) == [("tokenizer_config.json", "")]


def test_an_empty_folder_lacks_every_file(tmp_path: Path) -> None:
    missing = ["config.json", "tokenizer.json", "model.safetensors"]
    assert places(check_model(tmp_path)) == [(name, "") for name in missing]


def test_a_tokenizer_that_does_not_load_is_found(tmp_path: Path) -> None:
    write(tmp_path)
    set_keys(tmp_path / "tokenizer.json", pre_tokenizer={"type": "Unheard"})
    (finding,) = check_model(tmp_path).findings
    assert (finding.file.name, finding.fault) == ("tokenizer.json", True)


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{{ 1 / 0 }}", LOOPS])
def test_a_missing_or_failing_template_is_worth_knowing(
    tmp_path: Path, template: str | None
) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    report = check_model(tmp_path)
    assert report.supported
    assert places(report) == [("tokenizer_config.json", "chat_template")]
    assert report.has_template == (template is not None)


@pytest.mark.parametrize(
    "template", ["{{ 9 ** 99999999 }}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"]
)
def test_a_template_that_cannot_be_compiled_in_bounds_is_found(
    tmp_path: Path, template: str
) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (finding,) = check_model(tmp_path).findings
    assert (finding.file.name, finding.where) == ("tokenizer_config.json", "chat_template")
    assert finding.fault


def test_values_are_looked_at_where_that_is_wanted(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    assert examine_values(tmp_path, config) == []
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    assert check_model(tmp_path).supported
    (finding,) = examine_values(tmp_path, config)
    assert finding.file == tmp_path / "model.safetensors"
    assert "model.norm.weight: holds NaN" in finding.problem
