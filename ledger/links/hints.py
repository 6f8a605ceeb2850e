"""Signs that a model will soon be asked for: what an edge has seen, and tells its origins."""

from __future__ import annotations

from enum import StrEnum

HINT = "hint"
"""The class of objects whose names are the signs; the body of a POST names a model, or none."""


class Hint(StrEnum):
    MODELS = "models"
    """Somebody asked which models there are."""
    PAGE = "page"
    """A page was opened."""
    RECONNECT = "reconnect"
    """A client came back to a stream."""
    OPERATOR = "operator"
    """An operator's order: followed whenever there can be room."""
