"""The dialects of OpenAI's API: views of the same streams as `/v1/generate`, without state."""
