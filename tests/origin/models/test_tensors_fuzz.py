"""Whatever the files of a checkpoint hold, reading them gives a model or a ModelError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.kernels.shapes import Family
from tailrace.ledger.errors import ModelError
from tailrace.origin.checkpoint.model_check import check_model
from tailrace.origin.checkpoint.model_config import read_config
from tailrace.origin.models.tensors import checkpoint_files, read_tensors
from tests.origin.tiny_checkpoint import Shape, config, write_checkpoint

QUICK = settings(max_examples=60, suppress_health_check=[*HealthCheck])
SHAPES = {family: Shape(layers=1, ffn=64, family=family, shards=2) for family in Family}
ROPE_KEYS = (
    "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim", "rope_theta",
    "partial_rotary_factor", "original_max_position_embeddings",
)  # fmt: skip
KEYS = (
    *config(SHAPES[Family.BITNET]), "head_dim", "mlp_bias", "attention_bias", "layer_types",
    "sliding_window", "use_sliding_window", "max_window_layers", "final_logit_softcapping",
    "logits_scaling", "rope_scaling", "rope_parameters", "partial_rotary_factor",
)  # fmt: skip

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.sampled_from([1 << 62, -(1 << 62), 10**400, 1e308, 1e-308, 1 << 31])
    | st.floats()
    | st.sampled_from(["llama3", "yarn", "linear", "dynamic", "default", "bitnet", "online", ""])
    | st.text(max_size=4)
)
scalings = st.dictionaries(st.sampled_from(ROPE_KEYS), scalars, max_size=8)
values = scalars | scalings | st.lists(scalars, max_size=3)


def read(directory: Path) -> None:
    """All of it; anything but a ModelError that names a file goes on up."""
    field: str | None = str(directory / "every file")
    try:
        read_tensors(directory, read_config(directory))
        checkpoint_files(directory)
    except ModelError as error:
        field = error.field
    assert field is not None
    assert Path(field).parent == directory


@pytest.fixture(scope="module", params=list(Family), ids=lambda family: family.value)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fuzz")
    return write_checkpoint(directory, SHAPES[request.param])


@QUICK
@given(changes=st.dictionaries(st.sampled_from(KEYS), values, max_size=4))
def test_a_config_of_any_values(written: Path, changes: dict[str, Any]) -> None:
    path = written / "config.json"
    before = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(before) | changes))
        read(written)
        report = check_model(written)
        assert report.supported == (report.footprints != {})
    finally:
        path.write_text(before)


@QUICK
@given(
    name=st.sampled_from(
        ["config.json", "tokenizer.json", "model.safetensors.index.json",
         "generation_config.json", "model-00001-of-00002.safetensors"]
    ),
    places=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=3))),
    cut=st.none() | st.floats(0, 1),
)  # fmt: skip
def test_a_file_with_any_bytes_changed(
    written: Path, name: str, places: list[tuple[float, bytes]], cut: float | None
) -> None:
    path = written / name
    before = path.read_bytes()
    content = bytearray(before)
    # The header of a weights file, and a little more.
    length = min(len(content), 4096)
    for share, inserted in places:
        at = int(share * length)
        content[at : at + len(inserted)] = inserted
    try:
        path.write_bytes(content if cut is None else content[: int(cut * length)])
        read(written)
        check_model(written)
    finally:
        path.write_bytes(before)
