"""OpenAI's API: the same streams as those of `/v1/generate`, in other JSON. It has no state."""
