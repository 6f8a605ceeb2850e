"""A worker's process ends with its supervisor, whatever it is doing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 240.0
SUPERVISOR = """
import os, subprocess, sys
command = [sys.executable, "-P", "-m", "origin.workers.launch", str(os.getpid()), "endless_import"]
worker = subprocess.Popen(command)
print(worker.pid, flush=True)
worker.wait()
"""
IMPORTED = """
import signal
print("importing", flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker sees its socket close")
def test_a_worker_ends_with_its_supervisor_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "endless_import.py").write_text(IMPORTED)
    path = os.pathsep.join((str(ROOT), str(tmp_path)))
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        worker = int(supervisor.stdout.readline())
        assert supervisor.stdout.readline() == "importing\n"
        end = os.pidfd_open(worker)
        supervisor.kill()
        try:
            assert select.select([end], [], [], TIMEOUT_S)[0], "it lives on"
        finally:
            if not select.select([end], [], [], 0)[0]:
                os.kill(worker, signal.SIGKILL)
            os.close(end)


def test_a_worker_whose_supervisor_is_gone_already_imports_nothing() -> None:
    gone = str(os.getppid())
    command = [sys.executable, "-P", "-m", "origin.workers.launch", gone, "no_such_module"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, b"")
