"""OpenAI's API: shows the streams of `/v1/generate` in OpenAI's JSON, and keeps no state."""
