"""The first module that a worker's process runs.

    python -P -m tailrace.origin.workers.bootstrap PARENT MODULE …

PARENT is the supervisor's pid, and MODULE is the worker's program. Before any slow import, this
module ensures that the process ends with its supervisor, and that a fatal signal leaves a
traceback.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import cast

from tailrace.origin.workers.load_spans import PROCESS_SPANS

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that this process gets when its parent thread ends."""


def main(argv: Sequence[str]) -> int:
    """Run the `main` of a worker's module, and return the exit status."""
    parent, module, *rest = argv
    if not end_with(int(parent)):
        return 1
    # Ctrl-C in a terminal reaches every process, but the supervisor decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    PROCESS_SPANS.begin("imports")
    import_structlog()
    return int(importlib.import_module(module).main(rest))


def import_structlog() -> None:
    """Import structlog without rich, which costs a twentieth of a worker's start.

    structlog imports rich if it is installed, but only for tracebacks that our logs do not use. A
    later import of rich works as usual.
    """
    modules = cast(dict[str, ModuleType | None], sys.modules)
    if "rich" not in modules:
        modules["rich"] = None  # makes an import of it fail
        try:
            importlib.import_module("structlog")
        finally:
            del modules["rich"]


def end_with(parent: int) -> bool:
    """Have the kernel kill this process when `parent` ends; return False if it has ended already.

    The kernel does this on Linux only; elsewhere a worker ends when its socket is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
