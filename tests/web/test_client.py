"""The browser's client without connections: its codec, its rules, its types."""

from __future__ import annotations

import gzip
import re
import subprocess
from pathlib import Path

import pytest

from tailrace.client import SILENCE_TIMEOUT_S
from tailrace.edge.generate.encoders import KEEPALIVE_INTERVAL_S
from tailrace.edge.origins.watchers import HEARTBEAT_EVERY_S
from tailrace.origin.streams.read import SILENCE_S
from tests.npm import installed
from tests.schema_text import ROOT

HERE = Path(__file__).parent
PACKAGE = ROOT / "edge/web/tailrace"
PATIENCE_S = 120


def run(*command: str | Path) -> str:
    """Return what a command says; it has to succeed."""
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


@pytest.mark.parametrize(
    "suite", ["wire.test.js", "core.test.js", "pacer.test.js", "markdown.test.js"]
)
def test_in_node(suite: str) -> None:
    """The vectors by the codec; the rules of a reader, of the pace and of Markdown."""
    installed(HERE)
    run("node", "--test", suite)


def test_the_clients_types_hold() -> None:
    run(installed(HERE) / "tsc", "-p", HERE)


def test_a_lost_sign_of_life_is_noticed_within_ten_seconds() -> None:
    """Every sign comes in time at every client: the intervals and timeouts fit each other."""
    client_s = _number(PACKAGE / "connection.js", "SILENCE_MS") / 1000
    worker_s = _number(ROOT / "wrangler-compat/src/stream_object.ts", "SILENCE_MS") / 1000
    latest_s = max(KEEPALIVE_INTERVAL_S, worker_s, HEARTBEAT_EVERY_S, SILENCE_S)
    assert latest_s < min(client_s, SILENCE_TIMEOUT_S) - 3
    assert max(client_s, SILENCE_TIMEOUT_S) <= 10


def _number(file: Path, name: str) -> int:
    [found] = re.findall(rf"^(?:export )?const {name} = ([0-9_]+);", file.read_text("utf-8"), re.M)
    return int(found)


MOST_BYTES = 8_900
LOADED = ("index.min.js", "chunk.min.js", "schema.js")
"""Files that a page loads that imports the first; the rest comes when a WebSocket is wanted."""


def test_what_a_page_loads_is_current_and_small(tmp_path: Path) -> None:
    """Run `npm run build` in tests/web if this fails."""
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
