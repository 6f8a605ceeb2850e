"""The bench of a GPU runs where there is none, and survives the death of any of its parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tailrace.kernels.shapes import BITNET_2B4T
from tests.bench.gpu.supervisor import MARK, Part, Results, Supervisor
from tests.bench.gpu.work import step_bytes

BENCH = Path(__file__).parent / "bench_gpu.py"
DIES = {
    "killed": "import os; os.kill(os.getpid(), 9)",
    "failing": "raise RuntimeError('no such kernel')",
    "endless": "import time; time.sleep(600)",
}
CHILD = f'print({MARK!r} + \'["us", "NAME", 1.5]\', flush=True)\n'


def run_bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCH, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def supervised(kept: list[Results], seconds: float, *parts: Part) -> Results:
    """Run parts that find one thing each and then end as their names say."""

    def command(name: str) -> list[str]:
        return [sys.executable, "-c", CHILD.replace("NAME", name) + DIES.get(name, "")]

    supervisor = Supervisor(
        command, lambda results: kept.append(json.loads(json.dumps(results))), seconds
    )
    supervisor.run(parts)
    return supervisor.results


def test_what_a_part_has_found_is_kept_however_it_ends_and_the_next_begins() -> None:
    kept: list[Results] = []
    parts = [Part(name, 2.0 if name == "endless" else 60.0) for name in (*DIES, "fine")]
    results = supervised(kept, 200, *parts)
    assert results["us"] == dict.fromkeys((*DIES, "fine"), 1.5)
    assert set(results["failed_parts"]) == set(DIES)
    assert results["failed_parts"]["killed"] == "SIGKILL"
    assert results["failed_parts"]["failing"].endswith("RuntimeError: no such kernel")
    assert results["failed_parts"]["endless"] == "killed after 2 s"
    assert kept[0] == {"us": {"killed": 1.5}}, "kept when it came"


def test_a_part_that_is_killed_is_late_however_soon_its_end_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported = threading.Event()
    kill = subprocess.Popen.kill

    def return_after_the_report(child: subprocess.Popen[str]) -> None:
        kill(child)
        assert reported.wait(60)

    def keep(results: Results) -> None:
        if "failed_parts" in results:
            reported.set()

    monkeypatch.setattr(subprocess.Popen, "kill", return_after_the_report)
    supervisor = Supervisor(lambda name: [sys.executable, "-c", DIES[name]], keep, 60)
    supervisor.run([Part("endless", 0.1)])
    assert supervisor.results["failed_parts"] == {"endless": "killed after 0 s"}


def test_a_part_for_which_no_time_is_left_is_named() -> None:
    results = supervised([], 0.5, Part("fine", 60))
    assert results == {"failed_parts": {"fine": "not started: no time was left"}}


@pytest.mark.timeout(600)
def test_a_fake_run_walks_every_part_and_writes_what_comes_after_one_that_was_killed(
    tmp_path: Path,
) -> None:
    file = tmp_path / "measured.json"
    result = run_bench("--fake", "--write", str(file), "--seconds", "590")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    written = json.loads(file.read_text())
    assert written == report
    assert isinstance(report["load"], float), "the load of the machine"
    assert report["fake"] and report["failed_parts"] == {"crash": "SIGKILL"}
    assert [*report["part_seconds"]] == (
        "machine compile constants oracle parity chain kernels quantised attention crash"
        " prefill step sampler serving whole baseline exactness"
    ).split()
    assert not report["parity_failed"] and len(report["parity"]) > 30
    assert report["us"]["before the crash"] == 1.0
    for name in (
        "tiny-bitnet.attend float8_e4m3fn rows=1 length=70",
        "tiny-bitnet.prefill rows=3 start=0",
        "tiny-llama.qkv int4 rows=1",
        "tiny-qwen3.step rows=1 length=70 dependent",
        "tiny-bitnet.sample rows=1",
        "tiny-llama.compiled rows=1 length=70",
    ):
        assert report["us"][name] > 0
    assert "tiny-llama.step rows=1 length=70 torch.compile / ours" in report["ratios"]
    assert set(report["ttft_ms"]) == {"tiny-bitnet prompt of 6"}


def test_a_case_runs_in_a_loop_for_a_profiler() -> None:
    result = run_bench("--fake", "--case", "tiny-bitnet.sample rows=1", "--loop", "2")
    assert (result.returncode, result.stdout) == (0, "tiny-bitnet.sample rows=1: 2 times\n")
    result = run_bench("--fake", "--case", "nothing")
    assert result.returncode == 2 and "no case 'nothing'" in result.stderr


def test_an_installed_package_of_the_same_name_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").write_text("raise ImportError('not ours')")
    result = run_bench("--fake", "--only", "machine", PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_can_be_done() -> None:
    result = run_bench()
    assert (result.returncode, result.stdout) == (2, "")
    assert "no CUDA device; try --fake" in result.stderr


def test_a_part_that_is_none_is_refused_by_name() -> None:
    result = run_bench("--only", "attention,kernel")
    assert result.returncode == 2
    assert "'kernel' is none of machine, compile" in result.stderr


def test_the_bytes_of_a_step_are_those_that_memory_must_give() -> None:
    """1,178 MB with a bf16 head and 849 MB with an int8 one, and the cache on top."""
    assert round(step_bytes(BITNET_2B4T, 1, 0, int8_head=False) / 1e6) == 1178
    assert round(step_bytes(BITNET_2B4T, 1, 0, int8_head=True) / 1e6) == 849
