"""Reads an edge's settings from a `wrangler.toml` or `wrangler.jsonc` for Cloudflare Workers."""
