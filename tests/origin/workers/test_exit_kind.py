"""Causes of a worker's death: torch's exceptions, exit statuses, the kernel's counters."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

from tailrace.origin.workers.liveness import ExitKind, kind_of, kind_of_exit
from tailrace.origin.workers.worker_frame import Fault


def raised_by_torch_for_want_of_memory() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    return caught.value


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), ExitKind.MEMORY),
        (raised_by_torch_for_want_of_memory(), ExitKind.MEMORY),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
            ExitKind.MEMORY,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), ExitKind.DEVICE),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"), ExitKind.DEVICE),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), ExitKind.DEVICE),
        (KeyError("what a client wrote"), ExitKind.CRASHED),
    ],
)
def test_an_exception_amid_work_is_told_apart_by_what_it_means(
    error: Exception, kind: ExitKind
) -> None:
    assert kind_of(error, starting=False) is kind
    assert Fault.of(error, starting=False).kind == kind.value


def test_what_a_client_wrote_is_in_no_word_of_a_crash_and_a_failed_start_says_all() -> None:
    assert Fault.of(KeyError("what a client wrote"), starting=False) == Fault("KeyError", "crashed")
    start = Fault.of(ValueError("no such\nfile"), starting=True)
    assert start == Fault("ValueError: no such file", "start")


def test_a_process_that_was_killed_is_told_from_one_that_the_kernel_killed_for_memory() -> None:
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    status = subprocess.run(command, check=False).returncode
    assert kind_of_exit(status, 0) is ExitKind.KILLED
    assert kind_of_exit(status, 1) is ExitKind.MEMORY
    assert kind_of_exit(-signal.SIGSEGV, 1) is ExitKind.CRASHED
    assert kind_of_exit(0, 0) is ExitKind.EXITED


def test_a_word_that_no_worker_says_is_a_crash() -> None:
    assert (ExitKind.of("out_of_memory"), ExitKind.of("?")) == (ExitKind.MEMORY, ExitKind.CRASHED)
