"""The Call by which an edge asks an origin for the number of tokens of a prompt."""

from __future__ import annotations

TOKEN_COUNT = "token-count"
"""Class of the Call: the name is the model, the body an Open frame, the answer a decimal number."""
