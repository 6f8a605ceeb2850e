"""The browser's client without connections: its codec, its rules, its types."""

from __future__ import annotations

import gzip
import re
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
    run(installed(HERE) / "tsc", "-p", HERE)


MOST_BYTES = 8 << 10
LOADED = ("index.min.js", "chunk.min.js", "schema.js")
"""What a page loads that imports the first. The rest comes when a WebSocket is wanted."""


def test_what_a_page_loads_is_current_and_small(tmp_path: Path) -> None:
    """Else, in tests/web: npm run build"""
    installed(HERE)
    run("npm", "run", "--silent", "build", "--", f"--outdir={tmp_path}")
    built = sorted(path.name for path in tmp_path.iterdir())
    assert built == sorted(path.name for path in PACKAGE.glob("*.min.js"))
    for name in built:
        assert (tmp_path / name).read_bytes() == (PACKAGE / name).read_bytes(), name
    imported = re.findall(r'from"\./([^"]+)"', "".join(map(_text, LOADED)))
    assert set(imported) | {LOADED[0]} == set(LOADED)
    sizes = {name: len(gzip.compress((PACKAGE / name).read_bytes(), 9)) for name in LOADED}
    assert sum(sizes.values()) < MOST_BYTES, sizes


def _text(name: str) -> str:
    return (PACKAGE / name).read_text("utf-8")
