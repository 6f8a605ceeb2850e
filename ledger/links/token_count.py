"""The Call by which an edge asks an origin for the number of tokens of a prompt."""

from __future__ import annotations

TOKEN_COUNT = "token-count"
"""Class of the Call that asks for the number of tokens of a prompt. Its name is that of the model,
its body an Open frame with the prompt, and its answer a decimal number."""
