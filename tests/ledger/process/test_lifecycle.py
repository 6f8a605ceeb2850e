"""Set-up of a process for its whole life; each test runs processes of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.ledger.process.lifecycle import import_environment

ENDS_AT_ONCE = """
import asyncio, gc, os, signal
{imports}

async def main():
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
    {start}

asyncio.run(main())
assert gc.get_freeze_count() > 10_000, gc.get_freeze_count()
assert gc.get_threshold()[0] > 700, gc.get_threshold()
"""


@pytest.mark.parametrize(
    ("imports", "start"),
    [
        (
            "from tailrace.ledger.process.lifecycle import *",
            "look_less_often(); await Stop().asked.wait()",
        ),
        (
            "from tailrace.edge.serve import *",
            "c = EdgeConfig(http=('127.0.0.1:0',), origin=('127.0.0.1:9',));"
            " await serve(c, 1024, Sockets.bound(c), 0)",
        ),
    ],
)
def test_python_seldom_looks_for_cycles_and_never_in_what_was_loaded(
    imports: str, start: str
) -> None:
    code = ENDS_AT_ONCE.format(imports=imports, start=start)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


def test_a_child_imports_our_packages_although_they_are_not_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-S", "-c", "import tailrace.ledger.errors as it; print(it)"]
    result = subprocess.run(
        command, env=import_environment(), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
