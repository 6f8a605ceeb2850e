"""Sampling: one oracle, and the kernels that draw the same token."""
