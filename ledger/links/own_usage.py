"""The Call by which an edge asks an origin for the usage of a request's API key."""

from __future__ import annotations

OWN_USAGE = "usage"
"""Class of the object that returns the usage of the caller's API key; its name is `own`."""
