"""Sampling: a reference in torch, and kernels that draw the same tokens."""
