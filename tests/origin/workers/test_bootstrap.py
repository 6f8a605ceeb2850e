"""The fork server and its workers end with their supervisor, whatever they are doing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 240.0
SUPERVISOR = """
import ctypes, json, os, socket, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # orphans become its children
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
command = [sys.executable, "-P", "-m", "tailrace.origin.workers.bootstrap", str(os.getpid())]
command += ["tailrace.origin.workers.fork_server", str(theirs.fileno()), "held", ""]
fork_server = subprocess.Popen(command, pass_fds=[theirs.fileno()])
print(fork_server.pid, flush=True)
ours.recv(65_536)
if os.environ["MOMENT"] == "waits":
    print("waits", flush=True)
else:
    ours.send(json.dumps({"argv": [], "environment": {}}).encode())
fork_server.wait()
"""
HELD = """
import os
def reached(moment):
    if moment == os.environ["MOMENT"]:
        print(moment, flush=True)
        open(os.environ["GATE"]).close()  # until somebody opens it to write
def prepare(settings):
    os.register_at_fork(after_in_child=lambda: reached("forks"))
def main(argv):
    reached("works")
reached("imports")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker sees its socket close")
@pytest.mark.parametrize("moment", ["imports", "forks", "waits", "works"])
def test_a_fork_server_and_its_workers_end_with_their_supervisor(
    tmp_path: Path, moment: str
) -> None:
    (tmp_path / "held.py").write_text(HELD)
    path, gate = os.pathsep.join((str(ROOT), str(tmp_path))), tmp_path / "gate"
    os.mkfifo(gate)
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR],
        env={**os.environ, "PYTHONPATH": path, "MOMENT": moment, "GATE": str(gate)},
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as supervisor:
        assert supervisor.stdout is not None
        said = {supervisor.stdout.readline().strip() for _ in range(2)}
        fork_server = os.pidfd_open(int(min(said)))  # digits come before letters
        supervisor.kill()
        try:
            assert said - {min(said)} == {moment}
            assert select.select([fork_server], [], [], TIMEOUT_S)[0], "it lives on"
            opened = [os.open(gate, os.O_RDWR)] if moment == "forks" else []
            # Whoever was started holds the other end of this pipe, until he ends.
            supervisor.communicate(timeout=TIMEOUT_S)
            for file in opened:
                os.close(file)
        except (AssertionError, subprocess.TimeoutExpired):
            with suppress(ProcessLookupError):
                os.killpg(supervisor.pid, signal.SIGKILL)
            raise
        finally:
            os.close(fork_server)


def test_a_worker_whose_supervisor_is_gone_already_imports_nothing() -> None:
    gone = str(os.getppid())
    command = [
        sys.executable,
        "-P",
        "-m",
        "tailrace.origin.workers.bootstrap",
        gone,
        "no_such_module",
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, b"")


PROGRAM = """
import sys
def main(argv):
    import structlog
    print(*(name for name in ("structlog", "rich") if name in sys.modules))
    import rich.console
    print(rich.console.Console.__name__)
    return 3
"""


def test_a_worker_imports_structlog_without_rich_and_may_import_rich_itself(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-P", "-m", "tailrace.origin.workers.bootstrap", str(os.getpid())]
    done = subprocess.run(
        [*command, "program"],
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stdout.split()) == (3, ["structlog", "Console"])
