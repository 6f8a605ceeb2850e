"""The Call by which an edge asks an origin how many tokens of a prompt came from a KV cache."""

from __future__ import annotations

CACHED_TOKENS = "cached-tokens"
"""Class of the Call that asks for the cached tokens of an ended stream. Its name is the stream's id
in hex, its body a Resume frame of the stream, and its answer a decimal number."""
