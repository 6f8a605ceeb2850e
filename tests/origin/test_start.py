"""Imports of an origin before its workers run, and before it listens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def imported(modules: str, among: set[str]) -> set[str]:
    """Return which of `among` a new process has imported once it has imported `modules`."""
    code = f"import sys, {modules}\nprint(*sys.modules)"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return among & set(found.split())


def test_a_worker_is_started_before_what_only_the_supervisor_needs_is_imported() -> None:
    late = {"apsw", "cryptography", "httpx", "jinja2", "numpy", "prometheus_client", "tokenizers"}
    assert imported("tailrace.cli, tailrace.origin.start", late) == set()
    both = "tailrace.origin.start, tailrace.origin.supervisor"
    assert imported(both, {"apsw", "jinja2"}) == {"apsw"}
    assert imported("tailrace.origin.supervisor", {"llguidance", "numpy", "torch"}) == set()
