"""Numeric kernels: each with a plain torch oracle that says what it computes."""
