"""A worker for tests of the fork server: it reports its state, and waits until it is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence


def prepare(settings: str) -> None:
    """Start what `settings` names, which a fork server must not do."""
    if settings == "thread":
        threading.Thread(target=signal.pause, daemon=True).start()


def main(argv: Sequence[str]) -> int:
    path, settings = argv
    if settings == "raise":
        raise ValueError("of the worker")
    if settings == "exit":
        return 3
    stray = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    said = {
        "parent": os.getppid(),
        "open": sorted(map(int, os.listdir("/proc/self/fd"))),
        "drawn": random.random(),
        "stray": stray.pid,
        "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    with socket.socket(socket.AF_UNIX) as supervisor:
        supervisor.connect(path)
        supervisor.sendall(json.dumps(said).encode() + b"\n")
        signal.pause()
    return 0
