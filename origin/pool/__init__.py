"""Which models are loaded, and when one is loaded ahead or leaves: decided without I/O.

Nothing here reads a clock or starts a process: a caller says what happens and when, and carries
out the orders that come back. So the pool that serves, its shadow and the simulator are one code.
"""
