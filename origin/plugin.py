"""Modules of the operator's own: producers and filters."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType


def import_plugin(name: str) -> ModuleType:
    """A module that is installed, or lies in the folder that the origin was started in.

    The folder comes last, so that nothing in it takes the place of what we or others import.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)
