"""`tailrace model` as a person or a script would call it, on the demo model and copies of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "origin/demo/model"
# A machine that runs only a supervisor has no torch.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from tailrace.cli import main; main()"
WITH_TORCH = "from tailrace.cli import main; main()"


def check(*arguments: str | Path, code: str = WITHOUT_TORCH) -> tuple[int, str]:
    """(exit status, what it printed) of `tailrace model check`."""
    done = subprocess.run(
        [sys.executable, "-c", code, "model", "check", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    said = (done.stdout + done.stderr).decode()
    assert "Traceback" not in said
    return done.returncode, said


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def test_the_demo_model_is_told_in_figures() -> None:
    status, said = check(DEMO, "--memory", "1GiB")
    assert status == 0
    lines = {line.split("  ")[0]: line.split() for line in said.splitlines() if line[0] != " "}
    assert lines["supported"][-1] == "yes"
    assert lines["family"][-1] == "bitnet"
    assert lines["parameters"][-1] == "2,636,352"
    assert lines["full contexts in 1.0 GiB"][-2:] == ["226", "181"]


def test_the_same_as_json() -> None:
    status, said = check(DEMO, "--json", "--memory", "1GiB")
    document = json.loads(said)
    assert status == 0
    assert document["supported"] and document["chat_template"] and document["findings"] == []
    assert (document["family"], document["context"], document["files"]) == ("bitnet", 1024, 1)
    cpu = document["devices"]["cpu"]
    assert cpu["kv_page_bytes"] == 64 * cpu["kv_token_bytes"] == 64 * 2 * 3 * 32 * 6 * 4
    assert cpu["full_context_sequences"] == 226
    assert "null" in json.dumps(json.loads(check(DEMO, "--json")[1])["devices"]["cpu"])


def test_what_is_wrong_is_told_with_what_would_be_right(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config |= {"hidden_act": "silu", "num_hidden_layers": "six"}
    (copy / "config.json").write_text(json.dumps(config))
    status, said = check(copy)
    assert status == 1
    assert "wrong config.json: hidden_act: \"silu\" (expected 'relu2')" in said
    assert 'wrong config.json: num_hidden_layers: "six" (expected a whole number above 0)' in said
    document = json.loads(check(copy, "--json")[1])
    assert [f["where"] for f in document["findings"]] == ["num_hidden_layers", "hidden_act"]
    assert not document["supported"] and document["devices"] == {}


def test_formats_are_told_and_refused_as_an_origin_would() -> None:
    status, said = check(DEMO, "--kv-cache", "int8", "--head", "int8", "--json")
    document = json.loads(said)
    assert status == 0
    assert document["formats"] == {"weights": "auto", "kv_cache": "int8", "head": "int8"}
    assert document["devices"]["cpu"]["kv_token_bytes"] == 2 * 3 * (32 + 4) * 6
    status, said = check(DEMO, "--weights", "int4")
    assert status == 1
    assert "ternary weights of bitnet cannot be held as int4" in said
    assert "origin.weights" in check(DEMO, "--weights", "int3")[1]


def test_many_findings_are_cut_for_people_only(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"hidden_size": 384, "head_dim": 64}))
    assert "more: see --json" in check(copy)[1]
    assert len(json.loads(check(copy, "--json")[1])["findings"]) > 20


def test_every_weight_is_read_where_that_is_wanted(copy: Path) -> None:
    path = copy / "model.safetensors"
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    name = "model.layers.0.mlp.down_proj.weight"
    content[start + header[name]["data_offsets"][0]] = 0xFF
    path.write_bytes(content)
    assert check(copy)[0] == 0
    status, said = check(copy, "--values", code=WITH_TORCH)
    assert status == 1
    assert f"{name}: holds the code 3" in said


def test_a_missing_folder_and_a_wrong_size_are_wrong_usage(tmp_path: Path) -> None:
    status, said = check(tmp_path / "nowhere")
    assert status == 2
    assert "nowhere does not exist (give the folder of a checkpoint)" in said
    status, said = check(Path("Some/Model-1B"))
    assert status == 2
    assert "download it first: hf download Some/Model-1B --local-dir Model-1B" in said
    status, said = check(DEMO, "--memory", "lots")
    assert status == 2
    assert "--memory" in said


def test_what_is_served_all_the_same_is_a_note_behind_what_is_wrong(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config |= {"rope_scaling": {"type": "yarn", "factor": 2}}
    (copy / "config.json").write_text(json.dumps(config))
    status, said = check(copy)
    assert status == 0
    note = "note  config.json: max_position_embeddings: 1024: the scaling allows 2048 tokens; "
    assert said.splitlines()[-1].startswith(note)
    (copy / "tokenizer.json").unlink()
    status, said = check(copy)
    assert status == 1
    assert [line.split()[0] for line in said.splitlines()[-2:]] == ["wrong", "note"]


def test_a_name_of_the_hub_is_told_how_to_become_a_folder() -> None:
    status, said = check("Qwen/Qwen3-0.6B")
    assert status == 2
    assert "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B" in said


def test_a_cold_start_is_told_by_stages_that_follow_one_another(tmp_path: Path) -> None:
    chart = tmp_path / "start.svg"
    command = ["model", "load-profile", "--starts", "1", "--json", "--chart", str(chart)]
    (tmp_path / "tailrace.toml").write_text('[origin]\ndevice = "cpu"\n')
    done = subprocess.run(
        [sys.executable, "-c", WITH_TORCH, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout)
    stages = {stage["stage"]: stage for stage in told["stages"]}
    loaded = ["check", "read", "hash", "unpack", "tokenizer", "warm-up"]
    if sys.platform == "linux":  # a small model is loaded before the fork
        assert [*stages] == ["fork_server", "imports", *loaded, "fork", "connect"]
    else:
        assert [*stages] == ["spawn", "imports", "connect", *loaded]
    assert stages["read"]["bytes"] > 1_000_000
    assert all(stage["floor_ms"] <= stage["ms"] + 0.1 for stage in stages.values())
    took = sum(stage["ms"] for stage in stages.values())
    assert took == pytest.approx(told["cold_ms"] * told["attributed"], abs=1.0)
    assert "imports" in chart.read_text("utf-8")
