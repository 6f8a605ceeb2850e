"""Streams that are generated here: admission, recipes, runs."""
