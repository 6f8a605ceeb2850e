"""Hints from edges to origins that a model may soon receive requests."""

from __future__ import annotations

from enum import StrEnum

HINT = "hint"
"""Class of the objects at an origin to which edges send hints.

The name of such an object is a value of `Hint`. The body of a request to it is the name of the
model, or empty.
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
    """An operator requested a model, which is loaded as soon as there is memory for it."""
