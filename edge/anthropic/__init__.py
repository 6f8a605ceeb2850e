"""Anthropic's Messages API, served from the same streams as every other API of an edge."""
