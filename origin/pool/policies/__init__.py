"""Keep-alive policies for idle models, the clairvoyant optimum, and a simulator.

Nothing here reads a clock, a socket or a file, except the readers of traces, so that the policies
that a simulation compares are the objects that a pool uses.
"""
