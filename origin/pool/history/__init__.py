"""What a warm pool has lived through, kept for those who tune it: arrivals, loads, decisions.

Nothing here is on a token's way. What is recorded waits in a bounded queue, and is written by
another thread, or a server; what cannot be kept is counted, and missed by nobody but statistics.
"""
