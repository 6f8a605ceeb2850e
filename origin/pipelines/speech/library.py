"""The speech library, PocketSphinx, which is imported only by stages that use it.

It has a detector of speech (that of WebRTC), a recogniser, and a model of English.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from tailrace.ledger.errors import ConfigError

NAME = "pocketsphinx"
HINT = "install tailrace[speech]: pip install 'tailrace[speech]'"


def check_installed() -> None:
    """Check that the library is installed, without importing it.

    Raises:
        ValueError: The library is not installed.
    """
    if importlib.util.find_spec(NAME) is None:
        raise ValueError(f"the package {NAME!r} is not installed; {HINT}")


def load() -> Any:
    """Import the library, which has no types.

    Raises:
        ConfigError: The library is not installed.
    """
    try:
        return importlib.import_module(NAME)
    except ImportError as error:
        raise ConfigError(f"the package {NAME!r} is not installed", hint=HINT) from error


def model_folder() -> Path:
    """Return the folder of the English model, without importing the library."""
    check_installed()
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], "model", "en-us")
