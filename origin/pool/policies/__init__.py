"""Which model stays on the device while nobody asks for it: policies, the optimum, a simulator.

Nothing here reads a clock, a socket or a file but what reads traces, so that the policies that a
simulation compares are the objects that a pool would ask.
"""
