"""The history of a warm pool, for tuning it: arrivals, loads, decisions.

Nothing here is on the path of a token. Records wait in a bounded queue and are written by another
thread, or a server; records that cannot be kept are counted and dropped.
"""
