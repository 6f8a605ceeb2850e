"""Compiles every kernel ahead of time and reads its machine code; not part of a fingerprint."""
