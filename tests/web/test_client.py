"""The browser's client without connections: its codec, its rules, its types."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.npm import installed
from tests.schema_text import ROOT

HERE = Path(__file__).parent
PACKAGE = ROOT / "edge/web/tailrace"
PATIENCE_S = 120


def run(*command: str | Path) -> str:
    """What a command says; it has to succeed."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("suite", ["wire.test.js", "core.test.js"])
def test_in_node(suite: str) -> None:
    """The vectors by the codec; the rules of a reader."""
    installed(HERE)
    run("node", "--test", suite)


def test_the_clients_types_hold() -> None:
    run(installed(HERE) / "tsc", "-p", PACKAGE)
