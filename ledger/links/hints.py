"""Hints from edges to origins that a model may soon receive requests."""

from __future__ import annotations

from enum import StrEnum

HINT = "hint"
"""Class of the objects that receive hints.

An object's name is the `Hint`, and the body of its request is a model's name or empty.
"""


class Hint(StrEnum):
    """An event at an edge that makes a request likely."""

    MODELS = "models"
    """A client listed the models."""
    PAGE = "page"
    """A client opened the console or a page."""
    RECONNECT = "reconnect"
    """A client resumed a stream."""
    OPERATOR = "operator"
    """An operator asked for a model, which is loaded as soon as there is memory."""
