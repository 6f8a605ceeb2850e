"""The Call by which an edge asks an origin how many tokens of a prompt came from a KV cache."""

from __future__ import annotations

CACHED_TOKENS = "cached-tokens"
"""Class of the Call. Its name is the id of a stream that has ended, in hex, its body a Resume frame
of this stream, and its answer a decimal number."""
