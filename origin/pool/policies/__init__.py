"""Keep-alive policies for idle models, the clairvoyant optimum, and a simulator.

Nothing here reads a clock, a socket or a file, except the functions that import traces. So a
simulation can compare the very policies that a pool uses.
"""
