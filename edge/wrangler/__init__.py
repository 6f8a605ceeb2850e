"""Reads the settings of an edge from the file of a Worker, `wrangler.toml` or `wrangler.jsonc`."""
