"""Metrics, traces and request ids of an edge."""
