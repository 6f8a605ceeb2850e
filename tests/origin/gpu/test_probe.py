"""Facts that are read from this machine, and from doctored ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch

from tailrace.kernels import self_test
from tailrace.kernels.gpu_limits import GpuLimits
from tailrace.ledger.errors import ModelError
from tailrace.origin.gpu import probe as probing
from tailrace.origin.gpu.faults import GpuFacts, judge
from tailrace.origin.gpu.probe import gpu_is_usable, probe, require_gpu

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
CHECK = "from tailrace.cli import main; main()"
OLD_TORCH = f"import torch; torch.__version__ = '2.4.1'; torch.version.cuda = '12.4'; {CHECK}"
OLD_TRITON = f"""
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "3.1.0" if name == "triton" else real(name)
{CHECK}"""
NO_HEADER = f"""
import pathlib
there = pathlib.Path.is_file
pathlib.Path.is_file = lambda path: path.name != "Python.h" and there(path)
{CHECK}"""


def check(code: str = CHECK, **environment: str) -> tuple[int, dict[str, Any]]:
    """Return exit status and output of `tailrace gpu check --json` in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CC",)}
    ran = subprocess.run(
        [sys.executable, "-c", code, "gpu", "check", "--json"],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in ran.stderr
    return ran.returncode, json.loads(ran.stdout)


def codes(document: dict[str, Any]) -> list[str]:
    return [fault["code"] for fault in document["faults"]]


@pytest.fixture(scope="module")
def plain() -> tuple[int, dict[str, Any]]:
    """Return exit status and output of the check of this machine as it is."""
    return check(TRITON_INTERPRET="0")


@WITHOUT_GPU
def test_this_machine_is_told_what_it_lacks(plain: tuple[int, dict[str, Any]]) -> None:
    status, found = plain
    assert (status, found["usable"]) == (1, False)
    assert codes(found)[0] in ("driver_missing", "driver_library", "no_device_file")
    assert found["torch"] == torch.__version__
    assert found["devices"] == [] and not found["has_run"] and found["run_error"] == ""


@WITHOUT_GPU
@pytest.mark.parametrize(
    ("code", "environment", "fault"),
    [
        (CHECK, {"PATH": "/nonexistent"}, "compiler"),
        (CHECK, {"CC": "no-such-compiler"}, "compiler"),
        (CHECK, {"TRITON_INTERPRET": "1"}, "interpreted"),
        (NO_HEADER, {}, "python_header"),
        (OLD_TORCH, {}, "torch_old"),
        (OLD_TRITON, {}, "triton_version"),
        ("import sys; sys.modules['torch'] = None; " + CHECK, {}, "torch_broken"),
    ],
    ids=[
        *("no gcc", "wrong CC", "interpreted", "no Python.h"),
        *("old torch", "old Triton", "no torch"),
    ],
)
def test_a_doctored_environment_gets_the_line_for_it(
    code: str,
    environment: dict[str, str],
    fault: str,
    plain: tuple[int, dict[str, Any]],
) -> None:
    doctored = {"TRITON_INTERPRET": "0", **environment}
    status, found = check(code, **doctored)
    assert status == 1
    assert fault in codes(found) and fault not in codes(plain[1])


def test_a_driver_library_tells_the_cuda_version_that_it_supports(tmp_path: Path) -> None:
    """The library is a real one, with the one function that is called."""
    source = tmp_path / "cuda.c"
    source.write_text("int cuDriverGetVersion(int *found) { *found = 12080; return 0; }\n", "utf-8")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-o", library, source], check=True)
    _, found = check(LD_LIBRARY_PATH=str(tmp_path), TRITON_INTERPRET="0")
    assert found["has_driver_library"] and found["driver_cuda"] == [12, 8]


class FakeCuda:
    """Two GPUs as torch shows them, on which kernels are interpreted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tested: list[int] = []
        properties = SimpleNamespace(name="NVIDIA L4", major=8, minor=9)
        cuda = SimpleNamespace(
            init=lambda: None,
            device_count=lambda: 2,
            get_device_properties=lambda _: properties,
            mem_get_info=lambda _: (20 << 30, 24 << 30),
            device=torch.autocast,
        )
        cuda.device = lambda _: torch.inference_mode()
        monkeypatch.setattr(torch, "cuda", cuda)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
        monkeypatch.setattr(probing, "_driver_library", lambda: (True, (13, 0)))
        monkeypatch.setattr(probing, "DEVICE_FILES", (Path("/dev/null"),))
        limits = GpuLimits(99 << 10, 58)
        monkeypatch.setattr("tailrace.kernels.gpu_limits.limits_of", lambda _: limits)
        monkeypatch.setattr(self_test, "run_self_test", lambda at: self.tested.append(at.index))


ENVIRONMENT = {"PATH": os.environ["PATH"]}


def test_a_kernel_is_run_on_every_gpu_and_each_is_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeCuda(monkeypatch)
    facts = probe(environment=ENVIRONMENT)
    assert judge(facts) == []
    assert facts.has_run and fake.tested == [0, 1]
    assert [(one.name, one.shared_bytes >> 10) for one in facts.devices] == [("NVIDIA L4", 99)] * 2


def test_a_kernel_that_does_not_run_is_a_fault_and_no_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("Triton Error [CUDA]: out of resource")

    FakeCuda(monkeypatch)
    monkeypatch.setattr(self_test, "run_self_test", fail)
    faults = judge(probe(environment=ENVIRONMENT))
    assert [fault.code for fault in faults] == ["kernel"]
    assert "out of resource" in faults[0].problem


def test_nothing_is_run_where_something_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    facts = probe(environment={**ENVIRONMENT, "TRITON_INTERPRET": "1"})
    assert [fault.code for fault in judge(facts)] == ["interpreted"]
    assert fake.tested == []


def test_a_gpu_whose_driver_fails_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA unknown error")

    FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "init", fail)
    faults = judge(probe(environment=ENVIRONMENT))
    assert [fault.code for fault in faults] == ["no_device"]


def test_the_self_test_computes_a_linear(device: torch.device) -> None:
    self_test.run_self_test(device)


def test_the_self_test_finds_wrong_numbers(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "float_linear", lambda x, weight, out, **_: out.fill_(1))
    with pytest.raises(RuntimeError, match="wrong numbers"):
        self_test.run_self_test(device)


def test_a_required_gpu_that_is_missing_is_refused_with_the_first_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probing, "probe", lambda: GpuFacts(has_device_file=True))
    with pytest.raises(
        ModelError, match=r"GPU cannot be used: .*libcuda\.so\.1 is missing"
    ) as caught:
        require_gpu()
    assert caught.value.field == "device"
    assert caught.value.hint is not None
    assert "run ldconfig, or set device to cpu; `tailrace gpu check` names" in caught.value.hint


@pytest.mark.parametrize(
    ("facts", "level", "said"),
    [
        (GpuFacts(), "info", "no NVIDIA GPU"),
        (GpuFacts(has_driver_library=True), "warning", "/dev/nvidiactl"),
    ],
)
def test_the_choice_of_the_cpu_is_logged_with_its_reason(
    facts: GpuFacts, level: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "probe", lambda: facts)
    with structlog.testing.capture_logs() as logged:
        assert not gpu_is_usable()
    assert [one["log_level"] for one in logged] == [level]
    assert said in str(logged)
