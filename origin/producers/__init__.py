"""Producers that run in text workers: embedders and upstream servers."""
