"""Attention over paged KV caches, RoPE, and their oracles."""
