"""The wire vectors by the Worker's codec, where it runs: in workerd."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.npm import installed
from tests.worker.workerd import BUILD_TIMEOUT_S, FOLDER, runtime

HERE = Path(__file__).parent
VECTORS = HERE.parent / "vectors"
FILES = ("primitives", "frames", "invalid", "streams")
TIMEOUT_S = 60.0
CONFIG = """using Workerd = import "/workerd/workerd.capnp";
const config :Workerd.Config = (services = [(name = "vectors", worker = (
  modules = [(name = "vectors.js", esModule = embed "vectors.js")],
  compatibilityDate = "2026-11-01",
))]);
"""


def test_every_vector_holds_in_workerd(tmp_path: Path) -> None:
    entry = HERE / "vectors.js"
    flags = ["--bundle", "--format=esm", "--target=es2024", "--external:node:assert/strict"]
    flags += [f"--alias:node:{name}={entry}" for name in ("test", "fs")]
    flags += ["--loader:.json=text"]  # bundled as text
    flags += ['--define:import.meta.url="file:///tests/web/wire.test.js"', "--log-level=warning"]
    subprocess.run(
        [installed(FOLDER) / "esbuild", entry, *flags, f"--outfile={tmp_path / 'vectors.js'}"],
        check=True,
        timeout=BUILD_TIMEOUT_S,
    )
    config = tmp_path / "vectors.capnp"
    config.write_text(CONFIG)
    done = subprocess.run(
        [runtime(), "test", config, "--experimental", "--verbose"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.search(r"passed (\d+) in Cloudflare-Workers", done.stdout + done.stderr)
    assert said is not None, done.stdout + done.stderr
    files = [json.loads((VECTORS / f"{name}.json").read_text()) for name in FILES]
    primitives, *others = files
    vectors = sum(map(len, (primitives["valid"], primitives["invalid"], *others)))
    assert int(said[1]) > vectors > 0
