"""The Call by which an edge asks what the API key of a request has used."""

from __future__ import annotations

OWN_USAGE = "usage"
"""Class of the object that answers for the caller's own API key; its name is `own`."""
