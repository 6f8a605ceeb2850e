"""The gate as a command: over planted kernels, over some of the real ones, over the real plan."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tailrace.kernels.attention.paged_kv import KV_DTYPES
from tailrace.kernels.gate.aot_worker import kernel_modules, launched_kernels, planned
from tailrace.kernels.shapes import HEAD_DIMS, REAL_SHAPES

ROOT = Path(__file__).resolve().parents[3]
STEPS = {"qkv", "attend", "o", "gate_up", "down"}

PLANTED = """
from collections.abc import Iterator

import triton
import triton.language as tl

from tailrace.kernels.shapes import DecoderShape
from tailrace.kernels.variant import Variant

@triton.jit
def {name}(x_ptr, out_ptr, SIZE: tl.constexpr):
    column = tl.arange(0, SIZE)
    x = tl.load(x_ptr + column)
    {body}

def variants(shape: DecoderShape) -> Iterator[Variant]:
    pointers = {{"x_ptr": "*fp32", "out_ptr": "*fp32"}}
    yield Variant(
        name=f"{{shape.name}}.{name}", kernel={name}, signature=pointers,
        constants={{"SIZE": {size}}}, divisible=frozenset(pointers), num_warps=1, {more}
    )
"""
STORE = "tl.store(out_ptr + column, x)"
CROWDED = """place = tl.arange(0, 32)[:, None] * SIZE + column[None, :]
    y = tl.load(x_ptr + place)
    tl.store(out_ptr + place, y * tl.sum(y))"""
EARLY = f"""{STORE}
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()"""
LAUNCHED = """

@triton.jit
def forgotten(x_ptr):
    tl.store(x_ptr, 1.0)

def launch(x):
    forgotten[(1,)](x)
"""


def plant(folder: Path, name: str, body: str, size: int = 128, more: str = "") -> Path:
    file = folder / f"{name}_triton.py"
    file.write_text(PLANTED.format(name=name, body=body, size=size, more=more), "utf-8")
    return file


def run_gate(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tailrace.kernels.gate.aot", *arguments],
        cwd=ROOT,
        env={**os.environ, **({"PYTHONPATH": str(path)} if path else {})},
        capture_output=True,
        text=True,
        check=False,
    )


def summary_of(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return summary


@pytest.fixture(scope="module")
def offenders(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Return a run over a package in which every kernel but one does what the gate forbids."""
    folder = tmp_path_factory.mktemp("offenders") / "planted"
    folder.mkdir()
    (folder / "__init__.py").touch()
    file = plant(folder, "innocent", STORE, more='expects=("LDG",), step="qkv"')
    file.write_text(file.read_text("utf-8") + LAUNCHED, "utf-8")
    plant(folder, "atomic", "tl.atomic_add(out_ptr + column, x)")
    plant(folder, "crowded", CROWDED, more='options={"maxnreg": 32}')
    plant(folder, "unlike", STORE, more='expects=("HGMMA", "STG")')
    plant(folder, "broken", "tl.store(out_ptr + column, no_such_name)")
    plant(folder, "refused", STORE, size=100)
    plant(folder, "early", EARLY, more="launch_pdl=True")
    return run_gate("--package", "planted", "--jobs", "1", path=folder.parent)


def test_offenders_fail_the_gate_by_name(offenders: subprocess.CompletedProcess[str]) -> None:
    assert offenders.returncode == 1
    errors = offenders.stderr
    assert "planted.atomic_triton.atomic (bitnet-2b4t.atomic) adds floats atomically" in errors
    assert "planted.crowded_triton.crowded (bitnet-2b4t.crowded) spills" in errors
    assert "planted.unlike_triton.unlike (bitnet-2b4t.unlike) lacks HGMMA\n" in errors
    assert "planted.broken_triton.broken (bitnet-2b4t.broken) does not compile:" in errors
    assert "no_such_name is not defined" in errors
    assert "planted.refused_triton.refused (bitnet-2b4t.refused) does not compile:" in errors
    assert "power of 2" in errors
    assert "planted.innocent_triton.forgotten is launched, but no variant compiles it" in errors
    assert "planted.early_triton.early (bitnet-2b4t.early) does not wait" in errors
    assert "earlier launches before STG" in errors
    assert "planted.unlike_triton.unlike (bitnet-2b4t.unlike) for sm_80 lacks HGMMA\n" in errors
    assert "innocent (" not in errors


def test_the_last_line_counts_the_offences(offenders: subprocess.CompletedProcess[str]) -> None:
    summary = summary_of(offenders)
    assert summary["kernels"] == summary["compilations"] == 7
    assert summary["variants"] == 7 * len(REAL_SHAPES)
    assert summary["compile_errors"] == 2
    assert summary["float_atomics"] > 0
    assert summary["spill_bytes"] > 0
    assert summary["missing_instructions"] == 1
    assert summary["dependent"] == len(REAL_SHAPES)
    assert summary["before_wait"] == 1
    assert summary["launches_per_layer"] == 1
    assert summary["unplanned"] == ["planted.innocent_triton.forgotten"]


def test_the_table_has_a_row_for_each_kernel(offenders: subprocess.CompletedProcess[str]) -> None:
    header, *rows, last = offenders.stdout.splitlines()
    rows, targets = rows[:7], rows[7:]
    assert header.split()[:3] == ["kernel", "compiled", "registers"]
    names = ["atomic", "broken", "crowded", "early", "innocent", "refused", "unlike"]
    assert [row.split()[0] for row in rows] == [f"planted.{n}_triton.{n}" for n in names]
    assert rows[1].split()[1] == "0/1"
    assert [row.split()[0] for row in targets] == [
        *("architecture", "sm_80", "sm_89", "sm_100", "sm_120"),
    ]
    # `unlike` alone expects products; the others that pass on sm_90 take turns.
    assert [row.split()[1] for row in targets[1:]] == ["2/2", "2/2", "2/2", "2/2"]
    assert last.startswith("{")


def test_a_stack_that_holds_no_spill_passes_and_json_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "planted"
    folder.mkdir()
    (folder / "__init__.py").touch()
    plant(folder, "turned", "tl.store(out_ptr + column, tl.cos(x))", more='expects=("STL",)')
    result = run_gate("--package", "planted", "--json", "--jobs", "1", path=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) == 1
    assert summary_of(result)["spill_bytes"] == 0


def test_modules_that_cannot_be_listed_fail_the_gate(tmp_path: Path) -> None:
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "__init__.py").touch()
    (tmp_path / "planted" / "bad_triton.py").write_text("import no_such_module\n", "utf-8")
    result = run_gate("--package", "planted", path=tmp_path)
    assert result.returncode == 1
    assert "error: the kernels cannot be listed:" in result.stderr
    assert "No module named 'no_such_module'" in result.stderr


def test_real_kernels_pass_and_only_those_that_are_asked_for_are_compiled() -> None:
    result = run_gate("--json", "--only", "embedding_triton", "--jobs", "1")
    assert result.returncode == 0, result.stderr
    summary = summary_of(result)
    assert summary["kernels"] == 1
    assert summary["variants"] == 2 * len(REAL_SHAPES)
    assert summary["compilations"] == 2 * len({(s.hidden, s.vocab % 16 == 0) for s in REAL_SHAPES})


def test_a_ternary_linear_has_a_short_chain_behind_its_wait_and_is_compiled_once() -> None:
    result = run_gate("--json", "--only", "qkv ternary gemv rows=1", "--jobs", "1")
    assert result.returncode == 0, result.stderr
    summary = summary_of(result)
    assert (summary["variants"], summary["compilations"]) == (2, 1), "ordinary and dependent"
    assert 0 < summary["barriers_behind_wait"] <= 8
    assert 0 < summary["instructions_behind_wait"] <= 500
    assert summary["launches"] == {"bitnet-2b4t": 1}


def test_a_gate_that_compiles_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "__init__.py").touch()
    result = run_gate("--json", "--package", "planted", path=tmp_path)
    assert result.returncode == 1
    assert "error: nothing was compiled" in result.stderr


def test_the_real_plan_covers_every_launch_and_every_step() -> None:
    modules = kernel_modules("tailrace.kernels")
    plan = list(planned(modules))
    compiled = {entry.variant.kernel_name for entry in plan}
    launched = set[str]().union(*map(launched_kernels, modules))
    assert "tailrace.kernels.rows.norm_triton.norm_kernel" in launched
    assert launched <= compiled
    for shape in REAL_SHAPES:
        steps = {entry.variant.step for entry in plan if entry.shape is shape} - {None}
        assert steps == STEPS, shape.name
    assert all(entry.variant.bytes_moved > 0 for entry in plan if entry.variant.step)


def test_every_launch_of_a_step_of_one_row_is_planned_as_a_dependent_one() -> None:
    plan = list(planned(kernel_modules("tailrace.kernels")))
    for shape in REAL_SHAPES:
        own = [e.variant for e in plan if e.shape is shape]
        ordinary = {v.kernel_name for v in own if v.step or "rows=1" in v.name.split()}
        dependent = {v.kernel_name for v in own if v.launch_pdl}
        assert ordinary - dependent == {"tailrace.kernels.rows.embedding_triton.embed_kernel"}, (
            shape.name
        )


def test_attention_is_planned_for_every_head_and_every_cache() -> None:
    modules = [m for m in kernel_modules("tailrace.kernels") if getattr(m, "SHAPES", None)]
    assert len(modules) == 3
    for module in modules:
        plan = list(planned([module]))
        assert {entry.shape.head_dim for entry in plan} == set(HEAD_DIMS)
        words = {word for entry in plan for word in entry.variant.name.split()}
        assert {str(dtype).removeprefix("torch.") for dtype in KV_DTYPES} <= words
