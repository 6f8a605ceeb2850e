"""Settings of rotary position embeddings in a checkpoint's config."""

from pathlib import Path
from typing import Any

import pytest

from tailrace.kernels.attention.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from tailrace.kernels.shapes import Family
from tailrace.ledger.errors import ModelError
from tailrace.origin.checkpoint.finding import Findings
from tailrace.origin.checkpoint.model_config import examine_config, read_config
from tests.origin.tiny_checkpoint import Shape, remove_keys, set_keys, write_checkpoint

LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, Shape(layers=1, family=Family.LLAMA))


def test_the_base_is_found_where_newer_files_keep_it(llama: Path) -> None:
    remove_keys(llama, "rope_theta")
    set_keys(llama, rope_parameters={"rope_type": "default", "rope_theta": 1234.0})
    assert read_config(llama).rope_theta == 1234.0


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"type": "linear", "factor": 4}, LinearScaling(4.0)),
        ({"rope_type": "linear", "factor": 2.5}, LinearScaling(2.5)),
        ({"rope_type": "dynamic", "factor": 2.0}, None),
        ({"rope_type": "default"}, None),
        ({}, None),
        (LLAMA_31, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        (
            {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64},
            YarnScaling(1.0, 64, 1.0),
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "beta_fast": 16,
             "beta_slow": 2, "truncate": False, "original_max_position_embeddings": 64},
            YarnScaling(4.0, 64, 1.25, 16.0, 2.0, truncate=False),
        ),
        ({"rope_type": "yarn", "factor": 1, "mscale": 1.0}, YarnScaling(1.0, 256, 1.0)),
    ],
)  # fmt: skip
def test_scaling_is_read_in_both_spellings(
    llama: Path, key: str, raw: dict[str, Any], expected: object
) -> None:
    assert read_config(set_keys(llama, **{key: raw})).rope_scaling == expected


def test_the_older_spelling_goes_first_and_its_base_with_it(llama: Path) -> None:
    set_keys(llama, rope_scaling={"type": "linear", "factor": 2.0, "rope_theta": 77.0})
    config = read_config(set_keys(llama, rope_parameters={"rope_type": "default"}))
    assert (config.rope_scaling, config.rope_theta) == (LinearScaling(2.0), 77.0)


def test_the_context_of_training_at_the_top_of_the_file_goes_first(llama: Path) -> None:
    set_keys(llama, rope_scaling=LLAMA_31, original_max_position_embeddings=32)
    assert read_config(llama).rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 32)


def test_a_scaling_that_reaches_beyond_the_context_is_worth_knowing(llama: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    findings = Findings()
    assert examine_config(set_keys(llama, rope_scaling=yarn), findings) is not None
    (note,) = findings.all
    assert (note.fault, note.where) == (False, "max_position_embeddings")
    assert "512" in note.problem


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_scaling.rope_type"),
        ({"type": "mrope"}, "rope_scaling.type"),
        ({"type": "linear"}, "rope_scaling.factor"),
        ({"type": "linear", "factor": "2"}, "rope_scaling.factor"),
        ({"type": "linear", "factor": float("nan")}, "rope_scaling.factor"),
        ({"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA_31 | {"high_freq_factor": 0.5}, "rope_scaling: high_turns"),
        (LLAMA_31 | {"low_freq_factor": None}, "rope_scaling.low_freq_factor"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "rope_scaling.truncate"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5}, "rope_scaling: fast_turns"),
        ("linear", "rope_scaling"),
    ],
)
def test_a_scaling_that_is_not_computed_is_refused_by_key(
    llama: Path, raw: object, named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        read_config(set_keys(llama, rope_scaling=raw))
