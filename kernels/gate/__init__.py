"""The gate that compiles every kernel ahead of time and checks its machine code."""
