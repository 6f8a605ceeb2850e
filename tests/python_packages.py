"""Python packages for tests that cannot lie beside our own: environments, as files of pins say."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from fcntl import LOCK_EX, flock
from pathlib import Path

from tests.needs import needs

INSTALL_TIMEOUT_S = 280.0


def installed(pins: Path) -> Path:
    """Return where the commands of the packages in a file of pins are, installed if need be.

    The file pins all that its packages need, too, but what they can share with the tests (torch
    alone is as large as all the others). Two processes of tests may ask at the same time: one
    installs, the other waits for it.
    """
    folder = pins.with_name(f".{pins.stem}")
    stamp = folder / "installed.txt"
    wanted = f"{sys.version}\n{sys.prefix}\n{pins.read_text()}"
    with pins.open() as locked:
        flock(locked, LOCK_EX)
        if not stamp.exists() or stamp.read_text() != wanted:
            _install(pins, folder)
            stamp.write_text(wanted)
    return folder / "bin"


def _install(pins: Path, folder: Path) -> None:
    venv.create(folder, clear=True, symlinks=True)
    pip = ("-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet")
    done = subprocess.run(
        # Compiling all of them would take longer than the rest; most are never imported.
        [sys.executable, *pip, "--no-compile", "--no-deps", "-r", pins],
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        needs(f"pip install failed: {done.stderr[-500:]}", "a package index has to be in reach")
    [packages] = folder.glob("lib/python3*/site-packages")
    # After its own packages, so that pinned versions are found first.
    (packages / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
