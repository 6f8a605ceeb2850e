"""Loads the operator's Python code, named as MODULE:NAME: producers, filters, objects."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from tailrace.ledger.errors import ConfigError


def load_plugin(spec: str, field: str, shape: str) -> Any:
    """Return the object that `spec`, MODULE:NAME, names; None if the module has no such name.

    The module is imported from the installed packages, or else from the folder in which the origin
    was started. That folder is searched last, so that no file in it can replace an installed
    module. If the import fails, this raises ConfigError for the setting `field`, with `shape` as
    hint.
    """
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{spec!r} is not MODULE:NAME", field=field, hint=shape)
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"cannot import {module_name}: {said}", field=field, hint=shape
        ) from error
    return getattr(module, name, None)
