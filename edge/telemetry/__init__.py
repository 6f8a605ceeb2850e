"""Metrics and traces of an edge, and the names of requests in them."""
