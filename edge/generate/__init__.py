"""`/v1/generate`: its requests, its views of a stream, and its routes."""
