"""The console's names, fields and arguments, by TypeScript's compiler: no build would see them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.npm import installed
from tests.schema_text import ROOT

HERE = Path(__file__).parent
PATIENCE_S = 120


def test_the_consoles_types_hold() -> None:
    done = subprocess.run(
        [installed(ROOT / "tests/web") / "tsc", "-p", HERE, "--pretty", "false", "--listFiles"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    findings = [line for line in done.stdout.splitlines() if "error TS" in line]
    # Vendored files are not ours to annotate; the compiler reads them because we import them.
    assert [line for line in findings if "/console/vendor/" not in line] == []
    assert "/edge/web/console/main.js" in done.stdout
